"""A thousand loads and evictions of real weights: memory stays flat, and every answer stays plain PyTorch's.

The bounds are checked against a model that leaks, or a pass would prove nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.e2e import shelf
from tests.e2e.live import serving
from tests.e2e.memory import pss, slope
from tests.e2e.plain import MODELS, SMALL, known, same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.e2e.live import Live

pytestmark = pytest.mark.real

CYCLES = 1_000
WARM_UP = 400
BOUND = 4.0
"""Kilobytes that a process may grow per load and eviction; a leak of one small model would be hundreds."""


def evictions(live: Live) -> float:
    """Evictions on the device so far, from the metrics page."""
    total = 0.0
    for line in live.get("/metrics").body.decode().splitlines():
        if line.startswith("foreload_evictions_total{") and 'device="cpu:0"' in line:
            total += float(line.rpartition(" ")[2])
    return total


def grown(live: Live, rounds: int, each: int, turn: Callable[[int], None]) -> tuple[float, float]:
    """Run rounds of `each` cycles and give the growth in kB per cycle of the front and of the worker."""
    front: list[tuple[float, float]] = []
    worker: list[tuple[float, float]] = []
    pids = live.process.pid, live.worker
    for number in range(rounds):
        turn(number)
        front.append((number * each, pss(pids[0])))
        worker.append((number * each, pss(pids[1])))
    assert live.worker == pids[1], "the worker was replaced meanwhile"
    return slope(front), slope(worker)


@pytest.mark.slow
def test_a_demo_model_answers_as_plain_pytorch_before_and_after_swaps(
    tmp_path: Path, demo_repository: Path, demo_cache: Path
) -> None:
    """T14: all eight models, larger together than the device: the first answers, and after two rounds of swaps."""
    wanted = known(demo_repository)
    first: dict[str, dict[str, bytes]] = {}
    with serving(
        tmp_path, repository=[str(demo_repository)], disk__path=str(demo_cache), devices__memory="95MB"
    ) as live:
        client = live.client()
        for turn in range(3):
            for name in MODELS:
                reply = client.infer(name, wanted[name].inputs, binary=True)
                same(reply.outputs, wanted[name].outputs)
                bits = {key: array.tobytes() for key, array in reply.outputs.items()}
                assert first.setdefault(name, bits) == bits, f"{name} changed in turn {turn}"
        assert evictions(live) >= 4
        assert live.device()["used"] <= 95_000_000


@pytest.mark.slow
def test_a_thousand_loads_and_evictions_leave_memory_flat(
    tmp_path: Path, demo_repository: Path, demo_cache: Path
) -> None:
    """R9, F61, F82: 1,000 cycles of real weights, two large models among them: front and worker do not grow.

    Room for two models and five that take turns, so each request is a load and an eviction. Answers are compared in
    every round, at the end with plain PyTorch's again.
    """
    wanted = known(demo_repository)
    with serving(
        tmp_path,
        repository=[str(demo_repository)],
        disk__path=str(demo_cache),
        devices__memory="190MB",
        devices__count=2,
        telemetry__log={"level": "info", "format": "json"},
    ) as live:
        client = live.client()
        each = len(SMALL)

        def turn(number: int) -> None:
            if number % 40 == 0:
                for name in ("minilm", "crepe-full"):
                    same(client.infer(name, wanted[name].inputs, binary=True).outputs, wanted[name].outputs)
            for name in SMALL:
                same(client.infer(name, wanted[name].inputs, binary=True).outputs, wanted[name].outputs)

        for number in range(WARM_UP // each):
            turn(number)
        before = evictions(live)
        front, worker = grown(live, CYCLES // each, each, turn)
        assert evictions(live) - before >= CYCLES
        assert front < BOUND, f"the front grows {front:.1f} kB per cycle"
        assert worker < BOUND, f"the worker grows {worker:.1f} kB per cycle"
        device = live.device()
        assert (device["leaked"], device["foreign"], device["leases"], device["waiting"]) == (0, 0, 0, 0)
        for name in MODELS:
            same(client.infer(name, wanted[name].inputs, binary=True).outputs, wanted[name].outputs)
        assert len(live.members()) == 3


def test_the_check_catches_a_model_that_leaks(tmp_path: Path) -> None:
    """The negative control: 16 kB kept of each request are seen as growth over the bound, in the worker alone."""
    shelf.put(tmp_path / "models", "leaky", factory="hoarding", kept=16_384)
    shelf.put(tmp_path / "models", "other")
    with serving(tmp_path, devices__count=1) as live:

        def turn(_: int) -> None:
            for _each in range(5):
                assert live.infer("leaky").status == 200
                assert live.infer("other").status == 200

        turn(0)
        _, worker = grown(live, 20, 5, turn)
        assert worker > BOUND, f"a leak of 16 kB per cycle was measured as {worker:.1f}"


def test_the_check_catches_a_step_less_than_a_slope() -> None:
    """The regression itself: a line of 5 kB a step is seen, one jump and noise are not."""
    assert pss(os.getpid()) > 1_000
    flat: Sequence[tuple[float, float]] = [
        (at, 100_000 + (at % 7) * 40 + (900 if at > 180 else 0)) for at in range(200)
    ]
    rising = [(at, size + 5 * at) for at, size in flat]
    assert slope(flat) < 1 < BOUND < slope(rising)
