"""TensorRT's folder: engines of one warm-up serve the next worker. Without a GPU only the folder itself is tested."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.worker.engines.onnx import _providers
from runtime.worker.engines.tensorrt import PROVIDER, TensorRtFolder
from runtime.workers.port import ArtefactSpec
from tests.contracts.engine_kit import Artefact, module, onnx_of

if TYPE_CHECKING:
    from runtime.workers.port import LoadSpec

GPU = ("some GPU", "(9, 0)")


def spec_in(folder: Path, **changes: object) -> LoadSpec:
    """A load of a real ONNX file that keeps artefacts in a folder."""
    path = folder / "m.onnx"
    path.write_bytes(onnx_of(module()))
    return Artefact(path).spec("onnx", artefacts=ArtefactSpec(str(folder / "kept"), 1 << 20), **changes)


def where(folder: TensorRtFolder) -> Path:
    """What the provider is told."""
    name, options = folder.provider(1)
    assert (name, options["device_id"], options["trt_engine_cache_enable"]) == (PROVIDER, 1, True)
    return Path(options["trt_engine_cache_path"])


def test_engines_that_a_warm_up_built_are_there_for_the_next_worker(tmp_path: Path) -> None:
    """Copied in and out: TensorRT may write into its folder and spoils nobody's entry; other versions find nothing."""
    spec = spec_in(tmp_path)
    first = TensorRtFolder(spec, GPU, "1")
    assert [*where(first).iterdir()] == []
    (where(first) / "graph.engine").write_bytes(b"engine")
    first.built()
    assert first.kept is not None
    assert not first.kept.reused
    second = TensorRtFolder(spec, GPU, "1")
    assert [one.name for one in where(second).iterdir()] == ["graph.engine"]
    (where(second) / "another.engine").write_bytes(b"later")
    second.built()
    assert second.kept is not None
    assert second.kept.reused
    third = TensorRtFolder(spec, GPU, "1")
    assert [one.name for one in where(third).iterdir()] == ["graph.engine"]
    for other in (TensorRtFolder(spec, GPU, "2"), TensorRtFolder(spec, ("another", "(8, 0)"), "1")):
        assert [*where(other).iterdir()] == []
    left = where(third)
    del third
    assert not left.exists()


def test_it_goes_first_where_it_is_and_is_not_needed(tmp_path: Path) -> None:
    """TensorRT, then CUDA, then the CPU for what neither can."""
    device = torch.device("cuda:1")
    folder = TensorRtFolder(spec_in(tmp_path), GPU, "1")
    names = [
        each if isinstance(each, str) else each[0] for each in _providers(["CUDAExecutionProvider"], device, folder)
    ]
    assert names == [PROVIDER, "CUDAExecutionProvider", "CPUExecutionProvider"]
    assert len(_providers(["CUDAExecutionProvider"], device, None)) == 2
    assert _providers([], torch.device("cpu"), None) == ["CPUExecutionProvider"]
