"""One round of fitting: what it finds, when it stops, and that nothing which can be counted makes it fail."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.calendar import zone_of
from forecasting.counts import Counts
from forecasting.drift import noise_gate
from forecasting.fit import Sizes, fit
from forecasting.fitted import MOST_RATE, MOST_SLOT, Fitted
from forecasting.ladder import Confidence
from forecasting.onebyone import coverage, fleet_gate
from forecasting.pooled import some_of
from forecasting.week import narrow
from tests.forecasting.fleets import END, counted, daily, noise

if TYPE_CHECKING:
    from forecasting.snapshot import Snapshot

LONG = 1e6


@pytest.fixture(scope="module")
def periodic() -> Fitted:
    """16 models with a daily peak, 16 days; specialists are left out."""
    return fit(counted(daily(16, 16)).snapshot(), now=60.0 * END, deadline=LONG, specialists=False)


@pytest.fixture(scope="module")
def poisson() -> Fitted:
    """60 models of pure Poisson noise, 9 days."""
    return fit(counted(noise(60, 9)).snapshot(), now=60.0 * END, deadline=LONG, top=0)


def checked(fitted: Fitted) -> Fitted:
    """Through the checks that an answer of the fitting worker goes through."""
    return Fitted.from_arrays(fitted.to_arrays())


def short(snapshot: Snapshot, **how: float) -> Fitted:
    """A fit that must come through the checks whole."""
    return checked(fit(snapshot, now=snapshot.at, deadline=how.get("deadline", LONG), specialists=False))


# -- what it finds -----------------------------------------------------------------------------------


def test_pure_noise_switches_learned_loads_off(poisson: Fitted):
    """The gate says no for the fleet when nothing can be learned, whatever luck single models had."""
    assert poisson.complete
    assert not poisson.skill
    assert poisson.skilled.mean() < 0.05


def test_a_daily_peak_switches_them_on(periodic: Fitted):
    """The gate says yes for the fleet and for nearly every model, and seasons say what to keep."""
    assert periodic.skill
    assert periodic.schedule
    assert periodic.skilled.mean() > 0.9
    assert periodic.saved.min() > 0.3


def test_the_blend_of_a_daily_fleet_lives_on_seasons(periodic: Fitted):
    """Most of the weight is on rates at the same time of earlier days."""
    blend = periodic.blend()
    assert blend["s_week"] + blend["s_yesterday"] + blend["s_week_ago"] + blend["ttn"] > 0.6


def test_the_profile_of_a_daily_model_is_high_when_it_is_busy(periodic: Fitted):
    """Its busiest slots of the week hold nearly all of its requests."""
    profile = np.sort(periodic.profile, axis=1)[:, ::-1]
    busy = profile[:, : 3 * 4 * 7 + 14].sum(axis=1) / profile.sum(axis=1)
    assert busy.min() > 0.9


def test_the_next_use_of_a_daily_model_is_within_a_day(periodic: Fitted):
    """From every instant of the next 24 hours its next peak is less than a day away."""
    assert periodic.use.max() <= 86_400.0
    assert periodic.use.min() < 1800.0


def test_occurrence_is_judged_on_the_day_held_out(periodic: Fitted):
    """It beats the observed frequency by far, and is calibrated."""
    numbers = periodic.numbers
    assert numbers["occurrence_0_6_brier"] < 0.3 * numbers["occurrence_0_6_climatology"]
    assert numbers["occurrence_0_6_ece"] < 0.05
    assert periodic.tables["coefficients"].shape == (4, 25)
    assert periodic.tables["reliability"][:, 0].sum() == numbers["occurrence_0_1_judged"]


def test_the_busiest_get_a_forecast_of_their_own(periodic: Fitted):
    """The mixture's next day is there for them, with weights that add up to one."""
    rows = periodic.tables["ahead_rows"]
    assert sorted(rows.tolist()) == list(range(16))
    assert np.allclose(periodic.tables["mix"].sum(axis=1), 1, atol=1e-3)
    assert periodic.tables["ahead"].sum(axis=1).min() > 5


def test_confidence_grows_with_history_and_skill(periodic: Fitted, poisson: Fitted):
    """Two good weeks earn a better word than noise does."""
    assert Confidence.HIGH in {periodic.word(row) for row in range(16)}
    assert {poisson.word(row) for row in range(60)} <= {Confidence.LOW, Confidence.MEDIUM}


def test_cpu_seconds_are_told_by_part(periodic: Fitted):
    """Whoever pays wants to know for what."""
    spent = {name for name in periodic.numbers if name.startswith("cpu_")}
    assert spent == {"cpu_blend", "cpu_occurrence", "cpu_read", "cpu_models", "cpu_chances", "cpu_ahead"}


def test_arrays_bring_back_the_same_fit(periodic: Fitted):
    """Nothing is lost between two processes."""
    other = checked(periodic)
    assert other.keys == periodic.keys
    assert other.numbers == periodic.numbers
    for name, array in periodic.to_arrays().items():
        assert np.array_equal(other.to_arrays()[name], array), name


def test_a_week_of_local_days_survives_the_change_of_clocks():
    """F71: a peak at the same local time, over the end of summer time, is one peak and not two."""
    zone = zone_of("Europe/Berlin")
    end = 1_761_868_800 // 60  # 2025-10-31 00:00 UTC, five days after the change
    minute = np.arange(10 * 1440) + end - 10 * 1440
    change = 1_761_440_400 // 60
    local = (minute + np.where(minute < change, 120, 60)) % 1440
    busy = ((local >= 600) & (local < 660)).astype(np.int64)
    fitted = short(counted({"m@1": busy}, zone=zone, end=end).snapshot())
    # 24 h from 01:00 local time on: the peak begins nine hours later.
    peak = np.flatnonzero(fitted.season[0] > 0.5 * fitted.season[0].max())
    assert peak.min() >= 9 * 12 - 4
    assert peak.max() <= 10 * 12 + 2


# -- when it stops -----------------------------------------------------------------------------------


def ticking(steps: list[float]):
    """A clock that gives these seconds one after the other, and then the last one for ever."""
    return lambda: steps.pop(0) if len(steps) > 1 else steps[0]


def test_without_time_it_gives_an_empty_fit_that_says_so():
    """A deadline of nothing is not an error."""
    fitted = short(counted(daily(3, 3)).snapshot(), deadline=0.0)
    assert not fitted.complete
    assert fitted.keys == ()
    assert not fitted.skill


@pytest.mark.parametrize("looks", range(1, 7))
def test_it_stops_between_parts_wherever_time_runs_out(looks: int):
    """What is done by then is whole: all arrays belong to the same models."""
    snapshot = counted(daily(3, 3)).snapshot()
    clock = ticking([0.0] * (looks + 1) + [10.0])
    fitted = checked(fit(snapshot, now=snapshot.at, deadline=5.0, clock=clock, specialists=False))
    assert not fitted.complete
    assert len(fitted.keys) in {0, 3}
    assert len(fitted.profile) == len(fitted.keys)


def test_models_come_in_chunks():
    """A fit of several chunks equals that of one, and a deadline in between keeps the chunks that are done."""
    snapshot = counted(daily(7, 3)).snapshot()
    whole = short(snapshot)
    parts = fit(snapshot, now=snapshot.at, deadline=LONG, specialists=False, sizes=Sizes(2, 4))
    assert parts.keys == whole.keys
    assert np.array_equal(parts.profile, whole.profile)
    assert np.array_equal(parts.use, whole.use)
    clock = ticking([0.0] * 8 + [10.0])
    cut = checked(fit(snapshot, now=snapshot.at, deadline=5.0, clock=clock, sizes=Sizes(2, 4)))
    assert not cut.complete
    assert cut.keys == whole.keys[: len(cut.keys)]
    assert 0 < len(cut.keys) < 7


# -- what it must survive ----------------------------------------------------------------------------


@pytest.mark.parametrize("days", [0, 1, 2, 5])
def test_short_histories_are_fitted_as_far_as_they_reach(days: int):
    """A new installation is served, with little confidence and without learned loads."""
    fitted = short(counted(daily(4, days)).snapshot())
    assert fitted.complete
    assert len(fitted.keys) == 4
    assert not (days < 2 and fitted.skill)
    assert {fitted.word(row) for row in range(4)} <= {Confidence.PRIOR, Confidence.LOW}


def test_no_model_at_all_is_no_error():
    """An empty server fits nothing."""
    fitted = short(Counts(60.0 * END, 0.0, zone=UTC).snapshot())
    assert fitted.complete
    assert fitted.keys == ()
    assert not fitted.prior.any()


def test_a_fleet_without_a_request_expects_none():
    """Six silent days say: never."""
    counts = counted({"loud@1": np.ones(6 * 1440, np.int64)})
    for row in range(3):
        counts.index(f"silent-{row}@1")
    snapshot = counts.snapshot()
    fitted = short(some_of(snapshot, np.array([1, 2, 3])))
    assert np.isinf(fitted.use).all()
    assert not fitted.season.any()
    assert not fitted.skill


def test_one_huge_spike_is_cut(poisson: Fitted):
    """F72: 10^9 requests in a minute give no rate beyond what is possible, and no other model suffers."""
    fleet = noise(8, 6)
    fleet["noise-0@1"][3000] = 10**9
    fitted = short(counted(fleet).snapshot())
    assert fitted.profile.max() <= MOST_SLOT
    assert fitted.season.max() <= MOST_RATE
    assert np.isfinite(fitted.profile).all()
    assert len(fitted.keys) == len(fleet)
    assert poisson.complete


def poisoned(snapshot: Snapshot, value: float) -> Snapshot:
    """The same with a number in its sums and counters that nobody can have counted."""
    week = snapshot.week.freeze()
    column, _ = week.column(5, len(snapshot.table))
    column[0] = value
    week.sums[5] = narrow(column)
    decayed = snapshot.decayed.copy()
    decayed[:, 0] = value
    return replace(snapshot, week=week, decayed=decayed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -5.0, 1e9, 1e38])
def test_impossible_sums_are_cut_and_flagged(value: float):
    """F71, F72: the model with NaN, negative or absurd sums is flagged; the others are as without it."""
    snapshot = counted(daily(4, 9)).snapshot()
    fitted = short(poisoned(snapshot, value))
    assert fitted.absurd.tolist() == [True, False, False, False]
    assert np.array_equal(fitted.profile[1:], short(snapshot).profile[1:])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 3, 1000, 10**9, 2**40]), min_size=1, max_size=40), min_size=1, max_size=3)
)
def test_nothing_that_can_be_counted_makes_it_fail(shapes: list[list[int]]):
    """Whatever the counts: no exception, no NaN, nothing negative, nothing beyond the limits."""
    fleet = {f"m{row}@1": np.resize(np.array(shape, np.int64), 2 * 1440) for row, shape in enumerate(shapes)}
    fitted = short(counted(fleet).snapshot())
    assert fitted.complete


# -- the gate and the intervals ----------------------------------------------------------------------


def test_the_fleet_passes_by_the_share_of_models_that_did():
    """Few days alone can't prove it for the fleet as one, but many models that agree can."""
    losses = np.full((2, 40, 7), np.nan)
    losses[1, :, :3], losses[0, :, :3] = 10.0, 5.0
    assert not noise_gate(losses[0, :1], losses[1, :1]).fleet
    assert fleet_gate(losses, np.ones(40, np.bool_))
    assert not fleet_gate(losses, np.zeros(40, np.bool_))


def test_a_fleet_that_nobody_asked_has_no_skill():
    """Nothing judged, nothing proved."""
    assert not fleet_gate(np.full((2, 3, 7), np.nan), np.zeros(3, np.bool_))


def test_coverage_needs_days_that_are_known():
    """A model of unknown days has no coverage; one that repeats itself is covered."""
    snapshot = counted(daily(2, 9)).snapshot()
    month = snapshot.history(900)
    month.known[0] = False
    found = coverage(month, np.ones((2, 672)), UTC)
    assert np.isnan(found[:, 0]).all()
    assert (found[:, 1] > 0.6).all()


def test_coverage_of_nobody_is_nothing():
    """A chunk in which no model has known days."""
    month = counted(daily(1, 9)).snapshot().history(900)
    month.known[:] = False
    assert np.isnan(coverage(month, np.ones((1, 672)), UTC)).all()


def test_some_models_of_a_snapshot_keep_their_own_births():
    """A model that was forgotten leaves a hole in the indices; histories of the others stay theirs."""
    counts = counted(daily(3, 2))
    counts.forget(counts.keys[0])
    snapshot = counts.snapshot()
    whole = snapshot.history(900)
    last = some_of(snapshot, np.array([1])).history(900)
    assert np.array_equal(last.counts[0], whole.counts[1])
    assert np.array_equal(last.known[0], whole.known[1])


def test_chances_that_were_not_finished_are_left_out():
    """A table for some of the models only would be looked up for the others."""
    snapshot = counted(daily(2, 6)).snapshot()
    fitted = checked(fit(snapshot, now=snapshot.at, deadline=5.0, clock=ticking([0.0] * 6 + [10.0]), top=0))
    assert len(fitted.keys) == 2
    assert "coefficients" in fitted.tables
    assert "chances" not in fitted.tables


def test_specialists_that_earn_it_may_speak_for_the_busiest():
    """17 days of a smooth daily curve: specialists are fitted and judged, and a forecast comes out whole."""
    minute = np.arange(17 * 1440)
    wave = np.rint(20 + 15 * np.sin(2 * np.pi * minute / 1440)).astype(np.int64)
    snapshot = counted({"wave@1": wave}).snapshot()
    fitted = checked(fit(snapshot, now=snapshot.at, deadline=LONG, top=1))
    ahead = fitted.tables["ahead"][0]
    truth = 15 * (20 + 15 * np.sin(2 * np.pi * (np.arange(96) * 15 + 7) / 1440))
    assert np.abs(ahead - truth).mean() < 15
