"""Starts the jailed converter and turns however it ends into one of our errors.

Belongs here: the parent's side only. Never: torch, unpickling, or a decision about where results are kept.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import msgspec

import runtime
from actors.errors import CorruptWeights, LoadFailed, by_code
from runtime.worker.convert import Job, Outcome

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

TIMEOUT: Final = 900.0
"""Seconds of wall time that one conversion may take."""

_POLL = 0.05
_ANSWER_CAP = 64 << 10
_BYTES_PER_CPU_SECOND = 20 << 20
_LEAST_CPU_SECONDS = 60
_LEAST_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """How to read a .pth: dotted path of the state dict, and key prefixes to rename."""

    state_dict: str = ""
    rename: tuple[tuple[str, str], ...] = ()

    @property
    def spelled(self) -> str:
        """One text per set of options, for cache keys."""
        return msgspec.json.encode([1, self.state_dict, sorted(self.rename)]).decode()


def converting(
    source: Path, target: Path, options: Options, *, folder: Path, timeout: float = TIMEOUT
) -> Generator[None, None, Outcome]:
    """Convert `source` into `target` in a process of its own, with its temporary files below `folder`.

    Yields every 50 ms, so that the caller can stop; closing the generator kills the converter. Raises `CorruptWeights`
    or `DiskFull` for the converter's verdict, `LoadFailed` when it cannot be started, takes too long or dies.
    """
    size = source.stat().st_size
    job = Job(
        source=str(source),
        target=str(target),
        # Stored tensors cannot exceed the file; the rest is room for views of one storage that have to be unfolded.
        limit=4 * size + _LEAST_LIMIT,
        seconds=_LEAST_CPU_SECONDS + size // _BYTES_PER_CPU_SECOND,
        state_dict=options.state_dict,
        rename=dict(options.rename),
    )
    with TemporaryDirectory(dir=folder) as home, _spawned(job, home) as child:
        for _ in range(math.ceil(timeout / _POLL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL)
                return _outcome(child)
            yield
        raise LoadFailed(f"the checkpoint was not converted within {timeout:g} s")


@contextlib.contextmanager
def _spawned(job: Job, home: str) -> Generator[subprocess.Popen[bytes], None, None]:
    command = [sys.executable, "-P", "-s", "-B", "-m", "runtime.worker.convert", msgspec.json.encode(job).decode()]
    try:
        child = subprocess.Popen(  # noqa: S603 -- our own interpreter and module, the job is one JSON argument
            command,
            # Never written to: it breaks when this process dies, and the converter ends by it.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env=_environment(home),
            start_new_session=True,
        )
    except OSError as error:
        raise LoadFailed(f"the converter cannot be started: {os.strerror(error.errno or 0)}") from None
    try:
        yield child
    finally:
        if child.poll() is None:  # else its group's number may belong to somebody else by now
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def _environment(home: str) -> Mapping[str, str]:
    """Nothing of ours but what finding the code and its libraries needs; no credentials, no proxies."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    return kept | {
        "PYTHONPATH": str(Path(runtime.__file__).resolve().parents[1]),
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _outcome(child: subprocess.Popen[bytes]) -> Outcome:
    if child.returncode < 0:
        raise LoadFailed(f"the converter was ended by {_signal(-child.returncode)}")
    # The answer is one short line, so it was in the pipe's buffer before the process could exit.
    raw = child.stdout.read(_ANSWER_CAP) if child.stdout else b""
    try:
        outcome = msgspec.json.decode(raw, type=Outcome)
    except msgspec.DecodeError:
        raise LoadFailed(f"the converter ended with status {child.returncode} and no answer") from None
    if outcome.code:
        kind = by_code(outcome.code)
        raise (kind if kind.code == outcome.code else CorruptWeights)(outcome.message)
    if child.returncode:
        raise LoadFailed(f"the converter ended with status {child.returncode}")
    return outcome


def _signal(number: int) -> str:
    if number == signal.SIGXCPU:
        return "its limit of CPU time"
    if number == signal.SIGKILL:
        return "SIGKILL (out of memory, or its limit of CPU time)"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
