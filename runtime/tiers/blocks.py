"""Checksums of one weights file in blocks of 4 MiB, so that a later read can be checked while it happens.

xxh3_128 finds what disks and hands do to bytes; it is no defence against an attacker, which is why a file gets its
blocks only after its sha256 was right. Belongs here: the table and its file. Never: reading weights (`reader.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from xxhash import xxh3_128

Piece: TypeAlias = bytes | bytearray | memoryview
BlockSum = xxh3_128
"""A running checksum: `update` takes bytes and lets others run meanwhile, `digest` gives what a table holds."""

BLOCK: Final = 4 << 20
"""Bytes of file per checksum."""

STEP: Final = 256 << 10
"""Bytes hashed at a time: they are still in the core's cache from the read."""

WIDTH: Final = 16
_MAGIC: Final = b"FLBLOCK1"
_HEAD: Final = 16


@dataclass(frozen=True, slots=True)
class BlockTable:
    """`size` bytes of file and 16 bytes of checksum per started block."""

    size: int
    sums: bytes

    def expected(self, index: int) -> bytes:
        """The checksum of one block."""
        return self.sums[index * WIDTH : (index + 1) * WIDTH]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.sums) // WIDTH

    def to_bytes(self) -> bytes:
        """The table as a file, with a checksum of its own at the end."""
        body = _MAGIC + self.size.to_bytes(8, "little") + self.sums
        return body + BlockSum(body).digest()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self | None:
        """Read a table; None for anything that is not a whole one."""
        body, check = raw[:-WIDTH], raw[-WIDTH:]
        if len(raw) < _HEAD + WIDTH or not body.startswith(_MAGIC) or BlockSum(body).digest() != check:
            return None
        size, sums = int.from_bytes(body[len(_MAGIC) : _HEAD], "little"), body[_HEAD:]
        return cls(size, sums) if len(sums) == -(-size // BLOCK) * WIDTH else None


class Blocks:
    """Makes a table of bytes that pass by in order, in pieces of any length."""

    def __init__(self) -> None:
        self._sums = bytearray()
        self._running = BlockSum()
        self._size = 0

    def feed(self, piece: Piece) -> None:
        """Take the next bytes."""
        view = memoryview(piece).cast("B")
        while view:
            room = min(BLOCK - self._size % BLOCK, STEP)
            self._running.update(view[:room])
            self._size += len(view[:room])
            if self._size % BLOCK == 0:
                self._close()
            view = view[room:]

    def table(self) -> BlockTable:
        """The table of what passed; call it once, at the end."""
        if self._size % BLOCK:
            self._close()
        return BlockTable(self._size, bytes(self._sums))

    def _close(self) -> None:
        self._sums += self._running.digest()
        self._running.reset()


def checksum(*views: Piece) -> bytes:
    """The checksum of bytes that are in memory, as if they were one; the interpreter is free for others meanwhile."""
    running = BlockSum()
    for view in views:
        running.update(view)
    return running.digest()
