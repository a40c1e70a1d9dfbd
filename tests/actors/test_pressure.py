"""Watermarks: begin above the high mark, end below the low one, and never flutter in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ports import MemorySample
from actors.residency.pressure import Watermarks


def used(percent: int) -> MemorySample:
    """A reading with so many of 100 bytes in use."""
    return MemorySample(100, 100 - percent)


def test_pressure_has_hysteresis() -> None:
    """U25: near the mark nothing flutters; a change is told once."""
    marks = Watermarks(high=0.85, low=0.80)
    told = [(percent, marks.feed(used(percent)), marks.under_pressure) for percent in (84, 85, 84, 81, 80, 84, 90)]
    assert told == [
        (84, False, False),
        (85, True, True),
        (84, False, True),
        (81, False, True),
        (80, True, False),
        (84, False, False),
        (90, True, True),
    ]


def test_the_excess_leads_to_the_low_mark_and_is_zero_without_pressure() -> None:
    """What has to be given back, in bytes."""
    marks = Watermarks(high=0.85, low=0.80)
    assert marks.excess(used(90)) == 0
    marks.feed(used(90))
    assert marks.excess(used(90)) == pytest.approx(10, abs=1)
    assert marks.excess(used(70)) == 0


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.5, 0.5), (0.6, 0.5), (0.5, 1.1)])
def test_marks_that_make_no_sense_are_refused(low: float, high: float) -> None:
    """Bad configuration is an error with the numbers."""
    with pytest.raises(ValueError, match=f"low={low} high={high}"):
        Watermarks(high, low)


def test_a_machine_without_a_limit_is_never_under_pressure() -> None:
    """A reading of nothing is no reason to evict."""
    assert MemorySample(0, 0).used_ratio == 0.0
    assert not Watermarks().feed(MemorySample(0, 0))


@given(st.lists(st.integers(0, 100), max_size=50))
def test_pressure_follows_the_last_crossing(readings: list[int]) -> None:
    """The state is exactly what the last mark that was crossed says, and changes are told exactly once."""
    marks, expected = Watermarks(high=0.85, low=0.80), False
    for percent in readings:
        sample = used(percent)
        before = expected
        if sample.used_ratio >= 0.85:
            expected = True
        elif sample.used_ratio <= 0.80:
            expected = False
        assert marks.feed(sample) is (before != expected)
        assert marks.under_pressure is expected
        assert (marks.excess(sample) > 0) <= expected
