"""Promises of the weekly profile and the level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.profile import (
    FAST,
    HOUR,
    SLOW,
    Levels,
    fleet_prior,
    hier,
    level,
    levels,
    pulled,
    smooth,
    young,
)

WEEK = 672


def full(rate: float, weeks: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Sums of one model at a constant rate per slot."""
    return np.full((1, WEEK), rate * weeks), np.full((1, WEEK), weeks)


def test_constant_traffic_gives_a_constant_profile() -> None:
    """Shrinkage pulls to the mean and nowhere else."""
    assert hier(*full(7.0)) == pytest.approx(7.0, rel=1e-6)


def test_nothing_observed_gives_zero() -> None:
    """Neither a division by zero nor an invented request."""
    assert hier(np.zeros((2, WEEK)), np.zeros((2, WEEK))).max() == 0


def test_one_slot_by_hand() -> None:
    """The three pseudo-counts are .5, .3 of a day and 1, in that order."""
    sums, passes = np.zeros((1, 14)), np.ones((1, 14))
    sums[0, 0] = 14.0  # Monday, first half; two slots a day, mean 1
    slot = np.array([14.5, 0.5]) / 7.5
    expected = slot.sum()
    factor = np.full(7, 0.6 / (expected + 0.6))
    factor[0] = 14.6 / (expected + 0.6)
    base = (factor[:, None] * slot).ravel()
    assert hier(sums, passes, per_day=2)[0] == pytest.approx((sums[0] + base) / 2, rel=1e-6)


def test_one_day_of_history_fills_the_week() -> None:
    """With a single Monday seen, every other day looks like it: the profile collapses to the slot of the day."""
    sums, passes = np.zeros((1, WEEK)), np.zeros((1, WEEK))
    passes[0, :96] = 1
    sums[0, 32:64] = 10.0
    week = hier(sums, passes)[0].reshape(7, 96)
    assert week[3, 48] == pytest.approx(week[5, 48])
    assert week[3, 48] > 5 * week[3, 10]


def test_gaps_are_not_zeros() -> None:
    """Half of the passes missing changes nothing at a constant rate: exposure is the denominator."""
    sums, passes = full(6.0)
    sums[0, ::2] = passes[0, ::2] = 0
    assert hier(sums, passes) == pytest.approx(6.0, rel=1e-6)


def test_chunks_do_not_show() -> None:
    """More models than a chunk give what each alone gives."""
    draw = np.random.default_rng(1)
    sums = draw.poisson(3.0, (1003, 14)).astype(np.float64)
    passes = np.ones((1003, 14))
    assert hier(sums, passes, per_day=2)[1001] == pytest.approx(hier(sums[1001:1002], passes[:1], per_day=2)[0])


@given(st.integers(1, 3), st.integers(0, 5))
def test_smoothing_keeps_the_sum(radius: int, seed: int) -> None:
    """Requests are moved to neighbours, never made; also around the end of the week."""
    rates = np.random.default_rng(seed).random((2, WEEK))
    assert smooth(rates, radius).sum(axis=1) == pytest.approx(rates.sum(axis=1))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_hostile_sums_are_refused(bad: float) -> None:
    """A negative or infinite count names its field."""
    sums, passes = full(1.0)
    sums[0, 5] = bad
    with pytest.raises(ValueError, match="sums must be finite"):
        hier(sums, passes)


def test_shapes_are_checked() -> None:
    """A table of another slot width is refused, not read askew."""
    with pytest.raises(ValueError, match="must both be"):
        hier(np.zeros((1, 100)), np.zeros((1, 100)))


def test_a_new_model_takes_after_its_labels() -> None:
    """Models with the same labels first, else the fleet's median."""
    profiles = np.array([[1.0, 3.0], [3.0, 5.0], [100.0, 100.0]], np.float32)
    labels = [{"family": "a"}, {"family": "a"}, {"family": "b"}]
    assert fleet_prior(profiles, labels, {"family": "a"}).tolist() == [2.0, 4.0]
    assert fleet_prior(profiles, labels, {"family": "z"}).tolist() == [3.0, 5.0]
    assert fleet_prior(profiles, labels, {}).tolist() == [3.0, 5.0]


def test_a_declared_rate_sets_the_mean_and_keeps_the_shape() -> None:
    """`expected` overrides the level of the prior; an empty fleet gives a flat one."""
    profiles = np.array([[1.0, 3.0]], np.float32)
    assert fleet_prior(profiles, [{}], {}, expected=10.0) == pytest.approx([5.0, 15.0])
    assert fleet_prior(profiles[:0], [], {}, expected=10.0) == pytest.approx([10.0, 10.0])
    assert fleet_prior(np.zeros((2, 2), np.float32), [{}, {}], {}, expected=4.0) == pytest.approx([4.0, 4.0])
    assert fleet_prior(profiles[:0], [], {}).tolist() == [0.0, 0.0]


def test_hostile_priors_are_refused() -> None:
    """A rate that is no rate and labels that fit no profile."""
    profiles = np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match="expected must be finite"):
        fleet_prior(profiles, [{}], {}, expected=float("nan"))
    with pytest.raises(ValueError, match="labels"):
        fleet_prior(profiles, [], {})


def test_a_young_model_moves_from_the_prior_to_itself() -> None:
    """Without data it is the prior; with ten busy hours its own level shows, in the prior's shape."""
    prior = np.tile([1.0, 3.0], 336)
    nothing = np.zeros((1, WEEK))
    assert young(nothing, nothing, prior)[0] == pytest.approx(prior)
    passes, sums = nothing.copy(), nothing.copy()
    passes[0, :40], sums[0, :40] = 1.0, 20.0
    own = young(sums, passes, prior)[0]
    assert own[1] / own[0] == pytest.approx(3.0)
    assert 6 < own.mean() / prior.mean() < 10


def test_a_tripled_rate_shows_in_the_level() -> None:
    """Five half-lives after the change the level is close to 3, less the pull to 1."""
    counts, expected = np.full((1, 300), 30.0), np.full((1, 300), 10.0)
    assert level(counts, expected, np.ones((1, 300), bool), bucket=60.0, half_life=HOUR)[0] == pytest.approx(2.6, 0.01)


def test_gaps_do_not_lower_the_level() -> None:
    """An outage is absent on both sides."""
    counts, known = np.full((1, 120), 10.0), np.ones((1, 120), bool)
    counts[0, 60:], known[0, 60:] = 0.0, False
    assert level(counts, np.full((1, 120), 10.0), known, bucket=60.0, half_life=HOUR)[0] == pytest.approx(1.0)


def test_an_idle_model_keeps_its_level_at_one() -> None:
    """No expectation and no request: never 0/0."""
    assert pulled(np.zeros(1), np.zeros(1))[0] == 1.0
    empty = np.zeros((1, 0))
    assert level(empty, empty, empty.astype(bool), bucket=60.0, half_life=60.0)[0] == 1.0


def test_the_effect_fades_with_the_lead() -> None:
    """Now both levels act in full, after days only the profile is left."""
    both = Levels(np.array([2.0]), np.array([3.0]), FAST[2])
    factor = both.at(np.array([0.0, 3 * HOUR, 100 * SLOW.decay]))[0]
    assert factor[0] == pytest.approx(6.0)
    assert factor[1] == pytest.approx(2 ** np.exp(-3 / 72) * 3 ** np.exp(-1))
    assert factor[2] == pytest.approx(1.0)


def test_the_fast_level_is_relative_to_the_slow_one() -> None:
    """A lasting doubling sits in the slow level, so that the fast one does not count it twice."""
    counts, expected = np.full((1, 5000), 20.0), np.full((1, 5000), 10.0)
    made = levels(counts, expected, np.ones((1, 5000), bool), bucket=60.0, fade=FAST[2])
    assert 1.7 < made.slow[0] < 2.0
    assert 1.0 <= made.fast[0] < 1.2


def test_every_model_counts_the_same_in_the_fleets_shape() -> None:
    """When the median model is idle, the shape comes from the busy ones, a loud one no more than a quiet one."""
    profiles = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 3.0], [3000.0, 1000.0]], np.float32)
    assert fleet_prior(profiles, [{}] * 5, {}, expected=6.0) == pytest.approx([6.0, 6.0])
