"""On a real CUDA device only; skips itself elsewhere. What the CPU tests promise must hold on a GPU too."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from actors.errors import OutOfMemory
from runtime.worker.core import Core
from runtime.worker.cuda import CudaDevice
from runtime.worker.pinned import CHUNK
from runtime.workers.port import TensorSpec
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for
from tests.runtime.worker.test_core import ask, never

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("pinned", [0, 256 << 20])
def test_uploads_are_exact_and_come_back_to_the_allocator(pinned: int) -> None:
    """Every byte arrives, across chunk borders, by either way; dropping the tensors frees what the upload took (U6)."""
    device = CudaDevice(torch.device("cuda:0"), pinned)
    before = device.allocated()
    sources = [torch.rand(n) for n in (1, 0, 1000, CHUNK // 4 + 3, CHUNK)] + [torch.arange(5), torch.ones(3).bool()]
    order = tuple(reversed(range(len(sources))))
    for _ in range(3):
        copies, landing = device.upload("m", sources, order)
        assert (landing is None) == (pinned == 0)
        if landing is not None:
            landing.reach_all()
        for source, copy in zip(sources, copies, strict=True):
            assert torch.equal(source, copy.cpu())
        assert device.allocated() - before >= sum(source.nbytes for source in sources)
        del copies, copy
        assert device.allocated() == before
    device.relax()


def test_a_forward_runs_behind_its_copies_and_computes_the_same(tmp_path: Path) -> None:
    """The first forward after an upload is enqueued at once, and waits on the device for each weight as it needs it."""
    width = 8 << 20
    plain = randomised(modules.Linear, width=width)
    spec = spec_for(saved(tmp_path / "w.safetensors", plain), "Linear", config={"width": width})
    core = Core("cuda:0", ALLOW, pinned=1 << 30)
    array = np.ones((2, 4), np.float32)
    core.load(spec, never)
    golden = ask(core, spec.key, array)["y"].tobytes()
    for _ in range(20):
        core.evict(spec.key)
        core.load(spec, never)
        assert ask(core, spec.key, array)["y"].tobytes() == golden


def test_transfers_run_at_the_speed_of_page_locked_copies() -> None:
    """A host hit takes at most 1.15 times the bytes over the calibrated rate of page-locked copies."""
    device = CudaDevice(torch.device("cuda:0"), 1 << 30)
    sources = [torch.rand(8 << 20) for _ in range(12)]
    total = sum(source.nbytes for source in sources)
    locked, target = (
        torch.empty(total, dtype=torch.uint8, pin_memory=True),
        torch.empty(total, dtype=torch.uint8, device="cuda:0"),
    )
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    floors, mine = [], []
    device.upload("m", sources)[1].finish()
    for _ in range(9):
        torch.cuda.synchronize()
        begin.record()
        target.copy_(locked, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        floors.append(begin.elapsed_time(end) / 1e3)
        began = time.perf_counter()
        copies, landing = device.upload("m", sources)
        landing.finish()
        mine.append(time.perf_counter() - began)
        del copies
    assert median(mine) <= 1.15 * median(floors) + 0.0005


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
