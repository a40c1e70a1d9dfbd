"""Promises of the candidates and of how they are weighed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.backtest import past_origins, roll, weighed
from forecasting.candidates import NAIVE_DAY, NAIVE_WEEK, Forecasts, candidates, groups, slot_sums
from forecasting.choose import Trials, admit, band_of, losses, middle, mix
from tests.forecasting.panels import panel, wave

HOURS = 24


def trials(said: dict[str, float], came: float = 10.0, *, origins: int = 6, models: int = 1) -> Trials:
    """Candidates that always say the same number, on hourly buckets a day ahead."""
    names = tuple(said)
    shape = (models, origins, len(names), HOURS)
    values = np.broadcast_to(np.array([*said.values()])[None, None, :, None], shape).copy()
    truth = np.full((models, origins, HOURS), came)
    return Trials(names, values, truth, np.ones(truth.shape, np.bool_), 3600.0)


PLAIN = {"hier": 12.0, NAIVE_DAY: 14.0, NAIVE_WEEK: 18.0}


def test_bands_end_at_one_and_six_hours() -> None:
    """The first hour, the next five, the rest; longer horizons belong to the last band."""
    assert band_of(30, 3600.0).tolist() == [0] + [1] * 5 + [2] * 24
    assert band_of(8, 900.0).tolist() == [0] * 4 + [1] * 4


def test_weights_follow_the_cubed_loss() -> None:
    """(loss + 2 % of the mean) ** -3, to the digit."""
    raw = np.array([2.2, 4.2, 8.2]) ** -3
    made = mix(trials(PLAIN))
    assert made.weights[0, :, 1] == pytest.approx(raw / raw.sum(), rel=1e-6)
    assert not made.guarded.any()


def test_weights_add_up_and_use_one_variant_per_family() -> None:
    """Variants differ by a half-life only: together they would outvote the rest."""
    made = mix(trials({**PLAIN, "level/1h": 11.0, "level/6h": 11.5}))
    assert made.weights.sum(axis=1) == pytest.approx(1.0)
    assert made.weights[0, 4].max() == 0
    assert groups(made.names)[3:] == ("level", "level")
    assert "level/6h" not in made.explain(0)


def test_the_guard_repeats_yesterday_where_the_mixture_lost() -> None:
    """Never worse than the seasonal naive in its own backtest (goal 6)."""
    equals = ("hier", "level/1h", "median", "typical/1h", "hier+lvl/1h")
    lost = trials({**dict.fromkeys(equals, 20.5), NAIVE_DAY: 20.0, NAIVE_WEEK: 31.0})
    made = mix(lost)
    assert made.guarded.all()
    assert made.weights[0, lost.names.index(NAIVE_DAY)].tolist() == [1.0, 1.0, 1.0]
    assert (made.loss == made.naive).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_guard_holds_for_any_trials(seed: int) -> None:
    """Whatever was said and came: weights sum to one, losses never exceed the naive one's."""
    draw = np.random.default_rng(seed)
    names = ("hier", "hier+lvl/1h", NAIVE_DAY, NAIVE_WEEK, "median")
    said = draw.lognormal(1, 2, (12, 4, len(names), HOURS))
    said[draw.random(said.shape) < 0.3] = np.nan
    judged = draw.random((12, 4, HOURS)) < 0.7
    made = mix(
        Trials(names, said, draw.poisson(3.0, (12, 4, HOURS)).astype(float), judged, 3600.0),
        kinds=np.zeros(12, np.int64),
    )
    assert made.weights.sum(axis=1) == pytest.approx(1.0)
    assert (made.loss <= made.naive + 1e-9).all()


def test_without_any_outcome_the_profile_is_alone() -> None:
    """Nothing judged, nothing to weigh by."""
    empty = trials(PLAIN)
    empty = Trials(empty.names, empty.said, empty.came, np.zeros_like(empty.judged), empty.bucket)
    assert mix(empty).weights[0, 0].tolist() == [1.0, 1.0, 1.0]


def test_an_unjudged_band_borrows_from_the_others() -> None:
    """Young origins know only their first hours; the far band then ranks by what is known."""
    early = trials(PLAIN)
    early.judged[:, :, 6:] = False
    made = mix(early)
    assert made.weights[0, 0, 2] == pytest.approx(made.weights[0, 0, 1], rel=1e-6)


def test_younger_origins_weigh_more() -> None:
    """A candidate that failed long ago beats one that fails now."""
    now = trials({**PLAIN, "a": 10.0, "b": 10.0})
    now.said[:, 0, 3] = 40.0
    now.said[:, -1, 4] = 40.0
    loss, _ = losses(now)
    assert loss[0, 4, 1] == pytest.approx(loss[0, 3, 1] * 0.85**5, rel=1e-6)


def test_a_candidate_that_seldom_answers_is_untested() -> None:
    """A forecast for a few buckets is no forecast of the day."""
    some = trials(PLAIN)
    some.said[:, :, 2, :13] = np.nan
    assert np.isnan(losses(some)[0][0, 2]).all()
    assert mix(some).weights[0, 2].max() == 0


def test_classes_share_what_they_learned() -> None:
    """A model whose few outcomes favour a bad candidate is drawn to what its class found; a lone one is not."""
    many = trials({**PLAIN, "median": 10.0}, models=12)
    many.said[0, :, 3] = 12.5
    alone = mix(many).weights[0, 3, 1]
    assert mix(many, kinds=np.zeros(12, np.int64)).weights[0, 3, 1] > 1.5 * alone
    assert mix(many, kinds=np.arange(12, dtype=np.int64)).weights[0, 3, 1] == pytest.approx(alone)


def test_the_centre_is_a_weighted_median() -> None:
    """Half of the weight decides, the mean is something else."""
    said = np.array([[[0.0], [1.0], [100.0]]])
    assert middle(said, np.array([[[0.3], [0.3], [0.4]]])).tolist() == [[1.0]]
    assert middle(said, np.array([[[0.6], [0.0], [0.4]]])).tolist() == [[0.0]]


def test_weights_refuse_other_candidates() -> None:
    """Weights are for the candidates they were made from."""
    made = mix(trials(PLAIN))
    with pytest.raises(ValueError, match="the others for"):
        made.where(np.ones(1, np.bool_), mix(trials({**PLAIN, "mstl": 1.0})))
    with pytest.raises(ValueError, match="weights are for"):
        made.of(Forecasts(("hier",), np.ones((1, 1, 3))), 3600.0)


def test_absurd_answers_never_leave_the_mixture() -> None:
    """NaN falls back to the profile, infinity and minus one never reach a rate."""
    made = mix(trials(PLAIN))
    values = np.array([[[1.0] * 3, [np.nan, np.inf, -50.0], [1.0] * 3]])
    for result in (made.of(Forecasts(made.names, values), 3600.0), made.centre(Forecasts(made.names, values), 3600.0)):
        assert np.isfinite(result).all()
        assert (result >= 0).all()


def test_a_specialist_needs_margin_origins_and_weekdays() -> None:
    """5 % better than hier+lvl, six origins, two of them on other weekdays: each alone is not enough."""
    days = np.array([0, 0, 0, 0, 1, 2])
    rivals = {**PLAIN, "hier+lvl/1h": 12.0, "hier+lvl/5m": 13.0}
    assert admit(trials({**rivals, "mstl": 11.9}), days, "mstl").tolist() == [True]
    assert admit(trials({**rivals, "mstl": 11.95}), days, "mstl").tolist() == [False]
    assert admit(trials({**rivals, "mstl": 10.0}, origins=5), days[1:], "mstl").tolist() == [False]
    assert admit(trials({**rivals, "mstl": 10.0}), np.array([0, 0, 0, 0, 0, 2]), "mstl").tolist() == [False]
    silent = trials({**rivals, "mstl": 10.0})
    silent.said[:, 2, 5] = np.nan
    assert admit(silent, days, "mstl").tolist() == [False]


def test_candidates_see_nothing_after_their_origin() -> None:
    """The future may be anything: forecasts stay bit for bit the same."""
    counts = wave(21)
    origin = 15 * 24
    other = counts.copy()
    other[:, origin:] = 1e6
    made = [candidates(panel(one), next(iter(slot_sums(panel(one), [origin]))), 24) for one in (counts, other)]
    assert np.array_equal(made[0].values, made[1].values, equal_nan=True)


def test_sums_step_by_step_equal_sums_at_once() -> None:
    """Reading history once for many origins changes nothing."""
    data = panel(wave(15))
    direct = next(iter(slot_sums(data, [350])))
    *_, stepped = slot_sums(data, [20, 100, 350])
    assert stepped.counts == pytest.approx(direct.counts)
    assert stepped.passes == pytest.approx(direct.passes)


def test_naive_candidates_repeat_what_they_should() -> None:
    """A day and a week back, NaN in gaps and before the history."""
    counts = np.arange(24.0 * 10)[None]
    known = np.ones(counts.shape, np.bool_)
    known[0, 24 * 9 + 3] = False
    data = panel(counts, known=known)
    made = candidates(data, next(iter(slot_sums(data, [240]))), 24)
    assert made.of(NAIVE_DAY)[0, 5] == 24 * 9 + 5
    assert np.isnan(made.of(NAIVE_DAY)[0, 3])
    assert made.of(NAIVE_WEEK)[0, 5] == 24 * 3 + 5
    early = candidates(data, next(iter(slot_sums(data, [48]))), 24)
    assert np.isnan(early.of(NAIVE_WEEK)).all()
    assert np.isnan(early.of("harm+lvl/slow")).all()


def test_the_mixture_beats_the_naive_on_a_weekly_wave() -> None:
    """End to end: on clean weekly traffic the mixture halves the naive error over a weekend's start."""
    data = panel(wave(29))
    origin = 26 * 24  # a Saturday midnight: yesterday misleads
    past = past_origins(origin, 3600.0)
    rolled = roll(data, (origin, *past), 24)
    said = weighed(rolled, origin, past=past).centre(rolled.at[origin], 3600.0)
    truth = data.counts[:, origin : origin + 24]
    assert np.abs(said - truth).mean() < 0.5 * np.abs(rolled.at[origin].of(NAIVE_DAY) - truth).mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bucket": 7000.0}, "bucket must divide a day"),
        ({"phase": np.array([9999])}, "phase must lie"),
        ({"counts": np.array([[-1.0]])}, "counts must be finite"),
        ({"counts": np.array([[np.nan]])}, "counts must be finite"),
        ({"counts": np.ones(3)}, "must both be"),
    ],
)
def test_hostile_panels_are_refused(change: dict[str, object], message: str) -> None:
    """Each fault names its field."""
    good = {"counts": np.ones((1, 1)), "known": np.ones((1, 1), np.bool_), "phase": np.zeros(2, np.int64)}
    with pytest.raises(ValueError, match=message):
        type(panel(np.ones(24)))(**{**good, "bucket": 3600.0, "per_day": 24, **change})


def test_activity_is_a_share_of_known_hours() -> None:
    """Hours in a gap count on neither side; before the first hour nothing is active."""
    counts = np.tile([1.0, 0.0, 5.0, 0.0], 12)[None]
    known = np.ones(counts.shape, np.bool_)
    known[0, 1::4] = False
    data = panel(counts, known=known)
    assert data.active(48)[0] == pytest.approx(2 / 3)
    assert data.active(0).tolist() == [0.0]


def test_an_origin_without_a_past_forecasts_nothing() -> None:
    """Zero history gives zero sums and finite or missing answers, never an error."""
    data = panel(wave(2))
    sums = next(iter(slot_sums(data, [0])))
    assert sums.counts.sum() == 0
    made = candidates(data, sums, 24)
    assert made.of("hier").max() == 0
    assert np.isnan(made.of("level/1h")).all()
