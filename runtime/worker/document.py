"""The JSON part of an inference request: typed structs, and the guards that hostile JSON meets first.

Belongs here: reading a header once, safely. Never: tensor bytes, signatures, torch.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from actors.errors import BadRequest

Scalar: TypeAlias = str | bool | int | float

DEPTH_LIMIT = 64
"""Nested arrays and objects that a body may have."""

_LARGE = 8 << 10
"""Bytes of a header, or of a stretch without quotes in it, that are not worth a search."""

_STEP = 64 << 10
_FEW = 256
"""Occurrences that are worth being found one by one."""

D = TypeVar("D")

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class InputJson(msgspec.Struct, Generic[D]):
    """One input as it came. `data` is unparsed until its datatype is known, or a flat list if the reader knew it."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] = {}
    data: D | msgspec.UnsetType = msgspec.UNSET


class SelectorJson(msgspec.Struct):
    """One wanted output."""

    name: str
    parameters: dict[str, Scalar] = {}


class RequestJson(msgspec.Struct, Generic[D]):
    """The whole header. Unknown members are ignored, as every server of the protocol does."""

    inputs: list[InputJson[D]]
    id: str | None = None
    parameters: dict[str, Scalar] = {}
    outputs: list[SelectorJson] = []


AnyInput: TypeAlias = InputJson[msgspec.Raw] | InputJson[list[Any]]
AnyRequest: TypeAlias = RequestJson[msgspec.Raw] | RequestJson[list[Any]]


Reader: TypeAlias = msgspec.json.Decoder[AnyRequest]


@lru_cache(maxsize=64)
def reader_of(element: Any) -> Reader:
    """A decoder of headers whose `data` are flat lists of one JSON type; None leaves `data` unparsed.

    Keep it: finding it again means hashing a type, which takes longer than reading a small header.
    """
    return msgspec.json.Decoder(RequestJson[msgspec.Raw] if element is None else RequestJson[list[element]])


_untyped = reader_of(None)


def read(header: bytes, reader: Reader = _untyped, *, depth: int = DEPTH_LIMIT) -> AnyRequest:
    """Parse a header. Raises `BadRequest` naming the place for anything that is not a sound request.

    `reader` knows the JSON type that all `data` are expected to have: flat lists of it are parsed in this one pass.
    `depth` is how many arrays and objects may be nested.
    """
    guard_depth(header, depth)
    try:
        request = _decoded(header, reader)
    except RecursionError:
        raise BadRequest(f"the JSON is nested deeper than {depth}") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as fault:
        raise BadRequest(f"the JSON is not an inference request: {fault}") from None
    guard_duplicates(header, request)
    return request


def _decoded(header: bytes, reader: Reader) -> AnyRequest:
    if reader is not _untyped:
        try:
            return reader.decode(header)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            pass  # nested, or wrong: the second pass tells
    return _untyped.decode(header)


def _deepest(header: bytes) -> int:
    folded = np.frombuffer(header, np.uint8) | 0x20  # folds `[` onto `{` and `]` onto `}`
    opens = folded == ord("{")
    marks = np.flatnonzero(opens | (folded == ord("}")))
    return int(np.cumsum(np.where(opens[marks], 1, -1)).max(initial=0))


def guard_depth(header: bytes, limit: int = DEPTH_LIMIT) -> None:
    """Refuse a body nested deeper than the limit before any recursive parser sees it. Raises `BadRequest`."""
    # No more opening brackets than the limit: cannot be too deep. The common case ends here.
    if not (_exceeds(header, b"[", limit // 2) or _exceeds(header, b"{", limit // 2)):
        return
    # Brackets inside strings don't nest; they are blanked only if they could matter.
    if _deepest(header) > limit and _deepest(_STRING.sub(b'""', header)) > limit:
        raise BadRequest(f"the JSON is nested deeper than {limit}")


def _outline(header: bytes) -> bytes:
    """A large header without its long stretches of numbers, so that looking for words stays cheap."""
    if len(header) <= _LARGE:
        return header
    quotes = np.flatnonzero(np.frombuffer(header, np.uint8) == ord('"'))
    edges = np.flatnonzero(np.diff(quotes, prepend=-1, append=len(header)) > _LARGE)
    parts: list[bytes] = []
    at = 0
    for edge in edges.tolist():  # from the quote before each stretch to the one after it
        stop = int(quotes[edge - 1]) + 1 if edge else 0
        parts.append(header[at:stop])
        at = int(quotes[edge]) if edge < len(quotes) else len(header)
    parts.append(header[at:])
    return b"".join(parts)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"the JSON has the key {twice[:64]!r} twice in one object")
    return dict(pairs)


def guard_duplicates(header: bytes, request: AnyRequest) -> None:
    """Refuse an object that has one of the protocol's keys twice (F28). Raises `BadRequest`.

    Cheap questions come first: are there more quotes than what was read explains, then more of a word than it
    explains. Only then is the header parsed again, by a parser that sees every key.
    """
    if not _exceeds(header, b'"', _quotes(request)):
        return
    outline = _outline(header)
    inputs, outputs = len(request.inputs), len(request.outputs)
    explained = (
        (b'"inputs"', 1),
        (b'"outputs"', 1),
        (b'"id"', 1),
        (b'"parameters"', 1 + inputs + outputs),
        (b'"name"', inputs + outputs),
        (b'"shape"', inputs),
        (b'"datatype"', inputs),
        (b'"data"', inputs),
        (b'"binary_data_size"', inputs),
        (b'"binary_data"', outputs),
    )
    if all(outline.count(word) <= limit for word, limit in explained):
        return
    try:
        json.loads(header, object_pairs_hook=_unique)
    except ValueError:
        raise BadRequest("the JSON is malformed") from None


def _quotes(request: AnyRequest) -> int:
    """Quotes in the shortest spelling of what was read: two for each key and each string in it, none in numbers."""
    strings = 1 + (2 if request.id is not None else 0) + _strings(request.parameters)
    for one in request.inputs:
        strings += 5 + (one.data is not msgspec.UNSET) + _strings(one.parameters)
    if request.outputs:
        strings += 1
        for wish in request.outputs:
            strings += 2 + _strings(wish.parameters)
    return 2 * strings


def _strings(parameters: dict[str, Scalar]) -> int:
    if not parameters:
        return 0
    return 1 + len(parameters) + sum(isinstance(value, str) for value in parameters.values())


def _exceeds(header: bytes, byte: bytes, limit: int) -> bool:
    """Whether a byte occurs more than `limit` times. Between rare bytes `find` runs at the speed of memory."""
    if len(header) <= _LARGE or limit > _FEW:
        return _count(header, byte) > limit
    at = -1
    for _ in range(limit + 1):
        at = header.find(byte, at + 1)
        if at < 0:
            return False
    return True


def _count(header: bytes, byte: bytes) -> int:
    """`bytes.count` looks at one byte at a time; from a few thousand on numpy is ten times faster."""
    if len(header) <= _LARGE:
        return header.count(byte)
    array, wanted = np.frombuffer(header, np.uint8), ord(byte)
    # In steps, because fresh memory for one large comparison costs more than the comparison.
    return sum(int(np.count_nonzero(array[at : at + _STEP] == wanted)) for at in range(0, len(array), _STEP))
