"""What real actors state, seen through every view: the log replays to their own books, and the sums agree (I10)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors import events as e
from actors import messages as m
from actors.errors import ForeloadError
from actors.residency.model import Tier, Trigger
from actors.residency.states import State
from runtime.simulation.hardware import sometimes
from runtime.simulation.loop import run
from runtime.telemetry.eventlog import EventLog
from runtime.telemetry.export import Export
from runtime.telemetry.fanout import Fanout
from runtime.telemetry.feed import Feed
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.replay import replay
from runtime.telemetry.spans import Spans
from runtime.telemetry.tally import Tally
from tests.runtime.telemetry.samples import epoch
from tests.runtime.telemetry.test_logs import Recorder
from tests.simulation.rig import Rig, model, rig

if TYPE_CHECKING:
    from actors.events import Event
    from actors.residency.model import Model

MODELS = [model(name, 10) for name in "abcdef"]


async def client(r: Rig, rng: random.Random, number: int) -> None:
    """Some requests, some of which give up, and an operator's or a forecaster's wish now and then."""
    await anyio.sleep(rng.uniform(0, 4))
    wanted: Model = rng.choice(MODELS)
    with anyio.move_on_after(rng.choice((0.05, 0.2, 100.0))):
        try:
            match rng.randrange(8):
                case 0:
                    await r.ensure(wanted, Trigger.PREFETCH, expires=anyio.current_time() + 5)
                case 1:
                    await r.device.ask(m.Unload(wanted.key))
                case _:
                    await r.use(wanted, rng.uniform(0.001, 0.05), request=f"r{number}")
        except ForeloadError:
            pass


def schedule(seed: int) -> tuple[list[Event], dict[tuple[str, Tier], set[str]]]:
    """One random run: what was stated, and what the tiers say they hold at its end."""

    async def main() -> tuple[list[Event], dict[tuple[str, Tier], set[str]]]:
        rng = random.Random(seed)
        async with rig(seed=seed, host=45) as r:
            r.device_place.fault = sometimes(0.1, seed)
            async with anyio.create_task_group() as clients:
                for number in range(40):
                    clients.start_soon(client, r, rng, number)
            await r.settle(5.0)
            held = {
                (cache.where, cache.tier): {
                    row.model for row in cache.snapshot().residents if row.state is not State.UNLOADING
                }
                for cache in (r.cache, r.host_cache)
            }
            return list(r.events), held

    return run(main, seed=seed)


@pytest.mark.parametrize("seed", range(40))
def test_the_event_log_replays_to_what_the_actors_hold(seed: int):
    """I10: no gap, no contradiction, the same residents on both tiers, nothing left under way."""
    events, held = schedule(seed)
    found = replay(events)
    assert found.faults == ()
    assert {place: set(models) for place, models in found.resident.items()} == {
        place: models for place, models in held.items() if models
    }
    assert (found.loading, found.evicting, found.leases) == ({}, {}, {})


@pytest.mark.parametrize("seed", range(5))
def test_every_view_agrees_with_the_log(seed: int):
    """The same run through all subscribers at once: none fails, sums agree, no span and no gauge stays open."""
    events, _ = schedule(seed)
    kept = InMemorySpanExporter()
    spans, tally, feed = Spans(Export(kept), epoch()), Tally(epoch()), Feed(everything=True)
    metrics, recorder = Metrics(version="0"), Recorder()
    for each in MODELS:
        metrics.admit(each.name)
    fanout = Fanout()
    views = {
        "feed": feed.wants(),
        "tally": tally.wants(),
        "metrics": metrics.wants(),
        "log": EventLog(recorder).wants(),
        "spans": spans.wants(),
    }
    for name, wants in views.items():
        fanout.subscribe(name, wants)
    for event in events:
        fanout(event)
    assert fanout.subscribers == tuple(views), "a view raised"

    leases = [event for event in events if isinstance(event, e.LeaseGranted) and event.device == "cpu:0"]
    loads = [event for event in events if isinstance(event, e.LoadFinished)]
    victims = [event for event in events if isinstance(event, e.Evicted)]
    assert leases
    assert victims
    assert feed.last == len(events)
    assert tally.snapshot().total.lifetime.leases == len(leases)
    assert metric(metrics, "foreload_cache_hits_total") == len(leases)
    assert metric(metrics, "foreload_load_duration_seconds_count") == len(loads)
    assert metric(metrics, "foreload_evictions_total") == len(victims)
    assert metric(metrics, "foreload_loads_in_progress") == 0
    assert sum(what == "loaded" for _, what, _ in recorder.calls) == len(loads)
    spans.close()
    done = kept.get_finished_spans()
    started = {event.load for event in events if isinstance(event, e.LoadStarted)}
    assert sum(span.name in {"foreload.load", "foreload.prefetch"} for span in done) == len(started)
    assert not [span for span in done if (span.attributes or {}).get("error.type") == "unfinished"]


def metric(metrics: Metrics, name: str) -> float:
    return sum(
        sample.value for family in metrics.registry.collect() for sample in family.samples if sample.name == name
    )
