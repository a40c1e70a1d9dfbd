"""Lays a slab from a weights file: what goes where, and the one pass that reads, converts, hashes and writes.

Belongs here: planning as a pure function, and writing in steps. Never: names of files, or when a slab is wanted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from blake3 import blake3
from xxhash import xxh3_128

from actors.errors import CorruptWeights
from runtime.tiers.index import ITEM_BYTES, Entry, check_name, extent
from runtime.tiers.slab import ALIGN, BLOCK, PAGE, Header, Placed, spell, upward
from runtime.tiers.slabread import scratch
from runtime.tiers.variant import cast
from runtime.tiers.verify import unreadable, unwritable, write_at

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from numpy.typing import NDArray

    from runtime.tiers.index import WeightIndex
    from runtime.tiers.recipe import Computed, Recipe
    from runtime.tiers.variant import Variant

CHUNK: Final = 4 << 20
"""Bytes read, hashed and written at once: each of these hands the GIL over, which a loop in this process feels."""
STEP: Final = 8 << 20
"""Bytes between two points where the work can stop."""

_ZEROS = bytes(PAGE)


@dataclass(frozen=True, slots=True)
class Layout:
    """A slab that is planned: its header with empty checksums, and where each tensor's bytes come from."""

    header: Header
    sources: Mapping[str, Entry | bytes]

    @property
    def size(self) -> int:
        """Bytes that the file will have."""
        return len(spell(self.header)) + self.header.length

    def __repr__(self) -> str:
        return f"<Layout {len(self.sources)} tensors {self.header.length} B>"


def plan(index: WeightIndex, recipe: Recipe, variant: Variant, *, fingerprint: str, source: str) -> Layout:
    """Decide what is stored once, under which name, and where.

    Raises `LoadFailed` for a filter that fits nothing, and `CorruptWeights` for a recipe that makes no sense.
    """
    kept = variant.chosen(index.entries)
    owners = _owners(kept, index, recipe)
    stored = {name: index.entries[name] for name in kept if owners[name] == name}
    # A tensor that the module computes is never taken from there if the file has it as well.
    buffers = {name: _checked(name, one) for name, one in sorted(recipe.buffers.items()) if name not in index.entries}
    sources: dict[str, Entry | bytes] = {name: stored[name] for name in _ordered(stored, owners, recipe)}
    sources.update({name: one.content for name, one in buffers.items()})
    tensors: dict[str, Placed] = {}
    end = 0
    for name, come in sources.items():
        like = come if isinstance(come, Entry) else buffers[name]
        dtype = variant.dtype_of(like.dtype) if isinstance(come, Entry) else like.dtype
        size = variant.size_of(come) if isinstance(come, Entry) else len(come)
        tensors[name] = Placed(dtype, like.shape, upward(end, ALIGN), size)
        end = upward(end, ALIGN) + size if size else end
    aliases = {name: owner for name, owner in owners.items() if name != owner}
    left_out = frozenset(index.entries).difference(owners)
    length = upward(end, PAGE)
    blocks = ("0" * 32,) * -(-length // BLOCK)
    header = Header(fingerprint, source, length, tensors, frozenset(buffers), aliases, left_out, blocks, "0" * 64)
    return Layout(header, sources)


def _owners(kept: list[str], index: WeightIndex, recipe: Recipe) -> dict[str, str]:
    """For every name in the slab the one that stores it: tied in the file, or tied in the module."""
    owners: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in kept:
        owners[name] = first.setdefault(index.aliases.get(name, name), name)
    for tied in recipe.ties:
        present = [name for name in tied if name in owners]
        if not present:
            continue
        # Where a file has several names of one tensor, the last one counts, as in `load_state_dict`.
        owner = owners[present[-1]]
        gone = {owners[name] for name in present} - {owner}
        owners = {name: owner if held in gone else held for name, held in owners.items()}
        for name in tied:
            check_name(name)
            owners[name] = owner
    return owners


def _ordered(stored: Mapping[str, Entry], owners: Mapping[str, str], recipe: Recipe) -> Iterable[str]:
    """Names in the order of first use, then the rest as the file has them."""
    used = dict.fromkeys(owner for name in recipe.order if (owner := owners.get(name, "")) in stored)
    return [*used, *(name for name in stored if name not in used)]


def _checked(name: str, one: Computed) -> Computed:
    check_name(name)
    _, _, size = extent(one.dtype, list(one.shape), f"computed buffer {ascii(name)[:80]}")
    if size != len(one.content):
        raise CorruptWeights(f"computed buffer {ascii(name)[:80]} has {len(one.content)} bytes, its shape takes {size}")
    return one


# -- writing -------------------------------------------------------------------------------------------


class _Sink:
    """Writes one thing after another from `position` on, with a checksum of each block and one of it all.

    The file is written from its start in whole multiples of `CHUNK`, `position` zeros first. The page cache then holds
    it in pages of 2 MiB: mapping and locking it takes a thirtieth of the time that it takes in the pieces in which
    tensors come. (ext4 since Linux 6.16, XFS since 5.17; elsewhere it costs one copy in memory.)
    """

    def __init__(self, target: int, position: int) -> None:
        self._target = target
        self._memory = scratch(CHUNK)
        self._stage = np.frombuffer(self._memory, np.uint8)
        self._filled = position % CHUNK
        self._flushed = position - self._filled
        self._stage[: self._filled] = 0  # from a page never touched the kernel copies less, and then in small pages
        self._block = xxh3_128()
        self._room = BLOCK
        self._root = blake3()
        self.blocks: list[str] = []
        self.written = 0

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        self._root.update(view)
        rest = view
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._close_block()
        self._put(np.frombuffer(view, np.uint8))
        self.written += len(view)

    def _put(self, data: NDArray[np.uint8]) -> None:
        while data.size:
            part = data[: CHUNK - self._filled]
            self._stage[self._filled : self._filled + part.size] = part  # a memoryview would copy under the GIL
            self._filled += part.size
            data = data[part.size :]
            if self._filled == CHUNK:
                self._flush()

    def _flush(self) -> None:
        write_at(self._target, self._memory[: self._filled], self._flushed)
        self._flushed += self._filled
        self._filled = 0

    def pad(self, position: int) -> None:
        while self.written < position:
            self.write(_ZEROS[: position - self.written])

    def _close_block(self) -> None:
        self.blocks.append(self._block.hexdigest())
        self._block = xxh3_128()
        self._room = BLOCK

    def finish(self) -> str:
        if self._room < BLOCK:
            self._close_block()
        self._flush()
        return self._root.hexdigest()


def laying(layout: Layout, source: int, target: int) -> Generator[None, None, Header]:
    """Write a slab into an empty file, from an open weights file; returns its header. Yields every 8 MiB.

    Raises `CorruptWeights` if the source ends early, `FetchFailed` or `DiskFull` for what reading and writing say.
    The file is complete and synced when this returns.
    """
    head = len(spell(layout.header))
    sink = _Sink(target, head)
    buffer = scratch(CHUNK)
    since = 0
    for name, come in layout.sources.items():
        placed = layout.header.tensors[name]
        if not placed.size:
            continue
        sink.pad(placed.offset)
        if not isinstance(come, Entry):
            sink.write(come)
            continue
        for part in _read(source, come, buffer):
            sink.write(cast(part, come.dtype, placed.dtype))
            since += len(part)
            if since >= STEP:
                since = 0
                yield
    sink.pad(layout.header.length)
    header = replace(layout.header, root=sink.finish(), blocks=tuple(sink.blocks))
    try:
        os.pwrite(target, spell(header), 0)
        os.fsync(target)
    except OSError as error:
        raise unwritable(error) from None
    return header


def _read(source: int, entry: Entry, buffer: memoryview) -> Generator[memoryview, None, None]:
    """A tensor's bytes in pieces of whole elements."""
    position = entry.start
    item = ITEM_BYTES[entry.dtype]
    while position < entry.end:
        got, wanted = 0, min(len(buffer) // item * item, entry.end - position)
        while got < wanted:
            try:
                count = os.preadv(source, [buffer[got:wanted]], position + got)
            except OSError as error:
                raise unreadable(error) from None
            if not count:
                raise CorruptWeights("the weights were truncated while their slab was laid")
            got += count
        yield buffer[:wanted]
        position += wanted
