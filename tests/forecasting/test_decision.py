"""Hold, load, evict: prices compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.decision import gain, keep, threshold, value, worth_it

COST = st.floats(1e-6, 1e6)


def one(*numbers: float) -> list[np.ndarray]:
    """Each as an array of one model."""
    return [np.array([number]) for number in numbers]


@given(st.floats(0, 1), COST, COST)
def test_holding_is_chosen_exactly_when_it_is_cheaper(p: float, cold: float, hold: float) -> None:
    """(1 - p)·h < p·C, which is p > 1/(1 + C/h)."""
    resident, absent = (1 - p) * hold, p * cold
    if resident != pytest.approx(absent, rel=1e-9):
        assert keep(*one(p, cold, hold))[0] == (resident < absent)
    assert threshold(*one(cold, hold))[0] == pytest.approx(1 / (1 + cold / hold))


def test_free_memory_holds_everything_that_may_come() -> None:
    """Holding costs nothing: any chance at all suffices; a cold start that costs nothing is never worth memory."""
    assert keep(*one(1e-9, 1.0, 0.0))[0]
    assert not keep(*one(0.0, 1.0, 0.0))[0]
    assert not keep(*one(1.0, 0.0, 1.0))[0]
    assert not keep(*one(1.0, 0.0, 0.0))[0]


@given(st.floats(0, 1), COST, COST)
def test_loading_for_nothing_gains_what_keeping_does(p: float, cold: float, hold: float) -> None:
    """Without a price of the channel, gain is positive exactly where keeping pays."""
    worth = gain(*one(p, cold, hold, 3.0), 0.0)[0]
    if abs(worth) > 1e-9 * (cold + hold):
        assert (worth > 0) == keep(*one(p, cold, hold))[0]
    assert gain(*one(p, cold, hold, 3.0), 2.0)[0] == pytest.approx(worth - 6.0)


def test_the_cheapest_byte_leaves_first() -> None:
    """p·C per byte: a big model of the same value goes before a small one, and no size divides by zero."""
    worth = value(np.array([0.5, 0.5, 0.5]), np.ones(3), np.array([8.0, 2.0, 0.0]))
    assert np.argsort(worth).tolist() == [0, 1, 2]
    assert np.isfinite(worth).all()


def test_a_load_must_beat_its_victims_by_a_margin() -> None:
    """Two models of equal value never take each other's place in turn."""
    assert worth_it(2.0, np.array([0.5, 0.5]))
    assert not worth_it(1.0, np.array([0.5, 0.5]))
    assert not worth_it(1.2, np.array([0.5, 0.5]), hysteresis=0.5)
