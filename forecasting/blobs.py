"""Arrays as small blobs: byte planes under zlib, exact or rounded to what a checkpoint needs.

Belongs here: packing, and refusing to unpack what cannot be right. Never: SQL, meaning.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from forecasting.tiers import Minute, Row

MAX_LENGTH: Final = 1 << 20
_HEAD: Final = struct.Struct("<BBI")
_LENGTH: Final = struct.Struct("<I")
_DTYPES: Final = ("u1", "u2", "i4", "i8", "f2", "f4", "f8")
_LEVEL: Final = 1
_KEPT_BITS: Final = 5
"""Mantissa bits of a rounded float32: an error of at most 1.6 %."""

Numbers: TypeAlias = NDArray[np.generic]


class Damaged(ValueError):
    """Content that cannot have been written like this."""


class Packed(IntEnum):
    """How an array was packed."""

    EXACT = 0
    ROUNDED = 1


def pack_array(values: Numbers, how: Packed) -> bytes:
    """One-dimensional numbers as a blob. `ROUNDED` takes float32 and keeps 14 bits: sign, exponent, 5 of mantissa."""
    dtype = values.dtype.str[1:]
    if dtype not in _DTYPES or values.ndim != 1 or values.size > MAX_LENGTH:
        raise ValueError(f"cannot pack {values.ndim} dimensions of {values.size} {dtype}")
    content = values
    if how is Packed.ROUNDED:
        dropped = 23 - _KEPT_BITS
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        content = ((bits + (1 << (dropped - 1))) >> dropped << (dropped - 16)).astype(np.uint16)
    little = np.ascontiguousarray(content.astype(content.dtype.newbyteorder("<"), copy=False))
    planes = little.view(np.uint8).reshape(values.size, content.itemsize).T
    return _HEAD.pack(_DTYPES.index(dtype), how, values.size) + _deflated(planes.tobytes(), how)


def _deflated(content: bytes, how: Packed) -> bytes:
    """The shorter of two ways: by repeats, which sparse columns have, or by frequency, all that busy ones offer."""
    plain = zlib.compress(content, _LEVEL)
    if how is Packed.EXACT:
        return plain
    squeeze = zlib.compressobj(_LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)
    return min(plain, squeeze.compress(content) + squeeze.flush(), key=len)


def unpack_array(blob: object, dtype: str) -> Numbers:
    """Numbers of the dtype that is expected. Raises Damaged."""
    if not isinstance(blob, bytes) or len(blob) < _HEAD.size:
        raise Damaged("an array is cut short")
    code, how, count = _HEAD.unpack_from(blob)
    if code >= len(_DTYPES) or _DTYPES[code] != dtype or how not in (0, 1) or count > MAX_LENGTH:
        raise Damaged(f"an array of {dtype} has the wrong head")
    stored = np.dtype("<u2" if how == Packed.ROUNDED else "<" + dtype)
    raw = _inflated(blob[_HEAD.size :], count * stored.itemsize)
    if stored.itemsize == 1:
        return np.frombuffer(raw, np.uint8)
    planes: NDArray[np.uint8] = np.frombuffer(raw, np.uint8).reshape(stored.itemsize, count).T.copy()
    content: Numbers
    if how == Packed.ROUNDED:
        content = (np.frombuffer(planes.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        content = np.frombuffer(planes.tobytes(), stored).astype(np.dtype(dtype))
    if dtype[0] == "f" and not bool(np.isfinite(cast("NDArray[np.float64]", content)).all()):
        raise Damaged(f"an array of {dtype} holds what is no number")
    return content


def _inflated(blob: bytes, size: int) -> bytes:
    """Exactly `size` bytes; a blob that would grow beyond is stopped there."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(blob, size + 1)
    except zlib.error as error:
        raise Damaged(f"an array is damaged: {error}") from None
    if len(raw) != size or not inflater.eof:
        raise Damaged("an array has the wrong length")
    return raw


def codes_blob(row: Row) -> bytes:
    """A row's codes; one that is compressed already is taken as it is."""
    codes = row.codes
    if isinstance(row.content, bytes):
        return _HEAD.pack(_DTYPES.index("u1"), Packed.EXACT, codes.size) + row.content
    return pack_array(codes, Packed.EXACT)


def row_of(blob: object, known: int) -> Row:
    """The row that a blob holds, compressed as it is, after a look inside. Raises Damaged."""
    unpack_array(blob, "u1")
    return Row(cast("bytes", blob)[_HEAD.size :], known)


def minute_blob(row: Minute) -> bytes:
    """A minute's exact counts."""
    narrow = pack_array(row.narrow, Packed.EXACT)
    if row.wide is None:
        return _LENGTH.pack(len(narrow)) + narrow
    places = pack_array(row.wide[0], Packed.EXACT)
    values = pack_array(row.wide[1], Packed.EXACT)
    return _LENGTH.pack(len(narrow)) + narrow + _LENGTH.pack(len(places)) + places + values


def minute_of(blob: object, *, known: bool) -> Minute:
    """The minute that a blob holds. Raises Damaged."""
    if not isinstance(blob, bytes) or len(blob) < _LENGTH.size + _HEAD.size:
        raise Damaged("a minute is cut short")
    (length,) = _LENGTH.unpack_from(blob)
    head, rest = blob[4 : 4 + length], blob[4 + length :]
    narrow: NDArray[np.uint8] | NDArray[np.uint16]
    if head[:1] == bytes([_DTYPES.index("u2")]):
        narrow = unpack_array(head, "u2").astype(np.uint16, copy=False)
    else:
        narrow = unpack_array(head, "u1").astype(np.uint8, copy=False)
    if not rest:
        return Minute(narrow, known)
    if len(rest) < _LENGTH.size:
        raise Damaged("a minute is cut short")
    (length,) = _LENGTH.unpack_from(rest)
    places = unpack_array(rest[4 : 4 + length], "i4").astype(np.int32, copy=False)
    values = unpack_array(rest[4 + length :], "i8").astype(np.int64, copy=False)
    inside = places.size == values.size and bool(np.all((places >= 0) & (places < narrow.size) & (values >= 0)))
    if not inside:
        raise Damaged("a minute names models that it does not have")
    return Minute(narrow, known, (places, values))
