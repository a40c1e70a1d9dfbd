"""What is expected now, from live counters and the last fit: with none, with a stale one, for new models, for noise."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from forecasting.counts import Counts
from forecasting.estimate import STALE, Way, allowed, estimate
from forecasting.fit import fit
from forecasting.ladder import Confidence
from forecasting.scenarios import AHEAD, WINDOW
from tests.forecasting.fleets import END, counted, daily, noise

if TYPE_CHECKING:
    from forecasting.fitted import Fitted

WALL = 60.0 * END
LONG = 1e6


@pytest.fixture(scope="module")
def periodic() -> Fitted:
    """24 models with a daily peak, 10 days."""
    return fit(counted(daily(24, 10)).snapshot(), now=WALL, deadline=LONG, top=0)


def fresh() -> Counts:
    """The counts that `periodic` was fitted on."""
    return counted(daily(24, 10))


def peak_of(fitted: Fitted, key: str) -> float:
    """Seconds from the fit to the middle of a model's next peak."""
    return float(fitted.season[fitted.keys.index(key)].argmax()) * 300.0


# -- without a fit -----------------------------------------------------------------------------------


def test_without_a_fit_recency_speaks():
    """Both value rates are those of the last hour, and confidence is that of a guess."""
    counts = Counts(WALL, 0.0)
    counts.hit(counts.index("hot@1"))
    counts.index("cold@1")
    found = estimate(counts, None, wall=WALL + 1, monotonic=1.0)
    assert found.source == "rate"
    assert found.evict_rate[0] > 0
    assert found.evict_rate[1] == 0
    assert np.array_equal(found.evict_rate, found.prefetch_rate)
    assert np.isinf(found.next_use[1])
    assert (found.confidence == Confidence.PRIOR.value01).all()
    assert not allowed(counts, None, wall=WALL).any()


def test_no_model_is_no_error(periodic: Fitted):
    """An empty server has an empty estimate."""
    counts = Counts(WALL, 0.0)
    assert estimate(counts, None, wall=WALL, monotonic=0.0).rate.shape == (0,)
    assert estimate(counts, periodic, wall=WALL, monotonic=0.0).rate.shape == (0,)


@pytest.mark.parametrize("shift", [STALE + 1, -STALE - 1, 40 * 86_400.0])
def test_a_stale_fit_counts_as_none(periodic: Fitted, shift: float):
    """Whatever the clock does, a fit that is half a day away says nothing and allows nothing."""
    counts = fresh()
    found = estimate(counts, periodic, wall=WALL + shift, monotonic=0.0)
    assert found.source == "rate"
    assert not allowed(counts, periodic, wall=WALL + shift).any()


def test_mode_rate_ignores_the_fit(periodic: Fitted):
    """The operator's choice."""
    assert estimate(fresh(), periodic, wall=WALL, monotonic=0.0, mode="rate").source == "rate"


def test_a_fit_of_other_models_only_counts_as_none(periodic: Fitted):
    """A server whose models were all replaced."""
    counts = Counts(WALL, 0.0)
    counts.index("other@1")
    assert estimate(counts, periodic, wall=WALL, monotonic=0.0).source == "rate"
    assert not allowed(counts, periodic, wall=WALL).any()


# -- with a fit --------------------------------------------------------------------------------------


def test_a_model_is_wanted_at_its_hour_and_not_before(periodic: Fitted):
    """λ_P rises by far when the daily peak comes."""
    counts, key = fresh(), "daily-3@1"
    row = counts.keys.index(key)
    peak = peak_of(periodic, key)
    then = estimate(counts, periodic, wall=WALL + (peak - 3 * 3600) % STALE, monotonic=0.0)
    busy = estimate(counts, periodic, wall=WALL + min(peak, STALE), monotonic=0.0)
    if peak < STALE:
        assert busy.prefetch_rate[row] > 3 * then.prefetch_rate[row]
        assert busy.next_use[row] < 600
    assert busy.source == "blend"
    assert allowed(counts, periodic, wall=WALL)[row]


def test_what_is_used_sooner_is_worth_more(periodic: Fitted):
    """λ_E follows the next use when seasons rule: a model at its peak is worth far more than one half a day off."""
    counts = fresh()
    found = estimate(counts, periodic, wall=WALL + 3600, monotonic=86_400.0)
    soon, late = found.next_use < 900, found.next_use > 6 * 3600
    assert soon.any()
    assert late.any()
    assert found.evict_rate[soon].min() > 3 * found.evict_rate[late].max()


def test_a_fleet_of_noise_goes_by_the_last_hour():
    """Shut gate: λ_P is the 1-hour rate, and nothing may be loaded ahead."""
    counts = counted(noise(20, 9))
    fitted = fit(counts.snapshot(), now=WALL, deadline=LONG, top=0)
    found = estimate(counts, fitted, wall=WALL, monotonic=0.0)
    assert np.allclose(found.prefetch_rate, counts.rates(0.0)[:, 1])
    assert not allowed(counts, fitted, wall=WALL).any()


def test_a_new_model_follows_the_fleet(periodic: Fitted):
    """It is expected when the fleet's prior says so, with the confidence of a guess; the others are not disturbed."""
    counts = fresh()
    before = estimate(counts, periodic, wall=WALL, monotonic=0.0)
    counts.index("new@1")
    prior = np.full(672, 9.0, np.float32)
    found = estimate(counts, replace(periodic, prior=prior, memo={}), wall=WALL, monotonic=0.0)
    row = counts.keys.index("new@1")
    assert found.next_use[row] == pytest.approx(0.7 / (9 / 900))
    assert found.confidence[row] == Confidence.PRIOR.value01
    assert np.array_equal(np.delete(found.prefetch_rate, row), before.prefetch_rate)
    assert not allowed(counts, periodic, wall=WALL)[row]


def test_rows_are_found_anew_when_models_come_and_go(periodic: Fitted):
    """Each model keeps its own forecast, whatever the order of the counts."""
    counts = fresh()
    before = dict(zip(counts.keys, estimate(counts, periodic, wall=WALL, monotonic=0.0).next_use.tolist(), strict=True))
    counts.forget("daily-2@1")
    after = dict(zip(counts.keys, estimate(counts, periodic, wall=WALL, monotonic=0.0).next_use.tolist(), strict=True))
    assert after == {key: use for key, use in before.items() if key != "daily-2@1"}


@pytest.mark.parametrize("elapsed", [0.0, 1.0, 899.9, 43_199.0])
@pytest.mark.parametrize("mode", ["blend", "occurrence"])
def test_every_instant_gives_numbers_that_an_outlook_takes(periodic: Fitted, elapsed: float, mode: Way):
    """F71: finite, not negative, chances that rise with time; at the edges of the tables too."""
    counts = fresh()
    found = estimate(counts, periodic, wall=WALL + elapsed, monotonic=elapsed, mode=mode)
    outlook = found.outlook(counts.keys, 0.0, 60.0)
    for key in counts.keys:
        assert 0 <= outlook.of(key).chance(600) <= outlook.of(key).chance(7200) <= 1


def test_impossible_counters_are_cut(periodic: Fitted):
    """F71, F72: whatever is in the counters, no NaN and no absurd rate gets into an outlook."""
    counts = fresh()
    counts._decayed[:, 0] = np.nan
    counts._decayed[:, 1] = np.inf
    counts._decayed[:, 2] = -1e9
    for mode in ("blend", "rate", "occurrence"):
        found = estimate(counts, periodic, wall=WALL, monotonic=0.0, mode=mode)
        assert np.isfinite(found.prefetch_rate).all()
        assert (found.evict_rate >= 0).all()


# -- chances -----------------------------------------------------------------------------------------


def test_chances_are_high_in_the_busy_hours_and_low_else(periodic: Fitted):
    """Looked up for what has happened since the fit: nothing, for an hour."""
    counts = fresh()
    found = estimate(counts, periodic, wall=WALL + 3600, monotonic=3600.0, mode="occurrence")
    assert found.source == "occurrence"
    season = periodic.season[periodic.rows(counts.keys), 12:18]
    busy, quiet = season.min(axis=1) > 1e-3, season.max(axis=1) < 1e-5
    assert busy.any()
    assert found.chance(600)[busy].min() > 0.5
    assert found.chance(600)[quiet].max() < 0.1


def test_a_request_after_the_fit_raises_the_chance(periodic: Fitted):
    """A model that was just asked for is likelier to be asked again than one that was not."""
    counts = fresh()
    quiet = estimate(counts, periodic, wall=WALL + 1250, monotonic=1250.0, mode="occurrence").chance(600)
    row = int(quiet.argmin())
    counts.hit(counts.index(counts.keys[row]))
    assert (
        estimate(counts, periodic, wall=WALL + 1250, monotonic=1250.0, mode="occurrence").chance(600)[row] > quiet[row]
    )


def test_an_older_request_counts_less_than_one_just_now(periodic: Fitted):
    """Scenarios by idle windows: the chance of a model that is idle in its quiet hours falls again."""
    counts = fresh()
    row = int(estimate(counts, periodic, wall=WALL, monotonic=0.0, mode="occurrence").chance(3600).argmin())
    counts.hit(counts.index(counts.keys[row]))
    counts.roll(WALL + 30, 30.0)
    said = [
        estimate(counts, periodic, wall=WALL + at, monotonic=at, mode="occurrence").chance(600)[row]
        for at in (40.0, 2 * WINDOW + 40, 4 * WINDOW + 40)
    ]
    assert said[0] > said[1]


def test_beyond_the_tables_rates_speak_again(periodic: Fitted):
    """An hour and a half after the fit, chances that were worked out ahead are over."""
    counts = fresh()
    wall = WALL + AHEAD * WINDOW
    assert estimate(counts, periodic, wall=wall, monotonic=0.0, mode="occurrence").source == "blend"
    assert estimate(counts, periodic, wall=WALL - 700, monotonic=0.0, mode="occurrence").source == "blend"


def test_without_tables_rates_speak(periodic: Fitted):
    """Too little history for the regressions."""
    bare = replace(periodic, tables=MappingProxyType({}), memo={})
    assert estimate(fresh(), bare, wall=WALL, monotonic=0.0, mode="occurrence").source == "blend"


def test_a_new_model_has_chances_too(periodic: Fitted):
    """From its own last hour, or the fleet's prior."""
    counts = fresh()
    counts.hit(counts.index("new@1"))
    found = estimate(counts, periodic, wall=WALL + 5, monotonic=5.0, mode="occurrence")
    assert found.chance(3600)[counts.keys.index("new@1")] > 0.1


def test_chances_that_lost_to_the_frequency_are_not_used():
    """Days that are busy when the last one was silent: the held-out day says so, and rates speak."""
    past = daily(8, 10, hours=12)
    counts = counted({key: np.concatenate([seen[:-1440], np.roll(seen[-1440:], 720)]) for key, seen in past.items()})
    fitted = fit(counts.snapshot(), now=WALL, deadline=LONG, top=0)
    assert fitted.numbers["occurrence_0_1_brier"] > fitted.numbers["occurrence_0_1_climatology"]
    assert estimate(counts, fitted, wall=WALL, monotonic=0.0, mode="occurrence").source == "blend"


def test_a_second_look_in_a_window_says_what_a_first_one_would(periodic: Fitted):
    """Only models that were asked for meanwhile are looked up again, and those that the fit does not know."""
    counts = fresh()
    counts.index("stranger@1")
    random = np.random.default_rng(5)
    for step in range(1, 160):
        now = 10.0 * step
        for index in random.integers(0, len(counts.keys), 1 if step % 3 else 0).tolist():
            counts.hit(index)
        if step % 6 == 0:
            counts.roll(WALL + now, now)
        again = replace(periodic, memo={})
        one, two = (
            estimate(counts, fit, wall=WALL + now, monotonic=now, mode="occurrence") for fit in (periodic, again)
        )
        assert one.source == two.source == "occurrence"
        for name in ("rate", "evict_rate", "prefetch_rate", "next_use", "confidence", "hazards"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("source", ["blend", "occurrence"])
def test_left_to_itself_it_follows_the_choice_of_the_fit(periodic: Fitted, source: str):
    """`auto` serves what was cheaper in the backtest; a named source overrides it."""
    counts, fitted = fresh(), replace(periodic, source=source)
    assert estimate(counts, fitted, wall=WALL, monotonic=0.0).source == source
    assert estimate(counts, fitted, wall=WALL, monotonic=0.0, mode="auto").source == source
    assert estimate(counts, fitted, wall=WALL, monotonic=0.0, mode="blend").source == "blend"


@pytest.mark.parametrize("mode", ["blend", "occurrence"])
def test_a_demoted_model_follows_the_last_hour_and_earns_no_load(periodic: Fitted, mode: Way):
    """Whatever the source; the others notice nothing."""
    counts, key = fresh(), periodic.keys[3]
    before = estimate(counts, periodic, wall=WALL, monotonic=0.0, mode=mode)
    fallen = periodic.demoting({key})
    after = estimate(counts, fallen, wall=WALL, monotonic=0.0, mode=mode)
    plain = estimate(counts, None, wall=WALL, monotonic=0.0)
    row = counts.keys.index(key)
    assert after.source == mode
    assert after.prefetch_rate[row] == pytest.approx(plain.prefetch_rate[row], abs=1e-9)
    assert after.evict_rate[row] == pytest.approx(plain.evict_rate[row], abs=1e-9)
    others = np.arange(len(counts.keys)) != row
    np.testing.assert_array_equal(after.prefetch_rate[others], before.prefetch_rate[others])
    assert allowed(counts, periodic, wall=WALL)[row]
    assert not allowed(counts, fallen, wall=WALL)[row]
