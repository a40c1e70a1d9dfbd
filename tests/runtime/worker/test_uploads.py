"""Uploads to a device whose copies happen only when somebody waits for them: what is used too early is seen.

The lanes here keep every copy in a queue until a mark behind it is waited for, and fill memory with NaN before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.worker.builders import factory_for
from runtime.worker.cuda import AcceleratorDevice
from runtime.worker.mount import Mount, Steps
from runtime.worker.pinned import CHUNK, PinnedArena
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UNIT = 4096


class Queue:
    """Copies that have not happened yet."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.done = 0
        self.queued = 0
        self.waits: list[int] = []

    def run_to(self, count: int) -> None:
        while self.done < count:
            target, source = self.waiting.popleft()
            target.copy_(source)
            self.done += 1


class LateMark:
    """After the first `count` copies."""

    def __init__(self, queue: Queue, count: int) -> None:
        self._queue = queue
        self._count = count

    def wait(self) -> None:
        self._queue.waits.append(self._count)
        self._queue.run_to(self._count)

    def reached(self) -> bool:
        return self._queue.done >= self._count

    def synchronize(self) -> None:
        self._queue.run_to(self._count)


class LateLanes:
    """A device in host memory."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.queue = Queue()
        self.room = room
        self.broken_after: int | None = None

    def page_locked(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        if size > self.room:
            raise torch.OutOfMemoryError("no room")
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN in every float format

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.broken_after is not None and self.queue.queued >= self.broken_after:
            raise RuntimeError("the device is gone")
        self.queue.waiting.append((target, source))
        self.queue.queued += 1

    def mark(self) -> LateMark:
        return LateMark(self.queue, self.queue.queued)


def tensors_of(sizes: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=generator) for size in sizes]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs of 1 KiB, so that small models have many."""
    monkeypatch.setattr("runtime.worker.pinned.CHUNK", 1024)
    return 1024


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8), data=st.data(), pinned=st.sampled_from([0, 1 << 20])
)
def test_every_byte_arrives_whatever_the_order_and_the_way(sizes: list[int], data: st.DataObject, pinned: int) -> None:
    """Through staging buffers or from page-locked memory, the first time and later."""
    device = AcceleratorDevice(LateLanes(), pinned, unit=UNIT)
    order = data.draw(st.permutations(range(len(sizes))))
    sources = tensors_of(sizes)
    for _ in range(3):
        copies, landing = device.upload("m", sources, order)
        assert (landing is None) == (pinned == 0 or not sum(sizes)) or not sum(sizes)
        if landing is not None:
            for at in order:
                landing.reach(at)
                assert torch.equal(copies[at], sources[at])
        assert all(torch.equal(copy, source) for copy, source in zip(copies, sources, strict=True))


def test_a_tensor_is_waited_for_and_those_behind_it_are_not(small_chunks: int) -> None:
    """Copies come in the order of first use, so one wait covers all before it and none after."""
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, 1 << 20, unit=UNIT)
    sources = tensors_of([256] * 4)  # a chunk each
    copies, landing = device.upload("m", sources, (3, 1, 0, 2))
    assert landing is not None
    assert lanes.queue.done == 0
    landing.reach(1)
    assert lanes.queue.done == 2
    assert torch.equal(copies[3], sources[3])
    assert torch.isnan(copies[0]).all()
    landing.reach(3)
    assert lanes.queue.waits == [2], "what is there is not waited for again"
    landing.reach_all()
    assert lanes.queue.done == 4
    assert landing.landed
    assert small_chunks == 1024


def test_idle_models_leave_page_locked_memory_and_busy_ones_do_not(small_chunks: int) -> None:
    """Room is made from the least recently used; a model under way, or too large, changes nothing."""
    arena = PinnedArena(torch.zeros(4 * UNIT, dtype=torch.uint8), UNIT)
    flats = [torch.ones(UNIT, dtype=torch.uint8)]
    for key in "abc":
        assert arena.hold(key, flats, (0,)) is not None
    assert arena.get("a") is not None
    assert arena.hold("big", [torch.ones(2 * UNIT, dtype=torch.uint8)], (0,)) is not None
    assert arena.get("b") is None, "the least recently used left"
    assert arena.get("a") is not None
    assert arena.hold("huge", [torch.ones(5 * UNIT, dtype=torch.uint8)], (0,)) is None
    assert arena.get("big") is not None, "nobody left for what can never fit"
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, 2 * UNIT, unit=UNIT)
    sources = tensors_of([UNIT // 4])
    _, first = device.upload("x", sources)
    _, second = device.upload("y", sources)
    copies, third = device.upload("z", sources)
    assert third is None, "both are being copied from, so this one went through the staging buffers"
    assert torch.equal(copies[0], sources[0])
    assert first is not None
    assert second is not None
    first.finish()
    assert device.upload("z", sources)[1] is not None
    assert small_chunks


def test_what_left_the_host_gives_its_pages_back_and_returns_to_its_place() -> None:
    """`forget` never blocks, waits for copies under way before the bytes are anybody else's, and keeps the address."""
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, 4 * UNIT, unit=UNIT)
    sources = tensors_of([UNIT // 4])
    device.upload("x", sources)
    device.upload("y", sources)
    device.forget("x")
    device.forget("never heard of")
    assert lanes.queue.done >= 1
    assert device._arena.books.free == 3 * UNIT
    with device._lock:
        device.forget("y")
        assert device._arena.books.free == 3 * UNIT, "an upload is under way: later"
    device.upload("x", sources)
    assert device._arena._held["x"].layout.extents[0].start == 0
    assert device._arena.books.free == 3 * UNIT


@pytest.mark.parametrize("pinned", [0, 64 * UNIT])
def test_a_copy_that_fails_waits_for_those_before_it(pinned: int, small_chunks: int) -> None:
    """Memory must not be freed under a copy; the error goes through, and the next upload works."""
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, pinned, unit=UNIT)
    sources = tensors_of([CHUNK // 4, CHUNK // 4, 100] if not pinned else [1000, 1000])
    lanes.broken_after = 1
    with pytest.raises(RuntimeError, match="gone"):
        device.upload("x", sources)
    assert not lanes.queue.waiting
    lanes.broken_after = None
    copies, landing = device.upload("x", sources)
    if landing is not None:
        landing.finish()
    assert all(torch.equal(one, two) for one, two in zip(copies, sources, strict=True))
    assert small_chunks


def test_memory_that_runs_out_is_told_and_keeps_nothing() -> None:
    """The page-locked copy stays, since it is right and may be wanted again."""
    device = AcceleratorDevice(LateLanes(room=1000), 64 * UNIT, unit=UNIT)
    with pytest.raises(torch.OutOfMemoryError):
        device.upload("x", tensors_of([1000]))
    assert not device._arena._held["x"].busy


# -- modules that run while their weights land ---------------------------------------------------------


class Peeking(torch.nn.Module):
    """Uses a child's weight without calling the child, and reads all its parameters in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.second.weight)
        total = torch.stack([p.sum() for p in self.parameters()]).sum()
        return self.first(y) * total * self.scale[:4]


modules.Peeking = Peeking  # type: ignore[attr-defined]  # where the kit looks for factories
SHAPES = {
    "Linear": (2, 4),
    "Normed": (1, 3, 6, 6),
    "Rotary": (2, 4),
    "Cyclic": (2, 4),
    "Recurrent": (1, 3, 4),
    "Attention": (1, 3, 8),
    "Listed": (2, 4),
    "Peeking": (2, 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_forward_behind_its_copies_computes_what_plain_pytorch_does(
    name: str, tmp_path: Path, small_chunks: int
) -> None:
    """Each weight is waited for when it is reached for: NaN would tell of one that was not."""
    plain = randomised(getattr(modules, name))
    spec = spec_for(saved(tmp_path / "w.safetensors", plain), name)
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, 1 << 24, unit=UNIT)
    mount = Mount(spec, factory_for(spec.builder, ALLOW), Steps(lambda: False), device)
    x = torch.rand(SHAPES[name], generator=torch.Generator().manual_seed(3))

    def outputs(module: torch.nn.Module) -> list[bytes]:
        with torch.inference_mode():
            found = module(x)
        return [np.asarray(one).tobytes() for one in (found if isinstance(found, tuple) else (found,))]

    wanted = outputs(plain)
    mount.activate()
    with mount.watched():
        assert outputs(mount.module) == wanted
    mount.warmed()
    for _ in range(3):
        assert mount.deactivate() == 0
        registry = mount.module.__dict__["_parameters"]
        mount.activate()
        assert lanes.queue.waiting or lanes.queue.queued == lanes.queue.done
        for _ in range(2):
            assert outputs(mount.module) == wanted
        mount.deactivate()
        assert mount.module.__dict__["_parameters"] is registry, "the module is as it was"
        assert not mount.module._forward_hooks
        assert not mount.module._forward_pre_hooks
        mount.activate()
    assert small_chunks


def test_the_first_layer_runs_before_the_last_one_is_there(tmp_path: Path, small_chunks: int) -> None:
    """What pipelining is for: when the first layer's weights are used, the others are still on their way."""
    plain = randomised(modules.Linear, width=512)
    spec = spec_for(saved(tmp_path / "w.safetensors", plain), "Linear", config={"width": 512})
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, 1 << 24, unit=UNIT)
    mount = Mount(spec, factory_for(spec.builder, ALLOW), Steps(lambda: False), device)
    mount.activate()
    with mount.watched():
        mount.module(torch.ones(1, 4))
    mount.warmed()
    assert [mount._skeleton.cells[at].names[0] for at in mount._skeleton.order] == [
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    ]
    mount.deactivate()
    mount.activate()
    start = lanes.queue.done
    mount.module.a(torch.ones(1, 4))
    first = lanes.queue.done
    assert start < first < lanes.queue.queued
    mount.module(torch.ones(1, 4))
    assert lanes.queue.done == lanes.queue.queued
    assert small_chunks


def test_an_eviction_waits_for_copies_under_way(tmp_path: Path, small_chunks: int) -> None:
    """Never called, evicted at once: no copy may write into memory that is somebody else's by then."""
    plain = randomised(modules.Linear, width=512)
    spec = spec_for(saved(tmp_path / "w.safetensors", plain), "Linear", config={"width": 512})
    lanes = LateLanes()
    device = AcceleratorDevice(lanes, 1 << 24, unit=UNIT)
    mount = Mount(spec, factory_for(spec.builder, ALLOW), Steps(lambda: False), device)
    mount.activate()
    assert lanes.queue.waiting
    assert mount.deactivate() == 0
    assert not lanes.queue.waiting
    assert small_chunks
