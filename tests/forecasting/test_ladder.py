"""Promises of the ladder: which estimator, and which word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.ladder import Confidence, Rung, confidence, step_of, top
from forecasting.profile import DAY, HOUR


@pytest.mark.parametrize(
    ("history", "share", "chosen", "rung"),
    [
        (0, 0.0, False, Rung.PRIOR),
        (HOUR, 1.0, False, Rung.YOUNG),
        (DAY, 1.0, False, Rung.DAILY),
        (7 * DAY, 0.5, True, Rung.WEEKLY),
        (14 * DAY, 0.5, False, Rung.WEEKLY),
        (14 * DAY, 0.5, True, Rung.SPECIAL),
        (60 * DAY, 0.04, True, Rung.SPARSE),
    ],
)
def test_each_history_has_its_rung(history: float, share: float, chosen: bool, rung: Rung) -> None:  # noqa: FBT001  # a table
    """The borders belong to the higher rung; sparse models get no count model at any age."""
    assert step_of(history, share, chosen=chosen).rung is rung


def test_harmonics_need_activity() -> None:
    """`harm+lvl` competes from 30 % of active hours on; specialists only for the chosen."""
    assert "harm+lvl" not in step_of(8 * DAY, 0.29).families
    assert "harm+lvl" in step_of(8 * DAY, 0.30).families
    assert "mstl" not in step_of(20 * DAY, 0.9).families
    assert "mstl" in step_of(20 * DAY, 0.9, chosen=True).families


@given(st.floats(0, 1e9), st.floats(0, 1))
def test_more_history_never_takes_a_rung_away(history: float, share: float) -> None:
    """What may be mixed after so long may be mixed after twice as long."""
    assert set(step_of(history, share).families) - {"prior", "young"} <= set(step_of(2 * history, share).families)


def test_nonsense_is_refused() -> None:
    """NaN and negative inputs name their field."""
    with pytest.raises(ValueError, match="history"):
        step_of(float("nan"), 0.5)
    with pytest.raises(ValueError, match="active_share"):
        step_of(DAY, 1.5)


@pytest.mark.parametrize(
    ("history", "skill", "coverage", "word"),
    [
        (0, 0.9, 0.8, "prior"),
        (DAY, 0.9, 0.8, "low"),
        (30 * DAY, None, 0.8, "low"),
        (30 * DAY, -0.1, 0.8, "low"),
        (30 * DAY, float("nan"), 0.8, "low"),
        (30 * DAY, 0.3, 0.5, "low"),
        (30 * DAY, 0.3, None, "low"),
        (8 * DAY, 0.3, 0.8, "medium"),
        (30 * DAY, 0.01, 0.8, "medium"),
        (30 * DAY, 0.3, 0.99, "medium"),
        (30 * DAY, 0.3, 0.8, "high"),
    ],
)
def test_the_word_is_earned(history: float, skill: float | None, coverage: float | None, word: str) -> None:
    """Age alone earns nothing: no skill or no coverage means low."""
    assert confidence(history, skill=skill, coverage80=coverage) == word


def test_words_are_ordered_numbers() -> None:
    """As numbers the words rise within 0..1."""
    numbers = [word.value01 for word in Confidence]
    assert numbers == sorted(numbers)
    assert 0 <= numbers[0] < numbers[-1] <= 1


def test_the_top_is_by_rate_times_cold_cost() -> None:
    """Idle models are never chosen, ties go by name, and nobody is chosen for a negative number."""
    assert top(["a", "b", "c", "d"], [1, 10, 5, 0], [10, 1, 2, 99], 3) == ("a", "b", "c")
    assert top(["a"], [1], [1], -1) == ()
