"""One small model as a file of every engine: same weights, same answers. Files are made once per test session.

Belongs here: making artefacts, and calls on a core. Never: assertions about engines.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson
import torch
from torch import nn

from runtime.workers.port import BatchSpec, BuilderSpec, LoadSpec, TensorSpec
from tests.runtime.worker.modules import Linear, randomised, saved

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from actors.errors import ForeloadError
    from runtime.worker.core import Core
    from runtime.workers.port import Answer, Laid

F32 = np.float32
ENGINES = ("eager", "export", "aot", "torchscript", "onnx", "openvino")
WIDTH = 512
INPUTS = (TensorSpec("x", "FP32", (-1, 4)),)
OUTPUTS = (TensorSpec("y", "FP32", (-1, 3)),)


def never() -> bool:
    """Nobody cancels."""
    return False


def module() -> nn.Module:
    """The model: 4 -> 512 -> 3, large enough to be measured."""
    return randomised(Linear, width=WIDTH)


@dataclass(frozen=True)
class Artefact:
    """One file and what a worker is told of it."""

    path: Path
    graph: bytes = b""
    bytes: int = 0

    def spec(self, engine: str, **changes: Any) -> LoadSpec:
        """A load of it."""
        spec = LoadSpec(
            key="m@1",
            fingerprint=f"f-{engine}",
            weights=str(self.path),
            weights_bytes=self.path.stat().st_size,
            builder=BuilderSpec("python", "tests.runtime.worker.modules:Linear", {"width": WIDTH}),
            inputs=INPUTS,
            outputs=OUTPUTS,
            batch=BatchSpec(8),
            engine=engine,
            graph=self.graph,
            trusted=True,
        )
        return msgspec.structs.replace(spec, **changes)


def artefact(engine: str, folder: Path) -> Artefact:
    """Write the model as a file of one engine."""
    plain = module()
    path = folder / {"eager": "m.safetensors", "torchscript": "m.pt", "onnx": "m.onnx", "openvino": "m.bin"}.get(
        engine, f"{engine}.pt2"
    )
    graph = b""
    if engine == "eager":
        saved(path, plain)
    elif engine == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # people have such files, whatever torch recommends
            torch.jit.script(plain).save(str(path))
    elif engine == "onnx":
        path.write_bytes(onnx_of(plain))
    elif engine == "openvino":
        graph = _openvino(plain, folder)
    else:
        _exported(plain, path, package=engine == "aot")
    size = sum(one.nbytes for one in plain.state_dict().values())
    return Artefact(path, graph, size)


def _exported(plain: nn.Module, path: Path, *, package: bool) -> None:
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(plain, (torch.zeros(3, 4),), dynamic_shapes=({0: batch},))
    if package:
        compile_package(program, path)
    else:
        torch.export.save(program, path)


def compile_package(program: Any, path: Path) -> None:
    """Compile an exported program ahead of time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules, at their first import and use
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def _openvino(plain: nn.Module, folder: Path) -> bytes:
    import openvino

    (folder / "source.onnx").write_bytes(onnx_of(plain))
    openvino.save_model(openvino.Core().read_model(folder / "source.onnx"), folder / "m.xml", compress_to_fp16=False)
    return (folder / "m.xml").read_bytes()


# -- calls -------------------------------------------------------------------------------------------


def body_of(arrays: dict[str, np.ndarray[Any, Any]], datatypes: dict[str, str] | None = None) -> tuple[memoryview, int]:
    """A request in binary, asking for binary."""
    kinds = {"float32": "FP32", "int64": "INT64", "float64": "FP64"}
    rows = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": (datatypes or {}).get(name, kinds[str(array.dtype)]),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    head = orjson.dumps({"inputs": rows, "parameters": {"binary_data_output": True}})
    head += b" " * (-len(head) % 8)
    return memoryview(bytearray(head + b"".join(one.tobytes() for one in arrays.values()))), len(head)


def outputs_of(answer: Answer | Laid | ForeloadError) -> dict[str, np.ndarray[Any, Any]]:
    """The FP32 tensors of a binary answer. Raises the answer if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    assert answer.json_length is not None
    at, found = answer.json_length, {}
    for row in orjson.loads(body[:at])["outputs"]:
        size = row["parameters"]["binary_data_size"]
        found[row["name"]] = np.frombuffer(body[at : at + size], F32).reshape(row["shape"])
        at += size
    return found


def send(core: Core, key: str, told: list[Any], **arrays: np.ndarray[Any, Any]) -> None:
    """Submit one call."""
    body, length = body_of(arrays)
    core.submit(key, body, length, told.append)


def drain(core: Core) -> None:
    """Run everything that is queued."""
    while core.pending:
        core.step()


def ask(core: Core, key: str, **arrays: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """One call from submission to answer."""
    told: list[Any] = []
    send(core, key, told, **arrays)
    drain(core)
    assert len(told) == 1
    return outputs_of(told[0])


# -- ONNX, written by hand ---------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A protobuf number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    """A protobuf field: a number, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def tensor(name: str, array: np.ndarray[Any, Any], *extra: bytes) -> bytes:
    """A TensorProto of FP32."""
    dims = b"".join(field(1, size) for size in array.shape)
    return dims + field(2, 1) + field(8, name) + (b"".join(extra) or field(9, array.astype("<f4").tobytes()))


def value_info(name: str, *shape: int | str) -> bytes:
    """A ValueInfoProto of FP32; text is a symbolic dimension."""
    dims = b"".join(field(1, field(1, one) if isinstance(one, int) else field(2, one)) for one in shape)
    return field(1, name) + field(2, field(1, field(1, 1) + field(2, dims)))


def node(kind: str, inputs: list[str], output: str, *attributes: bytes) -> bytes:
    """A NodeProto."""
    names = b"".join(field(1, one) for one in inputs) + field(2, output) + field(4, kind)
    return names + b"".join(field(5, one) for one in attributes)


def model_proto(graph: bytes, *, opset: int = 17) -> bytes:
    """A ModelProto around a graph."""
    return field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, opset))


def onnx_of(plain: nn.Module, change: Callable[[str, np.ndarray[Any, Any]], bytes] = tensor) -> bytes:
    """`Linear` as ONNX; `change` may write its weights otherwise."""
    transposed = field(1, "transB") + field(3, 1) + field(20, 2)
    weights = {name.replace(".", "_"): one.numpy() for name, one in plain.state_dict().items()}
    graph = (
        field(1, node("Gemm", ["x", "a_weight", "a_bias"], "h", transposed))
        + field(1, node("Relu", ["h"], "r"))
        + field(1, node("Gemm", ["r", "b_weight", "b_bias"], "y", transposed))
        + field(2, "g")
        + b"".join(field(5, change(name, array)) for name, array in weights.items())
        + field(11, value_info("x", "n", 4))
        + field(12, value_info("y", "n", 3))
    )
    return model_proto(graph)


def header(length: int) -> bytes:
    """The length prefix of a safetensors file."""
    return struct.pack("<Q", length)
