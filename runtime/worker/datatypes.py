"""The datatypes of the Open Inference Protocol: sizes, numpy twins, JSON forms, and the BYTES layout.

Belongs here: what one element looks like on the wire. Never: requests, signatures, torch.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np

from actors.errors import BadTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype. `item` is bytes per element (0 for BYTES); `json` the Python type of a JSON element, or None.

    BF16 has no numpy type: its arrays hold the bit patterns as unsigned 16-bit integers.
    """

    name: str
    dtype: np.dtype[Any]
    item: int
    json: Any = None
    floating: bool = False


def _integer(name: str, dtype: type[np.integer[Any]]) -> Datatype:
    limits = np.iinfo(dtype)
    # msgspec takes bounds up to int64 only; numpy itself refuses what lies between those and uint64.
    meta = msgspec.Meta(ge=int(limits.min), le=min(int(limits.max), 2**63 - 1))
    bounded = Annotated[int, meta if limits.max < 2**63 else msgspec.Meta(ge=0)]
    return Datatype(name, np.dtype(dtype), np.dtype(dtype).itemsize, bounded)


_MAX32 = float(np.finfo(np.float32).max)
_FP32 = msgspec.Meta(ge=-_MAX32, le=_MAX32)

DATATYPES: dict[str, Datatype] = {
    one.name: one
    for one in (
        Datatype("BOOL", np.dtype(np.bool_), 1, bool),
        _integer("UINT8", np.uint8),
        _integer("UINT16", np.uint16),
        _integer("UINT32", np.uint32),
        _integer("UINT64", np.uint64),
        _integer("INT8", np.int8),
        _integer("INT16", np.int16),
        _integer("INT32", np.int32),
        _integer("INT64", np.int64),
        Datatype("FP16", np.dtype(np.float16), 2, None, floating=True),
        Datatype("BF16", np.dtype(np.uint16), 2, None, floating=True),
        Datatype("FP32", np.dtype(np.float32), 4, Annotated[float, _FP32], floating=True),
        Datatype("FP64", np.dtype(np.float64), 8, float, floating=True),
        Datatype("BYTES", np.dtype(np.object_), 0, str),
    )
}
"""Every datatype by its protocol name."""

_BF16_EXPONENT = 0x7F80
_LENGTH = 4
"""Bytes of the little-endian length in front of each BYTES element."""


@lru_cache(maxsize=256)
def json_decoder(datatype: str, depth: int) -> msgspec.json.Decoder[Any]:
    """A typed decoder for `depth` nested lists of one datatype's JSON elements."""
    kind: Any = DATATYPES[datatype].json
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def finite(datatype: Datatype, array: Array) -> bool:
    """Whether every element of a floating array is neither NaN nor infinite; True for other datatypes."""
    if not datatype.floating:
        return True
    if datatype.name == "BF16":
        return not bool(((array & _BF16_EXPONENT) == _BF16_EXPONENT).any())
    return bool(np.isfinite(array).all())


def from_json(datatype: Datatype, name: str, elements: list[Any]) -> Array:
    """A flat array of typed JSON elements. Raises `BadTensor` for values that the datatype cannot hold."""
    if datatype.json is str:
        texts = np.empty(len(elements), dtype=object)
        texts[:] = [text.encode() for text in elements]
        return texts
    try:
        # Typed parsing has checked ranges up to int64. fromiter beats np.array by a fifth, torch.tensor threefold.
        return np.fromiter(elements, datatype.dtype, len(elements))
    except (OverflowError, ValueError):
        raise BadTensor(f"input {name!r}: a value is out of range for {datatype.name}") from None


def from_base64(name: str, texts: Array) -> Array:
    """The files that the strings of a JSON body stand for. Raises `BadTensor`."""
    files = np.empty(len(texts), dtype=object)
    for place, text in enumerate(texts):
        try:
            files[place] = binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error:
            raise BadTensor(f"input {name!r}: element {place} is not base64, which files in JSON come as") from None
    return files


def unpack_bytes(name: str, count: int, buffer: memoryview) -> Array:
    """Read exactly `count` length-prefixed elements that fill `buffer`. Raises `BadTensor` otherwise."""
    found: list[bytes] = []
    at, end = 0, len(buffer)
    while at < end:
        start = at + _LENGTH
        if start > end:
            raise BadTensor(f"input {name!r}: element {len(found)} of BYTES is cut off in its length")
        at = start + int.from_bytes(buffer[at:start], "little")
        if at > end:
            raise BadTensor(f"input {name!r}: element {len(found)} of BYTES is longer than what is left of its bytes")
        if len(found) == count:
            raise BadTensor(f"input {name!r}: more than {count} BYTES elements for its shape")
        found.append(bytes(buffer[start:at]))
    if len(found) != count:
        raise BadTensor(f"input {name!r}: {len(found)} BYTES elements where its shape needs {count}")
    texts = np.empty(count, dtype=object)
    texts[:] = found
    return texts


def pack_bytes(elements: Iterable[Any]) -> bytes:
    """Lay elements (bytes or str) out with their lengths, the inverse of `unpack_bytes`."""
    parts: list[bytes] = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else bytes(element)
        parts += (len(raw).to_bytes(_LENGTH, "little"), raw)
    return b"".join(parts)
