"""On a real CUDA device only; skips itself elsewhere. What the CPU tests promise must hold on a GPU too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from actors.errors import OutOfMemory
from runtime.worker.core import Core
from runtime.worker.cuda import CHUNK, CudaDevice
from runtime.workers.port import TensorSpec
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for
from tests.runtime.worker.test_core import ask, never

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_uploads_are_exact_and_come_back_to_the_allocator() -> None:
    """Every byte arrives, across chunk borders; dropping the tensors frees what the upload took (U6)."""
    device = CudaDevice(torch.device("cuda:0"))
    before = device.allocated()
    sources = [torch.rand(n) for n in (1, 0, 1000, CHUNK // 4 + 3, CHUNK)] + [torch.arange(5), torch.ones(3).bool()]
    copies = device.upload(sources)
    for source, copy in zip(sources, copies, strict=True):
        assert torch.equal(source, copy.cpu())
    assert device.allocated() - before >= sum(source.nbytes for source in sources)
    del copies, copy
    assert device.allocated() == before
    device.relax()


def test_a_model_switches_fifty_times_with_one_answer_and_no_growth(tmp_path: Path) -> None:
    """Identical output after each host to device move, and the allocator's count returns each time (U22, T14)."""
    core = Core("cuda:0", ALLOW)
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Normed))
    inputs = (TensorSpec("x", "FP32", (-1, 3, 6, 6)),)
    spec = spec_for(weights, "Normed", inputs=inputs)
    array = np.ones((1, 3, 6, 6), np.float32)
    core.load(spec, never)
    golden = ask(core, spec.key, array)["y"].tobytes()
    core.evict(spec.key)
    empty = torch.cuda.memory_allocated()
    for _ in range(50):
        loaded = core.load(spec, never)
        assert torch.cuda.memory_allocated() - empty >= loaded.resident
        assert ask(core, spec.key, array)["y"].tobytes() == golden
        gone = core.evict(spec.key)
        assert (gone.returned, gone.leaked) == (loaded.resident, 0)
        assert torch.cuda.memory_allocated() == empty


def test_memory_that_runs_out_undoes_the_load(tmp_path: Path) -> None:
    """A model larger than what is free is told as such, and leaves nothing on the device."""
    core = Core("cuda:0", ALLOW)
    width = 16 << 20
    weights = saved(tmp_path / "w.safetensors", randomised(modules.Linear, width=width))
    spec = spec_for(weights, "Linear", config={"width": width})
    before, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.raises(OutOfMemory):
            core.load(spec, never)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == before
    assert core.inventory() == []
    assert core.load(spec, never).resident > 500 << 20
