"""A core without torch that echoes, waits, fails and dies on demand; what it does is written in specs and bodies."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import BadTensor, CorruptWeights, UnknownModel
from runtime.workers.pipelines import Prepared
from runtime.workers.port import Answer, LoadSpec, Timings

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.errors import ForeloadError


class CancelledError(Exception):
    """The load was told to stop, and undid itself."""


class FatalError(RuntimeError):
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

    def __init__(self, device: str, allow: tuple[str, ...] = (), threads: int = 1, preprocess: object = None) -> None:
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

    def attend(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def prepared(self) -> Prepared:
        return Prepared()

    # -- loads ---------------------------------------------------------------------------------------

    def listen(self, tell: Callable[..., None]) -> None:
        """Compiles nothing."""

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

    def due(self) -> float | None:
        return 0.0 if self.queue else None

    def step(self) -> None:
        call = self.queue[0]
        word, _, rest = bytes(call.body[:256]).partition(b" ")
        if word == b"!crash":
            raise RuntimeError("a bug")
        self.queue.popleft()
        if word == b"!thread":
            threading.Thread(target=call.done, args=(say(b"elsewhere"),)).start()
            return
        if word == b"!once":
            call.done(BadTensor("answered before the bug"))
            raise RuntimeError("a bug that passes")
        if word in DEEDS:
            DEEDS[word](rest.decode())
        answer = self.answer(word, rest, call)
        call.done(answer)
        call.done(answer)  # a core that answers twice must not answer someone else's call

    def answer(self, word: bytes, rest: bytes, call: Submission) -> Answer | ForeloadError:
        match word:
            case b"!big":
                return say(bytes(int(rest)))
            case b"!error":
                return BadTensor("shape", model=call.key, detail={"got": 3}, retry_after=1.5)
            case b"!longwinded":
                return BadTensor("x" * 5_000_000, model=call.key)
            case b"!env":
                return say(json.dumps(dict(os.environ)).encode())
            case b"!facts":
                return say(json.dumps(facts(self)).encode())
            case _:
                call.body[:1] = bytes(call.body[:1])  # the slot is writable, as torch wants it
                return Answer(bytes(call.body), call.json_length, Timings(queue=1, infer=2, encode=3, decode=4))


def say(body: bytes) -> Answer:
    """An answer without a JSON part."""
    return Answer(body, None, Timings())


def give_up(_: str) -> None:
    """End as a poisoned device would."""
    raise FatalError("the device is gone")


def read_truncated(path: str) -> None:
    """Map a file, cut it, read it: the kernel answers with SIGBUS."""
    Path(path).write_bytes(bytes(1 << 16))
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 1 << 16) as mapped:
        file.truncate(0)
        mapped[1 << 15]


def scribble(_: str) -> None:
    """Send what no worker may send, on the doorbell."""
    os.write(own_socket(socket.SOCK_SEQPACKET), b"garbage")


def babble(_: str) -> None:
    """Send what no worker may send, on the control socket."""
    os.write(own_socket(socket.SOCK_STREAM), b"\xff\xff\xff\xff")


def own_socket(kind: int) -> int:
    """The descriptor of the only socket of a kind that this process has."""
    (fd,) = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if kind_of(int(entry.name)) == kind]
    return fd


def kind_of(fd: int) -> int:
    """Of a socket; 0 for anything else."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return sock.type
    except OSError:
        return 0


DEEDS: dict[bytes, Callable[[str], object]] = {
    b"!fatal": give_up,
    b"!signal": lambda number: os.kill(os.getpid(), int(number)),
    b"!exit": lambda code: os._exit(int(code)),
    b"!gate": lambda gate: await_gate({"gate": gate}, lambda: False),
    b"!truncate": read_truncated,
    b"!scribble": scribble,
    b"!babble": babble,
}


def await_gate(config: dict[str, object], cancelled: Callable[[], bool]) -> None:
    """Say that we got here (`gate`.started), then wait until the file `gate` exists."""
    gate = Path(str(config["gate"]))
    if "started" not in config:
        gate.with_suffix(".started").touch()
    while not gate.exists():
        if cancelled():
            raise CancelledError
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
        "fds": sorted(str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()),
        "allow": core.allow,
        "threads": core.threads,
        "device": core.device,
        "switch": sys.getswitchinterval(),
    }
