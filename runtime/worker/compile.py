"""Compiles one model in a process of its own, at idle priority, and exits: `python -m runtime.worker.compile`.

Belongs here: from a `LoadSpec` to a package without weights, and the facts that say which inputs it may be given.
Never: the cache (`artefacts.py`), running what was compiled (`twin.py`).

Tracing is seconds of Python: in the worker it would take the GIL from every forward of every model. An order comes as
JSON on standard input; one line of JSON is the answer.
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from runtime.worker.twin import EXTRA, PACKAGE, PREFIX, tensors_of
from runtime.workers.port import LoadSpec  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runtime.worker.engine import Engine
    from runtime.workers.port import TensorSpec

CPU_SECONDS: Final = 1_800
"""CPU time of one compilation; by the clock it may take far longer beside a busy server (`compiler.py`)."""
EXTENTS: Final = (9, 65)
"""Sizes of the variable dimensions that are traced with; neither is a power of two, which would look like a rule."""
ROWS: Final = 3
_LARGEST: Final = 1 << 20
"""Upper bound of a variable dimension, so that indices of 32 bits suffice where they do."""


class Order(msgspec.Struct, frozen=True):
    """What to compile, for which device, and where to put it."""

    spec: LoadSpec
    device: str
    allow: tuple[str, ...]
    folder: str
    parent: int


class Verdict(msgspec.Struct, frozen=True):
    """Facts of a package that was made, or why there is none."""

    facts: dict[str, Any] = {}
    error: str = ""


def main() -> None:
    """Do one order."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    from runtime.worker.main import die_with

    die_with(order.parent)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 10))
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # What torch prints while it compiles must not be taken for the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        verdict = Verdict(compiled(order))
    except Exception as fault:  # noqa: BLE001 - whatever a model's own code does is why there is no package
        from runtime.worker.faults import words

        verdict = Verdict(error=words(fault))
    with os.fdopen(answer, "wb") as out:
        out.write(msgspec.json.encode(verdict))


def compiled(order: Order) -> dict[str, Any]:
    """Write the package and what it needs beside the weights; its facts, for `twin.Twin`. Raises what torch raises."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    device = torch.device("cpu" if order.device.startswith("cpu") else order.device)
    folder = Path(order.folder)
    with torch.no_grad():
        engine, mount = _engine(order, device)
        program = _traced(_traceable(engine), order.spec.inputs, device)
        facts = _facts(program, order.spec.inputs)
        torch._inductor.aoti_compile_and_package(  # noqa: SLF001 - its public home
            program,
            package_path=str(folder / PACKAGE),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "always_keep_tensor_constants": True,
                "aot_inductor.check_lowerbound": False,
                "compile_threads": 1,
            },
        )
        held = tensors_of(engine.module)
        extra = {
            name.removeprefix(PREFIX): one.detach().contiguous().cpu().clone()
            for name, one in {**program.state_dict, **program.constants}.items()
            if isinstance(one, torch.Tensor) and name.removeprefix(PREFIX) not in held
        }
    save_file(extra, folder / EXTRA)
    del mount
    return facts


def _engine(order: Order, device: torch.device) -> tuple[Engine, object]:
    """The model as a worker would run it, and what keeps its weights mapped."""
    from runtime.worker.builders import factory_for
    from runtime.worker.cuda import CudaDevice
    from runtime.worker.engines.programs import Exported
    from runtime.worker.mount import Mount, Steps

    spec = order.spec
    if spec.engine == "export":
        return Exported(spec, device).runs, None
    cuda = CudaDevice(device) if device.type == "cuda" else None
    mount = Mount(spec, factory_for(spec.builder, order.allow), Steps(lambda: False), cuda)
    mount.activate()
    return mount.engine(spec, device), mount


def _traceable(engine: Engine) -> nn.Module:
    from torch import nn

    class Traceable(nn.Module):
        """Takes its inputs in order, whatever the module calls them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = engine.module

        def forward(self, *tensors: torch.Tensor) -> Any:
            return engine.call({spec.name: one for spec, one in zip(engine.inputs, tensors, strict=True)})

    traceable = Traceable()
    traceable.training = False  # not `eval()`, which an exported program refuses: it is in that mode for good
    return traceable


def _traced(module: nn.Module, inputs: tuple[TensorSpec, ...], device: torch.device) -> Any:
    import torch

    from runtime.worker.engine import TORCH_OF

    dynamic = torch.export.Dim.DYNAMIC(min=1, max=_LARGEST)
    sizes = tuple({axis: dynamic for axis, size in enumerate(spec.shape) if size < 0} for spec in inputs)
    fault: Exception | None = None
    for extent in EXTENTS:
        given = tuple(
            torch.zeros(
                [size if size >= 0 else (extent if axis else ROWS) for axis, size in enumerate(spec.shape)],
                dtype=TORCH_OF[spec.datatype],
                device=device,
            )
            for spec in inputs
        )
        try:
            # A forward of the form (*tensors) is described as one argument that is a tuple.
            return torch.export.export(module, given, dynamic_shapes=(sizes,), strict=False)
        except Exception as error:  # noqa: BLE001 - the larger size may do what the smaller could not
            fault = error
    assert fault is not None
    raise fault


def _facts(program: Any, inputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """Which shapes the package is right for: each dimension a size, or a symbol with a range."""
    vals = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    shapes: dict[str, list[int | str]] = {}
    ranges: dict[str, list[int]] = {}
    known = {str(symbol): found for symbol, found in program.range_constraints.items()}
    for spec, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        shapes[spec.name] = []
        for axis, size in enumerate(vals[name].shape):
            if isinstance(size, int):
                shapes[spec.name].append(size)
                continue
            symbol = size.node.expr
            if not symbol.is_Symbol:
                msg = f"a dimension of {spec.name!r} has to be {symbol}, which is no plain size"
                raise ValueError(msg)
            shapes[spec.name].append(str(symbol))
            found = known[str(symbol)]
            # torch never traces with sizes below 2. A batch of one is computed like any other, and `twin.compare`
            # proves it; of other dimensions nobody knows.
            low = 1 if axis == 0 and found.lower <= ROWS - 1 else max(1, int(found.lower))
            low = min(low, ranges.get(str(symbol), [low])[0])
            ranges[str(symbol)] = [low, min(_LARGEST, _bound(found.upper))]
    return {"shapes": shapes, "ranges": ranges}


def _bound(upper: Any) -> int:
    try:
        return int(upper)
    except (OverflowError, TypeError, ValueError):  # an infinity of sympy's
        return _LARGEST


if __name__ == "__main__":
    main()
