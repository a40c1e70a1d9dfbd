"""Hold, load, evict: prices compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.decision import break_even, keep, spent, threshold, value, worth_it

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


def test_the_cheapest_byte_leaves_first() -> None:
    """p·C per byte: a big model of the same value goes before a small one, and no size divides by zero."""
    worth = value(np.array([0.5, 0.5, 0.5]), np.ones(3), np.array([8.0, 2.0, 0.0]))
    assert np.argsort(worth).tolist() == [0, 1, 2]
    assert np.isfinite(worth).all()


def test_a_load_must_beat_its_victims_by_a_margin() -> None:
    """Two models of equal value never take each other's place in turn; without victims any gain will do."""
    assert worth_it(1.6, 1.0, 1.5)
    assert not worth_it(1.5, 1.0, 1.5)
    assert worth_it(1e-9, 0.0, 1.5)
    assert not worth_it(0.0, 0.0, 1.5)


def test_a_keep_alive_says_what_memory_is_worth() -> None:
    """Idle for an hour at most, in windows of ten minutes: a chance of one in seven holds, and loads; no end, any."""
    price = break_even(600.0, np.array([3_600.0, np.inf]))
    assert threshold(np.ones(2), price).tolist() == pytest.approx([1 / 7, 0.0])


def test_what_was_held_and_what_was_cold_is_paid_for() -> None:
    """Each idle window that was held, and each cold start; nothing for a hit, nor for an absent model nobody wants."""
    hold, came = np.array([True, True, False, False]), np.array([True, False, True, False])
    assert spent(hold, came, np.full(4, 7.0), np.full(4, 2.0)) == 9.0
