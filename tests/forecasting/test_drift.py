"""Promises of drift detection, demotion and the noise gate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.drift import Cusum, Watch, daily_ratio, demotion, drifting, noise_gate, poisson_loss


def test_a_tripled_level_is_called_on_the_second_day() -> None:
    """One wild day alone raises no alarm; two in a row do, on the right side."""
    one = Cusum.fresh(2).after(np.log([3.0, 1 / 3]))
    assert one.drifting.tolist() == [0, 0]
    assert one.after(np.log([3.0, 1 / 3])).drifting.tolist() == [1, -1]


@given(st.floats(1e-9, 1e9))
def test_no_single_day_raises_an_alarm(ratio: float) -> None:
    """However wild: a viral day is not a new level."""
    assert Cusum.fresh(1).after(np.log([ratio])).drifting[0] == 0


def test_small_daily_noise_never_adds_up() -> None:
    """A year of days within 20 % raises no alarm."""
    draw, sums = np.random.default_rng(1), Cusum.fresh(50)
    for _ in range(365):
        sums = sums.after(draw.uniform(-0.2, 0.2, 50))
        assert not sums.drifting.any()


def test_a_slow_drift_is_found() -> None:
    """40 % too many every day is called within two weeks."""
    sums = Cusum.fresh(1)
    days = 0
    while not sums.drifting[0]:
        sums, days = sums.after(np.log([1.4])), days + 1
        assert days <= 14


def test_a_day_without_data_changes_nothing() -> None:
    """Neither sum."""
    sums = Cusum.fresh(2).after(np.log([2.0, 2.0]))
    same = sums.after(np.array([np.nan, np.nan]))
    assert same.up.tolist() == sums.up.tolist()


def test_few_requests_make_no_ratio() -> None:
    """Three requests where one was expected is no tripling; thousands are."""
    assert daily_ratio(np.array([3.0]), np.array([1.0]))[0] < np.log(1.5)
    assert daily_ratio(np.array([30000.0]), np.array([10000.0]))[0] > np.log(2.5)


def test_a_level_that_creeps_is_an_alarm_and_one_that_was_repaired_is_none() -> None:
    """Models may be new, unknown for days, or rescaled: then a day expects what came."""
    usual = np.array([100.0, 100.0, 100.0, 0.0])
    creeping = [(np.array([200.0, 100.0, 300.0, 50.0]), usual)] * 4
    assert drifting(creeping, 5).tolist() == [1, 0, 1, 0, 0]
    repaired = [(each, np.where(np.arange(4) == 2, 300.0, usual)) for each, _ in creeping]
    assert drifting(repaired, 5).tolist() == [1, 0, 0, 0, 0]
    assert drifting([], 2).tolist() == [0, 0]


def test_a_model_falls_by_its_losses_sooner_while_it_drifts_and_comes_back_by_two_good_days() -> None:
    """Losses against the simpler estimate's, oldest first; a day that was not judged counts for neither."""
    nan = np.nan
    learned = np.array(
        [
            [0.5, 0.5, 2.0, 2.0],  # two breaches
            [0.5, 0.5, 0.5, 2.0],  # one
            [0.5, 0.5, 0.5, 2.0],  # one, drifting
            [2.0, 2.0, 0.5, 0.5],  # good again
            [2.0, 2.0, 0.5, nan],  # not yet
            [0.5, 0.5, 0.5, 0.5],  # good, drifting
            [1.05, 1.05, 1.05, 1.05],  # no breach, no merit
        ]
    )
    alarm = np.array([0, 0, 1, 0, 0, -1, 0])
    fallen, earned = demotion(learned, np.ones_like(learned), alarm)
    assert fallen.tolist() == [True, False, True, False, False, False, False]
    assert earned.tolist() == [False, False, False, True, False, False, False]


def test_demotion_takes_two_breaches_in_a_row() -> None:
    """A good review in between starts the count again; either bound is enough for a breach."""
    good, bad = np.array([0.8]), np.array([0.6])
    loss, hier_loss = np.array([1.0]), np.array([1.0])
    once = Watch.fresh(1).after(bad, loss, hier_loss)
    assert not once.demoted[0]
    assert not once.after(good, loss, hier_loss).after(bad, loss, hier_loss).demoted[0]
    assert once.after(good, 1.2 * loss, hier_loss).demoted[0]


def test_a_review_without_numbers_changes_nothing() -> None:
    """Neither a breach nor a pardon."""
    nothing = np.array([np.nan])
    once = Watch.fresh(1).after(np.array([0.5]), nothing, nothing)
    assert once.after(nothing, nothing, nothing).breaches.tolist() == [1]


def test_poisson_noise_has_no_skill() -> None:
    """A profile learned from three weeks of pure noise never beats the constant rate: prefetch stays off."""
    draw = np.random.default_rng(2)
    rate = np.exp(draw.uniform(-2, 4, 200))[:, None]
    past = draw.poisson(rate[:, :, None], (200, 3, 96))
    profile, flat = past.mean(axis=1), past.mean(axis=(1, 2))[:, None]
    losses, constant = np.zeros((200, 10)), np.zeros((200, 10))
    for k in range(10):
        truth = draw.poisson(rate, (200, 96)).astype(np.float64)
        losses[:, k] = poisson_loss(truth, profile).mean(axis=1)
        constant[:, k] = poisson_loss(truth, np.broadcast_to(flat, truth.shape)).mean(axis=1)
    gate = noise_gate(losses, constant)
    assert not gate.fleet
    assert gate.saved.max() < 0.02


def test_a_real_season_opens_the_gate() -> None:
    """The same gate lets a daily wave through, and only for the model that has one."""
    draw = np.random.default_rng(3)
    wave = 20 * (1 + 0.9 * np.sin(np.arange(96) / 96 * 2 * np.pi))
    rate = np.stack([wave, np.full(96, 20.0)])
    losses, constant = np.zeros((2, 8)), np.zeros((2, 8))
    for k in range(8):
        truth = draw.poisson(rate).astype(np.float64)
        losses[:, k] = poisson_loss(truth, rate).mean(axis=1)
        constant[:, k] = poisson_loss(truth, np.full((2, 96), 20.0)).mean(axis=1)
    assert noise_gate(losses, constant).skilled.tolist() == [True, False]


def test_too_few_origins_prove_nothing() -> None:
    """Four origins, or losses that were never judged, keep the gate shut; shapes must agree."""
    assert not noise_gate(np.zeros((1, 4)), np.ones((1, 4))).fleet
    assert not noise_gate(np.full((1, 9), np.nan), np.ones((1, 9))).fleet
    with pytest.raises(ValueError, match="must both be"):
        noise_gate(np.zeros((1, 4)), np.zeros((1, 5)))
