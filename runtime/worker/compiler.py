"""Makes compiled twins of residents in the background, one after another, and keeps them for the next worker.

Belongs here: when to compile, the cache, the process that does it. Never: tracing (`compile.py`), running (`twin.py`).
The module serves meanwhile and for good if compiling fails; a fingerprint that failed is not tried again in this life.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil
import torch

from runtime.worker.artefacts import Artefacts, Entry, key_of
from runtime.worker.compile import Order, Verdict
from runtime.worker.faults import words
from runtime.workers.port import Note
from runtime.workers.spawn import filtered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from runtime.worker.engines.port import Kept
    from runtime.workers.port import LoadSpec

COMPILE_SECONDS: Final = 6 * 3_600.0
"""Longest compilation by the clock: at idle priority beside a busy server it takes its time."""
FORMAT: Final = 1
"""Of entries; a change of what a twin expects makes all of them stale."""


class Compiler:
    """One background thread, started with the first wish.

    `attach(spec, entry)` gives a resident its twin; False if it is not resident any more. It raises if the twin is no
    good. `tell` hears what happens, from the background thread.
    """

    def __init__(
        self,
        device: torch.device,
        allow: tuple[str, ...],
        attach: Callable[[LoadSpec, Entry], bool],
        limit: float = COMPILE_SECONDS,
    ) -> None:
        self._device = device
        self._allow = allow
        self._attach = attach
        self._limit = limit
        self._tell: Callable[[Note], None] = _unheard
        self._wishes: deque[LoadSpec] = deque()
        self._failed: set[str] = set()
        self._ripe = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False

    def __repr__(self) -> str:
        return f"<Compiler {len(self._wishes)} waiting{', busy' if self._busy else ''}>"

    def listen(self, tell: Callable[[Note], None]) -> None:
        """Send notes there from now on."""
        self._tell = tell

    def want(self, spec: LoadSpec) -> None:
        """Make a twin for a resident, soon."""
        with self._ripe:
            if spec.fingerprint in self._failed or any(one.key == spec.key and one == spec for one in self._wishes):
                return
            self._wishes.append(spec)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
                self._thread.start()
            self._ripe.notify_all()

    def note(self, spec: LoadSpec, kept: Kept) -> None:
        """A library has compiled by itself: tell it like the rest."""
        phase = "reused" if kept.reused else "finished"
        self._tell(Note(spec.key, spec.fingerprint, phase, kept.seconds, kept.saved))

    def settled(self, timeout: float) -> bool:
        """Wait until there is nothing to do; False when it took longer."""
        with self._ripe:
            return self._ripe.wait_for(lambda: not self._wishes and not self._busy, timeout)

    def _run(self) -> None:
        while True:
            with self._ripe:
                self._busy = False
                self._ripe.notify_all()
                self._ripe.wait_for(lambda: bool(self._wishes))
                spec = self._wishes.popleft()
                self._busy = True
            try:
                self._serve(spec)
            except Exception as fault:  # noqa: BLE001 - compiling is an offer; whatever goes wrong with it, eager serves
                self._failed.add(spec.fingerprint)
                self._tell(Note(spec.key, spec.fingerprint, "failed", cause=words(fault)))

    def _serve(self, spec: LoadSpec) -> None:
        with _kept(spec) as kept:
            key = self._key(spec)
            if not self._taken(spec, kept, key) and not self._made(spec, kept, key):
                self._taken(spec, kept, key)  # whoever made it meanwhile

    def _taken(self, spec: LoadSpec, kept: Artefacts, key: str) -> bool:
        """Whether there was an entry; its twin is attached then."""
        began = time.perf_counter()
        with kept.taken(key) as entry:
            if entry is None:
                return False
            if self._attach(spec, entry):
                took = time.perf_counter() - began
                saved = max(0.0, entry.seconds - took)
                self._tell(Note(spec.key, spec.fingerprint, "reused", took, saved))
            return True

    def _made(self, spec: LoadSpec, kept: Artefacts, key: str) -> bool:
        """Whether it was up to us to make the entry; its twin is attached then."""
        with kept.making(key) as folder:
            with kept.taken(key) as entry:
                if entry is not None:
                    return False
            self._tell(Note(spec.key, spec.fingerprint, "started"))
            began = time.perf_counter()
            facts = self._compile(spec, folder)
            took = time.perf_counter() - began
            if self._attach(spec, Entry(folder, took, facts)):
                self._tell(Note(spec.key, spec.fingerprint, "finished", took))
            # Last: what did not pass the comparison of `attach` is not kept.
            kept.publish(key, folder, seconds=took, facts=facts)
            return True

    def _compile(self, spec: LoadSpec, folder: Path) -> Mapping[str, object]:
        """Run the compiling process. Raises `CompileFailed`."""
        order = Order(spec, str(self._device), self._allow, str(folder), os.getpid())
        with tempfile.TemporaryDirectory(prefix="foreload-compile-") as scratch:
            # torch leaves its intermediate files where these point, and they go with the folder.
            environment = {**filtered(os.environ), "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TMPDIR": scratch}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.worker.compile"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            try:
                said, _ = process.communicate(msgspec.json.encode(order), timeout=self._limit)
            except subprocess.TimeoutExpired:
                raise CompileFailed(f"took longer than {self._limit:g} s") from None
            finally:
                _end(process)
        if process.returncode:
            raise CompileFailed(f"its process ended with {process.returncode}")
        verdict = msgspec.json.decode(said, type=Verdict)
        if verdict.error:
            raise CompileFailed(verdict.error)
        return verdict.facts

    def _key(self, spec: LoadSpec) -> str:
        return key_of(
            "aotinductor",
            {
                "format": FORMAT,
                "fingerprint": spec.fingerprint,
                "engine": spec.engine,
                "tensors": [(one.name, one.datatype, one.shape) for one in (*spec.inputs, *spec.outputs)],
                "cast": spec.cast,
                "versions": [torch.__version__, platform.python_version(), str(torch.version.cuda)],
                "machine": [platform.machine(), *_architecture(self._device)],
            },
        )


class CompileFailed(Exception):
    """There is no package, for a reason in words."""


@contextmanager
def _kept(spec: LoadSpec) -> Iterator[Artefacts]:
    """The folder that a spec names, or one that is gone afterwards."""
    if spec.artefacts.folder:
        yield Artefacts(Path(spec.artefacts.folder), spec.artefacts.size)
        return
    with tempfile.TemporaryDirectory(prefix="foreload-artefacts-") as folder:
        yield Artefacts(Path(folder), 1 << 62)


def _architecture(device: torch.device) -> list[str]:
    if device.type != "cpu":
        return [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    # The instruction sets that code was made for; the model name alone would not do behind a hypervisor.
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")
    return [str(torch.backends.cpu.get_cpu_capability()), " ".join(sorted(flags.split()))]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a compiling process with the compilers that it started, and collect it."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _unheard(_note: Note) -> None:
    """Nobody listens."""
