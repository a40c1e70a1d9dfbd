"""The same published model (Silero VAD) in every engine: what a load costs, what it holds, and what a call costs.

CPU time of the process on one thread, medians. A load ends with its warm-up; eager's is a first load (map, build, bind)
and a return from the host beside it. Agreement of the answers is a test (`tests/contracts/test_engines_real.py`).
"""

from __future__ import annotations

import io
import json
import resource
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from bench.report import Row, arguments, finish
from runtime.demo import wheels
from runtime.demo.voice import SileroVad
from runtime.worker.core import Core
from runtime.workers.port import BuilderSpec, LoadSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOW: Final = ("runtime.demo.architectures",)
WEIGHTS: Final = "silero_vad_16k.safetensors"
LOADS: Final = 5
CALLS: Final = 300
PATIENCE: Final = 900.0


def tensors(first: str, state: tuple[int, ...], rate: bool) -> tuple[TensorSpec, ...]:  # noqa: FBT001
    """The inputs of one format."""
    more = (TensorSpec("sr", "INT64", ()),) if rate else ()
    return (TensorSpec(first, "FP32", (1, 576)), TensorSpec("state", "FP32", state), *more)


def specs(folder: Path) -> dict[str, LoadSpec]:
    """A load of each format; files are made in `folder`."""
    with zipfile.ZipFile(wheels.fetch(wheels.SILERO, wheels.default_cache())) as wheel:
        for name in (WEIGHTS, "silero_vad_16k_op15.onnx", "silero_vad_openvino_16k.onnx"):
            (folder / name).write_bytes(wheel.read(f"silero_vad/data/{name}"))
        script: Any = torch.jit.load(io.BytesIO(wheel.read("silero_vad/data/silero_vad.jit")))  # type: ignore[no-untyped-call]
    script._model.save(str(folder / "silero.pt"))  # noqa: SLF001 - the network inside its streaming wrapper
    module = SileroVad().eval().requires_grad_(requires_grad=False)
    module.load_state_dict(load_file(folder / WEIGHTS))
    program = torch.export.export(module, (torch.zeros(1, 576), torch.zeros(1, 2, 128)))
    torch.export.save(program, folder / "silero.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "aot.pt2"))  # noqa: SLF001 - its home
    ours, published = (1, 2, 128), (2, 1, 128)
    outputs = ("probability", "next_state"), ("output", "stateN")

    def spec(engine: str, name: str, first: str, *, rate: bool = False) -> LoadSpec:
        own = first == "audio"
        state, (one, other) = (ours if own else published), outputs[not own]
        return LoadSpec(
            key=f"{engine}@1",
            fingerprint=f"{engine} {name}",
            weights=str(folder / name),
            weights_bytes=(folder / name).stat().st_size,
            builder=BuilderSpec("python", f"{ALLOW[0]}:silero_vad"),
            inputs=tensors(first, state, rate),
            outputs=(TensorSpec(one, "FP32", (1, 1)), TensorSpec(other, "FP32", state)),
            engine=engine,
            trusted=True,
        )

    return {
        "eager": spec("eager", WEIGHTS, "audio"),
        "eager, compiled": msgspec.structs.replace(
            spec("eager", WEIGHTS, "audio"), compile=True, key="twin@1", fingerprint="twin"
        ),
        "export": spec("export", "silero.pt2", "audio"),
        "aot": spec("aot", "aot.pt2", "audio"),
        "torchscript": spec("torchscript", "silero.pt", "input"),
        "onnx": spec("onnx", "silero_vad_16k_op15.onnx", "input", rate=True),
        "openvino": spec("openvino", "silero_vad_openvino_16k.onnx", "input"),
    }


def body_of(spec: LoadSpec) -> tuple[memoryview, int]:
    """One request, in binary."""
    arrays = [np.zeros(one.shape, np.int64 if one.datatype == "INT64" else np.float32) for one in spec.inputs]
    arrays = [np.full_like(each, 16_000) if each.dtype == np.int64 else each for each in arrays]
    rows = [
        {
            "name": one.name,
            "datatype": one.datatype,
            "shape": list(one.shape),
            "parameters": {"binary_data_size": each.nbytes},
        }
        for one, each in zip(spec.inputs, arrays, strict=True)
    ]
    head = json.dumps({"inputs": rows, "parameters": {"binary_data_output": True}}).encode()
    head += b" " * (-len(head) % 8)
    return memoryview(bytearray(head + b"".join(each.tobytes() for each in arrays))), len(head)


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this process for one piece of work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def call(core: Core, spec: LoadSpec) -> None:
    """One call from submission to answer. Raises what it is answered with, if that is an error."""
    told: list[Any] = []
    body, length = body_of(spec)
    core.submit(spec.key, body, length, told.append)
    while core.pending:
        core.step()
    if isinstance(told[0], Exception):
        raise told[0]


def measure(name: str, spec: LoadSpec) -> list[Row]:
    """One engine: bytes, seconds of a load that starts from the file, and of a call."""
    core = Core("cpu:0", ALLOW)
    loads, held = [], 0

    def load() -> None:
        nonlocal held
        held = core.load(spec, lambda: False).resident

    for _ in range(LOADS):
        loads.append(cpu(load))
        if len(loads) < LOADS:
            core.evict(spec.key)
            core.release_host(spec.fingerprint)
    rows = [
        Row(f"{name}: held", held / 1e6, "MB", spec.weights_bytes / 1e6, held / spec.weights_bytes),
        Row(f"{name}: load", 1e3 * median(loads[1:]), "CPU ms"),
    ]
    if spec.compile:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        core.compiled(PATIENCE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append(Row(f"{name}: compiling, in a process of its own", took, "CPU s"))
    for _ in range(20):
        call(core, spec)
    rows.append(Row(f"{name}: call", 1e6 * median(cpu(lambda: call(core, spec)) for _ in range(CALLS)), "CPU us"))
    return rows


def main() -> int:
    """Measure and report."""
    args = arguments(__doc__ or "").parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in specs(Path(folder)).items():
            if args.quick and spec.compile:
                continue
            rows += measure(name, spec)
    return finish("engines", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
