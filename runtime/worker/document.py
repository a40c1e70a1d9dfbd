"""The JSON part of an inference request: typed structs, and the guards that hostile JSON meets first.

Belongs here: reading a header once, safely. Never: tensor bytes, signatures, torch.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

import msgspec
import numpy as np

from actors.errors import BadRequest

Scalar: TypeAlias = str | bool | int | float

DEPTH_LIMIT = 64
"""Nested arrays and objects that a body may have."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


class InputJson(msgspec.Struct):
    """One input as it came. `data` stays unparsed until its datatype is known."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] = {}
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class SelectorJson(msgspec.Struct):
    """One wanted output."""

    name: str
    parameters: dict[str, Scalar] = {}


class RequestJson(msgspec.Struct):
    """The whole header. Unknown members are ignored, as every server of the protocol does."""

    inputs: list[InputJson]
    id: str | None = None
    parameters: dict[str, Scalar] = {}
    outputs: list[SelectorJson] = []


_DECODER = msgspec.json.Decoder(RequestJson)


def read(header: bytes) -> RequestJson:
    """Parse a header. Raises `BadRequest` naming the place for anything that is not a sound request."""
    guard_depth(header)
    try:
        request = _DECODER.decode(header)
    except RecursionError:
        raise BadRequest(f"the JSON is nested deeper than {DEPTH_LIMIT}") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as fault:
        raise BadRequest(f"the JSON is not an inference request: {fault}") from None
    guard_duplicates(header, request)
    return request


def _deepest(header: bytes) -> int:
    folded = np.frombuffer(header, np.uint8) | 0x20  # folds `[` onto `{` and `]` onto `}`
    opens = folded == ord("{")
    marks = np.flatnonzero(opens | (folded == ord("}")))
    return int(np.cumsum(np.where(opens[marks], 1, -1)).max(initial=0))


def guard_depth(header: bytes) -> None:
    """Refuse a body nested deeper than the limit before any recursive parser sees it. Raises `BadRequest`."""
    # No more opening brackets than the limit: cannot be too deep. The common case ends here.
    if header.count(b"[") + header.count(b"{") <= DEPTH_LIMIT:
        return
    # Brackets inside strings don't nest; they are blanked only if they could matter.
    if _deepest(header) > DEPTH_LIMIT and _deepest(_STRING.sub(b'""', header)) > DEPTH_LIMIT:
        raise BadRequest(f"the JSON is nested deeper than {DEPTH_LIMIT}")


def _without_data(header: bytes, request: RequestJson) -> bytes:
    """The header with each `data` replaced by 0, so that looking for keys never walks through tensor elements."""
    base = _address(header)
    parts: list[bytes] = []
    at = 0
    for one in request.inputs:
        if not isinstance(one.data, msgspec.Raw):
            continue
        start = _address(one.data) - base
        if not at <= start <= len(header):  # the parser gave a copy instead of a view: keep everything
            return header
        parts += (header[at:start], b"0")
        at = start + len(memoryview(one.data))
    parts.append(header[at:])
    return b"".join(parts)


def _address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data) if memoryview(buffer) else -1


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"the JSON has the key {twice[:64]!r} twice in one object")
    return dict(pairs)


def guard_duplicates(header: bytes, request: RequestJson) -> None:
    """Refuse an object that has one of the protocol's keys twice (F28). Raises `BadRequest`.

    Counting words comes first; only a header with more of them than its objects explain is parsed again.
    """
    bare = _without_data(header, request)
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
    if all(bare.count(word) <= limit for word, limit in explained):
        return
    try:
        json.loads(bare, object_pairs_hook=_unique)
    except ValueError:
        raise BadRequest("the JSON is malformed") from None
