"""Decayed counters, seasonal rates and the pooled blend."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.cells import MODELS, cells, fit_blend, history
from forecasting.nextuse import expected, next_use
from forecasting.rates import (
    COLUMNS,
    HALF_LIVES,
    R_6H,
    Blend,
    Decayed,
    columns,
    seasonal,
)

BUCKET = 300.0


# -- counters ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.floats(0, 1e5))
def test_a_rate_is_the_sum_of_all_requests_each_decayed(times: list[float], later: float) -> None:
    """Sum of 2^(-age/h) · ln 2/h over requests, for each half-life, at any later instant."""
    counter = Decayed(1)
    for at in sorted(times):
        counter.hit(0, at)
    now = max(times) + later
    half = np.array(HALF_LIVES)
    ages = now - np.array(times)[:, None]
    np.testing.assert_allclose(counter.rates(now)[0], (2.0 ** (-ages / half)).sum(0) * math.log(2) / half, rtol=1e-9)
    assert counter.age(now)[0] == pytest.approx(later, abs=1e-6)


def test_a_steady_stream_has_its_own_rate() -> None:
    """Two requests a second for long enough read as two a second at every half-life that has seen enough."""
    counter = Decayed(1)
    for minute in range(1, 24 * 60):
        counter.fold(np.array([120.0]), minute * 60.0)
    np.testing.assert_allclose(counter.rates(1439 * 60.0)[0, :3], 2.0, rtol=0.08)


def test_folding_a_batch_is_counting_each() -> None:
    """The minute tick gives what single hits would have given at its instant."""
    one, other = Decayed(2), Decayed(2)
    one.fold(np.array([3.0, 0.0]), 100.0)
    one.fold(np.array([1.0, 2.0]), 160.0)
    for row, at, n in ((0, 100.0, 3), (0, 160.0, 1), (1, 160.0, 2)):
        other.hit(row, at, n)
    np.testing.assert_allclose(one.rates(500.0), other.rates(500.0))
    np.testing.assert_array_equal(one.age(500.0), [340, 340])


def test_a_clock_that_steps_back_neither_counts_twice_nor_grows() -> None:
    """T9-class: an instant in the past counts as the latest one known."""
    counter = Decayed(1)
    counter.hit(0, 1000.0)
    before = counter.rates(1000.0)
    np.testing.assert_array_equal(counter.rates(0.0), before)
    counter.hit(0, 0.0)
    np.testing.assert_allclose(counter.rates(1000.0), 2 * before)
    assert counter.age(500.0)[0] == 0


def test_counters_print_themselves() -> None:
    """One line says for how many models they count."""
    assert repr(Decayed(3)) == "<Decayed 3 models>"


def test_a_model_never_requested_has_no_age() -> None:
    """Infinite, and therefore no age term."""
    assert Decayed(1).age(5.0)[0] == math.inf
    assert columns(np.zeros((1, 5)), np.zeros((3, 1)), np.zeros(1), np.array([math.inf]))[0, -1] == 0


@pytest.mark.parametrize("bad", [[math.nan], [-1.0], [math.inf], [1.0, 1.0]])
def test_counts_that_are_none_are_refused(bad: list[float]) -> None:
    """F72: nothing absurd enters a counter."""
    with pytest.raises(ValueError, match="counts"):
        Decayed(1).fold(np.array(bad), 1.0)


# -- seasons -----------------------------------------------------------------------------------------


def test_seasonal_rates_look_from_two_buckets_before_to_four_after() -> None:
    """A single request yesterday and another a week ago, seen through seven buckets."""
    days = np.zeros((1, 8, 24))
    days[0, 7, 10] = 7.0  # yesterday
    days[0, 1, 20] = 14.0  # a week ago: day 8 - 7
    week, yesterday, ago = seasonal(days, BUCKET)[:, 0]
    assert np.flatnonzero(yesterday).tolist() == list(range(6, 13))
    assert yesterday[6] == pytest.approx(7 / (7 * BUCKET))
    assert np.flatnonzero(ago).tolist() == list(range(16, 23))
    np.testing.assert_allclose(week, (yesterday + ago) / 7)


def test_a_weeks_memory_needs_a_week() -> None:
    """S7w is 0 with less than seven days."""
    assert not seasonal(np.ones((2, 6, 24)), BUCKET)[2].any()
    assert seasonal(np.ones((2, 7, 24)), BUCKET)[2].all()


def test_a_steady_day_has_its_rate_in_every_bucket() -> None:
    """Edges of the history do not dilute."""
    np.testing.assert_allclose(seasonal(np.full((1, 3, 24), 6.0), BUCKET)[:2], 6 / BUCKET)
    with pytest.raises(ValueError, match="at least one day"):
        seasonal(np.zeros((1, 0, 24)), BUCKET)


# -- the blend ---------------------------------------------------------------------------------------


def poisson(models: int, days: int, seed: int = 0) -> np.ndarray:
    """Bucket counts of models with a time of day."""
    rng = np.random.default_rng(seed)
    shape = np.where(np.arange(288) % 96 < 24, 2.0, 0.05)
    return rng.poisson(rng.gamma(1.0, 1.0, (models, 1, 1)) * shape, (models, days, 288)).astype(float)


def test_the_fit_is_non_negative_least_squares_of_the_weighted_rows() -> None:
    """Equal to scipy's on all rows; the small system is only cheaper."""
    from scipy.optimize import nnls

    rng = np.random.default_rng(3)
    x = rng.gamma(0.5, 1.0, (5000, 10))
    y = x @ np.array([0.5, 0, 0, 0.2, 0, 0.3, 0, 0, 0.1, 0]) + rng.normal(0, 0.2, 5000) - 0.3 * x[:, 1]
    scale = 1 / np.sqrt(x[:, R_6H] + x[:, 5] + 1e-5)
    direct, _ = nnls(x * scale[:, None], y * scale)
    np.testing.assert_allclose(fit_blend(x, y).weights, direct, atol=1e-5)


def test_a_column_of_nothing_gets_no_weight() -> None:
    """S7w before the second week: the fit stands."""
    x = np.random.default_rng(0).gamma(1.0, 1.0, (500, 10))
    x[:, 7] = 0
    blend = fit_blend(x, x[:, 0])
    assert blend.explain()["s_week_ago"] == 0
    assert blend.explain()["r_600"] == pytest.approx(1.0, abs=1e-4)


def test_scheduled_traffic_is_told_by_its_season_and_bursts_by_the_last_minutes() -> None:
    """What the weights say in `explain` is what the traffic is like."""
    scheduled = fit_blend(*cells(poisson(60, 10), BUCKET, most=8000))
    assert sum(scheduled.weights[5:8]) > 0.6
    rng = np.random.default_rng(1)
    mood = np.exp(np.cumsum(rng.normal(0, 0.35, (60, 10 * 288)), axis=1) * 0.5)
    bursts = rng.poisson(np.minimum(mood / mood.mean(), 20)).reshape(60, 10, 288).astype(float)
    assert fit_blend(*cells(bursts, BUCKET, most=8000)).weights[0] > 0.4


def test_no_cell_sees_its_own_future() -> None:
    """Rows of the days before stay the same when the last day changes; only its targets do."""
    days = poisson(5, 5)
    other = days.copy()
    other[:, 4] = 0
    x, y = cells(days, BUCKET, most=400)
    x_other, y_other = cells(other, BUCKET, most=400)
    np.testing.assert_array_equal(x[:300], x_other[:300])
    assert not np.array_equal(y[300:], y_other[300:])
    rates, age = history(days.reshape(5, -1), BUCKET)
    changed, changed_age = history(other.reshape(5, -1), BUCKET)
    np.testing.assert_array_equal(rates[: 4 * 288 + 1], changed[: 4 * 288 + 1])
    np.testing.assert_array_equal(age[: 4 * 288 + 1], changed_age[: 4 * 288 + 1])


def test_training_and_serving_agree_on_decayed_rates() -> None:
    """A counter folded once per bucket reads what the history says, but for where in its bucket a request lies."""
    days = poisson(3, 2)
    rates, _ = history(days.reshape(3, -1), BUCKET)
    counter = Decayed(3)
    for now in range(500):
        counter.fold(days.reshape(3, -1)[:, now], (now + 0.5) * BUCKET)
    np.testing.assert_allclose(counter.rates(500 * BUCKET)[:, 1:], rates[500].T[:, 1:], rtol=0.02)


def test_a_large_fleet_is_sampled() -> None:
    """More models than are needed cost no more and give the same kind of rows."""
    x, y = cells(poisson(MODELS + 5, 2), BUCKET, most=100)
    assert x.shape == (100, len(COLUMNS))
    assert y.shape == (100,)


def test_too_little_history_is_told() -> None:
    """One day cannot be learned from."""
    with pytest.raises(ValueError, match="two days"):
        cells(poisson(3, 1), BUCKET)


@pytest.mark.parametrize("weights", [np.zeros(9), np.full(10, -1.0), np.full(10, math.nan), np.full(10, math.inf)])
def test_an_absurd_blend_is_refused(weights: np.ndarray) -> None:
    """F72: negative, NaN or infinite weights from a fitter never price a model."""
    with pytest.raises(ValueError, match="blend"):
        Blend(weights)


def test_rows_that_are_none_are_refused() -> None:
    """NaN, nothing, or another width."""
    with pytest.raises(ValueError, match="finite"):
        fit_blend(np.full((1, 10), math.nan), np.zeros(1))
    with pytest.raises(ValueError, match="match"):
        fit_blend(np.zeros((0, 10)), np.zeros(0))
    with pytest.raises(ValueError, match="match"):
        fit_blend(np.zeros((3, 9)), np.zeros(3))


def test_every_number_of_a_season_is_finite_for_a_silent_fleet() -> None:
    """Nothing ever requested: zeros all the way."""
    days = np.zeros((2, 8, 288))
    ttn = next_use(expected(days), BUCKET)
    x = columns(Decayed(2).rates(0.0), seasonal(days, BUCKET)[:, :, 0], ttn.rate[:, 0], Decayed(2).age(0.0))
    assert not x.any()
    assert not fit_blend(*cells(days, BUCKET, most=200)).weights.any()
