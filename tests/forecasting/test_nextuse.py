"""Time to next use: from past days to seconds, checked against a slow definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forecasting.nextuse import ENOUGH, FLOOR, NEVER, expected, next_use

BUCKET = 300.0


def slow(rates: np.ndarray, bucket: float) -> np.ndarray:
    """The definition, one bucket at a time: min{x : Q(b + x) - Q(b) >= 0.7}, linear inside a bucket."""
    half = rates.shape[1] // 2
    found = np.empty((len(rates), half))
    for row, q in enumerate(rates):
        for b in range(half):
            left = ENOUGH
            for x in range(b, 2 * half):
                if q[x] >= left:
                    found[row, b] = (x - b + left / q[x]) * bucket
                    break
                left -= q[x]
            else:
                found[row, b] = NEVER * ENOUGH / max(q.sum(), FLOOR) if q.sum() > 0 else math.inf
    return found


@given(hnp.arrays(float, (2, 24), elements=st.sampled_from([0.0, 0.0, 0.05, 0.3, 0.7, 1.0, 40.0])))
@settings(deadline=None)
def test_it_is_the_first_time_that_enough_is_expected(rates: np.ndarray) -> None:
    """Equal to the definition wherever rounding does not decide."""
    fast = next_use(rates, BUCKET)
    # .7 in sums of tenths is reached or missed by rounding: compare at slightly more and less.
    low, high = slow(rates * (1 + 1e-9), BUCKET), slow(rates * (1 - 1e-9), BUCKET)
    ok = (fast.seconds >= np.minimum(low, high) - 1) & (fast.seconds <= np.maximum(low, high) + 1)
    assert np.all(ok | np.isinf(low))
    assert np.all(np.isinf(fast.seconds) == np.isinf(low))


def test_a_daily_run_is_expected_when_it_comes() -> None:
    """Once a day at 09:00 for three weeks: three hours ahead at 06:00, today's run, tomorrow's after it."""
    days = np.zeros((1, 21, 288))
    days[0, :, 108] = 1
    ttn = next_use(expected(days), BUCKET)
    seconds, rate = ttn.at(6 * 3600.0)
    assert seconds[0] == pytest.approx(3 * 3600, abs=900)
    assert rate[0] == pytest.approx(ENOUGH / seconds[0])
    assert ttn.at(12 * 3600.0)[0][0] == pytest.approx(21 * 3600, abs=900)


def test_half_of_what_is_expected_comes_from_the_same_weekday() -> None:
    """Sundays only, seen from a Sunday: half the 7-day mean and half the Sunday mean; tomorrow only the former."""
    days = np.zeros((1, 21, 10))
    days[0, [0, 7, 14], 5] = 1.0  # 21 days end with yesterday, so today is day 21: the same weekday as 0, 7, 14
    found = expected(days)[0]
    today, tomorrow = found[:10].sum(), found[10:].sum()
    assert today == pytest.approx(0.5 / 7 + 0.5)
    assert tomorrow == pytest.approx(0.5 / 7)


def test_without_a_week_of_history_recent_days_stand_alone() -> None:
    """Three days: their mean, today and tomorrow."""
    days = np.ones((1, 3, 10)) * np.array([1.0, 2.0, 3.0])[:, None]
    np.testing.assert_allclose(expected(days), 2.0)


def test_gaps_are_left_out_of_every_mean() -> None:
    """A day that was not observed is not a day without requests."""
    days = np.full((1, 9, 10), 4.0)
    known = np.ones(days.shape, bool)
    days[0, 5:, :] = 0.0
    known[0, 5:, :] = False
    np.testing.assert_allclose(expected(days, known), 4.0)
    np.testing.assert_allclose(expected(days, np.zeros_like(known)), 0.0)


def test_a_model_never_requested_has_no_next_use() -> None:
    """Infinite seconds, no rate; one that is barely expected keeps a small one."""
    rates = np.zeros((2, 24))
    rates[1, 3] = 0.01
    ttn = next_use(rates, BUCKET)
    assert np.all(np.isinf(ttn.seconds[0]))
    assert np.all(ttn.rate[0] == 0)
    assert np.all(ttn.seconds[1] == NEVER * ENOUGH / FLOOR)


def test_a_rate_never_exceeds_four_uses_a_bucket() -> None:
    """max(tau, bucket/4): a flood gives a finite rate."""
    assert next_use(np.full((1, 24), 1e9), BUCKET).rate.max() == pytest.approx(ENOUGH / (BUCKET / 4))


def test_days_of_another_shape_are_refused() -> None:
    """A matrix is no week."""
    with pytest.raises(ValueError, match="days must be"):
        expected(np.zeros((3, 288)))
    with pytest.raises(ValueError, match="days must be"):
        expected(np.zeros((3, 7, 288)), np.ones((3, 7, 2), bool))
