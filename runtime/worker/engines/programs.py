"""torch's own file formats: exported programs, compiled packages, TorchScript. All of them can run code when opened.

Belongs here: from a file to a module with a known way to call it. Never: whether it may be opened (`package.py`).
"""

from __future__ import annotations

import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from actors.errors import BadTensor, LoadFailed
from runtime.worker.codec import WireTensor
from runtime.worker.engine import Engine, to_wire, zeros
from runtime.worker.engines.aoti import open_package
from runtime.worker.engines.port import warm_extents
from runtime.worker.memory import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from runtime.workers.port import LoadSpec, TensorSpec


class Positional(nn.Module):
    """Calls something with tensors in order; for what takes no keywords."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        """One call."""
        return self.call(*tensors)


class ByName(nn.Module):
    """Calls something with tensors by name."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, **tensors: torch.Tensor) -> Any:
        """One call."""
        return self.call(**tensors)


class Exported:
    """A `torch.export` program."""

    mapped = 0

    def __init__(self, spec: LoadSpec, device: torch.device) -> None:
        """Open it. Raises `LoadFailed`, or what torch raises."""
        program = torch.export.load(spec.weights)
        module = program.module()
        if device.type != "cpu":
            module = module.to(device)
        self.witness = module
        self.weights = resident_bytes((*module.parameters(), *module.buffers()))
        positions, names = called(program.call_spec.in_spec)
        self.runs = Engine(_module(module, positions, names, spec.inputs), spec.inputs, spec.outputs, device)


class Precompiled:
    """An AOTInductor package: machine code and weights in one shared object."""

    def __init__(self, spec: LoadSpec, device: torch.device) -> None:
        """Open it. Raises `LoadFailed`, or what torch raises."""
        with zipfile.ZipFile(spec.weights) as archive:
            self.mapped = sum(row.file_size for row in archive.infolist() if row.filename.endswith(".so"))
        self.weights = self.mapped
        package = open_package(spec.weights, device, spec.artefacts)
        self.witness = package
        made_for = package.get_metadata().get("AOTI_DEVICE_KEY", device.type)
        if made_for != device.type:
            raise LoadFailed(f"the package was compiled for {made_for}, the device is {device.type}")
        text = package.loader.get_call_spec()[0]
        positions, names = called(torch.utils._pytree.treespec_loads(text))  # noqa: SLF001 -- the format's own reader
        self.runs = Alike(_module(package, positions, names, spec.inputs), spec.inputs, spec.outputs, device)


class Alike(Engine):
    """An engine for compiled code, which believes what it was told about sizes.

    It takes each size from one input and believes it of the others, so that unequal ones would be read past their end:
    they are refused. Packages made with torch's defaults also refuse a batch of one, though their code could run it
    (`aot_inductor.check_lowerbound`); where the warm-up shows that, a single row is sent twice and answered once.
    """

    _doubles = False

    def answer(self, inputs: Mapping[str, WireTensor], wanted: Collection[str]) -> dict[str, WireTensor]:
        """See `Runs.answer`. Raises `BadTensor`."""
        sizes: dict[int, tuple[str, int]] = {}
        for spec in self.inputs:
            shape = inputs[spec.name].array.shape
            for axis, extent in enumerate(spec.shape):
                if extent >= 0:
                    continue
                first, size = sizes.setdefault(axis, (spec.name, shape[axis]))
                if size != shape[axis]:
                    raise BadTensor(
                        f"input {spec.name!r} has {shape[axis]} in dimension {axis}, {first!r} has {size}; "
                        "a compiled package takes equal ones"
                    )
        if not self._doubles or sizes.get(0, ("", 0))[1] != 1:
            return super().answer(inputs, wanted)
        answered = super().answer({spec.name: self._doubled(spec, inputs[spec.name]) for spec in self.inputs}, wanted)
        return {
            name: WireTensor(name, one.datatype, one.array[:1] if one.array.shape[:1] == (2,) else one.array)
            for name, one in answered.items()
        }

    def warm_up(self) -> None:
        """See `Runs.warm_up`."""
        try:
            super().warm_up()
        except RuntimeError:
            self._doubles = True
            extents = warm_extents(self.inputs)
            for extent in extents:
                try:
                    self.answer({spec.name: _row(spec, extent) for spec in self.inputs}, ())
                except (RuntimeError, BadTensor):
                    if extent == extents[-1]:
                        raise
                else:
                    return

    @staticmethod
    def _doubled(spec: TensorSpec, one: WireTensor) -> WireTensor:
        if spec.shape[:1] != (-1,):
            return one
        return WireTensor(one.name, one.datatype, np.repeat(one.array, 2, axis=0))


def _row(spec: TensorSpec, extent: int) -> WireTensor:
    return to_wire(spec.name, spec.datatype, zeros(spec, extent, torch.device("cpu")))


class Scripted:
    """A TorchScript file."""

    mapped = 0

    def __init__(self, spec: LoadSpec, device: torch.device) -> None:
        """Open it. Raises `LoadFailed`, or what torch raises."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as such
            module: Any = torch.jit.load(spec.weights, map_location=device).eval()  # type: ignore[no-untyped-call]
        self.witness = module
        self.weights = resident_bytes((*module.parameters(), *module.buffers()))
        schema = module.forward.schema
        takes = [each.name for each in schema.arguments[1:]]
        needed = sum(not each.has_default_value() for each in schema.arguments[1:])
        if not needed <= len(spec.inputs) <= len(takes):
            raise LoadFailed(f"the file's forward takes {', '.join(takes) or 'nothing'}")
        self.runs = Engine(Positional(module), spec.inputs, spec.outputs, device)


def called(spec: Any) -> tuple[int, list[str]]:
    """How many tensors a program takes by position, and which by name."""
    arguments, keywords = spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    return arguments.num_leaves, list(keywords.context or ())


def _module(call: Any, positions: int, names: Sequence[str], inputs: Sequence[TensorSpec]) -> nn.Module:
    """A module that calls a program as it was exported. Raises `LoadFailed` if it takes other inputs."""
    declared = [each.name for each in inputs]
    if names and not positions:
        if set(names) != set(declared):
            raise LoadFailed(f"the file takes {', '.join(names)}, the manifest declares {', '.join(declared)}")
        return ByName(call)
    if names or positions != len(declared):
        raise LoadFailed(f"the file takes {positions + len(names)} inputs, the manifest declares {len(declared)}")
    return Positional(call)
