"""Downloads that are not whole yet, kept over a crash so that they can go on where they stopped.

A partial is a file, of its final size while it grows, and a journal: one line per chunk that was written, with its
checksum. Chunks are written in order, so what the journal proves is always the beginning of the file. Nothing here is
ever served.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from runtime.tiers.blocks import checksum
from runtime.tiers.staging import locked, opened, same_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEPT: Final = 7 * 86_400.0
"""Seconds after its last chunk that a partial is worth keeping."""

_STEP = 1 << 20
_JOURNAL_CAP = 64 << 20


class Partials:
    """The folder of unfinished downloads below `root`. A partial in use is locked, so an unlocked one is loose."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "partial"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path, status in self.listed():
            if time.time() - status.st_mtime > KEPT:
                self.remove(path)
        for path in self._folder.glob("*.journal"):
            if not path.with_suffix("").exists():
                path.unlink(missing_ok=True)

    def listed(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every partial with its status."""
        for path in self._folder.iterdir():
            if path.suffix != ".journal":
                with contextlib.suppress(OSError):
                    yield path, path.lstat()

    def has(self, path: Path) -> bool:
        """Whether a path is a partial and no blob."""
        return path.parent == self._folder

    def forget(self, path: Path) -> None:
        """The file is gone: so is its journal."""
        if self.has(path):
            path.with_name(f"{path.name}.journal").unlink(missing_ok=True)

    def remove(self, path: Path) -> None:
        """Remove a partial unless somebody is at it."""
        with contextlib.suppress(OSError), opened(path, os.O_RDWR) as descriptor:
            if locked(descriptor):
                path.unlink()
                self.forget(path)

    @contextlib.contextmanager
    def opened(self, sha256: str, size: int) -> Iterator[Partial]:
        """Open, or begin, the download of one file; the caller has claimed it. It stays for the next one to go on."""
        path = self._folder / sha256
        while True:
            with opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
                if not locked(descriptor) or not same_file(descriptor, path):
                    continue  # somebody who makes room is removing it this very moment
                journal = path.with_name(f"{sha256}.journal")
                with opened(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND) as log:
                    yield Partial(path, descriptor, log, size)
            return


@dataclass(frozen=True, slots=True)
class _Line:
    end: int
    tag: str
    sum: str


class Partial:
    """One download under way. `done` bytes from the beginning are on disk and proven; `tag` names their version."""

    def __init__(self, path: Path, descriptor: int, journal: int, size: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.size = size
        self.done = 0
        self.tag = ""
        self._journal = journal

    def recover(self, take: Callable[[memoryview], None]) -> Iterator[int]:
        """Read again what a former life wrote, as far as it is sound, giving it to `take`; yields after each chunk."""
        kept = 0
        there = min(os.fstat(self.descriptor).st_size, self.size)
        for line, length in self._lines():
            if not self.done < line.end <= there or (self.tag and line.tag != self.tag):
                break
            buffer = memoryview(mmap.mmap(-1, line.end - self.done))
            if os.preadv(self.descriptor, [buffer], self.done) != len(buffer) or checksum(buffer).hex() != line.sum:
                break
            for start in range(0, len(buffer), _STEP):
                take(buffer[start : start + _STEP])
            self.done, self.tag, kept = line.end, line.tag, length
            yield self.done
        os.ftruncate(self._journal, kept)
        os.ftruncate(self.descriptor, self.done)

    def _lines(self) -> Iterator[tuple[_Line, int]]:
        raw = os.pread(self._journal, _JOURNAL_CAP, 0)
        position = 0
        for row in raw.splitlines(keepends=True):
            position += len(row)
            try:
                line = _Line(**json.loads(row))
            except (ValueError, TypeError, RecursionError):
                return
            if not row.endswith(b"\n") or not isinstance(line.end, int) or not isinstance(line.tag, str):
                return
            yield line, position

    def allocate(self) -> None:
        """Take the file's room on the disk at once. Raises `OSError`."""
        if self.size:
            os.posix_fallocate(self.descriptor, 0, self.size)

    def write(self, pieces: list[memoryview], tag: str) -> None:
        """Write the next chunk and journal it. Raises `OSError`."""
        start = self.done
        for piece in pieces:
            view = piece
            while view:
                count = os.pwrite(self.descriptor, view, start)
                view, start = view[count:], start + count
        line = {"end": start, "tag": tag, "sum": checksum(*pieces).hex()}
        os.write(self._journal, f"{json.dumps(line)}\n".encode())
        self.done, self.tag = start, tag

    def restart(self) -> None:
        """Forget what was written: the source is not the one it came from."""
        os.ftruncate(self._journal, 0)
        self.done, self.tag = 0, ""

    def leave(self) -> None:
        """Give back the room for what did not come, and all of it if nothing did."""
        if self.done:
            os.ftruncate(self.descriptor, self.done)
        else:
            self.discard()

    def discard(self) -> None:
        """Remove it; whoever comes next begins anew."""
        self.path.unlink(missing_ok=True)
        self.path.with_name(f"{self.path.name}.journal").unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<Partial {self.path.name[:8]} {self.done} of {self.size} B>"
