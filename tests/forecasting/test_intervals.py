"""Promises of hurdle quantiles and recalibration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.intervals import GRID, Calibration, Hurdle, around, calibration, chances, grids, hurdle

NORMAL = np.array([-2.326, *np.quantile(np.random.default_rng(0).normal(size=200_000), GRID[1:-1]), 2.326])


def bursts(models: int = 40, days: int = 14, seed: int = 1) -> np.ndarray:
    """Hourly counts: active with a daily rhythm, log-normal when active."""
    draw = np.random.default_rng(seed)
    hour = np.arange(days * 24) % 24
    chance = np.clip(0.45 + 0.4 * np.sin(2 * np.pi * hour / 24), 0.02, 0.98)
    active = draw.random((models, days * 24)) < chance
    return np.where(active, np.ceil(draw.lognormal(4, 1.5, active.shape)), 0.0)


def test_quantiles_by_hand() -> None:
    """Zero up to 1 - p, then the residual at (q - (1 - p)) / p around the location."""
    made = Hurdle(np.array([[0.5]]), np.array([[2.0]]), np.broadcast_to(GRID, (1, 99)))
    low, high = made.quantiles((0.4, 0.75))[0, 0]
    assert low == 0
    assert high == pytest.approx(np.exp(2.5))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_quantiles_never_cross(seed: int) -> None:
    """Monotone in the level, finite and not negative, for any probability and residuals."""
    draw = np.random.default_rng(seed)
    made = Hurdle(draw.random((3, 4)), draw.normal(0, 5, (3, 4)), np.sort(draw.normal(0, 3, (3, 99)), axis=1))
    result = made.quantiles((0.025, 0.1, 0.5, 0.9, 0.975))
    assert (np.diff(result, axis=2) >= 0).all()
    assert np.isfinite(result).all()
    assert (result >= 0).all()


def test_a_model_that_is_never_asked_has_zero_quantiles() -> None:
    """A chance of zero divides by nothing."""
    assert Hurdle(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 99))).quantiles((0.5, 0.99)).max() == 0


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
def test_levels_outside_are_refused(level: float) -> None:
    """A quantile level names a probability."""
    with pytest.raises(ValueError, match="levels must lie"):
        Hurdle(np.ones((1, 1)), np.ones((1, 1)), np.zeros((1, 99))).quantiles((level,))


def test_coverage_lies_in_the_bands() -> None:
    """Goal 5 on made bursts: 80 % in [.76, .90], 95 % in [.92, .99], a day ahead, out of sample."""
    counts = bursts()
    known, kinds = np.ones(counts.shape, np.bool_), np.ones(len(counts), np.int64)
    inside = np.zeros(2)
    for back in (1, 2, 3):
        origin = counts.shape[1] - 24 * back
        chance = chances(counts > 0, known, origin, 24, 24)
        bounds = hurdle(counts, known, origin=origin, chance=chance, day=24, kinds=kinds).quantiles(
            (0.025, 0.1, 0.9, 0.975)
        )
        truth = counts[:, origin : origin + 24]
        for at, (low, high) in enumerate(((1, 2), (0, 3))):
            inside[at] += ((truth >= bounds[..., low]) & (truth <= bounds[..., high])).mean() / 3
    assert 0.76 <= inside[0] <= 0.90
    assert 0.92 <= inside[1] <= 0.99


def test_intervals_ignore_the_future_and_gaps() -> None:
    """What comes after the origin, and what lies in a gap, changes nothing."""
    counts = bursts(models=12, days=8)
    known = np.ones(counts.shape, np.bool_)
    known[:, 100:110] = False
    other = counts.copy()
    other[:, 168:], other[:, 100:110] = 9e9, 7e7
    made = []
    for one in (counts, other):
        chance = chances(one > 0, known, 168, 24, 24)
        made.append(hurdle(one, known, origin=168, chance=chance, day=24, kinds=np.zeros(12, np.int64)))
    assert np.array_equal(made[0].location, made[1].location)
    assert np.array_equal(made[0].grid, made[1].grid)


def test_chances_follow_the_slot_of_the_day() -> None:
    """A model that is always asked at noon and never at night is expected at noon."""
    active = np.tile(np.arange(24) == 12, (5, 10))
    chance = chances(active, np.ones(active.shape, np.bool_), 240, 24, 24)
    assert chance[0, 12] > 0.9
    assert chance[0, 3] < 0.1


def test_short_histories_give_finite_answers() -> None:
    """Half a day of history: probabilities in 0..1 and quantiles from the class alone."""
    counts = bursts(models=3, days=1)[:, :12]
    known = np.ones(counts.shape, np.bool_)
    chance = chances(counts > 0, known, 12, 24, 24)
    assert ((chance >= 0) & (chance <= 1)).all()
    made = hurdle(counts, known, origin=12, chance=chance, day=24, kinds=np.zeros(3, np.int64))
    assert np.isfinite(made.quantiles((0.1, 0.9))).all()


def test_recalibration_mends_a_boaster() -> None:
    """Said twice as often as it comes: after recalibration the mean is right, and order is kept."""
    draw = np.random.default_rng(4)
    said = draw.random(20_000)
    came = draw.random(20_000) < said / 2
    mended = calibration(said, came).of(said)
    assert mended.mean() == pytest.approx(came.mean(), abs=0.01)
    assert (np.diff(mended[np.argsort(said)]) >= -1e-12).all()


def test_nothing_learned_changes_nothing() -> None:
    """No predictions, no map."""
    assert calibration(np.empty(0), np.empty(0, np.bool_)).of(np.array([0.3])).tolist() == [0.3]
    assert Calibration(np.empty(0), np.empty(0)).of(np.array([0.7])).tolist() == [0.7]


def test_own_residuals_are_phased_in_by_n() -> None:
    """Fifteen own residuals weigh half, none nothing, and classes don't mix."""
    residual = np.full((3, 15), np.nan)
    residual[0] = 2.0
    residual[2] = 50.0
    made = grids(residual, np.array([0, 0, 1]))
    assert made[0] == pytest.approx(2.0)
    assert made[1] == pytest.approx(2.0)
    residual[1] = 0.0
    assert grids(residual, np.array([0, 0, 1]))[1, -1] == pytest.approx(1.0)
    assert made[2] == pytest.approx(50.0)
    assert grids(np.full((1, 3), np.nan), np.zeros(1, np.int64)).max() == 0


def test_residuals_around_a_forecast() -> None:
    """Symmetric in log1p, never below zero, finite for an absurd residual."""
    assert around(np.array([[9.0]]), np.zeros((1, 99)), (0.1, 0.9)).ravel() == pytest.approx([9.0, 9.0])
    bounds = around(np.array([[9.0]]), NORMAL[None], (0.025, 0.5, 0.975))[0, 0]
    assert 0 < bounds[0] < bounds[1] < bounds[2]
    assert np.isfinite(around(np.array([[1.0]]), np.full((1, 99), 1e9), (0.5,))).all()
