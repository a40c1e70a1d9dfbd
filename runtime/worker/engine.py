"""Runs one eager module: named tensors in, named tensors out, and the way between numpy and torch.

Belongs here: the forward and what surrounds it directly. Never: bodies, queues, where weights come from.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from actors.errors import InferenceFailed, LoadFailed
from runtime.worker.codec import WireTensor
from runtime.worker.engines.port import warm_extents, warm_shape

if TYPE_CHECKING:
    from torch import nn

    from runtime.worker.twin import Twin
    from runtime.workers.port import TensorSpec

TORCH_OF: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
"""Protocol datatypes that a tensor can have; BYTES is not among them."""


def to_torch(tensor: WireTensor, device: torch.device) -> torch.Tensor:
    """A tensor over the array's memory where that may be written, else over a copy; then moved to the device."""
    array = tensor.array if tensor.array.flags.writeable else tensor.array.copy()
    local = torch.from_numpy(array)
    if tensor.datatype == "BF16":
        local = local.view(torch.bfloat16)
    return local if device.type == "cpu" else local.to(device)


def to_wire(name: str, datatype: str, tensor: torch.Tensor) -> WireTensor:
    """The tensor's values as an array in host memory."""
    local = tensor.detach().contiguous().cpu()
    if datatype == "BF16":
        local = local.view(torch.uint16)
    return WireTensor(name, datatype, local.numpy())


class Engine:
    """One module with a signature. Not thread-safe: one forward at a time.

    `twin` is the same model compiled, once there is one; it takes over the calls that it was compiled for.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        device: torch.device,
    ) -> None:
        """Look at the forward's parameters once. Raises `LoadFailed` for a signature that torch cannot serve."""
        for spec in (*inputs, *outputs):
            if spec.datatype not in TORCH_OF:
                raise LoadFailed(f"tensor {spec.name!r}: this engine has no datatype {spec.datatype[:32]!r}")
        if not outputs:
            raise LoadFailed("the signature has no outputs")
        self.module = module
        self.inputs = tuple(inputs)
        self._datatypes = {spec.name: spec.datatype for spec in outputs}
        self._outputs = tuple((spec.name, TORCH_OF[spec.datatype]) for spec in outputs)
        self._device = device
        self.twin: Twin | None = None
        self._by_name = _takes_names(module, [spec.name for spec in inputs])

    def __repr__(self) -> str:
        return f"<Engine {type(self.module).__name__} on {self._device}>"

    def answer(self, inputs: Mapping[str, WireTensor], wanted: Collection[str]) -> dict[str, WireTensor]:
        """See `engines.port.Runs`: `run` from the wire and back to it."""
        results = self.run({name: to_torch(tensor, self._device) for name, tensor in inputs.items()})
        return {name: to_wire(name, self._datatypes[name], results[name]) for name in results if name in wanted}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One forward in inference mode; outputs by name in their declared datatypes.

        Raises `InferenceFailed` when the module gives something else than it declared, and whatever it raises itself.
        """
        with torch.inference_mode():
            twin = self.twin
            return self.named(self.call(inputs) if twin is None or not twin.takes(inputs) else twin(inputs))

    def call(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """One forward of the module itself, and whatever it gives."""
        if self._by_name:
            return self.module(**inputs)
        return self.module(*(inputs[spec.name] for spec in self.inputs))

    def warm_up(self) -> None:
        """One forward with small zero inputs. Raises what it raises at the last size tried."""
        extents = warm_extents(self.inputs)
        for extent in extents:
            try:
                self.run({spec.name: zeros(spec, extent, self._device) for spec in self.inputs})
            except RuntimeError:
                if extent == extents[-1]:
                    raise
            else:
                return

    def named(self, result: Any) -> dict[str, torch.Tensor]:
        """A forward's result as outputs by name, in their declared datatypes. Raises `InferenceFailed`."""
        found: Sequence[Any]
        if isinstance(result, torch.Tensor):
            found = (result,)
        elif isinstance(result, Mapping):
            if missing := [name for name, _ in self._outputs if name not in result]:
                raise InferenceFailed(f"the model gave no output {missing[0]!r}; it gave {sorted(map(str, result))}")
            found = [result[name] for name, _ in self._outputs]
        elif isinstance(result, Sequence) and not isinstance(result, str):
            found = result
        else:
            raise InferenceFailed(f"the model gave a {type(result).__name__} instead of tensors")
        if len(found) < len(self._outputs):
            raise InferenceFailed(f"the model gave {len(found)} outputs where {len(self._outputs)} are declared")
        named: dict[str, torch.Tensor] = {}
        for (name, dtype), tensor in zip(self._outputs, found, strict=False):
            if not isinstance(tensor, torch.Tensor):
                raise InferenceFailed(f"output {name!r} is a {type(tensor).__name__} instead of a tensor")
            named[name] = tensor if tensor.dtype == dtype else tensor.to(dtype)
        return named


def _takes_names(module: nn.Module, names: list[str]) -> bool:
    """Whether the forward takes every input as a keyword."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return not any(one.kind is one.VAR_POSITIONAL for one in parameters)
    allowed = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return allowed.issuperset(names)


def zeros(spec: TensorSpec, extent: int, device: torch.device) -> torch.Tensor:
    """A small input of zeros: one row, and `extent` in its other variable dimensions."""
    return torch.zeros(warm_shape(spec, extent), dtype=TORCH_OF[spec.datatype], device=device)
