"""Reads a slab's data: into memory of the caller's, past the page cache if wanted, and checked on the way.

Belongs here: blocks, their checksums, alignment. Never: where the memory comes from, or what a bad slab leads to.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

from blake3 import blake3
from xxhash import xxh3_128

from actors.errors import CorruptWeights
from runtime.tiers.slab import BLOCK
from runtime.tiers.verify import unreadable

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.tiers.slab import Slab

STEP: Final = 256 << 10
"""Bytes read and hashed in turn: they are still in the core's own cache when they are hashed."""
THREADS: Final = 4
"""Reads under way at a time; one saturates a quiet disk, four a busy one."""


def blocks_within(slab: Slab, start: int, end: int) -> range:
    """The blocks that begin in a range of the file, so that ranges next to each other check each block once."""
    first = max(0, -(-(start - slab.data) // BLOCK))
    return range(first, max(first, min(len(slab.header.blocks), -(-(end - slab.data) // BLOCK))))


def scratch(size: int = STEP) -> memoryview:
    """Memory to read into, on page borders as O_DIRECT wants it; a bytearray would be zeroed under the GIL."""
    return memoryview(mmap.mmap(-1, size))


def check_block(descriptor: int, slab: Slab, number: int, buffer: memoryview) -> None:
    """Read one block through the page cache and compare its checksum. Raises `CorruptWeights` or `FetchFailed`.

    A large buffer costs a little more CPU and hands the GIL over less often, which is what a loop in the same process
    feels.
    """
    start, end = _range(slab, number)
    summed = xxh3_128()
    for at in range(start, end, len(buffer)):
        piece = buffer[: min(len(buffer), end - at)]
        _read(descriptor, piece, at)
        summed.update(piece)
    _must_match(slab, number, summed.hexdigest())


def read_data(descriptor: int, slab: Slab, target: memoryview, *, verify: bool = True, threads: int = 1) -> None:
    """Fill `target`, of `slab.header.length` bytes, with the slab's data.

    A descriptor opened by `open_direct` needs a target on a page border; it leaves the page cache alone. With
    `verify` each block's checksum is compared. Raises `CorruptWeights` or `FetchFailed`.
    """
    one = partial(_fill, descriptor, slab, target, verify=verify)
    numbers = range(len(slab.header.blocks))
    if threads == 1:
        for number in numbers:
            one(number)
        return
    shared = iter(numbers)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: deque(map(one, shared), 0), range(threads)))


def open_direct(path: Path) -> int:
    """Open a file for reading past the page cache, or the usual way where that can't be. Raises `FetchFailed`."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError:
            return os.open(path, flags)
    except OSError as error:
        raise unreadable(error) from None


def check_root(path: Path, slab: Slab) -> None:
    """Compare the blake3 of all data: for a slab that came from elsewhere. Raises `CorruptWeights` or `FetchFailed`."""
    found = blake3()
    buffer = scratch(BLOCK)
    descriptor = open_direct(path)
    try:
        for number in range(len(slab.header.blocks)):
            start, end = _range(slab, number)
            _read(descriptor, buffer[: end - start], start)
            found.update(buffer[: end - start])
    finally:
        os.close(descriptor)
    if found.hexdigest() != slab.header.root:
        raise CorruptWeights("the slab's blake3 is not the one of its header")


def _fill(descriptor: int, slab: Slab, target: memoryview, number: int, *, verify: bool) -> None:
    start, end = _range(slab, number)
    whole = target[start - slab.data : end - slab.data]
    if not verify:
        _read(descriptor, whole, start)
        return
    summed = xxh3_128()
    # Past the page cache small reads are slow ones, and the bytes come from the disk's own copy anyway.
    step = BLOCK if _direct(descriptor) else STEP
    for at in range(0, len(whole), step):
        piece = whole[at : at + step]
        _read(descriptor, piece, start + at)
        summed.update(piece)
    _must_match(slab, number, summed.hexdigest())


def _direct(descriptor: int) -> bool:

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _range(slab: Slab, number: int) -> tuple[int, int]:
    start = slab.data + number * BLOCK
    return start, min(start + BLOCK, slab.size)


def _read(descriptor: int, piece: memoryview, at: int) -> None:
    while piece:
        try:
            count = os.preadv(descriptor, [piece], at)
        except OSError as error:
            raise unreadable(error) from None
        if not count:
            raise CorruptWeights("the slab was truncated")
        piece, at = piece[count:], at + count


def _must_match(slab: Slab, number: int, found: str) -> None:
    if found != slab.header.blocks[number]:
        raise CorruptWeights(f"block {number} of the slab is damaged")
