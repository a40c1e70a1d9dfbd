"""Will it be asked for: features from the past only, a pooled regression, models in their first day."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.activity import Activity, Horizon
from forecasting.glm import _scored, _statsmodels, binomial, ridge
from forecasting.launch import LAUNCH_COLUMNS, fleet_shape, launch_features
from forecasting.occurrence import COLUMNS, Occurrence, features
from forecasting.odds import chance_of, expit, logit, rate_of
from forecasting.training import SHRUNK, Windows, fit, launch_sample, sample

HOUR = 3600.0
DAY = 24
WEEK = 7 * DAY
SOON, LATER = Horizon(0, 1), Horizon(6, 3)


def rolled(counts: np.ndarray, known: np.ndarray | None = None) -> Activity:
    """Hourly windows of a few models, from Monday midnight."""
    state = Activity(len(counts), HOUR, (1, 3))
    for now in range(counts.shape[1]):
        state.roll(now % WEEK, counts[:, now], None if known is None else known[:, now])
    return state


def habits(models: int, days: int, seed: int = 0) -> np.ndarray:
    """Clients that are active in their own working hours, most days."""
    rng = np.random.default_rng(seed)
    hour = np.arange(days * DAY) % DAY
    start = rng.integers(0, DAY, (models, 1))
    p = np.where((hour - start) % DAY < 6, rng.uniform(0.3, 0.95, (models, 1)), 0.01)
    return (rng.random((models, days * DAY)) < p) * rng.integers(1, 50, (models, days * DAY)).astype(float)


def column(name: str, x: np.ndarray) -> np.ndarray:
    """One of the 25."""
    return x[:, COLUMNS.index(name)]


# -- features ----------------------------------------------------------------------------------------


def test_there_are_25_columns_in_the_order_of_their_names() -> None:
    """11 base columns and 13 for onsets, with an intercept: 25, all finite even for a model that nobody ever saw."""
    x = features(rolled(np.zeros((3, 0))), SOON, 0)
    assert x.shape == (3, 25) == (3, len(COLUMNS))
    assert np.all(np.isfinite(x))


@given(st.integers(0, 2**32 - 1), st.sampled_from([SOON, LATER, Horizon(12, 1)]))
@settings(max_examples=20, deadline=None)
def test_no_feature_sees_its_own_future(seed: int, horizon: Horizon) -> None:
    """Whatever comes from now on, the features asked for now are the same."""
    rng = np.random.default_rng(seed)
    past = (rng.random((4, 9 * DAY)) < 0.3) * 5.0
    now = rolled(past)
    before = features(now, horizon, (9 * DAY) % WEEK)
    longer = np.concatenate((past, np.full((4, DAY), 7.0)), axis=1)
    state = Activity(4, HOUR, (1, 3))
    for window in range(longer.shape[1]):
        if window == 9 * DAY:
            np.testing.assert_array_equal(features(state, horizon, window % WEEK), before)
        state.roll(window % WEEK, longer[:, window])


def test_columns_say_what_their_names_say() -> None:
    """Checked by hand on one week: since, active, yesterday, last week, onset yesterday, 4-day share, volume."""
    counts = np.zeros((2, 8 * DAY))
    counts[0, [10, 7 * DAY - 14, 7 * DAY + 8]] = 3  # Monday 10:00, Sunday 10:00, Monday 8:00
    counts[1, -1] = 1
    state = rolled(counts[:, : 7 * DAY + 10])
    x = features(state, SOON, 7 * DAY % WEEK + 10)
    assert column("since", x)[0] == pytest.approx(math.log1p(1))
    assert column("active", x).tolist() == [0, 0]
    assert column("yesterday", x).tolist() == [1, 0]
    assert column("last_week", x).tolist() == [1, 0]
    assert column("onset_yesterday_idle", x).tolist() == [1, 0]
    assert column("since_over_day", x).tolist() == [0, 1]
    decay = 2.0 ** (-np.arange(7 * DAY + 10)[::-1] / (4 * DAY))
    share = decay[[10, 7 * DAY - 14, 7 * DAY + 8]].sum() / decay.sum()
    assert column("share_4d", x)[0] == pytest.approx(logit(np.array([share]), 0.0005)[0])
    recent = 2.0 ** (-np.arange(7 * DAY + 10)[::-1] / 3)
    volume = recent[[10, 7 * DAY - 14, 7 * DAY + 8]].sum() * math.log(4) / recent.sum() / 5
    assert column("volume", x)[0] == pytest.approx(volume)


def test_a_profile_smooths_three_slots_and_shrinks_to_the_share() -> None:
    """(.25 S- + .5 S + .25 S+ + .5 share) / (the same of exposure + .5), to the digit."""
    counts = np.zeros((1, 3 * DAY))
    counts[0, [10, DAY + 10, DAY + 11]] = 1
    state = rolled(counts)
    fade = 2.0**-0.25
    exposure = 1 + fade + fade**2
    at_10, at_11 = fade**2 + fade, fade
    share = float(state.share(2)[0])
    expected = (0.5 * at_10 + 0.25 * at_11 + 0.5 * share) / (exposure + 0.5)
    found = column("profile", features(state, Horizon(10, 1), 0))[0]
    assert found == pytest.approx(logit(np.array([expected]), 0.0005)[0], rel=1e-5)


def test_a_gap_in_what_is_known_is_not_an_idle_time() -> None:
    """Outages leave shares, profiles and gap lengths alone; only the time since the last request goes on."""
    rng = np.random.default_rng(1)
    counts = (rng.random((3, 6 * DAY)) < 0.5) * 1.0
    known = np.ones(counts.shape, bool)
    known[:, 60:100] = False
    wrong = counts.copy()
    wrong[:, 60:100] = 99
    one, other = rolled(counts, known), rolled(wrong, known)
    np.testing.assert_array_equal(features(one, LATER, 0), features(other, LATER, 0))
    assert one.gaps.counts[:, 38:].sum() == 0
    np.testing.assert_allclose(one.share(2), 0.5, atol=0.15)


def test_what_was_unknown_yesterday_is_taken_from_the_profile() -> None:
    """A missing memory is neither a yes nor a no."""
    counts = np.ones((1, 3 * DAY))
    known = np.ones(counts.shape, bool)
    known[:, 2 * DAY :] = False
    x = features(rolled(counts, known), SOON, 3 * DAY)
    assert 0.8 < column("yesterday", x)[0] <= 1
    assert column("yesterday", x)[0] == column("last_week", x)[0]


def test_state_prints_itself() -> None:
    """One line says how much is in it."""
    state = rolled(np.ones((2, 3)))
    assert repr(state) == "<Activity 2 models, window 3600 s, 2 active>"
    assert repr(state.gaps) == "<Gaps 2 models, 4 gaps up to 48>"


def test_some_models_are_rows_of_all() -> None:
    """Asking for a part gives the same numbers."""
    state = rolled(habits(6, 9))
    rows = np.array([4, 1])
    np.testing.assert_array_equal(features(state, LATER, 30, rows), features(state, LATER, 30)[rows])


@pytest.mark.parametrize("bad", [[-1.0], [math.nan], [math.inf], [1.0, 2.0]])
def test_counts_that_are_none_are_refused(bad: list[float]) -> None:
    """F-class input: negative, NaN, infinite or of the wrong length changes nothing."""
    state = Activity(1, HOUR)
    with pytest.raises(ValueError, match="counts"):
        state.roll(0, np.array(bad))
    assert state.age.tolist() == [0]


def test_windows_slots_and_horizons_are_checked() -> None:
    """Each impossible setting names itself."""
    with pytest.raises(ValueError, match="divide a day"):
        Activity(1, 7.5 * HOUR)
    with pytest.raises(ValueError, match="spans"):
        Activity(1, HOUR, (24,))
    with pytest.raises(ValueError, match="slot"):
        Activity(1, HOUR).roll(WEEK, np.zeros(1))
    with pytest.raises(ValueError, match="horizon"):
        Horizon(-1, 1)


# -- fitting -----------------------------------------------------------------------------------------


def test_scoring_finds_what_statsmodels_finds() -> None:
    """Rare answers, columns of very different size; a column that others make up is left to statsmodels."""
    rng = np.random.default_rng(11)
    x = np.column_stack([np.ones(4000), rng.normal(0, 1, (4000, 3)) * (1.0, 100.0, 1e-3), rng.random(4000) < 0.02])
    y = (rng.random(4000) < expit(x @ np.array([-4.0, 1.0, 0.01, 300.0, 2.0]))).astype(np.float64)
    found, wanted = _scored(x, y), _statsmodels(x, y)
    assert found is not None
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(binomial(x, y), found)
    double = np.column_stack([x, x[:, 1] + x[:, 0]])
    assert _scored(double, y) is None
    assert _scored(np.column_stack([x, np.zeros(4000)]), y) is None
    assert _scored(x, (x[:, 1] > 0).astype(np.float64)) is None


def test_the_ridge_agrees_with_statsmodels() -> None:
    """Without a ridge both are the same maximum of the same likelihood."""
    library: Any = importlib.import_module("statsmodels.api")
    rng = np.random.default_rng(2)
    x = np.concatenate((np.ones((3000, 1)), rng.normal(size=(3000, 4))), axis=1)
    y = (rng.random(3000) < expit(x @ np.array([-1.0, 0.5, -2.0, 0.0, 1.0]))).astype(float)
    theirs = library.GLM(y, x, family=library.families.Binomial()).fit().params
    np.testing.assert_allclose(ridge(x, y, strength=0.0), theirs, atol=1e-6)


def test_a_ridge_at_its_optimum_has_no_slope() -> None:
    """Rare answers and wide columns, where whole Newton steps run away: still the one maximum, and a smaller one."""
    rng = np.random.default_rng(5)
    x = np.concatenate((np.ones((4000, 1)), rng.normal(size=(4000, 6)) * [1, 8, 30, 1, 1, 60]), axis=1)
    y = (rng.random(4000) < expit(x @ np.array([-9.0, 2.0, 1.0, -0.2, 0.0, 1.0, 0.05]))).astype(float)
    for strength in (1.0, 30.0, 1000.0):
        weights = ridge(x, y, strength)
        slope = x.T @ (y - expit(x @ weights)) - strength * np.concatenate(([0.0], weights[1:]))
        assert np.abs(slope).max() < 1e-3
    assert np.abs(binomial(x, y, 0.01)[1:]).sum() < np.abs(ridge(x, y, 0.0)[1:]).sum()


def test_only_what_lies_ahead_is_drawn_to_zero() -> None:
    """The further ahead a horizon starts, the more, up to half a day; the next window is left alone."""
    counts = habits(20, 6)
    past = Windows(counts, np.ones(counts.shape, bool), np.arange(counts.shape[1]) % WEEK, HOUR)
    far = Horizon(18, 3)
    found = sample(past, [SOON, LATER, far], since=2 * DAY, rows=10**6)
    assert [found[h].shrunk for h in (SOON, LATER, far)] == [0.0, SHRUNK / 2, SHRUNK]
    rows, answers = np.concatenate(found[far].rows), np.concatenate(found[far].answers)
    plain, drawn = binomial(rows, answers), binomial(rows, answers, 100 * SHRUNK)
    assert np.abs(drawn[1:]).sum() < 0.9 * np.abs(plain[1:]).sum()
    assert np.array_equal(fit(found, binomial).known[far], binomial(rows, answers, SHRUNK))


@pytest.mark.parametrize("answers", [np.zeros(40), np.ones(40), (np.arange(40) >= 20).astype(float)])
def test_separable_answers_give_finite_coefficients(answers: np.ndarray) -> None:
    """Never, always, and perfectly told apart: no warning, no infinity, and the right side of one half."""
    x = np.stack((np.ones(40), np.linspace(-1, 1, 40)), axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = binomial(x, answers)
    assert np.all(np.abs(weights) < 100)
    assert np.mean((expit(x @ weights) > 0.5) == answers) > 0.9


def test_rows_that_are_none_are_refused() -> None:
    """NaN, answers that are no answers, nothing at all: a fault of ours, told as one."""
    with pytest.raises(ValueError, match="finite"):
        binomial(np.array([[1.0, math.nan]]), np.array([1.0]))
    with pytest.raises(ValueError, match="0 or 1"):
        binomial(np.ones((1, 2)), np.array([0.5]))
    with pytest.raises(ValueError, match="match"):
        binomial(np.ones((0, 2)), np.zeros(0))


def test_habits_are_learned_and_transfer_to_models_never_seen() -> None:
    """Fitted on other models, the forecast beats each model's own frequency by half and is calibrated."""
    counts = habits(40, 10)
    train = Windows(counts, np.ones(counts.shape, bool), np.arange(counts.shape[1]) % WEEK, HOUR)
    model = fit(sample(train, [SOON], since=DAY, rows=4000), binomial)
    fresh = habits(40, 10, seed=9)
    state = Activity(40, HOUR, (1, 3))
    p, came = [], []
    for now in range(fresh.shape[1]):
        if now >= 8 * DAY:
            p.append(model.chance(state, SOON, now % WEEK))
            came.append(fresh[:, now] > 0)
        state.roll(now % WEEK, fresh[:, now])
    stated, true = np.array(p), np.array(came)
    brier = float(((stated - true) ** 2).mean())
    assert brier < 0.5 * true.mean() * (1 - true.mean())
    assert abs(stated.mean() - true.mean()) < 0.02


def test_training_rows_are_what_serving_would_have_seen() -> None:
    """Each row equals the features at its instant, and each answer lies after it."""
    counts = habits(3, 4)
    past = Windows(counts, np.ones(counts.shape, bool), np.arange(counts.shape[1]) % WEEK, HOUR)
    pairs = sample(past, [LATER], since=2 * DAY, rows=10**6)[LATER]
    assert sum(map(len, pairs.answers)) == 3 * (2 * DAY - LATER.lead - LATER.span + 1)
    state = Activity(3, HOUR, (1, 3))
    for now in range(2 * DAY + 6):
        if now >= 2 * DAY:
            np.testing.assert_array_equal(pairs.rows[now - 2 * DAY], features(state, LATER, now % WEEK))
            came = (counts[:, now + 6 : now + 9] > 0).any(axis=1)
            np.testing.assert_array_equal(pairs.answers[now - 2 * DAY], came)
        state.roll(now % WEEK, counts[:, now])


def test_an_answer_that_is_not_wholly_known_is_no_training_row() -> None:
    """A gap in the target window gives no row at all."""
    counts = habits(2, 3)
    known = np.ones(counts.shape, bool)
    known[0, -30:] = False
    past = Windows(counts, known, np.arange(counts.shape[1]) % WEEK, HOUR)
    pairs = sample(past, [SOON], since=2 * DAY, rows=10**6)[SOON]
    assert sum(map(len, pairs.answers)) == DAY
    with pytest.raises(ValueError, match="do not match"):
        Windows(counts, known[:, 1:], np.arange(counts.shape[1]), HOUR)


# -- models in their first day -----------------------------------------------------------------------


def test_a_young_model_follows_the_launch_regression() -> None:
    """Until it is a day old the fleet's shape speaks for it; then its own columns do."""
    young = np.zeros(len(LAUNCH_COLUMNS))
    young[LAUNCH_COLUMNS.index("fleet")] = 1.0
    model = Occurrence({SOON: np.zeros(len(COLUMNS))}, {SOON: young})
    shape = np.where(np.arange(DAY) < 12, 0.6, 0.1)
    state = rolled(np.zeros((1, 5)))
    assert model.chance(state, SOON, 5, shape)[0] > 0.5 > model.chance(state, SOON, 20, shape)[0]
    grown = rolled(np.zeros((1, DAY)))
    assert model.chance(grown, SOON, 5, shape)[0] == 0.5


def test_launches_are_learned_from_the_first_days_of_others() -> None:
    """Trained on other models' first days, the forecast beats the fleet's frequency."""
    fleet, fresh = habits(60, 8), habits(40, 1, seed=4)
    state = rolled(fleet)
    shape = fleet_shape(state)
    first = Windows(fleet[:, :DAY], np.ones((60, DAY), bool), np.arange(DAY), HOUR)
    weights = fit({}, binomial, young=launch_sample(first, [SOON], shape)).young[SOON]
    new = Activity(40, HOUR, (1, 3))
    squared, base = [], []
    for now in range(DAY):
        p = expit(launch_features(new, SOON, now, shape, np.arange(40)) @ weights)
        squared.append((p - (fresh[:, now] > 0)) ** 2)
        base.append((shape[now] - (fresh[:, now] > 0)) ** 2)
        new.roll(now, fresh[:, now])
    assert np.mean(squared[2:]) < 0.8 * np.mean(base[2:])


def test_the_shape_of_an_empty_fleet_is_a_guess() -> None:
    """Nothing seen: one half everywhere."""
    assert fleet_shape(Activity(0, HOUR)).tolist() == [0.5] * DAY


# -- keeping it --------------------------------------------------------------------------------------


def test_coefficients_survive_as_plain_arrays() -> None:
    """What is persisted restores to the same forecast."""
    rng = np.random.default_rng(0)
    model = Occurrence({LATER: rng.normal(size=25)}, {SOON: rng.normal(size=10)})
    other = Occurrence.restore(model.arrays())
    np.testing.assert_array_equal(other.known[LATER], model.known[LATER])
    np.testing.assert_array_equal(other.young[SOON], model.young[SOON])


def test_a_state_survives_as_plain_arrays() -> None:
    """Restored, it forecasts and rolls on as if nothing had happened."""
    counts = habits(4, 9)
    state, other = rolled(counts), Activity(4, HOUR, (1, 3))
    other.restore({name: array.copy() for name, array in state.arrays().items()})
    state.gaps.refresh(np.arange(4), state.share(2))
    for now in range(3):
        np.testing.assert_array_equal(features(other, LATER, 48 + now), features(state, LATER, 48 + now))
        for each in (state, other):
            each.roll(48 + now, counts[:, now])


@pytest.mark.parametrize("name", ["slots", "ring", "gaps", "since", "profile/3"])
def test_a_persisted_state_that_is_damaged_changes_nothing(name: str) -> None:
    """Missing, misshapen, negative or not finite: refused by name, and the state stays as it was."""
    good = rolled(habits(2, 2)).arrays()
    state = Activity(2, HOUR, (1, 3))
    damaged = [
        {key: array for key, array in good.items() if key != name},
        {**good, name: good[name][..., :1]},
        {**good, name: good[name].astype(float) - 1e9},
        {**good, name: np.full(good[name].shape, math.nan)},
    ]
    for arrays in damaged:
        with pytest.raises(ValueError, match=name):
            state.restore(arrays)
    assert not state.age.any()


def test_models_come_and_go() -> None:
    """Taking some keeps their forecasts to the digit; a new one starts from nothing."""
    state = rolled(habits(5, 9))
    other = state.take(np.array([3, -1, 0]))
    before = features(state, LATER, 48)
    after = features(other, LATER, 48)
    np.testing.assert_array_equal(after[[0, 2]], before[[3, 0]])
    np.testing.assert_array_equal(after[1], features(Activity(1, HOUR, (1, 3)), LATER, 48)[0])


@pytest.mark.parametrize(
    "arrays",
    [
        {"known/0/1": np.zeros(24)},
        {"known/0/1": np.full(25, math.nan)},
        {"young/0/1": np.full(10, 1e400)},
        {"known/0": np.zeros(25)},
        {"known/-1/1": np.zeros(25)},
        {"../../etc/0/1": np.zeros(25)},
    ],
)
def test_an_absurd_fit_is_refused(arrays: dict[str, np.ndarray]) -> None:
    """Wrong width, NaN, infinity or an unknown name from a fitter never reaches serving."""
    with pytest.raises(ValueError, match=r"coefficients|horizon"):
        Occurrence.restore(arrays)


@given(st.floats(0, 1), st.floats(1, 1e6))
def test_chances_and_rates_are_two_spellings_of_one_thing(p: float, within: float) -> None:
    """-ln(1 - p)/t and back; certainty stays finite."""
    rate = rate_of(np.array([p]), within)
    assert np.all(np.isfinite(rate))
    assert chance_of(rate, within)[0] == pytest.approx(p, abs=1e-8)


def test_a_rate_needs_a_duration() -> None:
    """No time, no rate."""
    with pytest.raises(ValueError, match="within"):
        rate_of(np.array([0.5]), 0.0)
