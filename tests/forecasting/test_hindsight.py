"""The forecast's own record: what was stated, against what came, and which outcomes count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.counts import Counts
from forecasting.hindsight import SPAN, Hindsight
from forecasting.sources import Estimate, from_rates

START = 1_700_000_400.0
"""A whole number of windows."""
MINUTE = 60.0


def stated(*chances: float) -> Estimate:
    """An estimate that states these probabilities of a request within a window."""
    rate = -np.log1p(-np.array(chances)) / SPAN
    return from_rates("test", evict_rate=rate, prefetch_rate=rate, next_use=1 / rate, confidence=np.ones(len(rate)))


class Day:
    """Counts of models `a`, `b`, ... and a record of them, on one clock."""

    def __init__(self, models: int, start: float = START) -> None:
        self.wall = start - 5 * MINUTE  # counting has begun before
        self.counts = Counts(self.wall, self.wall)
        for name in "abcdefgh"[:models]:
            self.counts.index(name)
        self.hindsight = Hindsight()
        self.pass_to(start)

    def pass_to(self, wall: float, *, asked: str = "") -> None:
        """Minutes pass, in the first of which these models are asked for."""
        for name in asked:
            self.counts.hit(self.counts.index(name))
        while self.wall < wall:
            self.wall = min(self.wall + MINUTE, wall)
            self.counts.roll(self.wall, self.wall)

    def look(self, estimate: Estimate | None) -> bool:
        """Look now."""
        return self.hindsight.look(self.counts, estimate, self.wall)


def test_a_statement_is_judged_when_its_window_is_over_and_not_before() -> None:
    """One of two came: the Brier score is that of the two statements, exactly."""
    day = Day(2)
    assert not day.look(stated(0.9, 0.2))
    day.pass_to(START + SPAN - MINUTE, asked="a")
    assert not day.look(stated(0.5, 0.5))
    day.pass_to(START + SPAN)
    assert day.look(stated(0.5, 0.5))
    assert day.hindsight.record.n == 2
    assert day.hindsight.record.brier == pytest.approx((0.1**2 + 0.2**2) / 2)
    assert not day.look(stated(0.5, 0.5)), "once a window"


def test_a_request_of_the_next_window_is_not_one_of_this() -> None:
    """The look that judges comes late; what was asked meanwhile belongs to the future."""
    day = Day(1)
    day.look(stated(0.25))
    day.pass_to(START + SPAN)
    day.pass_to(START + SPAN + 3 * MINUTE, asked="a")
    assert day.look(None)
    assert day.hindsight.record.brier == pytest.approx(0.25**2)


def test_models_come_and_go_between_statement_and_judgement() -> None:
    """The gone one says nothing, the new one was not spoken of, and rows do not shift."""
    day = Day(3)
    day.look(stated(0.9, 0.5, 0.2))
    day.pass_to(START + 2 * MINUTE, asked="c")
    day.counts.forget("b")
    day.counts.index("z")
    day.pass_to(START + SPAN, asked="z")
    assert day.look(None)
    assert day.hindsight.record.n == 2
    assert day.hindsight.record.brier == pytest.approx((0.9**2 + 0.8**2) / 2)


def test_windows_that_were_not_seen_whole_say_nothing() -> None:
    """Nobody looked for eleven minutes: no request is not the same as none seen."""
    day = Day(1)
    day.look(stated(0.9))
    day.pass_to(START + 2 * MINUTE)
    day.wall += 11 * MINUTE  # suspended
    day.counts.roll(day.wall, day.wall)
    assert not day.look(None)
    assert day.hindsight.record.n == 0


def test_what_is_stated_in_the_middle_of_a_window_or_not_at_all_is_not_held_against_it() -> None:
    """A server that starts at seven past states its first at ten past; a fallback states nothing."""
    day = Day(1, start=START + 7 * MINUTE)
    day.look(stated(0.9))
    day.pass_to(START + SPAN)
    assert not day.look(None)
    day.pass_to(START + 2 * SPAN)
    assert not day.look(stated(0.5))
    day.pass_to(START + 3 * SPAN)
    assert day.look(None)


def test_a_clock_set_back_starts_over() -> None:
    """Statements about windows that come a second time are dropped."""
    day = Day(1)
    day.look(stated(0.5))
    day.wall = START - 2 * SPAN
    day.counts.roll(day.wall, START + MINUTE)
    assert not day.look(stated(0.5))
    for window in range(1, 5):
        day.pass_to(START + (window - 2) * SPAN)
        day.look(stated(0.5))
    assert day.hindsight.record.n <= 4


@given(st.lists(st.floats(0.0, 4_000.0), max_size=30), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_looks_at_any_time_never_judge_twice(steps: list[float], seed: int) -> None:
    """However irregular the looks: at most one judgement per model and window."""
    rng = np.random.default_rng(seed)
    day = Day(2)
    for step in steps:
        day.pass_to(day.wall + step, asked="ab"[: int(rng.integers(0, 3))])
        day.look(stated(0.5, 0.1) if rng.random() < 0.8 else None)
    assert day.hindsight.record.n <= 2 * (int(day.wall // SPAN) - int(START // SPAN))
