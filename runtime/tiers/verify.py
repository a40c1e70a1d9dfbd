"""Hashes files in steps with the GIL released, alone or while copying, and remembers what was verified.

Belongs here: sha256 over whole files. Never: deciding what happens to a bad file (`disk.py`).
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from actors.errors import CorruptWeights, DiskFull, FetchFailed

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from runtime.tiers.blocks import Blocks

R = TypeVar("R")

STEP: Final = 8 << 20
"""Bytes per read: large enough to stream, small enough to keep the loop responsive and cancellation quick."""

Identity: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, mtime_ns, ctime_ns: unchanged means the same bytes, short of a clock set back."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def identity_of(status: os.stat_result) -> Identity:
    """What must be equal for a verified file to count as unchanged."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises `FetchFailed`, without the path."""
    try:
        # O_NONBLOCK: a FIFO must not hang the loader; it means nothing to a regular file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FetchFailed("the file cannot be read: not a regular file")
    return descriptor


def unreadable(error: OSError) -> FetchFailed:
    """Say why a file cannot be read, without its path."""
    return FetchFailed(f"the file cannot be read: {os.strerror(error.errno or errno.EIO)}")


def unwritable(error: OSError) -> DiskFull | FetchFailed:
    """Say why the cache cannot be written, without its path."""
    if error.errno in _FULL:
        return DiskFull("the disk has no room for these weights")
    return FetchFailed(f"the cache cannot be written: {os.strerror(error.errno or errno.EIO)}")


@dataclass(frozen=True, slots=True)
class Digest:
    """Bytes read and their sha256 in lower-case hex."""

    size: int
    sha256: str


def hashing(
    source: int, target: int | None = None, *, most: int | None = None, blocks: Blocks | None = None
) -> Generator[None, None, Digest]:
    """Read a descriptor to its end in 8 MiB steps, hashing, and writing each step to `target` if there is one.

    Yields after each step, so that the caller can stop. `blocks` gets what is read, for its checksums. More than
    `most` bytes raise `CorruptWeights`; a failing read raises `FetchFailed`, a failing write `DiskFull` or
    `FetchFailed`.
    """
    digest = hashlib.sha256()
    buffer = memoryview(mmap.mmap(-1, STEP))  # a bytearray would be zeroed under the GIL
    position = 0
    while True:
        try:
            count = os.preadv(source, [buffer], position)
        except OSError as error:
            raise unreadable(error) from None
        if not count:
            return Digest(position, digest.hexdigest())
        if most is not None and position + count > most:
            raise CorruptWeights(f"the file holds more than its manifest's {most} bytes")
        digest.update(buffer[:count])
        if blocks is not None:
            blocks.feed(buffer[:count])
        if target is not None:
            write_at(target, buffer[:count], position)
        position += count
        yield


def write_at(target: int, view: memoryview, position: int) -> None:
    """Write all of `view` from `position` on. Raises `DiskFull` or `FetchFailed`."""
    while view:
        try:
            count = os.pwrite(target, view, position)
        except OSError as error:
            raise unwritable(error) from None
        view, position = view[count:], position + count


def sha256_of(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256 of a file. Raises `FetchFailed`."""
    descriptor = open_regular(path)
    try:
        found = finish(hashing(descriptor))
    finally:
        os.close(descriptor)
    return found.size, found.sha256


def finish(steps: Generator[None, None, R]) -> R:
    """Run stepped work to its end in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # a generator's return value is untyped there


class Verified:
    """Remembers which files hold which bytes, by identity, so that a file is read for its hash once.

    Also remembers the wrong ones: a bad file is not hashed again on each retry. Safe to use from many threads.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._known: OrderedDict[Identity, str] = OrderedDict()
        self._limit = limit
        self._lock = Lock()

    def recall(self, status: os.stat_result) -> str | None:
        """The sha256 of an unchanged file that was hashed before."""
        with self._lock:
            return self._known.get(identity_of(status))

    def note(self, before: os.stat_result, after: os.stat_result, sha256: str) -> None:
        """Remember a hash, unless the file changed while it was read."""
        if identity_of(before) != identity_of(after):
            return
        with self._lock:
            self._known[identity_of(after)] = sha256
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def __repr__(self) -> str:
        return f"<Verified {len(self._known)} files>"
