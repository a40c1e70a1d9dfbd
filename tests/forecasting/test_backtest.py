"""Promises of rolling evaluation and of its bounded, staggered cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.backtest import (
    TURNS,
    activity_class,
    coverage,
    due,
    geometric,
    past_origins,
    pinball,
    residuals,
    roll,
    score,
    turn_of,
    weighed,
)
from tests.forecasting.panels import panel, wave

if TYPE_CHECKING:
    from forecasting.profile import Floats


def test_origins_go_back_in_steps_of_seven_hours() -> None:
    """Newest first, only those with history before them."""
    assert past_origins(100, 3600.0, count=3) == (93, 86, 79)
    assert past_origins(10, 3600.0) == (3,)
    assert past_origins(5, 3600.0) == ()


def test_only_what_is_over_is_judged() -> None:
    """An origin seven hours ago has seven outcomes, and gaps are none."""
    counts = wave(15)
    known = np.ones(counts.shape, np.bool_)
    known[0, 295] = False
    data = panel(counts, known=known)
    rolled = roll(data, (300, 293, 200), 24)
    trials = rolled.trials(300, (293, 200))
    assert trials.judged[0, 0].tolist() == [True, True, False] + [True] * 4 + [False] * 17
    assert trials.judged[0, 1].all()
    assert trials.came[0, 0, 0] == counts[0, 293]


def test_a_specialist_that_proved_itself_stands_alone() -> None:
    """Admitted, its forecast is used undiluted; without proof it has no weight at all."""
    data = panel(wave(29, seed=3))

    def oracle(origin: int, horizon: int) -> Floats:
        return data.counts[:, origin : origin + horizon]

    origin = 26 * 24
    past = past_origins(origin, 3600.0)
    proof = tuple(origin - 25 * k for k in range(1, 8))
    rolled = roll(data, (origin, *past, *proof), 24, {"mstl": oracle})
    column = rolled.at[origin].names.index("mstl")
    assert weighed(rolled, origin, past=past).weights[0, column].max() == 0
    assert weighed(rolled, origin, past=past, admission=proof).weights[0, column].tolist() == [1, 1, 1]


def test_scores_by_hand() -> None:
    """Mean absolute errors over known buckets, per band and overall, relative to the naive ones."""
    data = panel(np.full((1, 48), 10.0))
    data.known[0, 25] = False
    said, naive = np.full((1, 24), 12.0), np.full((1, 24), 14.0)
    said[0, 1] = 1e6  # in the gap
    result = score(data, {24: said}, {24: naive})
    assert result.relative.tolist() == [0.5]
    assert result.geometric() == pytest.approx(0.5)
    assert result.geometric_band(1) == pytest.approx(0.5)


def test_a_naive_gap_costs_nobody() -> None:
    """Where the naive forecast has no answer both get the same error."""
    data = panel(np.full((1, 48), 10.0))
    naive = np.full((1, 24), 12.0)
    naive[0, :12] = np.nan
    assert score(data, {24: np.full((1, 24), 11.0)}, {24: naive}).relative[0] == pytest.approx(24 / 36)


def test_geometric_means_resist_perfection() -> None:
    """One perfect series counts as a tenth, NaN as nothing."""
    assert geometric(np.array([1.0, 0.0, np.nan])) == pytest.approx(0.1**0.5)
    assert np.isnan(geometric(np.array([np.nan])))


def test_quantile_loss_and_coverage_by_hand() -> None:
    """Too low costs the level, too high its complement; the interval is closed."""
    assert pinball(np.array([10.0]), np.array([[8.0, 12.0]]), (0.9, 0.5)).tolist() == [pytest.approx(1.8 + 1.0)]
    truth = np.array([1.0, 2.0, 3.0, 4.0])
    assert coverage(truth, np.full(4, 2.0), np.full(4, 3.0)) == 0.5
    assert np.isnan(coverage(truth[:0], truth[:0], truth[:0]))


def test_residuals_skip_what_was_not_judged() -> None:
    """Log1p gaps, NaN elsewhere."""
    data = panel(wave(15))
    trials = roll(data, (300, 293), 24).trials(300, (293,))
    made = residuals(trials, trials.said[:, :, 0])
    assert np.isnan(made[0, 7:]).all()
    assert made[0, 0] == pytest.approx(np.log1p(trials.came[0, 0, 0]) - np.log1p(trials.said[0, 0, 0, 0]))


def test_classes_begin_where_the_glossary_says() -> None:
    """Dense from .9, intermittent from .3."""
    assert activity_class(np.array([1.0, 0.9, 0.89, 0.3, 0.29])).tolist() == [0, 0, 1, 1, 2]


def test_every_model_has_one_turn_a_week() -> None:
    """All hours of a week together visit each model exactly once, without bunching."""
    keys = [f"m{i}@1" for i in range(2000)]
    turns = [due(keys, hour, cost=0.1, budget=1e9)[0] for hour in range(TURNS)]
    assert sorted(key for turn in turns for key in turn) == sorted(keys)
    assert max(map(len, turns)) < 3 * 2000 / TURNS + 10
    assert turn_of("m1@1") == turn_of("m1@1")


@given(st.integers(1, 40), st.floats(0.05, 3), st.floats(0.1, 5))
def test_a_turn_never_exceeds_its_budget(models: int, cost: float, budget: float) -> None:
    """Count times cost stays within the budget; what does not fit is counted, not dropped silently."""
    keys = [f"m{i}" for i in range(models)]
    mine, waiting = due(keys, 0, cost=cost, budget=budget, turns=1)
    assert len(mine) * cost <= budget * (1 + 1e-9)
    assert len(mine) + waiting == models


def test_an_overfull_turn_starves_nobody() -> None:
    """Five models, room for two: after three weeks all have been through."""
    keys = [f"m{i}" for i in range(5)]
    seen = {key for week in range(3) for key in due(keys, week, cost=1.0, budget=2.0, turns=1)[0]}
    assert seen == set(keys)
