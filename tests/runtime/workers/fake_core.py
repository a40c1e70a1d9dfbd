"""A core without torch that echoes, waits, fails and dies on demand; what it does is written in specs and bodies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import BadTensor, CorruptWeights, UnknownModel
from runtime.workers.port import Answer, LoadSpec, Timings

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.errors import ForeloadError


class Cancelled(Exception):
    """The load was told to stop, and undid itself."""


class Fatal(RuntimeError):
    """The device can't go on."""

    fatal = True


@dataclass
class Loaded:
    resident: int
    steps: tuple[tuple[str, float], ...]
    reused: bool


@dataclass
class Evicted:
    returned: int
    leaked: int


@dataclass
class Resident:
    key: str
    fingerprint: str
    resident: int
    in_flight: int


@dataclass
class Submission:
    core: FakeCore
    key: str
    body: memoryview
    json_length: int | None
    done: Callable[[Answer | ForeloadError], None] = field(repr=False)

    def cancel(self) -> bool:
        try:
            self.core.queue.remove(self)
        except ValueError:
            return False
        return True


class FakeCore:
    """Loads by `builder.target`, answers by the body's first word; `!` starts a command."""

    def __init__(self, device: str, allow: tuple[str, ...] = (), threads: int = 1) -> None:
        if device == "broken:0":
            msg = "no such device"
            raise RuntimeError(msg)
        if device == "slow:0":
            threading.Event().wait()
        self.device = device
        self.allow = allow
        self.threads = threads
        self.held: dict[str, LoadSpec] = {}
        self.queue: deque[Submission] = deque()

    # -- loads ---------------------------------------------------------------------------------------

    def load(self, spec: LoadSpec, cancelled: Callable[[], bool]) -> Loaded:
        config = spec.builder.config
        match spec.builder.target:
            case "gate":
                await_gate(config, cancelled)
            case "deaf":
                await_gate(config, lambda: False)
            case "hang":
                threading.Event().wait()
            case "fail":
                raise CorruptWeights("the header lies", model=spec.key, detail={"at": 8}, retry_after=3.0)
            case "surprise":
                raise ValueError("/secret/path")
            case "starve":
                raise MemoryError
            case "signal":
                os.kill(os.getpid(), int(str(config["signal"])))
            case "exit":
                os._exit(int(str(config["code"])))
            case "fork":
                child = subprocess.Popen(["/bin/sh", "-c", "sleep 100 & echo $! > $0; wait", str(config["pid"])])
                await_gate({"gate": config["pid"], "started": ""}, lambda: False)
                sys.stderr.write(json.dumps({"event": "forked", "pid": child.pid}) + "\n")
        self.held[spec.key] = spec
        return Loaded(spec.weights_bytes, (("bind", 0.25),), False)

    def evict(self, key: str) -> Evicted:
        spec = self.held.get(key)
        if spec is None:
            return Evicted(0, 0)
        if spec.builder.config.get("evict") == "hang":
            threading.Event().wait()
        del self.held[key]
        return Evicted(spec.weights_bytes - 1, 1)

    def release_host(self, fingerprint: str) -> None:
        if any(spec.fingerprint == fingerprint for spec in self.held.values()):
            raise CorruptWeights("still bound")

    def inventory(self) -> list[Resident]:
        return [Resident(s.key, s.fingerprint, s.weights_bytes, len(self.queue)) for s in self.held.values()]

    # -- calls ---------------------------------------------------------------------------------------

    def submit(
        self,
        key: str,
        body: memoryview,
        json_length: int | None,
        done: Callable[[Answer | ForeloadError], None],
    ) -> Submission:
        if bytes(body[:7]) == b"!refuse":
            raise BadTensor("refused at the door", model=key)
        if bytes(body[:7]) == b"!stumble"[:7]:
            raise KeyError(key)
        if key not in self.held:
            raise UnknownModel("not resident", model=key)
        submission = Submission(self, key, body, json_length, done)
        self.queue.append(submission)
        return submission

    @property
    def pending(self) -> bool:
        return bool(self.queue)

    def step(self) -> None:
        call = self.queue[0]
        word, _, rest = bytes(call.body[:256]).partition(b" ")
        if word == b"!crash":
            raise RuntimeError("a bug")
        self.queue.popleft()
        answer: Answer | ForeloadError = Answer(b"", None, Timings())
        match word:
            case b"!fatal":
                raise Fatal("the device is gone")
            case b"!once":
                call.done(BadTensor("answered before the bug"))
                raise RuntimeError("a bug that passes")
            case b"!signal":
                os.kill(os.getpid(), int(rest))
            case b"!exit":
                os._exit(int(rest))
            case b"!gate":
                await_gate({"gate": rest.decode()}, lambda: False)
            case b"!big":
                answer = Answer(bytes(int(rest)), None, Timings())
            case b"!error":
                answer = BadTensor("shape", model=call.key, detail={"got": 3}, retry_after=1.5)
            case b"!longwinded":
                answer = BadTensor("x" * 5_000_000, model=call.key)
            case b"!env":
                answer = Answer(json.dumps(dict(os.environ)).encode(), None, Timings())
            case b"!facts":
                answer = Answer(json.dumps(facts(self)).encode(), None, Timings())
            case b"!thread":
                threading.Thread(target=call.done, args=(Answer(b"elsewhere", None, Timings()),)).start()
                return
            case _:
                call.body[:1] = bytes(call.body[:1])  # the slot is writable, as torch wants it
                answer = Answer(bytes(call.body), call.json_length, Timings(queue=1, infer=2, encode=3, decode=4))
        call.done(answer)
        call.done(answer)  # a core that answers twice must not answer someone else's call


def await_gate(config: dict[str, object], cancelled: Callable[[], bool]) -> None:
    """Say that we got here (`gate`.started), then wait until the file `gate` exists."""
    gate = Path(str(config["gate"]))
    if "started" not in config:
        gate.with_suffix(".started").touch()
    while not gate.exists():
        if cancelled():
            raise Cancelled
        time.sleep(0.002)


def facts(core: FakeCore) -> dict[str, object]:
    """What a test wants to know of the process it runs in."""
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "argv": sys.orig_argv,
        "torch": "torch" in sys.modules,
        "fds": sorted(os.listdir("/proc/self/fd")),
        "allow": core.allow,
        "threads": core.threads,
        "device": core.device,
        "switch": sys.getswitchinterval(),
    }
