"""Judging probabilities after the fact, online and per class."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forecasting.calibration import Calibration, Docket, judge

HOUR = 3600.0


def test_brier_is_the_mean_squared_error() -> None:
    """By hand: three forecasts."""
    verdict = judge(np.array([0.0, 0.5, 0.9]), np.array([False, True, True]))
    assert verdict.brier == pytest.approx((0 + 0.25 + 0.01) / 3)
    assert verdict.climatology == pytest.approx(2 / 3 * 1 / 3)


def test_a_forecast_that_comes_true_as_often_as_stated_is_calibrated() -> None:
    """Said .25 four times, came once: no calibration error, whatever the Brier score."""
    verdict = judge(np.full(4, 0.25), np.array([True, False, False, False]))
    assert verdict.ece == 0.0
    assert verdict.table() == ((0.25, 0.25, 4),)


def test_calibration_error_weighs_bins_by_their_forecasts() -> None:
    """Three quarters off by .1, a quarter off by .5."""
    p = np.array([0.1, 0.1, 0.1, 0.5])
    assert judge(p, np.array([False, False, False, True])).ece == pytest.approx(0.75 * 0.1 + 0.25 * 0.5)


@given(hnp.arrays(float, st.integers(1, 60), elements=st.floats(0, 1)), st.integers(0, 2**32 - 1))
def test_scores_are_bounded_for_any_probabilities(p: np.ndarray, seed: int) -> None:
    """Brier and ECE lie in 0..1 and every forecast is counted once."""
    verdict = judge(p, np.random.default_rng(seed).random(p.shape) < p)
    assert 0 <= verdict.brier <= 1
    assert 0 <= verdict.ece <= 1 + 1e-9
    assert sum(n for _, _, n in verdict.table()) == p.size


@pytest.mark.parametrize("p", [[-0.1], [1.1], [math.nan], [0.5, 0.5]])
def test_what_is_no_probability_is_not_judged(p: list[float]) -> None:
    """F72: nonsense is refused, not averaged."""
    with pytest.raises(ValueError, match=r"0\.\.1"):
        judge(np.array(p), np.array([True]))


def test_nothing_judged_has_no_score() -> None:
    """NaN says "not yet"; zero would say "perfect"."""
    empty = Calibration().fleet()
    assert math.isnan(empty.brier)
    assert math.isnan(empty.ece)
    assert math.isnan(empty.climatology)
    assert empty.table() == ()


def test_the_window_forgets() -> None:
    """What was judged longer ago than the period no longer counts."""
    track = Calibration(period=24 * HOUR)
    track.add(0.0, np.array([1.0]), np.array([False]))
    track.add(23 * HOUR, np.array([0.0]), np.array([False]))
    assert track.fleet().brier == 0.5
    track.add(24 * HOUR, np.array([0.0]), np.array([False]))
    assert track.fleet().brier == 0.0
    assert track.fleet().n == 2


def test_classes_are_judged_apart_and_together() -> None:
    """A bad class does not hide behind a good one."""
    track = Calibration(("prior", "high"))
    track.add(0.0, np.array([0.9, 0.9, 0.1]), np.array([False, True, False]), np.array([0, 1, 1]))
    assert track.of("prior").brier == pytest.approx(0.81)
    assert track.of("high").brier == pytest.approx(0.01)
    assert track.fleet().n == 3
    assert "n=3" in repr(track)
    track.add(0.0, np.array([0.5]), np.array([True]), np.array([1]))
    assert track.of("prior").n == 1


def test_an_impossible_window_is_refused() -> None:
    """No period, no window."""
    with pytest.raises(ValueError, match="impossible"):
        Calibration(period=0.0)


def test_recalibration_learns_a_bias_and_leaves_honest_forecasts_alone() -> None:
    """Twice too high is halved; calibrated stays within noise; the order of forecasts never turns."""
    rng = np.random.default_rng(0)
    p = rng.random(40_000)
    biased = judge(p, rng.random(p.size) < p / 2)
    asked = np.linspace(0, 1, 50)
    fixed = biased.recalibrate(asked)
    assert np.all(np.diff(fixed) >= -1e-12)
    assert abs(fixed[25] - asked[25] / 2) < 0.1
    honest = judge(p, rng.random(p.size) < p).recalibrate(asked)
    assert np.abs(honest - asked).max() < 0.04


@settings(deadline=None)
@given(hnp.arrays(float, 20, elements=st.floats(0, 1)))
def test_recalibration_without_evidence_changes_little(p: np.ndarray) -> None:
    """Pseudo forecasts keep one bad day from rewriting the scale; none and no evidence at all changes nothing."""
    few = judge(np.array([0.95]), np.array([False]))
    assert np.abs(few.recalibrate(p) - p).max() < 0.06
    np.testing.assert_array_equal(few.recalibrate(p, pseudo=0.0), p)


def test_forecasts_wait_until_their_windows_are_over() -> None:
    """Asked at window 3 about 3 to 8, judged when 8 has closed and not before."""
    docket = Docket()
    docket.file(3, 6, ("a",), np.array([0.5]))
    docket.file(4, 6, ("a",), np.array([0.6]))
    assert docket.due(7) == []
    assert [(first, span) for first, span, _, _ in docket.due(8)] == [(3, 6)]
    assert len(docket) == 1
