"""Between a V2 body and named numpy arrays, with every check that the protocol asks for.

Belongs here: decoding requests against a signature and encoding answers. Never: torch, models, scheduling.
Whatever a body holds, the outcome is arrays or an `Invalid` error that names the field; never another exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from actors.errors import BadRequest, BadTensor, InferenceFailed, Unsupported
from runtime.worker import document
from runtime.worker.datatypes import (
    DATATYPES,
    Array,
    Datatype,
    finite,
    from_base64,
    from_json,
    json_decoder,
    pack_bytes,
    unpack_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runtime.worker.document import AnyInput, AnyRequest, Scalar
    from runtime.workers.port import Parts, TensorSpec

MAX_RANK = 32
IN_PARTS = 16 << 10
"""Bytes of binary tensors from which an answer is left in parts: copying them together would cost more than a call."""
MAX_ELEMENTS = 2**40
"""Beyond this a shape is a mistake or an attack, whatever its datatype."""


@dataclass(slots=True)
class WireTensor:
    """One named tensor: protocol datatype and its array (object array of bytes for BYTES, bit patterns for BF16)."""

    name: str
    datatype: str
    array: Array


@dataclass(slots=True)
class InferRequest:
    """A decoded request. `wanted` maps each output to answer with to whether it goes out as binary."""

    id: str | None
    parameters: Mapping[str, Scalar]
    inputs: dict[str, WireTensor]
    wanted: dict[str, bool]


class Codec:
    """Decodes and encodes for one model's signature. Stateless, so one instance serves any number of calls."""

    def __init__(
        self,
        key: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        reject_nonfinite: bool = False,
        json_depth: int = document.DEPTH_LIMIT,
    ) -> None:
        name, _, version = key.rpartition("@")
        self._names: dict[str, str] = {"model_name": name or version}
        if name:
            self._names["model_version"] = version
        self._inputs = {spec.name: spec.wire for spec in inputs}
        self._files = frozenset(spec.name for spec in inputs if spec.preprocess is not None)
        self._outputs = {spec.name: spec for spec in outputs}
        self._reject_nonfinite = reject_nonfinite
        self._json_depth = json_depth
        wire = self._inputs.values()
        elements = {DATATYPES[spec.datatype].json for spec in wire if spec.datatype in DATATYPES}
        self._reader = document.reader_of(elements.pop() if len(elements) == 1 else None)

    def __repr__(self) -> str:
        return f"<Codec {self._names['model_name']} {len(self._inputs)} in {len(self._outputs)} out>"

    # -- requests ------------------------------------------------------------------------------------

    def decode(self, body: memoryview | bytes, json_length: int | None) -> InferRequest:
        """Read one body. Arrays view it where alignment allows, so it must outlive them.

        `json_length`: None when all of it is JSON, 0 for a raw binary request, else the length of the JSON part.
        Raises `BadRequest`, `BadTensor` or `Unsupported`.
        """
        view = memoryview(body)
        if json_length == 0:
            return self._decode_raw(view)
        if json_length is not None and not 0 < json_length <= len(view):
            raise BadRequest("Inference-Header-Content-Length is not within the body's length")
        text = bytes(view if json_length is None else view[:json_length])
        header = document.read(text, self._reader, depth=self._json_depth)
        tail = None if json_length is None else view[json_length:]
        inputs = self._decode_inputs(header, tail)
        return InferRequest(header.id, header.parameters, inputs, self._wanted(header))

    def _decode_inputs(self, header: AnyRequest, tail: memoryview | None) -> dict[str, WireTensor]:
        inputs: dict[str, WireTensor] = {}
        used = 0
        for one in header.inputs:
            datatype, shape = self._checked(one, inputs)
            size = _declared_size(one)
            if size is None:
                array = _from_data(one, datatype, prod(shape))
                if one.name in self._files:
                    array = from_base64(one.name, array)
            else:
                if tail is None:
                    raise BadRequest(f"input {one.name!r} is binary, but Inference-Header-Content-Length is missing")
                if size > len(tail) - used:
                    raise BadTensor(f"input {one.name!r}: binary_data_size {size} is more than the body has left")
                array = self._from_binary(one.name, datatype, prod(shape), tail[used : used + size])
                used += size
            inputs[one.name] = WireTensor(one.name, datatype.name, array.reshape(shape))
        if tail is not None and used != len(tail):
            raise BadRequest(f"{len(tail) - used} bytes of the body belong to no input")
        if missing := [name for name in self._inputs if name not in inputs]:
            raise BadTensor(f"input {missing[0]!r} is missing; the model takes {len(self._inputs)}")
        return inputs

    def _checked(self, one: AnyInput, seen: Mapping[str, object]) -> tuple[Datatype, tuple[int, ...]]:
        """What an input claims, held against the signature before any byte of it is read."""
        if one.name in seen:
            raise BadTensor(f"input {one.name[:128]!r} is given twice")
        spec = self._inputs.get(one.name)
        if spec is None:
            raise BadTensor(f"input {one.name[:128]!r} is unknown; the model takes {sorted(self._inputs)}")
        datatype = DATATYPES.get(one.datatype)
        if datatype is None:
            raise BadTensor(f"input {one.name!r}: unknown datatype {one.datatype[:32]!r}")
        if datatype.name != spec.datatype:
            raise BadTensor(f"input {one.name!r}: datatype {datatype.name} where the model takes {spec.datatype}")
        return datatype, _checked_shape(one.name, one.shape, spec.shape)

    def _from_binary(self, name: str, datatype: Datatype, count: int, buffer: memoryview) -> Array:
        if datatype.name == "BYTES":
            return unpack_bytes(name, count, buffer)
        if len(buffer) != count * datatype.item:
            needed = count * datatype.item
            raise BadTensor(f"input {name!r}: {len(buffer)} bytes where {datatype.name} and its shape need {needed}")
        if datatype.name == "BOOL" and np.frombuffer(buffer, np.uint8).max(initial=0) > 1:
            raise BadTensor(f"input {name!r}: a BOOL byte is neither 0 nor 1")
        array: Array = np.frombuffer(buffer, datatype.dtype)
        if not array.flags.aligned:  # the JSON part's length decides; vectorised kernels need it right
            array = array.copy()
        if self._reject_nonfinite and not finite(datatype, array):
            raise BadTensor(f"input {name!r} holds NaN or infinity, which this model refuses")
        return array

    def _decode_raw(self, body: memoryview) -> InferRequest:
        """A body that is the bytes of the only input; its one variable dimension follows from the length."""
        if len(self._inputs) != 1:
            raise BadRequest(f"a raw binary request needs a model with one input; this one has {len(self._inputs)}")
        spec = next(iter(self._inputs.values()))
        datatype = DATATYPES[spec.datatype]
        if datatype.name == "BYTES":
            if spec.shape not in ((1,), (-1,)):
                raise BadRequest(f"input {spec.name!r}: a raw binary request takes BYTES only with shape [1]")
            array = np.empty(1, dtype=object)
            array[0] = bytes(body)
        else:
            shape = _shape_from_length(spec, datatype, len(body))
            array = self._from_binary(spec.name, datatype, prod(shape), body).reshape(shape)
        tensor = WireTensor(spec.name, datatype.name, array)
        return InferRequest(None, {}, {spec.name: tensor}, dict.fromkeys(self._outputs, True))

    def _wanted(self, header: AnyRequest) -> dict[str, bool]:
        otherwise = _flag(header.parameters, "binary_data_output", "the request", default=False)
        if not header.outputs:
            return dict.fromkeys(self._outputs, otherwise)
        wanted: dict[str, bool] = {}
        for one in header.outputs:
            if one.name in wanted:
                raise BadRequest(f"output {one.name[:128]!r} is asked for twice")
            if one.name not in self._outputs:
                raise BadRequest(f"output {one.name[:128]!r} is unknown; the model gives {sorted(self._outputs)}")
            if "shared_memory_region" in one.parameters or "classification" in one.parameters:
                raise Unsupported(f"output {one.name!r}: shared memory and classification are not offered")
            wanted[one.name] = _flag(one.parameters, "binary_data", f"output {one.name!r}", default=otherwise)
        return wanted

    # -- answers -------------------------------------------------------------------------------------

    def encode(
        self,
        request: InferRequest,
        outputs: Mapping[str, WireTensor],
        parameters: Mapping[str, Scalar] | None = None,
    ) -> tuple[bytes | Parts, int | None]:
        """Lay an answer out: its body, and the length of the JSON part when binary tensors follow it.

        A large body comes in parts that view `outputs`.

        Raises `BadTensor` for what has no JSON form (FP16, BF16, NaN, infinity, bytes that are not UTF-8).
        """
        rows: list[dict[str, Any]] = []
        tail: list[bytes | memoryview] = []
        for name, binary in request.wanted.items():
            if name not in outputs:
                raise InferenceFailed(f"the model gave no output {name!r}")
            tensor = outputs[name]
            row: dict[str, Any] = {
                "name": name,
                "datatype": tensor.datatype,
                "shape": list(tensor.array.shape),
            }
            if binary:
                raw = _to_binary(tensor)
                row["parameters"] = {"binary_data_size": len(raw)}
                tail.append(raw)
            else:
                row["data"] = _to_json(tensor)
            rows.append(row)
        answer: dict[str, Any] = dict(self._names)
        if request.id is not None:
            answer["id"] = request.id
        if parameters:
            answer["parameters"] = dict(parameters)
        answer["outputs"] = rows
        head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
        if not any(request.wanted.values()):
            return head, None
        parts = (head, *tail)
        return (parts if sum(map(len, tail)) >= IN_PARTS else b"".join(parts)), len(head)


def _flag(parameters: Mapping[str, Scalar], name: str, owner: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{owner}: parameter {name!r} must be true or false")
    return value


def _checked_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > MAX_RANK:
        raise BadTensor(f"input {name!r}: {len(shape)} dimensions, at most {MAX_RANK} are allowed")
    elements = 1
    for extent in shape:
        if extent < 0:
            raise BadTensor(f"input {name!r}: a dimension is negative")
        elements *= extent or 1  # a zero would hide the others, and numpy would still overflow on them
    if elements > MAX_ELEMENTS:
        raise BadTensor(f"input {name!r}: its shape has more than 2**40 elements")
    fits = len(shape) == len(wanted)
    if fits:
        for extent, allowed in zip(shape, wanted, strict=True):
            fits = fits and allowed in (-1, extent)
    if not fits:
        raise BadTensor(f"input {name!r}: shape {list(shape)} where the model takes {list(wanted)}")
    return tuple(shape)


def _declared_size(one: AnyInput) -> int | None:
    """Bytes of a binary input, None for one with JSON `data`; exactly one of the sources must be there."""
    if one.parameters and any(name.startswith("shared_memory_") for name in one.parameters):
        raise Unsupported(f"input {one.name!r}: shared memory is not offered")
    size = one.parameters.get("binary_data_size")
    if (size is None) == (one.data is msgspec.UNSET):
        both = "both" if size is not None else "neither"
        raise BadTensor(f"input {one.name!r} has {both} of 'data' and 'binary_data_size'; exactly one is needed")
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadTensor(f"input {one.name!r}: binary_data_size must be a whole number, not negative")
    return size


def _opening(raw: bytes) -> int:
    """How many lists open before the first element; the typed decoder refuses anything that differs later."""
    depth = 0
    for byte in raw:
        if byte == ord("["):
            depth += 1
        elif byte not in b" \t\r\n":
            break
    return depth


def _from_data(one: AnyInput, datatype: Datatype, count: int) -> Array:
    """A flat array of JSON `data`, which may be flat or nested row by row."""
    if datatype.json is None:
        raise BadTensor(f"input {one.name!r}: {datatype.name} has no JSON form; send it as binary")
    elements, depth = (one.data, 1) if isinstance(one.data, list) else _parsed(one, datatype)
    for axis in range(depth - 1):
        lengths = {len(inner) for inner in elements}
        if len(lengths) > 1 or (depth == len(one.shape) and lengths and lengths != {one.shape[axis + 1]}):
            raise BadTensor(f"input {one.name!r}: 'data' is nested unlike its shape {one.shape}")
        elements = list(chain.from_iterable(elements))
    if len(elements) != count:
        raise BadTensor(f"input {one.name!r}: {len(elements)} elements where its shape needs {count}")
    return from_json(datatype, one.name, elements)


def _parsed(one: AnyInput, datatype: Datatype) -> tuple[list[Any], int]:
    """`data` as lists of its datatype, and how deep they are nested."""
    raw = memoryview(one.data)  # type: ignore[arg-type]  # a Raw, which has the buffer protocol on every version
    depth = _opening(bytes(raw[:256]))
    if not 1 <= depth <= MAX_RANK:
        raise BadTensor(f"input {one.name!r}: 'data' must be a list, nested at most {MAX_RANK} deep")
    try:
        return json_decoder(datatype.name, depth).decode(raw), depth
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as fault:
        raise BadTensor(f"input {one.name!r}: 'data' is not {datatype.name}: {fault}") from None


def _shape_from_length(spec: TensorSpec, datatype: Datatype, length: int) -> tuple[int, ...]:
    fixed = prod(extent for extent in spec.shape if extent >= 0) * datatype.item
    variable = sum(extent < 0 for extent in spec.shape)
    if variable > 1:
        raise BadRequest(f"input {spec.name!r} has {variable} variable dimensions; a raw binary request allows one")
    if variable and (fixed == 0 or length % fixed):
        raise BadTensor(f"input {spec.name!r}: {length} bytes are not a multiple of the {fixed} of one row")
    return tuple(length // fixed if extent < 0 else extent for extent in spec.shape)


def _to_binary(tensor: WireTensor) -> bytes | memoryview:
    """A tensor's bytes; a view of them if they are many."""
    if tensor.datatype == "BYTES":
        return pack_bytes(tensor.array.ravel())
    if tensor.array.nbytes < IN_PARTS:
        return tensor.array.tobytes()
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data


def _to_json(tensor: WireTensor) -> Array | list[str]:
    datatype = DATATYPES[tensor.datatype]
    if datatype.json is None:
        raise BadTensor(f"output {tensor.name!r}: {datatype.name} has no JSON form; ask for it with binary_data")
    if not finite(datatype, tensor.array):
        raise BadTensor(f"output {tensor.name!r} holds NaN or infinity; ask for it with binary_data")
    flat = np.ascontiguousarray(tensor.array).reshape(-1)
    if datatype.name != "BYTES":
        return flat
    try:
        return [text if isinstance(text, str) else bytes(text).decode() for text in flat]
    except UnicodeDecodeError:
        raise BadTensor(f"output {tensor.name!r} is not UTF-8 text; ask for it with binary_data") from None
