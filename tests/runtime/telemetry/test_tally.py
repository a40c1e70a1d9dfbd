"""Hit accounting and Triton-shaped statistics: right sums, right windows, bounded memory."""

from __future__ import annotations

import sys

import pytest

from actors import events as e
from actors.residency.model import ModelKey, Tier
from runtime.telemetry.epoch import Epoch
from runtime.telemetry.tally import Tally
from runtime.telemetry.windows import AT, Ring
from runtime.workers.port import Timings
from tests.runtime.telemetry.samples import (
    DEVICE,
    KEY,
    OTHER_KEY,
    WALL_NS,
    Ticks,
    deliver,
    evicted,
    finished,
    granted,
    joined,
    load_finished,
    one_of_each,
)


def tally(at: float = 100.0) -> tuple[Tally, Ticks]:
    clock = Ticks(100.0)
    made = Tally(Epoch(clock, lambda: WALL_NS))
    clock.at = at
    return made, clock


def test_the_mean_access_time_follows_the_formula():
    """h1*t1 + (1-h1)*(h2*t2 + (1-h2)*t3), from what was measured; equal to the plain mean of all waits."""
    made, _ = tally()
    waits = [(Tier.DEVICE, 0.0)] * 6 + [(Tier.HOST, 0.1), (Tier.HOST, 0.3), (Tier.DISK, 2.0), (Tier.REMOTE, 10.0)]
    for found, waited in waits:
        deliver(made.wants(), granted("r", found=found, waited=waited, result="hit" if waited == 0 else "miss"))
    life = made.snapshot().models[KEY].lifetime
    assert (life.leases, life.device, life.host, life.disk, life.remote) == (10, 6, 2, 1, 1)
    assert (life.h1, life.h2) == (0.6, 0.5)
    assert (life.t1, life.t2, life.t3) == (0.0, pytest.approx(0.2), pytest.approx(6.0))
    assert life.mean == pytest.approx(0.6 * 0.0 + 0.4 * (0.5 * 0.2 + 0.5 * 6.0))
    assert life.mean == pytest.approx(sum(waited for _, waited in waits) / len(waits))
    assert life.misses == 4


def test_nothing_seen_is_nothing_claimed():
    """Without a lease there are no ratios and no times, instead of zeros that look good."""
    made, _ = tally()
    total = made.snapshot().total.lifetime
    assert (total.leases, total.h1, total.h2, total.t1, total.mean) == (0, None, None, None, None)
    deliver(made.wants(), granted("r"))
    total = made.snapshot().total.lifetime
    assert (total.h1, total.h2, total.t3, total.mean) == (1.0, None, None, 0.0)


def test_models_are_counted_apart_and_together():
    """Per model and in total; joins, leaves, coalesced and prefetch hits too."""
    made, _ = tally()
    deliver(
        made.wants(),
        granted("r1"),
        granted("r2", model=OTHER_KEY, result="prefetch_hit"),
        joined("r3"),
        granted("r3", result="coalesced", found=Tier.HOST, waited=1.0),
        e.WaiterLeft(100.0, DEVICE, KEY, 9, "r4", "busy", 0.0),
    )
    snapshot = made.snapshot()
    one, other, total = snapshot.models[KEY].lifetime, snapshot.models[OTHER_KEY].lifetime, snapshot.total.lifetime
    assert (one.leases, one.joined, one.left, one.coalesced) == (2, 1, 1, 1)
    assert (other.leases, other.prefetch_hits) == (1, 1)
    assert (total.leases, total.joined, total.left, total.coalesced, total.prefetch_hits) == (3, 1, 1, 1, 1)


def test_the_host_tiers_own_leases_do_not_count_twice():
    """A cold request leases on the host tier too; it is one access."""
    made, _ = tally()
    deliver(made.wants(), joined("r1", device="host"), granted("r1", device="host", found=Tier.HOST))
    assert made.snapshot().total.lifetime.leases == 0


def test_old_minutes_leave_the_windows_and_stay_in_the_lifetime():
    """Five minutes, one hour, for ever."""
    made, clock = tally()
    for at in (0.0, 3_000.0, 3_500.0):
        deliver(made.wants(), granted("r", at))
    clock.at = 3_540.0
    windows = made.snapshot().total
    assert (windows.five_minutes.leases, windows.hour.leases, windows.lifetime.leases) == (1, 3, 3)
    clock.at = 3_500.0 + 3_720.0
    windows = made.snapshot().total
    assert (windows.five_minutes.leases, windows.hour.leases, windows.lifetime.leases) == (0, 0, 3)


def test_a_year_of_traffic_keeps_an_hour_of_minutes():
    """Memory does not grow with time."""
    ring = Ring()
    for minute in range(0, 365 * 24 * 60, 7):
        ring.add(minute * 60.0, AT["misses"])
    assert sys.getsizeof(ring._slots) < 10_000
    assert len(ring._slots) <= 61


def test_models_beyond_the_limit_count_in_the_total_only():
    """Memory does not grow with names either."""
    made = Tally(Epoch(Ticks()), limit=2)
    for index in range(100):
        deliver(made.wants(), granted("r", model=ModelKey(f"m{index}@1")))
    snapshot = made.snapshot()
    assert sorted(snapshot.models) == ["m0@1", "m1@1"]
    assert snapshot.total.lifetime.leases == 100


def test_statistics_have_the_shape_that_triton_clients_read():
    """Counts and nanoseconds per phase, batches as forwards, memory by device; unknown models have zeros."""
    made, _ = tally()
    deliver(
        made.wants(), load_finished("L1"), finished("r1", 100.5), finished("r2", 100.6), finished("r3", outcome="busy")
    )
    made.record(KEY, Timings(queue=10, decode=20, infer=3_000, encode=40, batch=2), ok=True)
    made.record(KEY, Timings(queue=12, decode=22, infer=3_000, encode=42, batch=2), ok=True)
    made.record(KEY, Timings(infer=99), ok=False)
    (row, unknown) = made.statistics([KEY, ModelKey("ghost@3")])["model_stats"]
    zero = {"count": 0, "ns": 0}
    assert row == {
        "name": "resnet",
        "version": "1",
        "last_inference": (WALL_NS + 600_000_000) // 1_000_000,
        "inference_count": 2,
        "execution_count": 1,
        "inference_stats": {
            "success": {"count": 2, "ns": 20_000_000},
            "fail": {"count": 1, "ns": 10_000_000},
            "queue": {"count": 2, "ns": 22},
            "compute_input": {"count": 2, "ns": 42},
            "compute_infer": {"count": 2, "ns": 6_000},
            "compute_output": {"count": 2, "ns": 82},
            "cache_hit": zero,
            "cache_miss": zero,
        },
        "batch_stats": [
            {
                "batch_size": 2,
                "compute_input": {"count": 1, "ns": 42},
                "compute_infer": {"count": 1, "ns": 3_000},
                "compute_output": {"count": 1, "ns": 82},
            }
        ],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 900}],
    }
    assert (unknown["name"], unknown["last_inference"], unknown["inference_stats"]["success"]) == ("ghost", 0, zero)


def test_memory_leaves_with_the_model_or_with_its_worker():
    """Evicted bytes are not reported, nor those of a process that died."""
    made, _ = tally()
    deliver(made.wants(), load_finished("L1"), load_finished("L2", model=OTHER_KEY), evicted("E1"))
    usage = [row["memory_usage"] for row in made.statistics([KEY, OTHER_KEY])["model_stats"]]
    assert usage == [[], [{"type": "CPU", "id": 0, "byte_size": 900}]]
    deliver(made.wants(), e.WorkerLost(104.0, DEVICE, 1, "killed by signal 9"))
    assert made.statistics([OTHER_KEY])["model_stats"][0]["memory_usage"] == []


def test_every_event_can_pass():
    """No kind of event breaks the tally; a forgotten model starts anew."""
    made, _ = tally()
    deliver(made.wants(), *one_of_each())
    made.forget(KEY)
    assert KEY not in made.snapshot().models
