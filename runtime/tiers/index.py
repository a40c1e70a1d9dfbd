"""Reads a safetensors header strictly, without torch, and says exactly what is wrong with a bad one.

Belongs here: the header's grammar and its arithmetic. Never: mapping, tensors, or the reading of weights.
Everything is checked against the file's real size *before* it is allocated or believed.
Format: https://huggingface.co/docs/safetensors (8-byte little-endian length, JSON, data without holes).
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn, cast

from actors.errors import CorruptWeights, FetchFailed
from runtime.tiers.sniff import looks_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

HEADER_CAP: Final = 16 << 20
TENSOR_CAP: Final = 1_000_000
NAME_CAP: Final = 1024
ALIASES: Final = "foreload.aliases"
"""Metadata key of our converter: a JSON object from the names of tied tensors to the name that is stored."""
DIMENSION_CAP: Final = 64
"""torch itself stops at 64 dimensions."""

_BY_WIDTH = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64", "C64"),
}
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType({name: n for n, names in _BY_WIDTH.items() for name in names})
"""Bytes per element of the dtypes that torch has too; the format's sub-byte ones are refused."""

_PREFIX = 8
_U64_LIMIT = 1 << 64
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_SHOWN = 80
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SLASH = re.compile(r"[/\\]")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: safetensors dtype, shape, and its bytes as the absolute file range `[start, end)`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Where each tensor of one file lies. `total` is the bytes of tensor data, `data` the absolute start of it.

    Tied tensors are in `entries` under each of their names, with the same range; `aliases` maps the further names to
    the stored one. `buffers` names the entries that are no state but non-persistent buffers of the module, and
    `left_out` what a filter kept out of the file; only a `slab` has either.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    total: int = 0
    data: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    slab: bool = False

    def __repr__(self) -> str:
        return f"<WeightIndex {len(self.entries)} tensors {self.total} B>"


def read_index(path: Path, *, header_cap: int = HEADER_CAP) -> WeightIndex:
    """Read and check the header of one safetensors file.

    Raises `CorruptWeights`, naming the field, for anything but a consistent file, and `FetchFailed` when the file
    cannot be opened or read. Messages never hold the path.
    """
    with opened(path) as descriptor:
        return read_index_at(descriptor, header_cap=header_cap)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a weights file while the block runs, whatever the file is. Raises `FetchFailed`."""
    try:
        # O_NONBLOCK: a FIFO in place of the weights must not hang the loader.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise unreadable(error) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_index_at(descriptor: int, *, header_cap: int = HEADER_CAP) -> WeightIndex:
    """As `read_index`, for a file that is open already; reads with `pread`, so the offset stays."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptWeights("the weights are not a regular file")
        header = _read_header(descriptor, status.st_size, header_cap)
    except OSError as error:
        raise unreadable(error) from None
    return _parse(header, status.st_size)


def unreadable(error: OSError | ValueError) -> FetchFailed:
    """Say why the weights cannot be read, without their path."""
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a valid path"
    return FetchFailed(f"the weights cannot be read: {reason}")


def _read_header(descriptor: int, size: int, cap: int) -> bytes:
    head = os.pread(descriptor, 64, 0)
    if len(head) < _PREFIX:
        refuse("truncated: shorter than the 8 bytes of the header length", head)
    length = int.from_bytes(head[:_PREFIX], "little")
    if length > cap:
        refuse(f"header length {length} is over the cap of {cap} bytes", head)
    if length > size - _PREFIX:
        refuse(f"truncated: header length {length} lies beyond the file's {size} bytes", head)
    if length < len(b"{}"):
        refuse(f"header length {length} is too short for a header", head)
    chunks: list[bytes] = []
    position = _PREFIX
    while position < _PREFIX + length:
        chunk = os.pread(descriptor, _PREFIX + length - position, position)
        if not chunk:
            refuse("truncated while it was being read")
        chunks.append(chunk)
        position += len(chunk)
    header = b"".join(chunks)
    if not header.startswith(b"{"):
        refuse("the header does not start with '{'", head)
    return header


def _parse(header: bytes, size: int) -> WeightIndex:
    tree = decoded(header)
    metadata = _metadata(tree.pop("__metadata__", None))
    if len(tree) > TENSOR_CAP:
        refuse(f"{len(tree)} tensors are over the limit of {TENSOR_CAP}")
    data = _PREFIX + len(header)
    entries: dict[str, Entry] = {}
    for name, fields in tree.items():
        check_name(name)
        entries[name] = _entry(name, fields, data, size)
    _check_contiguous(entries, data, size)
    aliases = _aliases(metadata.get(ALIASES, "{}"), entries)
    entries.update({alias: entries[stored] for alias, stored in aliases.items()})
    tables = (MappingProxyType(entries), MappingProxyType(metadata))
    return WeightIndex(*tables, size - data, data, MappingProxyType(aliases))


def decoded(header: bytes) -> dict[str, object]:
    """Parse a header that starts with `{`, without duplicate keys or floats. Raises `CorruptWeights`."""
    try:
        text = header.decode("utf-8")
        tree = json.loads(text, object_pairs_hook=_object, parse_float=_no_float, parse_constant=_no_float)
    except UnicodeDecodeError as error:
        refuse(f"the header is not UTF-8 at byte {error.start}")
    except RecursionError:
        refuse("the header is nested too deeply")
    except json.JSONDecodeError as error:
        refuse(f"the header is not JSON: {error.msg} at character {error.pos}")
    except ValueError:  # an integer of more digits than Python converts
        refuse("the header holds a number that is too long")
    # A text that starts with '{' and parses is an object.
    return cast("dict[str, object]", tree)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build one JSON object, refusing duplicate keys: the two copies could be read differently by two readers."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            refuse(f"duplicate key {quoted(key)} in the header")
        seen.add(key)
    return found


def _no_float(text: str) -> NoReturn:
    refuse(f"the header holds {quoted(text)}, which is not an integer")


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("__metadata__ is not an object")
    for key, text in value.items():
        if not isinstance(text, str):
            refuse(f"__metadata__ {quoted(key)} is not a string")
        if not (_is_unicode(key) and _is_unicode(text)):
            refuse(f"__metadata__ {quoted(key)} is not UTF-8")
    return value


def _aliases(text: str, entries: Mapping[str, Entry]) -> dict[str, str]:
    if not text.startswith("{"):
        refuse(f"__metadata__ {ALIASES} is not an object")
    aliases = decoded(text.encode())
    for alias, stored in aliases.items():
        check_name(alias)
        if alias in entries:
            refuse(f"alias {quoted(alias)} is a tensor as well")
        if not isinstance(stored, str) or stored not in entries:
            refuse(f"alias {quoted(alias)} points at {quoted(stored)}, which is not stored")
    return cast("dict[str, str]", aliases)


def check_name(name: str) -> None:
    """Refuse a tensor name that could be taken for a path, or that no log line could show. Raises `CorruptWeights`."""
    if not _is_unicode(name):
        refuse(f"tensor name {quoted(name)} is not UTF-8")
    if len(name.encode()) > NAME_CAP:
        refuse(f"tensor name {quoted(name)} is longer than {NAME_CAP} bytes")
    if not name:
        refuse("a tensor has an empty name")
    if _CONTROL.search(name):
        refuse(f"tensor name {quoted(name)} holds a control character")
    if name[0] in "/\\" or ".." in _SLASH.split(name):
        refuse(f"tensor name {quoted(name)} looks like a path")


def _is_unicode(text: str) -> bool:
    # JSON can spell lone surrogates (\ud800), which no UTF-8 text holds.
    return text.isascii() or not _SURROGATE.search(text)


def _entry(name: str, value: object, data: int, size: int) -> Entry:
    shown = f"tensor {quoted(name)}"
    if not isinstance(value, dict):
        refuse(f"{shown} is not an object")
    if value.keys() != _FIELDS:
        odd = min(value.keys() ^ _FIELDS)
        refuse(f"{shown}: field {quoted(odd)} is {'missing' if odd in _FIELDS else 'unknown'}")
    dtype, shape, expected = extent(value["dtype"], value["shape"], shown)
    offsets = naturals(value["data_offsets"], f"{shown}: data_offsets")
    if len(offsets) != len(("begin", "end")):
        refuse(f"{shown}: data_offsets are not a pair")
    begin, end = offsets
    if begin > end or end > size - data:
        refuse(f"{shown}: data_offsets {begin}..{end} lie outside the {size - data} bytes of data")
    if expected != end - begin:
        refuse(f"{shown}: shape {spelled(shape)} of {dtype} takes {expected} bytes, not {end - begin}")
    return Entry(dtype, shape, data + begin, data + end)


def extent(dtype: object, shape: object, shown: str) -> tuple[str, tuple[int, ...], int]:
    """Check a tensor's dtype and shape; gives them back with the bytes they take. Raises `CorruptWeights`."""
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        refuse(f"{shown}: unknown dtype {quoted(dtype)}")
    dimensions = naturals(shape, f"{shown}: shape")
    if len(dimensions) > DIMENSION_CAP:
        refuse(f"{shown}: shape has {len(dimensions)} dimensions, over the limit of {DIMENSION_CAP}")
    # Unlike the product, the product of the non-zero dimensions overflows elsewhere even for an empty tensor.
    if math.prod(dimension or 1 for dimension in dimensions) * ITEM_BYTES[dtype] >= _U64_LIMIT:
        refuse(f"{shown}: shape {spelled(dimensions)} overflows")
    return dtype, dimensions, math.prod(dimensions) * ITEM_BYTES[dtype]


def naturals(value: object, shown: str) -> tuple[int, ...]:
    """Check a list of unsigned 64-bit integers. Raises `CorruptWeights` with `shown` in front."""
    if not isinstance(value, list):
        refuse(f"{shown} is not a list")
    for number in value:
        # `type`, because JSON's true is an int to isinstance.
        if type(number) is not int or not 0 <= number < _U64_LIMIT:
            refuse(f"{shown} holds {quoted(number)}, which is not an unsigned 64-bit integer")
    return tuple(value)


def _check_contiguous(entries: Mapping[str, Entry], data: int, size: int) -> None:
    position = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            kind = "overlaps its neighbour" if entry.start < position else "leaves a hole before it"
            refuse(f"tensor {quoted(name)}: {kind} at data offset {entry.start - data}")
        position = entry.end
    if position != size:
        refuse(f"{size - position} trailing bytes after the last tensor")


def quoted(value: object) -> str:
    """Spell a value of unknown origin for an error message, cut short."""
    # Scalars only: the repr of a hostile container may be huge, or nested as deeply as the parser allowed.
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'map'} of {len(value)}"
    text = ascii(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def spelled(shape: tuple[int, ...]) -> str:
    """A shape for an error message."""
    return quoted("x".join(map(str, shape[:8])) or "scalar")


def refuse(reason: str, head: bytes | None = None) -> NoReturn:
    """Raise `CorruptWeights`; `head` are the file's first bytes where they may tell what it really is."""
    kind = looks_like(head) if head is not None else ""
    if kind:
        raise CorruptWeights(f"not a safetensors checkpoint (looks like {kind}): {reason}")
    raise CorruptWeights(f"corrupt weights: {reason}")
