"""The one way out for facts keeps its promises: order, isolation, no re-entrancy surprises, almost no cost."""

from __future__ import annotations

import pytest

from actors import events as e
from runtime.telemetry.fanout import EVENT_TYPES, Fanout
from tests.runtime.telemetry.samples import arrived, finished, one_of_each, seconds_each


def test_subscribers_get_each_event_once_in_order_of_subscription():
    """First come, first told; each event once."""
    seen: list[str] = []
    fanout = Fanout()
    fanout.subscribe("a", lambda event: seen.append(f"a {event.request}"))
    fanout.subscribe("b", lambda event: seen.append(f"b {event.request}"))
    fanout(arrived("r1"))
    fanout(arrived("r2"))
    assert seen == ["a r1", "b r1", "a r2", "b r2"]


def test_a_subscriber_pays_only_for_the_types_it_wants():
    """A mapping by type gets these types and no others."""
    seen: list[object] = []
    fanout = Fanout()
    fanout.subscribe("a", {e.RequestFinished: seen.append})
    for event in one_of_each():
        fanout(event)
    assert [type(event) for event in seen] == [e.RequestFinished]


def test_a_subscriber_that_raises_is_switched_off_and_the_others_hear_of_it(caplog: pytest.LogCaptureFixture):
    """One bad consumer costs itself only; the rest get the event, the report, and what follows."""
    seen: list[object] = []

    def bad(_event: object) -> None:
        raise ValueError("first line\nsecond line")

    fanout = Fanout()
    fanout.subscribe("bad", bad)
    fanout.subscribe("good", seen.append)
    fanout(arrived("r1", 7.0))
    fanout(arrived("r2", 8.0))
    dropped = e.SubscriberDropped(7.0, "bad", "ValueError: first line second line")
    assert seen == [arrived("r1", 7.0), dropped, arrived("r2", 8.0)]
    assert fanout.subscribers == ("good",)
    assert "bad raised" in caplog.text
    assert "second line" in caplog.text


def test_the_last_subscriber_may_fail_too():
    """With nobody left, events go nowhere and nothing raises."""
    fanout = Fanout()
    fanout.subscribe("bad", lambda _event: 1 / 0)
    fanout(arrived("r1"))
    fanout(arrived("r2"))
    assert fanout.subscribers == ()


def test_an_event_stated_during_delivery_comes_after_the_current_one_for_everybody():
    """Re-entrancy never changes the order that a subscriber sees."""
    seen: list[str] = []
    fanout = Fanout()

    def answering(event: e.RequestArrived) -> None:
        fanout(finished(event.request))

    fanout.subscribe("answering", {e.RequestArrived: answering})
    fanout.subscribe("a", lambda event: seen.append(type(event).__name__))
    fanout(arrived("r1"))
    assert seen == ["RequestArrived", "RequestFinished"]


def test_a_subscriber_that_answers_facts_with_facts_for_ever_is_dropped():
    """An endless chain ends, and the report names who made it."""
    reports: list[e.SubscriberDropped] = []
    fanout = Fanout()
    fanout.subscribe("echo", {e.RequestArrived: fanout})
    fanout.subscribe("watch", {e.SubscriberDropped: reports.append})
    fanout(arrived("r1"))
    assert [report.subscriber for report in reports] == ["echo"]
    assert fanout.subscribers == ("watch",)


def test_one_that_raises_in_the_last_rounds_of_a_storm_is_dropped_too():
    """Whoever speaks without end and whoever breaks meanwhile both go; the rest stay."""
    seen = 0
    fanout = Fanout()

    def breaks_late(_event: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 1_000:
            raise ValueError("late")

    fanout.subscribe("late", {e.RequestArrived: breaks_late})
    fanout.subscribe("echo", {e.RequestArrived: fanout})
    fanout.subscribe("watch", {e.SubscriberDropped: lambda _event: None})
    fanout(arrived("r1"))
    assert fanout.subscribers == ("watch",)
    assert repr(fanout) == "<Fanout watch>"


def test_subscribing_refuses_a_name_in_use_and_types_that_are_no_events():
    """A wiring mistake shows at start, with the name in the message."""
    fanout = Fanout()
    fanout.subscribe("a", print)
    with pytest.raises(ValueError, match="'a' is there already"):
        fanout.subscribe("a", print)
    with pytest.raises(ValueError, match="'b' wants int"):
        fanout.subscribe("b", {int: print})


def test_the_samples_hold_every_event_of_the_union_once():
    """Other tests rely on the samples to reach every kind."""
    assert sorted(type(event).__name__ for event in one_of_each()) == sorted(kind.__name__ for kind in EVENT_TYPES)


def test_delivery_to_one_subscriber_costs_about_a_microsecond_at_most():
    """Measured 0.25 us; the bound leaves room for a busy machine (budget: 1 us)."""
    fanout = Fanout()
    fanout.subscribe("nothing", lambda _event: None)
    event = arrived("r1")
    assert seconds_each(lambda: fanout(event)) < 4e-6
