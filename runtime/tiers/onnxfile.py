"""Walks an ONNX file's protobuf without building it: is it whole, is it a model, does it reach outside itself.

Belongs here: the wire format and the few fields that matter for safety. Never: operators, shapes, the meaning of a
graph, which ONNX Runtime checks itself. Payloads are skipped, not read, so the cost is that of the structure.
Format: https://protobuf.dev/programming-guides/encoding, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, NoReturn

from actors.errors import CorruptWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH: Final = 32
"""Deepest nesting of graphs; each level is a subgraph of an If, Loop or Scan."""

FIELDS: Final = 20_000_000
"""Most fields walked: a model of a million nodes has about ten million."""

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_VARINT_BITS = 70
_EXTERNAL = 1

# Message -> field -> (name, message of the field); what is not listed is skipped.
_INSIDE: Final[dict[str, dict[int, tuple[str, str]]]] = {
    "model": {7: ("graph", "graph"), 20: ("training_info", "training"), 25: ("functions", "function")},
    "graph": {1: ("node", "node"), 5: ("initializer", "tensor"), 15: ("sparse_initializer", "sparse")},
    "node": {5: ("attribute", "attribute")},
    "function": {7: ("node", "node"), 11: ("attribute_proto", "attribute")},
    "attribute": {
        5: ("t", "tensor"),
        6: ("g", "graph"),
        10: ("tensors", "tensor"),
        11: ("graphs", "graph"),
        22: ("sparse_tensor", "sparse"),
        23: ("sparse_tensors", "sparse"),
    },
    "sparse": {1: ("values", "tensor"), 2: ("indices", "tensor")},
    "training": {1: ("initialization", "graph"), 2: ("algorithm", "graph")},
}
_TENSOR_EXTERNAL, _TENSOR_LOCATION = 13, 14


def check_onnx(descriptor: int, size: int) -> None:
    """Check a file of `size` bytes. Raises `CorruptWeights` naming the field."""
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as view:
        walk = _Walk(view)
        if not walk.message("model", 0, size, "", 0):
            walk.refuse("graph", "is missing")


class _Walk:
    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._fields = 0

    def message(self, kind: str, at: int, end: int, where: str, depth: int) -> bool:
        """Walk one message; whether it holds a graph directly."""
        if depth > 4 * DEPTH:
            self.refuse(where, f"is nested more than {DEPTH} graphs deep")
        inside = _INSIDE.get(kind, {})
        found = False
        for number, wire, start, stop in self._fields_of(at, end, where):
            if kind == "tensor":
                self._tensor_field(number, wire, start, where)
            elif number in inside:
                name, below = inside[number]
                path = f"{where}.{name}" if where else name
                if wire != _BYTES:
                    self.refuse(path, "is not a message")
                self.message(below, start, stop, path, depth + 1)
                found |= name == "graph"
        return found

    def _tensor_field(self, number: int, wire: int, start: int, where: str) -> None:
        external = number == _TENSOR_EXTERNAL
        if number == _TENSOR_LOCATION and wire == _VARINT:
            external = self._varint(start, len(self._view), where)[0] == _EXTERNAL
        if external:
            self.refuse(where, "keeps its data in another file; save the model with its data inside")

    def _fields_of(self, at: int, end: int, where: str) -> Iterator[tuple[int, int, int, int]]:
        """Number, wire type, and the range of each field's value."""
        while at < end:
            self._fields += 1
            if self._fields > FIELDS:
                self.refuse(where, f"the model has more than {FIELDS} fields")
            key, at = self._varint(at, end, where)
            number, wire = key >> 3, key & 7
            if not number:
                self.refuse(where, "holds a field of number 0")
            if wire == _VARINT:
                start, at = at, self._varint(at, end, where)[1]
            elif wire == _BYTES:
                length, start = self._varint(at, end, where)
                at = start + length
            elif wire in {_EIGHT, _FOUR}:
                start, at = at, at + (8 if wire == _EIGHT else 4)
            else:
                self.refuse(where, f"holds a field of wire type {wire}")
            if at > end:
                self.refuse(where, f"truncated: field {number} ends at byte {at} of {end}")
            yield number, wire, start, at

    def _varint(self, at: int, end: int, where: str) -> tuple[int, int]:
        value = 0
        shift = 0
        while True:
            if at >= end:
                self.refuse(where, "truncated inside a number")
            if shift >= _VARINT_BITS:
                self.refuse(where, "holds a number of more than 64 bits")
            byte = self._view[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004 -- the continuation bit
                return value, at
            shift += 7

    def refuse(self, where: str, reason: str) -> NoReturn:
        """Say what is wrong, and where."""
        raise CorruptWeights(f"corrupt weights: not an ONNX model: {where or 'model'}: {reason}")
