"""First days: whose are learned from, how they are lined up, and what a fit does with a model that is new."""

from __future__ import annotations

import numpy as np

from forecasting.activity import Activity
from forecasting.launch import fleet_shape
from forecasting.launches import LEAST, MOST, launches, shape_of
from forecasting.pooled import learned_chances, part_of, some_of, worked_out
from forecasting.scenarios import ACTIVE, HORIZONS, QUIET
from forecasting.training import Windows
from tests.forecasting.fleets import counted, daily

HOUR = 3_600.0
DAY = 24
BEFORE = -5
"""Born before anything is known."""


def known(counts: np.ndarray) -> Windows:
    """Hours without gaps."""
    return Windows(counts, np.ones(counts.shape, bool), np.arange(counts.shape[1]), HOUR)


def test_a_first_day_begins_with_the_first_request() -> None:
    """Lined up by it, with the hour of the week it fell on; what lies behind the history is unknown."""
    counts = np.zeros((2, 48))
    counts[0, [5, 7]], counts[1, 40:] = 1, 2
    found = launches(known(counts), np.array([5, 40]))
    assert found.real == 2
    assert found.begins.tolist() == [5, 40]
    assert found.past.counts[:, :3].tolist() == [[1, 0, 1], [2, 2, 2]]
    assert found.past.known.sum(axis=1).tolist() == [DAY, 8]


def test_models_that_appeared_count_first_and_the_fleet_fills_up() -> None:
    """Few new ones: the others stand in; many: they are enough; silent ones teach nothing."""
    counts = np.ones((LEAST + 20, 48))
    counts[-1] = 0
    born = np.full(len(counts), BEFORE)
    born[:3] = 1
    few = launches(known(counts), born)
    assert (few.real, len(few.begins)) == (3, LEAST)
    many = launches(known(np.ones((MOST + 9, 48))), np.ones(MOST + 9, np.int64))
    assert (many.real, len(many.begins)) == (MOST, MOST)
    assert launches(known(np.zeros((3, 48))), born[:3]).begins.size == 0


def test_the_shape_of_the_day_is_that_of_the_state() -> None:
    """Counted at once or rolled window by window, but for what a state forgets."""
    counts = (np.random.default_rng(1).random((30, 2 * DAY)) < 0.3).astype(float)
    state = Activity(30, HOUR, (1,))
    for slot in range(2 * DAY):
        state.roll(slot, counts[:, slot])
    np.testing.assert_allclose(shape_of(known(counts)), fleet_shape(state), atol=0.02)


def test_a_new_model_is_told_by_how_models_begin() -> None:
    """Twelve models appear in the week of the fit and are learned from; in its first day a model follows them."""
    fleet = daily(40, 9)
    for number, key in enumerate(list(fleet)[:12]):
        fleet[key][: (5 + number % 3) * 1440] = 0
    newest = list(fleet)[12]
    fleet[newest][: 9 * 1440 - 300] = 0
    fleet[newest][-300:-20:7] = 1
    snapshot = counted(fleet).snapshot()
    learned = learned_chances(snapshot)
    assert learned is not None
    assert learned.launched >= 12
    assert set(learned.model.young) == set(HORIZONS)
    own = some_of(snapshot, np.array([snapshot.keys.index(newest)]))
    past = part_of(own.history(300), slice(None))
    young, grown = (worked_out(past, snapshot.zone, np.array([age]), learned) for age in (300 * 60.0, 9 * 86_400.0))
    assert young[0, ACTIVE, 0, 0] > young[0, QUIET, 0, 0]
    assert (young != grown).any()
    state = Activity(1)
    state.age[:] = 10
    said = learned.model.chance(state, HORIZONS[0], 0, learned.shape)
    assert 0 < said[0] < 1
