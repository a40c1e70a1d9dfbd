"""Events to test with: one of each kind, and small stories. Nothing random, nothing shared."""

from __future__ import annotations

import sys
import timeit
from typing import TYPE_CHECKING

import pytest

from actors import events as e
from actors.residency.model import ModelKey, Ticket, Tier, Trigger
from runtime.telemetry.epoch import Epoch
from runtime.telemetry.fanout import Fanout

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.events import Event
    from runtime.telemetry.fanout import Wants

KEY = ModelKey("resnet@1")
OTHER_KEY = ModelKey("bert@2")
DEVICE = "cpu:0"
WALL_NS = 1_800_000_000_000_000_000


class Ticks:
    """A clock set by hand."""

    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def epoch(at: float = 100.0) -> Epoch:
    """Loop second `at` is one known instant."""
    return Epoch(Ticks(at), lambda: WALL_NS)


def seconds_each(once: Callable[[], None]) -> float:
    """Best of nine: seconds for one call. Skips under a tracer, such as coverage, which is what it would measure."""
    if sys.gettrace() is not None:
        pytest.skip("a tracer is running")
    return min(timeit.repeat(once, number=500, repeat=9)) / 500


def deliver(wants: Wants, *events: Event) -> None:
    """Hand events to one subscriber, by way of a fan-out; fails if it raised."""
    fanout = Fanout()
    fanout.subscribe("under test", wants)
    for event in events:
        fanout(event)
    assert fanout.subscribers == ("under test",), "the subscriber raised"


def arrived(request: str, at: float = 100.0, model: ModelKey = KEY) -> e.RequestArrived:
    return e.RequestArrived(at, request, model)


def granted(
    request: str,
    at: float = 100.0,
    *,
    result: str = "hit",
    found: Tier = Tier.DEVICE,
    waited: float = 0.0,
    load: str = "",
    device: str = DEVICE,
    model: ModelKey = KEY,
    ticket: int = 1,
) -> e.LeaseGranted:
    return e.LeaseGranted(at, device, model, Ticket(ticket), request, result, found, waited, load)


def released(at: float = 100.0, *, device: str = DEVICE, model: ModelKey = KEY, ticket: int = 1) -> e.LeaseReleased:
    return e.LeaseReleased(at, device, model, Ticket(ticket), 0.01)


def joined(request: str, at: float = 100.0, *, load: str = "", device: str = DEVICE) -> e.WaiterJoined:
    return e.WaiterJoined(at, device, KEY, Ticket(1), request, 1, load)


def finished(
    request: str, at: float = 100.01, *, outcome: str = "ok", load_wait: float = 0.0, model: ModelKey = KEY
) -> e.RequestFinished:
    return e.RequestFinished(at, request, model, outcome, 0.01, load_wait, 0.001, 0.008, 1)


def load_started(
    load: str,
    at: float = 100.0,
    *,
    trigger: Trigger = Trigger.DEMAND,
    request: str = "",
    tier: Tier = Tier.DEVICE,
    device: str = DEVICE,
    model: ModelKey = KEY,
) -> e.LoadStarted:
    return e.LoadStarted(at, load, device, tier, model, "f" * 64, 1_000, trigger, request)


def load_finished(
    load: str,
    at: float = 101.0,
    *,
    trigger: Trigger = Trigger.DEMAND,
    tier: Tier = Tier.DEVICE,
    device: str = DEVICE,
    model: ModelKey = KEY,
    source: Tier = Tier.DISK,
) -> e.LoadFinished:
    steps = (("read", 0.6), ("bind", 0.4))
    return e.LoadFinished(at, load, device, tier, model, trigger, source, 1.0, 900, steps)


def load_failed(load: str, at: float = 101.0, *, cause: str = "bad header", code: str = "load_failed") -> e.LoadFailed:
    return e.LoadFailed(at, load, DEVICE, Tier.DEVICE, KEY, Trigger.DEMAND, code, cause, 1.0, 5.0)


def load_cancelled(load: str, at: float = 101.0) -> e.LoadCancelled:
    return e.LoadCancelled(at, load, DEVICE, Tier.DEVICE, KEY, Trigger.DEMAND, 1.0)


def eviction_started(
    eviction: str, at: float = 102.0, *, model: ModelKey = KEY, load: str = "", for_model: str = ""
) -> e.EvictionStarted:
    return e.EvictionStarted(at, eviction, DEVICE, Tier.DEVICE, model, "room", load, for_model)


def evicted(
    eviction: str, at: float = 102.5, *, model: ModelKey = KEY, leaked: int = 0, reason: str = "room"
) -> e.Evicted:
    return e.Evicted(at, eviction, DEVICE, Tier.DEVICE, model, reason, 900, leaked, 60.0, 20.0, 0.5, 3)


def one_of_each() -> tuple[Event, ...]:
    """Every kind of event once, in an order that makes sense."""
    return (
        e.WorkerStarted(99.0, DEVICE, 17),
        e.CatalogChanged(99.0, "resnet", "admitted"),
        e.WarmSettled(99.5, OTHER_KEY, required=True, ready=False, cause="too large"),
        arrived("r1"),
        joined("r1", load="L1"),
        load_started("L1", trigger=Trigger.PREFETCH, request="r1"),
        e.LoadUpgraded(100.1, DEVICE, Tier.DEVICE, KEY, Trigger.PREFETCH, "r1"),
        e.FetchStarted(100.2, KEY, "s3", 1_000),
        e.FetchProgressed(100.3, KEY, "s3", 500, 1_000, 5_000.0, 0.1),
        e.FetchFinished(100.4, KEY, "s3", 1_000, 0.2, "ok"),
        load_finished("L1"),
        granted("r1", 101.0, result="miss", found=Tier.DISK, waited=1.0, load="L1"),
        e.Adopted(101.0, DEVICE, Tier.DEVICE, OTHER_KEY, 10, 1),
        e.PrefetchSettled(101.0, DEVICE, KEY, "used", 30.0),
        released(101.1),
        finished("r1", 101.1, load_wait=1.0),
        e.WaiterLeft(101.2, DEVICE, OTHER_KEY, Ticket(9), "r2", "deadline_exceeded", 3.0),
        load_failed("L2", 101.5),
        load_cancelled("L3", 101.6),
        e.PressureChanged(101.7, "host", Tier.HOST, high=True, used_ratio=0.93),
        eviction_started("E1", load="L4"),
        evicted("E1"),
        e.PrefetchWithheld(102.5, DEVICE, KEY, "observe"),
        e.PeakInfeasible(102.6, DEVICE, KEY, "morning", 3600.0, True, "memory", "10 more bytes"),
        e.ForecastFitted(102.7, 2, 1, 0.5, 0.03, 0.01, "occurrence", 0.6, 0.5),
        e.ForecastJudged(102.75, 40, 0.02, 0.01, 0.2),
        e.ForecastFell(102.8, "fitting", "TimeoutError: late"),
        e.ForecastDemoted(102.8, True, (KEY,), 1, 1),
        e.ForesightReported(102.9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        e.CompileStarted(102.9, DEVICE, KEY, "f" * 8),
        e.CompileFinished(102.95, DEVICE, KEY, "f" * 8, 0.05, False, 0.0),
        e.CompileFailed(102.96, DEVICE, OTHER_KEY, "f" * 8, "ValueError: no"),
        e.ActorRestarted(103.0, "device:cpu:0", 2, "KeyError: 'x'"),
        e.SubscriberDropped(103.0, "dashboard", "ValueError: no"),
        e.WorkerLost(104.0, DEVICE, 17, "killed by signal 9"),
        e.DrainStarted(105.0, "SIGTERM"),
        e.DrainFinished(106.0, 1, 1.0),
    )
