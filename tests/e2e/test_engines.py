"""Models that are no safetensors, through the whole server: found, trusted or not, served, measured, known again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from runtime.catalog.describe import write_manifest
from tests.contracts.engine_kit import F32, artefact, module
from tests.e2e.live import serving

if TYPE_CHECKING:
    from pathlib import Path

X = np.linspace(-1, 1, 8, dtype=F32).reshape(2, 4)
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": X.ravel().tolist()}]}).encode()


def put(folder: Path, engine: str, **settings: Any) -> None:
    """One model folder called like its engine."""
    directory = folder / "models" / engine
    directory.mkdir(parents=True)
    made = artefact(engine, directory)
    about = {
        "name": engine,
        "version": "1",
        "engine": engine,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        **settings,
    }
    only = [made.path.name, *(["m.xml"] if made.graph else [])]
    write_manifest(directory, about, only)


def test_models_of_other_engines_are_served_and_their_size_is_remembered(tmp_path: Path) -> None:
    """Two engines beside each other, one that is not trusted; after a restart the measured size is planned with."""
    put(tmp_path, "onnx")
    put(tmp_path, "openvino", graph="m.xml")
    put(tmp_path, "torchscript", trust="code")
    with torch.inference_mode():
        wanted = module()(torch.from_numpy(X.copy())).numpy()
    with serving(tmp_path) as live:
        for engine in ("onnx", "openvino"):
            said = live.infer(engine, BODY)
            assert said.status == 200, said.body
            np.testing.assert_allclose(
                np.array(said.json["outputs"][0]["data"], F32).reshape(2, 3), wanted, rtol=1e-4, atol=1e-4
            )
        assert live.get("/v2/models/onnx").json["platform"] == "onnx_onnxv1"
        refused = live.infer("torchscript", BODY)
        assert (refused.status, refused.json["code"]) == (503, "load_failed")
        assert "`trust`" in refused.json["error"]
        assert str(tmp_path) not in refused.json["error"]
        compiled = live.until(lambda: live.said("compiled"), "OpenVINO tells what it compiled")
        assert (compiled[0]["model"], compiled[0]["reused"]) == ("openvino@1", False)
    rows = json.loads((tmp_path / "cache" / "footprints.json").read_text())["rows"]
    assert len(rows) == 2
    assert all(row.keys() == {"cpu", "host"} and row["cpu"] > 0 for row in rows.values())
    with serving(tmp_path, trust=["torchscript"]) as live:
        assert live.infer("torchscript", BODY).status == 200
        assert live.infer("openvino", BODY).status == 200
        compiled = live.until(lambda: live.said("compiled"), "OpenVINO finds what it had compiled")
        assert compiled[0]["reused"] is True
        assert 'foreload_compilations_total{result="reused"} 1.0' in live.get("/metrics").body.decode()
        started = [
            each for each in live.said("load started") if each["model"] == "openvino@1" and each["tier"] == "device"
        ]
        assert started[0]["reserved"] in {row["cpu"] for row in rows.values()}


@pytest.mark.slow
@pytest.mark.timeout(1_200)  # the compiler runs at idle priority
def test_a_compiled_twin_takes_over_in_a_worker_process(tmp_path: Path) -> None:
    """Served at once, compiled beside it; the next worker reuses what was kept, and nothing is left of the compiler."""
    builder = {"kind": "python", "target": "tests.runtime.worker.modules:Linear", "arguments": {"width": 512}}
    put(tmp_path, "eager", builder=builder, compile=True)
    with torch.inference_mode():
        wanted = module()(torch.from_numpy(X.copy())).numpy()
    for reused in (False, True):
        with serving(tmp_path, devices__allow=["tests.runtime.worker."]) as live:
            first = live.infer("eager", BODY)
            assert first.status == 200, first.body
            compiled = live.until(lambda: live.said("compiled"), "the twin takes over", seconds=1_000.0)
            assert compiled[0]["reused"] is reused
            said = live.infer("eager", BODY)
            found = np.array(said.json["outputs"][0]["data"], F32).reshape(2, 3)
            np.testing.assert_allclose(found, wanted, rtol=1e-4)
            assert not live.said("compilation failed")
            assert len(live.members()) == 3, "front, zygote and worker, no compiler"
