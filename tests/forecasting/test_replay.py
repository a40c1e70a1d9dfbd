"""A past taken in at once leaves the same state as rolling through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from forecasting.activity import Activity, Horizon
from forecasting.occurrence import features
from forecasting.replay import settled

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW, DAY, MODELS = 3600.0, 24, 30
WEEK = 7 * DAY
SPANS = (1, 6)


def past(length: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Requests of models from never to always active, all known, and week slots that begin in mid-week."""
    random = np.random.default_rng(seed)
    share = np.concatenate(([0.0, 1.0], random.uniform(0.01, 0.9, MODELS - 2)))
    counts = random.poisson(3.0, (MODELS, length)) * (random.random((MODELS, length)) < share[:, None])
    return counts.astype(np.float64), np.ones(counts.shape, np.bool_), (np.arange(length) + 53) % WEEK


def rolled(counts: NDArray[np.float64], known: NDArray[np.bool_], phase: NDArray[np.int64]) -> Activity:
    """Window by window, hazards refreshed at the end."""
    state = Activity(len(counts), WINDOW, SPANS)
    for now, slot in enumerate(phase.tolist()):
        state.roll(slot, counts[:, now], known[:, now])
    state.gaps.refresh(np.arange(len(state), dtype=np.int64), state.share(2))
    return state


def expect_same(counts: NDArray[np.float64], known: NDArray[np.bool_], phase: NDArray[np.int64]) -> None:
    """Every array, and every feature that is made of them."""
    found, wanted = settled(counts, known, phase, WINDOW, SPANS), rolled(counts, known, phase)
    assert found is not None
    arrays = found.arrays()
    for name, array in wanted.arrays().items():
        assert arrays[name].dtype == array.dtype, name
        assert np.allclose(arrays[name], array, rtol=1e-4, atol=1e-5), name
    for horizon in (Horizon(0, 1), Horizon(0, 6), Horizon(5, 6)):
        slot = int(phase[-1] + 1) % WEEK
        assert np.allclose(features(found, horizon, slot), features(wanted, horizon, slot), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 5, DAY, 3 * DAY + 7, 8 * DAY, 9 * DAY + 1])
def test_a_past_that_is_known_throughout(length: int):
    """From one window to more than a week."""
    expect_same(*past(length))


def test_models_that_appeared_one_after_the_other_and_one_that_never_did():
    """Nothing is known before a model's first window."""
    counts, known, phase = past(8 * DAY)
    first = np.linspace(0, 8 * DAY, MODELS).astype(np.int64)
    known &= np.arange(8 * DAY) >= first[:, None]
    expect_same(counts, known, phase)


def test_a_gap_that_all_models_share():
    """An outage makes gaps between requests meaningless, and no window idle."""
    counts, known, phase = past(8 * DAY)
    known[:, 50:57] = False
    known[:, -3:] = False
    known[4, :90] = False
    expect_same(counts, known, phase)


def test_what_products_cannot_tell_is_left_to_rolling():
    """A gap of one model alone, an hour that comes twice, and a past in which nothing is known."""
    counts, known, phase = past(3 * DAY)
    masked = known.copy()
    masked[3, 20:25] = False
    assert settled(counts, masked, phase, WINDOW, SPANS) is None
    assert settled(counts, known, np.concatenate((phase[:30], phase[29:-1])), WINDOW, SPANS) is None
    assert settled(counts, np.zeros_like(known), phase, WINDOW, SPANS) is None
