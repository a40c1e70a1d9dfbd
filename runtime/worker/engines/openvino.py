"""OpenVINO: an IR graph with its `.bin`, or an `.onnx` file, compiled for the CPU.

Belongs here: models and requests of the library. Never: paths out of a graph, devices other than the CPU.
"""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from actors.errors import LoadFailed
from runtime.worker.artefacts import Artefacts, key_of
from runtime.worker.engines.onnx import warm_up, wire
from runtime.worker.engines.port import Kept, check_complete, check_declared
from runtime.worker.faults import words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from runtime.worker.codec import WireTensor
    from runtime.workers.port import LoadSpec

_BLOB: Final = "model.blob"
_DATATYPES: Final = {
    "boolean": "BOOL",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
    **{f"{sign}{width}": f"{word}INT{width}" for sign, word in (("i", ""), ("u", "U")) for width in (8, 16, 32, 64)},
}


class OpenVinoModel:
    """One compiled model with one request; `Opened` and `Runs` in one."""

    def __init__(self, spec: LoadSpec, device: torch.device) -> None:
        """Read and compile. Raises `LoadFailed`."""
        if device.type != "cpu":
            raise LoadFailed("engine openvino runs on cpu devices")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own modules, at import
            try:
                import openvino
            except ImportError:
                raise LoadFailed(
                    "engine openvino needs the extra 'openvino' installed (pip install 'foreload[openvino]')"
                ) from None
        core = openvino.Core()
        try:
            compiled, self._weights, self.kept = _compiled(openvino, core, spec)
            self._check(spec, compiled)
        except LoadFailed:
            raise
        except Exception as fault:  # noqa: BLE001 -- its errors have no base of their own
            raise LoadFailed(f"OpenVINO refuses the file: {words(fault)}") from None
        self.weights = 0  # what is mapped, or was compiled into something of another size
        self._request = compiled.create_infer_request()
        self._ports = {name: port for port in compiled.outputs for name in port.get_names()}
        self._inputs = spec.inputs
        self._outputs = {output.name: output.datatype for output in spec.outputs}

    def __repr__(self) -> str:
        return f"<OpenVinoModel {len(self._inputs)} in {len(self._outputs)} out>"

    @property
    def mapped(self) -> int:
        """Bytes of the `.bin` that the compiled model may still point into."""
        return 0 if self._weights is None else int(self._weights.nbytes)

    @property
    def witness(self) -> object:
        """See `Opened.witness`."""
        return self._request

    @property
    def runs(self) -> OpenVinoModel:
        """See `Opened.runs`."""
        return self

    def answer(self, inputs: Mapping[str, WireTensor], wanted: Collection[str]) -> dict[str, WireTensor]:
        """See `Runs.answer`."""
        results = self._request.infer({name: tensor.array for name, tensor in inputs.items()})
        return {
            name: wire(name, datatype, results[self._ports[name]])
            for name, datatype in self._outputs.items()
            if name in wanted
        }

    def warm_up(self) -> None:
        """See `Runs.warm_up`."""
        warm_up(self, self._inputs, list(self._outputs))

    @staticmethod
    def _check(spec: LoadSpec, model: Any) -> None:
        found = {name: _spelled(port) for port in model.inputs for name in port.get_names()}
        check_declared("input", spec.inputs, found)
        declared = {each.name for each in spec.inputs}
        # A port with several names wants one of them.
        check_complete(spec.inputs, [next(iter(port.get_names() & declared), port.any_name) for port in model.inputs])
        outputs = {name: _spelled(port) for port in model.outputs for name in port.get_names()}
        check_declared("output", spec.outputs, outputs)


def _settings() -> dict[str, object]:
    return {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # By default it computes in bf16 where the CPU has it, and answers would differ from every other engine's.
        "INFERENCE_PRECISION_HINT": "f32",
    }


def _compiled(openvino: Any, core: Any, spec: LoadSpec) -> tuple[Any, np.ndarray[Any, Any] | None, Kept | None]:
    """The compiled model; out of the artefact cache if it is there and the spec names one, else put there."""
    if not spec.artefacts.folder:
        model, weights = _read(openvino, core, spec)
        return core.compile_model(model, "CPU", _settings()), weights, None
    kept = Artefacts(Path(spec.artefacts.folder), spec.artefacts.size)
    settings = {name: str(value) for name, value in _settings().items()}
    about = core.get_property("CPU", "FULL_DEVICE_NAME"), core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    key = key_of(
        "openvino",
        {"fingerprint": spec.fingerprint, "version": openvino.get_version(), "device": about, "settings": settings},
    )
    began = time.perf_counter()
    with kept.taken(key) as entry:
        if entry is not None:
            compiled = core.import_model((entry.folder / _BLOB).read_bytes(), "CPU", _settings())
            took = time.perf_counter() - began
            return compiled, None, Kept(reused=True, seconds=took, saved=max(0.0, entry.seconds - took))
    model, weights = _read(openvino, core, spec)
    compiled = core.compile_model(model, "CPU", _settings())
    took = time.perf_counter() - began
    # A disk that fails costs the next worker its time and this one nothing.
    with suppress(OSError), kept.making(key) as folder:
        blob = compiled.export_model()
        (folder / _BLOB).write_bytes(blob if isinstance(blob, bytes) else blob.getvalue())
        kept.publish(key, folder, seconds=took, facts={})
    return compiled, weights, Kept(reused=False, seconds=took)


def _read(openvino: Any, core: Any, spec: LoadSpec) -> tuple[Any, np.ndarray[Any, Any] | None]:
    if not spec.graph:
        return core.read_model(spec.weights), None
    # Copy-on-write: the library asks for memory that may be written, and never does.
    weights = np.memmap(spec.weights, dtype=np.uint8, mode="c")
    return core.read_model(spec.graph, openvino.Tensor(weights, shared_memory=True)), weights


def _spelled(port: Any) -> tuple[str, tuple[int, ...] | None]:
    kind = port.get_element_type().get_type_name()
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return _DATATYPES.get(kind, kind), None
    return _DATATYPES.get(kind, kind), tuple(-1 if each.is_dynamic else each.get_length() for each in shape)
