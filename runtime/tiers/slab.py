"""The slab: one model's weights laid out for reading. The format, and a reader that believes nothing.

Belongs here: the header's grammar and arithmetic. Never: reading weights, or writing files (`lay.py`).

    SLAB0001 | u64 header length | header, JSON | xxh3_128 of all before | zeros to 4 KiB | data, padded to 4 KiB

Offsets in the header count from the start of the data. Each tensor lies at a multiple of 256 bytes, in the order in
which a forward first uses them, and at most 255 bytes after the one before.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar, cast

from xxhash import xxh3_128_digest

from actors.errors import CorruptWeights
from runtime.tiers.index import (
    TENSOR_CAP,
    Entry,
    WeightIndex,
    check_name,
    decoded,
    extent,
    naturals,
    opened,
    quoted,
    read_index_at,
    refuse,
    unreadable,
)
from runtime.tiers.verify import identity_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from runtime.tiers.verify import Identity

T = TypeVar("T")

MAGIC: Final = b"SLAB0001"
PAGE: Final = 4096
"""Where data start and end: what O_DIRECT and a mapping want."""
ALIGN: Final = 256
"""Where tensors start: what vectorised kernels want."""
BLOCK: Final = 4 << 20
"""Bytes of data under one checksum."""
HEADER_CAP: Final = 32 << 20
"""Bytes of JSON: a million names with their shapes, and the checksums of terabytes, stay below it."""
NAMES_CAP: Final = TENSOR_CAP
REMEMBERED: Final = 64
"""Headers that are kept: some hundred kilobytes each for a thousand tensors."""

_PREFIX = len(MAGIC) + 8
_SUM = 16
_KEYS = frozenset({"fingerprint", "source", "length", "tensors", "buffers", "aliases", "left_out", "blocks", "root"})
_FIELDS = frozenset({"dtype", "shape", "offset"})
_HEX = re.compile(r"[0-9a-f]*", re.ASCII)
_HASH = 64
_BLOCK_HASH = 32


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor in a slab: safetensors dtype, shape, and `offset` and `size` in bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """All that a slab says of itself.

    `fingerprint` is the model's, `source` the sha256 of the file that it was laid from, `length` the bytes of data with
    padding. `blocks` are xxh3_128 of each 4 MiB of the data, `root` is blake3 of all of it; both in hex.
    """

    fingerprint: str
    source: str
    length: int
    tensors: Mapping[str, Placed]
    buffers: frozenset[str]
    aliases: Mapping[str, str]
    left_out: frozenset[str]
    blocks: tuple[str, ...]
    root: str


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab that was read: its header, where its data start in the file, and its tensors as any weights file's."""

    header: Header
    data: int
    index: WeightIndex

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.data + self.header.length

    def __repr__(self) -> str:
        return f"<Slab {self.header.fingerprint[:8]} {len(self.header.tensors)} tensors {self.size} B>"


def upward(size: int, step: int) -> int:
    """The next multiple of `step`, or `size` if it is one."""
    return -(-size // step) * step


def spell(header: Header) -> bytes:
    """The bytes before the data, checksum and padding included; as long for any checksums of the data."""
    tree = {
        "fingerprint": header.fingerprint,
        "source": header.source,
        "length": header.length,
        "tensors": {
            name: {"dtype": one.dtype, "shape": one.shape, "offset": one.offset} for name, one in header.tensors.items()
        },
        "buffers": sorted(header.buffers),
        "aliases": dict(header.aliases),
        "left_out": sorted(header.left_out),
        "blocks": header.blocks,
        "root": header.root,
    }
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > HEADER_CAP:
        raise CorruptWeights(f"the slab's header would have {len(text)} bytes, over the cap of {HEADER_CAP}")
    head = MAGIC + len(text).to_bytes(8, "little") + text
    head += xxh3_128_digest(head)
    return head + bytes(upward(len(head), PAGE) - len(head))


def is_slab(descriptor: int) -> bool:
    """Whether an open file says that it is one. Raises `FetchFailed`."""
    try:
        return os.pread(descriptor, len(MAGIC), 0) == MAGIC
    except OSError as error:
        raise unreadable(error) from None


_known: OrderedDict[Identity, WeightIndex] = OrderedDict()
_slabs: OrderedDict[Identity, Slab | None] = OrderedDict()
_knowing = Lock()


def read_weights(path: Path) -> WeightIndex:
    """Read the header of a weights file of either format, or remember it: parsing is half of a small model's load.

    Raises `CorruptWeights` or `FetchFailed`.
    """
    with opened(path) as descriptor:
        return _remembered(_known, descriptor, _read_either)


def slab_at(descriptor: int) -> Slab | None:
    """The header of an open weights file if that is a slab, remembered as `read_weights` does.

    Raises `CorruptWeights` or `FetchFailed`.
    """
    return _remembered(_slabs, descriptor, lambda one: read_slab_at(one) if is_slab(one) else None)


def _read_either(descriptor: int) -> WeightIndex:
    return read_slab_at(descriptor).index if is_slab(descriptor) else read_index_at(descriptor)


def _remembered(known: OrderedDict[Identity, T], descriptor: int, read: Callable[[int], T]) -> T:
    identity = identity_of(os.fstat(descriptor))
    with _knowing:
        if identity in known:
            known.move_to_end(identity)
            return known[identity]
    found = read(descriptor)
    with _knowing:
        known[identity] = found
        while len(known) > REMEMBERED:
            known.popitem(last=False)
    return found


def read_slab(path: Path) -> Slab:
    """Read and check the header of a slab.

    Raises `CorruptWeights`, naming the field, for anything but a consistent file, and `FetchFailed` when the file
    cannot be opened or read. Messages never hold the path.
    """
    with opened(path) as descriptor:
        return read_slab_at(descriptor)


def read_slab_at(descriptor: int, *, header_cap: int = HEADER_CAP) -> Slab:
    """As `read_slab`, for a file that is open already; reads with `pread`, so the offset stays."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptWeights("the slab is not a regular file")
        text = _read_header(descriptor, status.st_size, header_cap)
    except OSError as error:
        raise unreadable(error) from None
    return _parse(text, status.st_size)


# -- the strict part -----------------------------------------------------------------------------------


def _read_header(descriptor: int, size: int, cap: int) -> bytes:
    head = os.pread(descriptor, _PREFIX, 0)
    if len(head) < _PREFIX:
        refuse(f"slab truncated: shorter than the {_PREFIX} bytes of its prefix")
    if not head.startswith(MAGIC):
        refuse(f"not a slab: magic is {quoted(head[: len(MAGIC)].decode('latin-1'))}")
    length = int.from_bytes(head[len(MAGIC) :], "little")
    if length > cap:
        refuse(f"slab: header length {length} is over the cap of {cap} bytes")
    if length + _PREFIX + _SUM > size:
        refuse(f"slab truncated: header length {length} lies beyond the file's {size} bytes")
    found = _exactly(descriptor, length + _SUM, _PREFIX)
    text, checksum = found[:length], found[length:]
    if xxh3_128_digest(head + text) != checksum:
        refuse("slab: the header's checksum is wrong")
    padding = upward(_PREFIX + length + _SUM, PAGE) - (_PREFIX + length + _SUM)
    if any(_exactly(descriptor, min(padding, max(0, size - _PREFIX - length - _SUM)), _PREFIX + length + _SUM)):
        refuse("slab: something lies between header and data")
    if not text.startswith(b"{"):
        refuse("slab: the header does not start with '{'")
    return text


def _exactly(descriptor: int, count: int, offset: int) -> bytes:
    chunks: list[bytes] = []
    while count:
        chunk = os.pread(descriptor, count, offset)
        if not chunk:
            refuse("slab truncated while it was being read")
        chunks.append(chunk)
        count, offset = count - len(chunk), offset + len(chunk)
    return b"".join(chunks)


def _parse(text: bytes, size: int) -> Slab:
    tree = decoded(text)
    _must_have(tree, _KEYS, "slab")
    (length,) = naturals([tree["length"]], "slab: length")
    data = upward(_PREFIX + len(text) + _SUM, PAGE)
    if length % PAGE:
        refuse(f"slab: length {length} is no multiple of {PAGE}")
    if data + length != size:
        refuse(f"slab: length {length} after {data} bytes of header does not give the file's {size} bytes")
    tensors = _tensors(tree["tensors"], length)
    _check_places(tensors, length)
    aliases = _aliases(tree["aliases"], tensors)
    buffers = _names(tree["buffers"], "buffers")
    for name in buffers - tensors.keys():
        refuse(f"slab: buffers: {quoted(name)} is not stored")
    left_out = _names(tree["left_out"], "left_out")
    for name in left_out & (tensors.keys() | aliases.keys()):
        refuse(f"slab: left_out: {quoted(name)} is stored")
    header = Header(
        fingerprint=_hash(tree["fingerprint"], "fingerprint", _HASH),
        source=_hash(tree["source"], "source", _HASH),
        length=length,
        tensors=MappingProxyType(tensors),
        buffers=buffers,
        aliases=MappingProxyType(aliases),
        left_out=left_out,
        blocks=_blocks(tree["blocks"], length),
        root=_hash(tree["root"], "root", _HASH),
    )
    return Slab(header, data, _index(header, data))


def _index(header: Header, data: int) -> WeightIndex:
    entries = {
        name: Entry(one.dtype, one.shape, data + one.offset, data + one.offset + one.size)
        for name, one in header.tensors.items()
    }
    entries.update({alias: entries[stored] for alias, stored in header.aliases.items()})
    return WeightIndex(
        MappingProxyType(entries),
        total=header.length,
        data=data,
        aliases=header.aliases,
        buffers=header.buffers,
        left_out=header.left_out,
        slab=True,
    )


def _must_have(tree: Mapping[str, object], keys: frozenset[str], shown: str) -> None:
    if tree.keys() != keys:
        odd = min(tree.keys() ^ keys)
        refuse(f"{shown}: field {quoted(odd)} is {'missing' if odd in keys else 'unknown'}")


def _tensors(value: object, length: int) -> dict[str, Placed]:
    if not isinstance(value, dict):
        refuse("slab: tensors is not an object")
    if len(value) > TENSOR_CAP:
        refuse(f"slab: {len(value)} tensors are over the limit of {TENSOR_CAP}")
    found: dict[str, Placed] = {}
    for name, fields in value.items():
        check_name(name)
        shown = f"slab: tensor {quoted(name)}"
        if not isinstance(fields, dict):
            refuse(f"{shown} is not an object")
        _must_have(fields, _FIELDS, shown)
        dtype, shape, size = extent(fields["dtype"], fields["shape"], shown)
        (offset,) = naturals([fields["offset"]], f"{shown}: offset")
        if offset % ALIGN:
            refuse(f"{shown}: offset {offset} is no multiple of {ALIGN}")
        if offset + size > length:
            refuse(f"{shown}: offset {offset} and {size} bytes lie outside the {length} bytes of data")
        found[name] = Placed(dtype, shape, offset, size)
    return found


def _check_places(tensors: Mapping[str, Placed], length: int) -> None:
    """Refuse overlaps, and room in which something could hide."""
    end = 0
    stored = ((name, one) for name, one in tensors.items() if one.size)
    for name, one in sorted(stored, key=lambda item: item[1].offset):
        if one.offset < end:
            refuse(f"slab: tensor {quoted(name)}: overlaps its neighbour at offset {one.offset}")
        if one.offset != upward(end, ALIGN):
            refuse(f"slab: tensor {quoted(name)}: leaves a hole before it at offset {one.offset}")
        end = one.offset + one.size
    if length != upward(end, PAGE):
        refuse(f"slab: length {length} is not the {upward(end, PAGE)} bytes that its tensors take")


def _aliases(value: object, tensors: Mapping[str, Placed]) -> dict[str, str]:
    if not isinstance(value, dict):
        refuse("slab: aliases is not an object")
    if len(value) > NAMES_CAP:
        refuse(f"slab: {len(value)} aliases are over the limit of {NAMES_CAP}")
    for alias, stored in value.items():
        check_name(alias)
        if alias in tensors:
            refuse(f"slab: alias {quoted(alias)} is a tensor as well")
        if not isinstance(stored, str) or stored not in tensors:
            refuse(f"slab: alias {quoted(alias)} points at {quoted(stored)}, which is not stored")
    return cast("dict[str, str]", value)


def _names(value: object, key: str) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > NAMES_CAP:
        refuse(f"slab: {key} is not a list of at most {NAMES_CAP} names")
    for name in value:
        if not isinstance(name, str):
            refuse(f"slab: {key} holds {quoted(name)}, which is not a name")
        check_name(name)
    return _unlike(value, key)


def _unlike(names: Sequence[str], key: str) -> frozenset[str]:
    for first, second in itertools.pairwise(sorted(names)):
        if first == second:
            refuse(f"slab: {key} holds {quoted(first)} twice")
    return frozenset(names)


def _blocks(value: object, length: int) -> tuple[str, ...]:
    needed = -(-length // BLOCK)
    if not isinstance(value, list) or len(value) != needed:
        refuse(f"slab: blocks is not a list of {needed} checksums")
    return tuple(_hash(each, "blocks", _BLOCK_HASH) for each in cast("Iterable[object]", value))


def _hash(value: object, key: str, digits: int) -> str:
    if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
        refuse(f"slab: {key} holds {quoted(value)}, which is not {digits} hex digits")
    return value
