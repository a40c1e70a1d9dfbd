"""A compiled package that runs on the weights of a module which is resident: its twin.

Belongs here: attaching one, and knowing which calls it may take. Never: compiling (`compile.py`), when to do it
(`compiler.py`). The package holds no weights of its own, so a twin costs its code and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file

from actors.errors import LoadFailed
from runtime.worker.engines.aoti import open_package
from runtime.workers.port import ArtefactSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from runtime.worker.engine import Engine

PACKAGE: Final = "model.pt2"
EXTRA: Final = "extra.safetensors"
PREFIX: Final = "inner."
"""Of every tensor's name in a package: it was traced inside another module."""

_NOWHERE: Final = ArtefactSpec()
_CLOSE: Final = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float64: 1e-6}
_USUAL: Final = 1e-3
"""How far, relative to the largest value of an output, a twin's answer may be from the module's."""


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names, tied ones under each."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor that holds nothing: the caller sees to it that the memory outlives it.

    A package never lets go of the tensors that it was lent (torch 2.13), and would keep the weights mapped for ever.
    """
    of = torch._C._construct_storage_from_data_pointer  # noqa: SLF001 -- torch has no other
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    reach = (last + 1) * tensor.itemsize if tensor.numel() else 0
    storage = of(tensor.data_ptr(), tensor.device, reach)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


class Twin:
    """One package, attached to the tensors of a module. `takes` says for which inputs it is right.

    It must not be called once those tensors are gone.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        engine: Engine,
        device: torch.device,
        artefacts: ArtefactSpec = _NOWHERE,
    ) -> None:
        """Open the package and lend it the weights. Raises `LoadFailed`, or what torch raises."""
        self._package = open_package(str(folder / PACKAGE), device, artefacts)
        self._names = [spec.name for spec in engine.inputs]
        self._shapes: list[tuple[str, tuple[int | str, ...]]] = [
            (name, tuple(facts["shapes"][name])) for name in self._names
        ]
        self._ranges: dict[str, tuple[int, int]] = {name: (low, high) for name, (low, high) in facts["ranges"].items()}
        self._extra = {name: one.to(device) for name, one in load_file(folder / EXTRA).items()}
        held = {**self._extra, **tensors_of(engine.module)}
        wanted = self._package.get_constant_fqns()
        missing = [name for name in wanted if name.removeprefix(PREFIX) not in held]
        if missing:
            raise LoadFailed(f"the compiled package wants {missing[0]!r}, which the module has not")
        lent = {name: alias(held[name.removeprefix(PREFIX)]) for name in wanted}
        self._package.load_constants(lent, check_full_update=True, user_managed=True)

    def __repr__(self) -> str:
        return f"<Twin {len(self._names)} in>"

    def takes(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether every size is one that the package was compiled for, and equal sizes are equal."""
        sizes: dict[str, int] = {}
        for name, shape in self._shapes:
            tensor = inputs[name]
            found = tensor.shape
            if len(found) != len(shape) or not tensor.is_contiguous():
                return False
            for size, wanted in zip(found, shape, strict=True):
                if isinstance(wanted, int):
                    if size != wanted:
                        return False
                    continue
                low, high = self._ranges[wanted]
                if not low <= size <= high or sizes.setdefault(wanted, size) != size:
                    return False
        return True

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """One forward, with the module's own form of result."""
        return self._package(*(inputs[name] for name in self._names))


def compare(engine: Engine, twin: Twin, device: torch.device) -> None:
    """Run both on noise, for one row and for several. Raises `LoadFailed` if they differ, or the twin takes neither."""
    with torch.inference_mode():
        _compare(engine, twin, device)


def _compare(engine: Engine, twin: Twin, device: torch.device) -> None:
    from runtime.worker.engine import TORCH_OF

    noise = torch.Generator().manual_seed(0)
    tried = 0
    for rows, extent in ((1, 8), (3, 9), (1, 64)):
        inputs: dict[str, torch.Tensor] = {}
        for spec in engine.inputs:
            shape = [size if size >= 0 else (extent if axis else rows) for axis, size in enumerate(spec.shape)]
            dtype = TORCH_OF[spec.datatype]
            # Whole numbers are ids of something: zero is the one that is surely known.
            given = torch.rand(shape, generator=noise).to(dtype) if dtype.is_floating_point else torch.zeros(shape)
            inputs[spec.name] = given.to(dtype).to(device)
        if not twin.takes(inputs):
            continue
        try:
            wanted = engine.named(engine.call(inputs))
        except RuntimeError:  # too small for this model
            continue
        tried += 1
        _check_close(wanted, engine.named(twin(inputs)))
    if not tried:
        raise LoadFailed("the compiled package takes none of the sizes that were tried")


def _check_close(wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    for name, one in wanted.items():
        if found[name].shape != one.shape:
            raise LoadFailed(f"output {name!r} of the compiled package has shape {_sizes(found[name].shape)}")
        if not one.numel():
            continue
        largest = max(float(one.abs().max()), 1e-6) if one.is_floating_point() else 1.0
        off = float((found[name].double() - one.double()).abs().max()) / largest
        if not off <= (_CLOSE.get(one.dtype, _USUAL) if one.is_floating_point() else 0):
            raise LoadFailed(f"output {name!r} of the compiled package is off by {off:.2g}")


def _sizes(shape: Sequence[int]) -> list[int]:
    return [int(size) for size in shape]
