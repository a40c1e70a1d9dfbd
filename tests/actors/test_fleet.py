"""Costs of loads follow the loads, not the guesses that they began with."""

from __future__ import annotations

import pytest

from actors import events as e
from actors.fleet import Fleet
from actors.load_times import LoadTimes
from actors.residency.model import Tier, Trigger
from tests.simulation.rig import model

A, B = model("a", load_seconds=10.0), model("b", load_seconds=10.0)


def loaded(times: LoadTimes, key: str, source: Tier, seconds: float) -> None:
    """Tell of one load onto a device."""
    event = e.LoadFinished(1.0, "l", "d", Tier.DEVICE, key, Trigger.DEMAND, source, seconds, 1)
    times.wants()[e.LoadFinished](event)


def test_a_load_that_was_seen_replaces_the_guess() -> None:
    """Only of that model, only for that source, and each is told once."""
    times = LoadTimes()
    fleet = Fleet((A, B), times)
    guess = fleet.disk_cost.tolist(), fleet.host_cost.tolist()
    loaded(times, A.key, Tier.DISK, 3.0)
    news = times.news()
    assert news == {A.key}
    assert times.news() == frozenset()
    for key in news:
        fleet.relearn(key, times)
    assert fleet.disk_cost.tolist() == [pytest.approx(3.0), guess[0][1]]
    assert fleet.host_cost.tolist() == guess[1]


def test_a_model_that_is_gone_is_no_news() -> None:
    """It left between its load and the look."""
    times = LoadTimes()
    loaded(times, A.key, Tier.HOST, 0.5)
    times.forget(A.key)
    assert times.news() == frozenset()
    Fleet((B,), times).relearn(A.key, times)
