"""Every kind of event has a place in every view, or a reason why it has none."""

from __future__ import annotations

from typing import assert_never

import pytest

from actors import events as e
from runtime.telemetry.eventlog import EventLog
from runtime.telemetry.export import Export
from runtime.telemetry.fanout import EVENT_TYPES
from runtime.telemetry.feed import PER_REQUEST, Feed
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.spans import Spans
from runtime.telemetry.tally import Tally
from tests.runtime.telemetry.samples import epoch, one_of_each
from tests.runtime.telemetry.test_logs import Recorder


def views() -> dict[str, tuple[set[type], dict[type, str]]]:
    """What each view handles, and what it ignores with a reason."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = Spans(Export(InMemorySpanExporter()), epoch())
    spans.close()
    feed = Feed()
    return {
        "spans": (set(spans.wants()), dict(Spans.IGNORED)),
        "metrics": (set(Metrics(version="0").wants()), dict(Metrics.IGNORED)),
        "tally": (set(Tally(epoch()).wants()), dict(Tally.IGNORED)),
        "log": (set(EventLog(Recorder()).wants()), dict(EventLog.IGNORED)),
        "feed": (set(feed.wants()), dict(PER_REQUEST)),
    }


@pytest.mark.parametrize("name", ["spans", "metrics", "tally", "log", "feed"])
def test_a_view_handles_or_knowingly_ignores_every_event(name: str):
    """A new kind of event fails here until somebody decides, and an outdated reason fails too."""
    handled, ignored = views()[name]
    assert handled | set(ignored) == set(EVENT_TYPES)
    assert handled & set(ignored) == set()
    assert all(len(reason) > 5 for reason in ignored.values())


def told_by(event: e.Event) -> str:  # noqa: C901 -- one closed union, one match
    """The view that an operator would look at first; type checking fails here for a kind that is not named."""
    match event:
        case e.RequestArrived() | e.LeaseGranted() | e.WaiterJoined() | e.WaiterLeft() | e.RequestFinished():
            where = "spans"
        case (
            e.LoadStarted()
            | e.LoadUpgraded()
            | e.EvictionStarted()
            | e.CompileStarted()
            | e.CompileFinished()
            | e.CompileFailed()
            | e.DrainStarted()
            | e.DrainFinished()
        ):
            where = "spans"
        case e.FetchStarted():
            where = "log"
        case e.FetchProgressed() | e.FetchFinished():
            where = "metrics"
        case e.LoadFinished() | e.LoadFailed() | e.LoadCancelled() | e.Evicted() | e.PrefetchSettled():
            where = "feed"
        case e.PressureChanged() | e.WarmSettled() | e.WorkerStarted() | e.WorkerLost() | e.ActorRestarted():
            where = "log"
        case e.PeakInfeasible() | e.ForecastFitted() | e.ForecastFell() | e.ForesightReported():
            where = "log"
        case e.PrefetchWithheld() | e.ForecastJudged() | e.ForecastDemoted():
            where = "metrics"
        case e.CatalogChanged() | e.Adopted():
            where = "log"
        case e.SubscriberDropped():
            where = "metrics"
        case e.LeaseReleased():
            where = "replay"  # leases are read at scrape time, and booked by replay
        case _ as unhandled:
            assert_never(unhandled)
    return where


def test_every_event_is_told_somewhere():
    """No fact is stated for nothing."""
    handled = {name: kinds for name, (kinds, _) in views().items()}
    for event in one_of_each():
        where = told_by(event)
        assert where == "replay" or type(event) in handled[where]
