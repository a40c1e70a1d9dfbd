"""Costs of loads follow the loads, not the guesses that they began with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from actors import events as e
from actors.fleet import Fleet
from actors.foresight import Foresight
from actors.load_times import LoadTimes
from actors.residency.ledger import Ledger
from actors.residency.model import Tier, Trigger
from forecasting.refill import DEVICE, DISK, HOST
from forecasting.sources import Estimate
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


def test_where_models_are_follows_every_move() -> None:
    """What was looked up at one look is not believed at the next, once a row has moved."""
    fleet, device, host = Fleet((A, B), LoadTimes()), *(SimpleNamespace(ledger=Ledger(100)) for _ in range(2))
    keys = (B.key, A.key)
    rates = Estimate("rate", *(np.array([1.0, 2.0]) for _ in range(5)))

    def seen(now: float = 100.0) -> tuple[list[int], list[bool]]:
        scene = fleet.scene(device, host, keys=keys, estimate=rates, allowed=np.ones(2, np.bool_), now=now)
        assert scene.rate.tolist() == [2.0, 1.0]
        return scene.where.tolist(), scene.movable.tolist()

    assert seen() == ([DISK, DISK], [False, False])
    host.ledger.reserve(A, 10, now=0.0, trigger=Trigger.DEMAND)
    assert seen() == ([DISK, DISK], [False, False])
    host.ledger.commit(A.key, 10, now=0.0)
    assert seen() == ([HOST, DISK], [False, False])
    device.ledger.reserve(A, 10, now=0.0, trigger=Trigger.DEMAND)
    row = device.ledger.commit(A.key, 10, now=0.0)
    assert seen() == ([DEVICE, DISK], [True, False])
    device.ledger.lease(row, "t", now=1.0)
    assert seen() == ([DEVICE, DISK], [False, False])
    device.ledger.release("t", now=2.0)
    row.hold(200.0, firm=False, now=2.0)
    assert seen() == ([DEVICE, DISK], [False, False])
    assert seen(300.0) == ([DEVICE, DISK], [True, False])
    device.ledger.retire(A.key, now=3.0)
    device.ledger.forget(A.key)
    assert seen() == ([HOST, DISK], [False, False])


def test_the_control_group_of_many_is_that_of_each() -> None:
    """Drawn for all at once, with the same hash; other hours and other models are drawn anew."""
    foresight = Foresight(share=0.3, wall=lambda: 0.0)
    for keys in (("a@1", "bb@2", "c@1"), tuple(f"m{at}@1" for at in range(500))):
        for at in (0.0, 3_599.0, 3_600.0, 1_772_409_600.0):
            assert foresight.controls(keys, at).tolist() == [foresight.control(key, at) for key in keys]
    assert not Foresight(share=0.0, wall=lambda: 0.0).controls(("a@1",), 0.0).any()
