"""Days at the same local time, and the held-out judgement of the blend: the same numbers as its own columns give."""

from __future__ import annotations

from datetime import UTC

import numpy as np
import pytest

from forecasting.cells import history
from forecasting.daily import Days, blended, by_day, held_out
from forecasting.nextuse import expected, next_use
from forecasting.occurrence import Occurrence
from forecasting.rates import Blend, columns, seasonal
from forecasting.scenarios import HORIZONS, IDLE, chances, state_after, window_slots, windows
from forecasting.tiers import History


@pytest.mark.parametrize("ttn", [0.0, 2.0])
def test_the_backtested_rate_is_the_rate_that_would_have_served(ttn: float):
    """Every instant of every held-out day equals the blend of the ten columns, computed one by one."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(0.05, (4, 8, 288)).astype(np.float64)
    weights = rng.random(10)
    weights[8] = ttn
    blend = Blend(weights)
    rate = blended(Days(counts, counts >= 0, 300.0), blend).reshape(counts.shape)
    decayed, age = history(counts.reshape(4, -1), 300.0)
    for day in (1, 2, 7):
        season, use = seasonal(counts[:, :day], 300.0), next_use(expected(counts[:, :day]), 300.0).rate
        for bucket in (0, 7, 100, 280):
            at = day * 288 + bucket
            row = columns(decayed[at].T, season[:, :, bucket], use[:, bucket], age[at])
            assert np.allclose(rate[:, day, bucket], blend.rate(row), rtol=1e-9, atol=1e-15)


def test_one_day_holds_nothing_out():
    """There is nothing to look back on."""
    held = held_out(Days(np.ones((2, 1, 288)), np.ones((2, 1, 288), np.bool_), 300.0), Blend(np.ones(10)))
    assert held.learned.shape == (2, 0)
    assert held.said.shape == (2, 0)


def test_unknown_days_are_not_judged():
    """A gap is no silence."""
    known = np.ones((1, 3, 288), np.bool_)
    known[0, 2] = False
    held = held_out(Days(np.ones((1, 3, 288)), known, 300.0), Blend(np.ones(10)))
    assert np.isfinite(held.learned[0, 0])
    assert np.isnan(held.learned[0, 1])


def test_days_begin_where_the_history_ends():
    """The last bucket of the last day is the one before the origin."""
    counts = np.arange(3 * 96, dtype=np.float64)[None]
    past = History(0.0, 900.0, counts, np.ones((1, 3 * 96), np.bool_))
    days = by_day(past, 3 * 86_400.0, UTC, 8)
    assert np.array_equal(days.counts.reshape(1, -1), counts)
    assert by_day(past, 3 * 86_400.0, UTC, 2).counts[0, 0, 0] == 96


def test_a_history_of_nothing_has_no_days():
    """Nothing is known, and nothing is invented."""
    empty = History(0.0, 900.0, np.zeros((2, 0)), np.zeros((2, 0), np.bool_))
    assert by_day(empty, 900.0, UTC, 8).counts.shape == (2, 0, 96)


# -- scenarios ---------------------------------------------------------------------------------------


def test_chances_worked_out_ahead_equal_those_of_the_rolled_state():
    """For models that nobody asked for since the fit, the table says what rolling on would say (seasons aside)."""
    rng = np.random.default_rng(1)
    past = windows(
        History(0.0, 300.0, rng.poisson(0.1, (30, 5 * 288)).astype(np.float64), np.ones((30, 1440), np.bool_))
    )
    state = state_after(past.counts, past.known, past.phase(UTC))
    model = Occurrence({horizon: rng.normal(0, 0.2, 25) for horizon in HORIZONS})
    first = past.first + past.counts.shape[1]
    slots = window_slots(first, 9, UTC)
    table = chances(state, model, slots)
    for ahead in range(4):
        exact = np.stack([model.chance(state, horizon, int(slots[ahead])) for horizon in HORIZONS])
        assert np.abs(table[:, 0, ahead] - exact).max() < 0.06
        state.roll(int(slots[ahead]), np.zeros(30))


def test_a_request_now_and_one_long_ago_are_told_apart():
    """A state that says 'active' and states idle for longer and longer get chances of their own."""
    past = windows(History(0.0, 300.0, np.tile([1.0] + [0.0] * 11, (2, 120)), np.ones((2, 1440), np.bool_)))
    weights = np.zeros(25)
    weights[5], weights[6] = 3.0, -1.0  # active now; windows since
    table = chances(
        state_after(past.counts, past.known, past.phase(UTC)),
        Occurrence({HORIZONS[0]: weights}),
        window_slots(720, 9, UTC),
    )
    said = table[0, :, 5, 0].tolist()
    assert said[1] == max(said)
    assert sorted(said[2 : 2 + len(IDLE)], reverse=True) == said[2 : 2 + len(IDLE)]
    assert not table[1:].any()  # horizons without coefficients


def test_odd_beginnings_are_skipped():
    """A window is two 5-minute buckets that begin together on the clock."""
    past = windows(History(300.0, 300.0, np.arange(7, dtype=np.float64)[None], np.ones((1, 7), np.bool_)))
    assert past.first == 1
    assert past.counts.tolist() == [[3.0, 7.0, 11.0]]


def test_window_slots_follow_the_local_week():
    """Monday 00:00 UTC is slot 0; an hour later slot 6."""
    monday = 4 * 86_400 // 600
    assert window_slots(monday, 8, UTC).tolist() == list(range(8))
