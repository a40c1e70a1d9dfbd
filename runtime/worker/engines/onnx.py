"""ONNX Runtime: a checked `.onnx` file with everything in it, run on numpy arrays.

Belongs here: sessions and their signatures. Never: custom operators, files beside the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from actors.errors import BadTensor, CorruptWeights, InferenceFailed, LoadFailed
from runtime.worker.codec import WireTensor
from runtime.worker.engines.port import check_complete, check_declared, warm_extents, warm_shape
from runtime.worker.engines.tensorrt import PROVIDER, TensorRtFolder
from runtime.worker.faults import words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from runtime.worker.engines.port import Kept
    from runtime.workers.port import LoadSpec, TensorSpec

_DATATYPES: Final = {
    "tensor(bool)": "BOOL",
    "tensor(string)": "BYTES",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    **{f"tensor({sign}int{width})": f"{sign.upper()}INT{width}" for sign in ("", "u") for width in (8, 16, 32, 64)},
}
NUMPY_OF: Final[dict[str, Any]] = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    **{f"{sign.upper()}INT{width}": np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)},
}
_QUIET = 3
"""ONNX Runtime's log level for errors: its warnings are about how others export."""


class OnnxModel:
    """One session; `Opened` and `Runs` in one."""

    mapped = 0

    def __init__(self, spec: LoadSpec, device: torch.device) -> None:
        """Open the file. Raises `LoadFailed` or `CorruptWeights`."""
        try:
            import onnxruntime
        except ImportError:
            raise LoadFailed("engine onnx needs the extra 'onnx' installed (pip install 'foreload[onnx]')") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = _QUIET
        # An arena would keep the largest request's memory for good, and an eviction would not give it back.
        options.enable_cpu_mem_arena = False
        self._tensorrt = _tensorrt(onnxruntime, spec, device)
        providers = _providers(onnxruntime.get_available_providers(), device, self._tensorrt)
        try:
            session = onnxruntime.InferenceSession(spec.weights, options, providers=providers)
        except Exception as fault:  # noqa: BLE001 -- its errors have no base of their own
            kind = CorruptWeights if type(fault).__name__ in {"InvalidProtobuf", "InvalidGraph"} else LoadFailed
            raise kind(f"ONNX Runtime refuses the file: {words(fault)}") from None
        self._session = session
        self.weights = spec.weights_bytes
        self._inputs = spec.inputs
        self._outputs = {output.name: output.datatype for output in spec.outputs}
        found = {each.name: _spelled(each) for each in session.get_inputs()}
        check_declared("input", spec.inputs, found)
        check_complete(spec.inputs, found.keys())
        check_declared("output", spec.outputs, {each.name: _spelled(each) for each in session.get_outputs()})

    def __repr__(self) -> str:
        return f"<OnnxModel {len(self._inputs)} in {len(self._outputs)} out>"

    @property
    def kept(self) -> Kept | None:
        """What TensorRT built or was spared."""
        return None if self._tensorrt is None else self._tensorrt.kept

    @property
    def witness(self) -> object:
        """See `Opened.witness`."""
        return self._session

    @property
    def runs(self) -> OnnxModel:
        """See `Opened.runs`."""
        return self

    def answer(self, inputs: Mapping[str, WireTensor], wanted: Collection[str]) -> dict[str, WireTensor]:
        """See `Runs.answer`."""
        names = [name for name in self._outputs if name in wanted]
        results = self._session.run(names, {name: _told(tensor) for name, tensor in inputs.items()})
        return {name: wire(name, self._outputs[name], result) for name, result in zip(names, results, strict=True)}

    def warm_up(self) -> None:
        """See `Runs.warm_up`."""
        warm_up(self, self._inputs, list(self._outputs))
        if self._tensorrt is not None:
            self._tensorrt.built()


def warm_up(runs: OnnxModel | Any, inputs: tuple[TensorSpec, ...], outputs: list[str]) -> None:
    """Forwards with zeros of several sizes, until one succeeds. Raises what the last one raised."""
    extents = warm_extents(inputs)
    for extent in extents:
        try:
            runs.answer({spec.name: _zeros(spec, extent) for spec in inputs}, outputs)
        except Exception:
            if extent == extents[-1]:
                raise
        else:
            return


def wire(name: str, datatype: str, result: Any) -> WireTensor:
    """A result as it goes out. Raises `InferenceFailed` for what is no tensor of its declared datatype."""
    if not isinstance(result, np.ndarray):
        raise InferenceFailed(f"output {name!r} is a {type(result).__name__} instead of a tensor")
    if datatype == "BYTES":
        return WireTensor(
            name, datatype, np.array([str(text).encode() for text in result.flat], object).reshape(result.shape)
        )
    return WireTensor(name, datatype, result)


def _told(tensor: WireTensor) -> Any:
    if tensor.datatype != "BYTES":
        return tensor.array
    try:
        texts = [bytes(one).decode() for one in tensor.array.flat]
    except UnicodeDecodeError:
        raise BadTensor(f"input {tensor.name!r} is not UTF-8 text") from None
    return np.array(texts, dtype=object).reshape(tensor.array.shape)


def _zeros(spec: TensorSpec, extent: int) -> WireTensor:
    shape = warm_shape(spec, extent)
    if spec.datatype == "BYTES":
        return WireTensor(spec.name, "BYTES", np.full(shape, b"", dtype=object))
    return WireTensor(spec.name, spec.datatype, np.zeros(shape, NUMPY_OF[spec.datatype]))


def _spelled(each: Any) -> tuple[str, tuple[int, ...] | None]:
    """Datatype and shape of a session's tensor; symbolic dimensions are variable."""
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in each.shape or ())
    return _DATATYPES.get(each.type, each.type), shape


def _providers(available: list[str], device: torch.device, tensorrt: TensorRtFolder | None) -> list[Any]:
    """What may run the nodes, best first."""
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in available:
        raise LoadFailed("this ONNX Runtime has no CUDA; install onnxruntime-gpu in place of onnxruntime")
    number = device.index or 0
    first = [] if tensorrt is None else [tensorrt.provider(number)]
    return [*first, ("CUDAExecutionProvider", {"device_id": number}), "CPUExecutionProvider"]


def _tensorrt(onnxruntime: Any, spec: LoadSpec, device: torch.device) -> TensorRtFolder | None:
    if device.type == "cpu" or PROVIDER not in onnxruntime.get_available_providers():
        return None
    machine = torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))
    return TensorRtFolder(spec, machine, f"{onnxruntime.__version__} {torch.version.cuda}")
