"""Reads published weights files and checks every block of 4 MiB while it is in the core's cache.

Two ways (measured in `bench/disk.py`): `checking` reads through the page cache, for tiers that map the file; and
`read_into` reads past it with O_DIRECT into memory that is there already, four threads by 4 MiB. Never: writing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from actors.errors import CorruptWeights
from runtime.tiers.blocks import BLOCK, BlockSum, BlockTable, checksum
from runtime.tiers.verify import open_regular, unreadable

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

THREADS: Final = 4
"""Readers of one load: one saturates a disk when the machine is quiet, four also when it is busy."""

ALIGN: Final = 4096
"""What O_DIRECT asks of address, offset and length."""

_STEP_BLOCKS = 2
_PIECE = 1 << 20
"""Larger ones have left the core's cache before they are hashed, smaller ones hand the GIL over more often."""
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})


@dataclass(frozen=True, slots=True)
class Reading:
    """One file read into memory: bytes, wall seconds, and whether the page cache was left alone all the way."""

    size: int
    seconds: float
    direct: bool

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds if self.seconds > 0 else 0.0


def checking(descriptor: int, table: BlockTable) -> Generator[None, None, bool]:
    """Read a file once, in order, through the page cache; False at the first block that is not what it was.

    Yields after each 8 MiB but the last. One sequential pass with readahead also makes mapping it cheap afterwards.
    """
    buffer = memoryview(mmap.mmap(-1, _PIECE))
    for index in range(table.count):
        if index and index % _STEP_BLOCKS == 0:
            yield
        try:
            found = _sum_of(descriptor, buffer, index * BLOCK, min((index + 1) * BLOCK, table.size))
        except OSError as error:
            raise unreadable(error) from None
        if found != table.expected(index):
            return False
    return os.fstat(descriptor).st_size == table.size


def _sum_of(descriptor: int, buffer: memoryview, start: int, end: int) -> bytes:
    """The checksum of a range, hashed piece by piece while it is in the core's cache."""
    running = BlockSum()
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            break
        running.update(buffer[:count])
        start += count
    return running.digest()


def _fill(descriptor: int, view: memoryview, start: int) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            break
        done += count
    return done


def read_into(
    path: Path, target: memoryview, table: BlockTable | None = None, *, size: int | None = None, threads: int = THREADS
) -> Reading:
    """Read a whole file into memory that lies on a page boundary, checking each block against `table` if there is one.

    `target` has room for the file, rounded up to 4 KiB where it may be read past the page cache to its very end.
    `size` is what the file must have. Where O_DIRECT is refused, by the file system or for this address, the page
    cache serves. Blocking. Raises `FetchFailed`, or `CorruptWeights` for a wrong size or block; then `target` holds
    anything.
    """
    started = time.perf_counter()
    plain = open_regular(path)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, plain)
        length = os.fstat(plain).st_size
        expected = table.size if table is not None else length if size is None else size
        if length != expected:
            raise CorruptWeights(f"the weights have {length} bytes where {expected} were written")
        if len(target) < length:
            raise ValueError(f"{len(target)} bytes of memory for a file of {length}")
        direct = _open_direct(path, plain)
        if direct >= 0:
            stack.callback(os.close, direct)
        blocks = _Blocks(plain, direct, target, length, table)
        workers = min(threads, max(1, -(-length // BLOCK)))
        if workers == 1:
            blocks.work()
        else:
            with ThreadPoolExecutor(workers) as pool:
                for each in [pool.submit(blocks.work) for _ in range(workers)]:
                    each.result()
    return Reading(length, time.perf_counter() - started, blocks.direct)


def _open_direct(path: Path, plain: int) -> int:
    """The same file without the page cache; -1 where that is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1
    if not os.path.samestat(os.fstat(descriptor), os.fstat(plain)):
        os.close(descriptor)
        return -1
    return descriptor


class _Blocks:
    """The blocks of one file, taken one by one by whichever thread is free."""

    def __init__(self, plain: int, direct: int, target: memoryview, length: int, table: BlockTable | None) -> None:
        self._plain = plain
        self._direct = direct
        self._target = target
        self._length = length
        self._table = table
        self._next = itertools.count()  # its step is atomic
        self._stop = False
        self.direct = direct >= 0

    def work(self) -> None:
        try:
            while not self._stop and (start := (index := next(self._next)) * BLOCK) < self._length:
                self._read(index, start)
        except BaseException:
            self._stop = True
            raise

    def _read(self, index: int, start: int) -> None:
        end = min(start + BLOCK, self._length)
        view = self._target[start:end]
        try:
            if not (self._direct >= 0 and self._read_direct(start, end)) and _fill(self._plain, view, start) < len(
                view
            ):
                raise CorruptWeights("the weights were truncated while they were read")
        except OSError as error:
            raise unreadable(error) from None
        if self._table is not None and checksum(view) != self._table.expected(index):
            raise CorruptWeights("the weights on disk are not what was written", detail={"block": index})

    def _read_direct(self, start: int, end: int) -> bool:
        """Read past the page cache; False if this block cannot be."""
        rounded = -(-end // ALIGN) * ALIGN
        if rounded > len(self._target):
            self.direct = False
            return False
        try:
            # The last block is asked for beyond the file's end, which is where the kernel stops.
            return _fill_direct(self._direct, self._target[start:rounded], start, end - start)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._direct, self.direct = -1, False
            return False


def _fill_direct(descriptor: int, view: memoryview, start: int, wanted: int) -> bool:
    count = os.preadv(descriptor, [view], start)
    # A short read would go on at an address that is not aligned: the page cache has to do the rest.
    return count >= wanted
