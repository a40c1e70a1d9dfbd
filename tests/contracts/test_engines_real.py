"""Silero VAD as it is published: the same weights in every format give the same answers, from folder to worker.

The wheel has them as TorchScript and ONNX (three exports); its safetensors are of another training run, so those of
the TorchScript file are written out for the engines that need a module.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from actors.errors import FetchFailed
from runtime.catalog.describe import write_manifest
from runtime.catalog.record import load_spec, record_of
from runtime.demo import wheels
from runtime.demo.voice import SileroVad
from runtime.tiers.disk import DiskStore
from runtime.worker.core import Core
from tests.contracts.engine_kit import F32, ask, compile_package, never
from tests.runtime.demo.test_demo_architectures import _SILERO_NAMES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.real, pytest.mark.slow]

TOLERANCE = 2e-5
ALLOW = ("runtime.demo.architectures",)
NAMES = {"eager": ("audio", "state"), "published": ("input", "state")}
MODELS = {
    "eager": ("eager", "silero.safetensors", {"builder": {"kind": "python", "target": f"{ALLOW[0]}:silero_vad"}}),
    "export": ("export", "silero.pt2", {"trust": "code"}),
    "aot": ("aot", "aot.pt2", {"trust": "code"}),
    "torchscript": ("torchscript", "silero.pt", {"trust": "code"}),
    "onnx": ("onnx", "silero_vad_16k_op15.onnx", {}),
    "onnx-18": ("onnx", "silero_vad_op18_ifless.onnx", {}),
    "openvino": ("openvino", "silero_vad_openvino_16k.onnx", {}),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every format of the published weights in one folder."""
    folder = tmp_path_factory.mktemp("silero")
    try:
        wheel = wheels.fetch(wheels.SILERO, wheels.default_cache())
    except FetchFailed as error:
        pytest.skip(error.message)
    with zipfile.ZipFile(wheel) as archive:
        for _, name, _ in MODELS.values():
            if name.endswith(".onnx"):
                (folder / name).write_bytes(archive.read(f"silero_vad/data/{name}"))
        script = archive.read("silero_vad/data/silero_vad.jit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded: Any = torch.jit.load(io.BytesIO(script), map_location="cpu")  # type: ignore[no-untyped-call]
        loaded._model.save(str(folder / "silero.pt"))
    tensors = {}
    for key, tensor in loaded._model.state_dict().items():
        old = next(old for old in _SILERO_NAMES if key.startswith(old))
        tensors[key.replace(old, _SILERO_NAMES[old])] = tensor.clone().contiguous()
    save_file(tensors, folder / "silero.safetensors")
    module = SileroVad().eval().requires_grad_(requires_grad=False)
    module.load_state_dict(tensors)
    batch = torch.export.Dim("batch", min=1, max=1024)
    example = (torch.zeros(3, 576), torch.zeros(3, 2, 128))
    program = torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))
    torch.export.save(program, folder / "silero.pt2")
    compile_package(program, folder / "aot.pt2")
    return folder


def signature(model: str) -> dict[str, Any]:
    """Inputs and outputs of one format; published ones keep the state's batch in the middle."""
    first = model in {"eager", "export", "aot"}
    rows: Any = 1 if model == "openvino" else -1
    state = [rows, 2, 128] if first else [2, rows, 128]
    names = ("audio", "state", "probability", "next_state") if first else ("input", "state", "output", "stateN")
    tensors = [
        {"name": name, "datatype": "FP32", "shape": shape}
        for name, shape in zip(names, ([rows, 576], state, [rows, 1], state), strict=True)
    ]
    rate = [{"name": "sr", "datatype": "INT64", "shape": []}] if model.startswith("onnx") else []
    return {"inputs": [*tensors[:2], *rate], "outputs": tensors[2:]}


def loaded(model: str, files: Path, folder: Path) -> Core:
    """A core that holds one format, which came all the way: manifest, record, disk tier, spec."""
    engine, name, settings = MODELS[model]
    directory = folder / "models" / model
    directory.mkdir(parents=True)
    (directory / name).write_bytes((files / name).read_bytes())
    about = {"name": "silero", "version": "1", "engine": engine, **settings, **signature(model)}
    record = record_of(directory, write_manifest(directory, about))
    spec = load_spec(record, DiskStore(folder / "cache", 1 << 30).admit(record))
    core = Core("cpu:0", ALLOW)
    core.load(msgspec.structs.replace(spec, trusted="trust" in settings), never)
    return core


def speech(model: str, core: Core) -> np.ndarray[Any, Any]:
    """Probabilities and states of six chunks of noise, the state carried along, one row."""
    rng = np.random.default_rng(7)
    shape = (1, 2, 128) if model in {"eager", "export", "aot"} else (2, 1, 128)
    state, heard = np.zeros(shape, F32), []
    for at in range(6):
        audio = (rng.standard_normal((1, 576)) * 0.1 * (at + 1)).astype(F32)
        names = [one["name"] for one in signature(model)["inputs"]]
        given = dict(zip(names, (audio, state, np.array(16_000, np.int64)), strict=False))
        answer = ask(core, "silero@1", **given)
        probability, state = (answer[one["name"]].copy() for one in signature(model)["outputs"])
        heard.append(np.concatenate([probability.ravel(), state.ravel()]))
    return np.stack(heard)


@pytest.fixture(scope="session")
def wanted(files: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    """What the published TorchScript says."""
    return speech("torchscript", loaded("torchscript", files, tmp_path_factory.mktemp("reference")))


@pytest.mark.parametrize("model", [model for model in MODELS if model != "torchscript"])
def test_every_format_answers_as_the_published_torchscript(
    model: str, files: Path, wanted: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """Six chunks with their state agree to 2e-5, whatever file and whatever runtime."""
    assert float(np.ptp(wanted[:, 0])) > 0.01, "the input has to matter"
    np.testing.assert_allclose(speech(model, loaded(model, files, tmp_path)), wanted, rtol=0, atol=TOLERANCE)


def test_every_format_is_measured(files: Path, tmp_path: Path) -> None:
    """No engine claims to hold less than its weights."""
    weights = sum(one.stat().st_size for one in files.iterdir() if one.name == "silero.safetensors")
    for model in MODELS:
        (held,) = loaded(model, files, tmp_path / model).inventory()
        assert held.resident >= 0.9 * weights, model
