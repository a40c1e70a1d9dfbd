"""Gaps between active windows, and the hazard that they imply."""

from __future__ import annotations

import numpy as np
import pytest

from forecasting.interarrival import Gaps, hazard

ALL = np.arange(1)


def seen(gaps: list[int], limit: int = 12, rate: float = 0.1) -> Gaps:
    """One model's histogram after these gaps."""
    found = Gaps(1, limit)
    for gap in gaps:
        found.observe(ALL, np.array([gap], np.int32))
    found.refresh(ALL, np.array([rate]))
    return found


def test_hazard_is_the_share_of_survivors_that_end_now() -> None:
    """(G[g] + .5 rate) / (survivors[g] + .5), G smoothed .25/.5/.25, to the digit."""
    counts = np.array([[0.0, 4.0, 0.0, 0.0, 2.0]], np.float32)  # four gaps of 2, two beyond the limit of 4
    smooth = np.array([1.0, 2.0, 1.0, 0.0, 2.0])
    survivors = smooth[::-1].cumsum()[::-1]
    ended = smooth.copy()
    ended[-1] /= 4
    expected = (ended + 0.5 * 0.2) / (survivors + 0.5)
    np.testing.assert_allclose(hazard(counts, np.array([0.2]))[0], expected, rtol=1e-6)


def test_a_strict_rhythm_is_expected_at_its_beat() -> None:
    """A model that comes every sixth window is likely then and unlikely before."""
    gaps = seen([6] * 50)
    beat = gaps.chance(ALL, np.array([6], np.int32))[0]
    assert beat > 0.6
    assert gaps.chance(ALL, np.array([3], np.int32))[0] < 0.02


def test_without_gaps_the_hazard_is_the_models_own_rate() -> None:
    """A model never seen twice is expected at its share of active windows."""
    assert Gaps(2, 5).chance(np.arange(2), np.array([1, 3], np.int32)) == pytest.approx([0, 0])
    np.testing.assert_allclose(hazard(np.zeros((1, 6), np.float32), np.array([0.3])), 0.3, rtol=1e-6)


def test_a_longer_span_is_the_complement_of_surviving_each_window() -> None:
    """P(any of k windows) multiplies the windows' survival."""
    gaps = seen([1, 2, 3, 3, 5, 9])
    each = [gaps.chance(ALL, np.array([2 + step], np.int32))[0] for step in range(3)]
    whole = gaps.chance(ALL, np.array([2], np.int32), 3)[0]
    assert whole == pytest.approx(1 - np.prod([1 - p for p in each]))


def test_gaps_beyond_the_limit_share_one_bin_and_never_fail() -> None:
    """A model idle for a month still has a chance between 0 and 1."""
    gaps = seen([5000, 1])
    p = gaps.chance(ALL, np.array([2**30], np.int32))[0]
    assert 0 <= p <= 1
    assert gaps.counts[0, -1] == 1


def test_old_gaps_fade() -> None:
    """A refresh may shrink what was counted, so that a new rhythm wins."""
    gaps = seen([6] * 10)
    gaps.refresh(ALL, np.array([0.1]), keep=0.5)
    assert gaps.counts.sum() == pytest.approx(5)


def test_taking_models_keeps_their_histories_and_adds_empty_ones() -> None:
    """Models come and go without touching the others."""
    gaps = Gaps(3, 4)
    gaps.observe(np.array([0, 2]), np.array([1, 4], np.int32))
    other = gaps.take(np.array([2, -1]))
    np.testing.assert_array_equal(other.counts, [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize(("models", "limit"), [(-1, 4), (3, 0)])
def test_an_impossible_histogram_is_refused(models: int, limit: int) -> None:
    """No silent empty table."""
    with pytest.raises(ValueError, match="impossible"):
        Gaps(models, limit)
