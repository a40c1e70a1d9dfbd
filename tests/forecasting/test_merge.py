"""Windows that overlap, touch, are suppressed, or meet a forecast."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.merge import (
    REACH,
    Cut,
    Declared,
    Part,
    Quiet,
    Window,
    cuts_of,
    declared,
    merged,
    quiets_of,
    windows_of,
    without,
)
from forecasting.outlook import Prospect

DAY = 86_400.0


def part(start: float, end: float, cause: str = "p", **more: object) -> Part:
    """What an entry says."""
    return replace(Part(start, end, cause, began=start), **more)  # type: ignore[arg-type]  # fields by name


def only(*parts: Part, bridge: float = 0.0) -> Window:
    """The one window of some parts."""
    (window,) = windows_of("m", parts, bridge=bridge)
    return window


# -- union -------------------------------------------------------------------------------------------


def test_overlapping_windows_are_one_with_the_highest_of_each() -> None:
    """Union in time; lead, confidence, priority and rate are the highest; required if one is; all causes are named."""
    a = part(100, 200, "a", lead=10, rps=5, priority=3, confidence=0.5)
    b = part(150, 300, "b", lead=40, rps=7, priority=1, confidence=0.9, require=True)
    window = only(b, a)
    assert (window.start, window.end, window.ready_by) == (100, 300, 60)
    assert (window.rps, window.priority, window.confidence, window.require) == (7, 3, 0.9, True)
    assert window.cause == ("a", "b")


@pytest.mark.parametrize(("gap", "bridge", "count"), [(0, 0, 1), (1, 0, 2), (59, 60, 1), (60, 60, 2)])
def test_touching_windows_are_one_and_short_gaps_are_bridged(gap: float, bridge: float, count: int) -> None:
    """No flapping at seams: what would be unloaded only to be loaded again stays."""
    assert len(windows_of("m", [part(0, 100), part(100 + gap, 200 + gap)], bridge=bridge)) == count


def test_a_long_window_holds_short_ones_inside_and_what_follows() -> None:
    """The end of a group is the latest so far, not the end of its last part."""
    (window,) = windows_of("m", [part(0, 100), part(10, 20), part(100, 110)])
    assert (window.start, window.end) == (0, 110)


def test_rates_add_only_where_an_entry_says_so() -> None:
    """`combine: sum` comes on top of the highest of the others, at each instant."""
    base, more, sale = part(0, 100, rps=10), part(0, 50, rps=4), part(40, 60, rps=3, adds=True)
    window = only(base, more, sale)
    assert [window.rate(at) for at in (-1, 0, 45, 60, 99, 100)] == [0, 10, 13, 10, 10, 0]
    assert window.rps == 13


def test_rates_of_parts_that_never_meet_do_not_add() -> None:
    """The peak of a window is the highest instant, not the sum of its parts."""
    window = only(part(0, 50, rps=5, adds=True), part(50, 100, rps=6, adds=True))
    assert window.rps == 6


def test_a_ramp_reaches_its_rate_linearly_also_in_what_was_cut() -> None:
    """A part that begins later than its entry's window is further up the ramp."""
    ramped = part(0, 100, rps=10, ramp=40)
    assert [ramped.rate(at) for at in (0, 10, 40, 99)] == [0, 2.5, 10, 10]
    assert replace(ramped, start=20).rate(20) == 5
    assert only(ramped).rps == 10
    assert only(part(0, 100, rps=10, ramp=200)).rps == pytest.approx(5)


# -- suppression -------------------------------------------------------------------------------------


def test_suppression_takes_out_of_the_middle_and_says_so() -> None:
    """What is left keeps its entry's ramp; every piece taken is reported with who took it."""
    quiet = quiets_of("m", [((40, 60), "freeze")])
    kept, cuts = without("m", [part(0, 100, "p", rps=1, ramp=50)], quiet)
    assert [(each.start, each.end, each.began) for each in kept] == [(0, 40, 0), (60, 100, 0)]
    assert cuts == [Cut("m", 40, 60, "p", ("freeze",))]


def test_suppression_does_not_touch_what_is_required() -> None:
    """`suppress` beats forecast and schedule, not `require`."""
    must = part(0, 100, "must", require=True)
    assert without("m", [must], [Quiet("m", -10, 200, ("freeze",))]) == ([must], [])


def test_suppressions_that_overlap_or_touch_are_one() -> None:
    """So that a window is cut once."""
    found = quiets_of("m", [((50, 70), "b"), ((0, 50), "a"), ((80, 90), "c")])
    assert found == [Quiet("m", 0, 70, ("a", "b")), Quiet("m", 80, 90, ("c",))]


def test_nothing_is_made_ready_while_it_is_quiet() -> None:
    """The lead of a window after a suppression begins when that ends; a required one keeps its lead."""
    quiet = [Quiet("m", 0, 95, ("freeze",))]
    assert windows_of("m", [part(100, 200, lead=30)], quiet)[0].ready_by == 95
    assert windows_of("m", [part(100, 200, lead=3)], quiet)[0].ready_by == 97
    assert windows_of("m", [part(100, 200, lead=30, require=True)], quiet)[0].ready_by == 70


_parts = st.lists(
    st.builds(
        lambda start, length, **rest: part(float(start), float(start + length), **rest),
        st.integers(0, 200),
        st.integers(1, 60),
        cause=st.sampled_from("abc"),
        lead=st.sampled_from([0.0, 7.0]),
        rps=st.sampled_from([0.0, 1.0, 8.0]),
        ramp=st.sampled_from([0.0, 20.0]),
        adds=st.booleans(),
        require=st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(parts=_parts, bridge=st.sampled_from([0.0, 5.0]))
def test_merging_keeps_every_instant_and_no_order(parts: list[Part], bridge: float) -> None:
    """Covered is what the parts cover, plus gaps below the bridge; the order of entries is nobody's choice."""
    found = windows_of("m", parts, bridge=bridge)
    backwards = windows_of("m", parts[::-1], bridge=bridge)
    assert [(w.start, w.end, w.rps, w.cause) for w in backwards] == [(w.start, w.end, w.rps, w.cause) for w in found]
    assert all(a.end < b.start and b.start - a.end >= bridge for a, b in pairwise(found))
    for at in range(280):
        here = [each for each in parts if each.start <= at < each.end]
        window = next((w for w in found if w.start <= at < w.end), None)
        assert window is not None or not here
        if window is not None:
            best = max((p.rate(at) for p in here if not p.adds), default=0.0)
            assert window.rate(at) == pytest.approx(best + sum(p.rate(at) for p in here if p.adds))
            assert window.rate(at) <= window.rps + 1e-9


@settings(max_examples=100, deadline=None)
@given(parts=_parts, spans=st.lists(st.tuples(st.integers(0, 250), st.integers(1, 40)), max_size=4))
def test_suppression_splits_every_part_into_kept_and_cut(parts: list[Part], spans: list[tuple[int, int]]) -> None:
    """Nothing is lost and nothing counted twice."""
    quiet = quiets_of("m", [((float(start), float(start + length)), "q") for start, length in spans])
    kept, cuts = without("m", parts, quiet)
    assert math.isclose(
        sum(p.end - p.start for p in kept) + sum(c.end - c.start for c in cuts), sum(p.end - p.start for p in parts)
    )
    free = [p for p in kept if not p.require]
    assert not any(p.start < q.end and q.start < p.end for p in free for q in quiet)


def test_long_windows_are_cut_at_turns_of_the_month_deep_inside_them() -> None:
    """Never near an end, so a turn's verdict needs no look further than its reach."""
    year = 365 * DAY  # 1970, from 1 January
    turns = cuts_of(0.0, year)
    assert [round(at / DAY) for at in turns] == [31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334]
    assert cuts_of(0.0, 2 * REACH - 1) == []
    pieces = windows_of("m", [part(0, year, rps=1)])
    assert [w.start for w in pieces] == [0, *turns]
    assert [w.end for w in pieces] == [*turns, year]


# -- with a forecast ---------------------------------------------------------------------------------


def test_what_is_declared_ahead_is_the_highest_of_the_windows_in_reach() -> None:
    """A window in reach gives chance and rate, one beyond it only the time to it; one that is over gives nothing."""
    near, far = only(part(100, 200, rps=50, confidence=0.9)), only(part(900, 1000, rps=9, confidence=1.0))
    assert declared([near, far], at=0, within=150) == {"m": Declared(0.9, 50, 100)}
    assert declared([far], at=0, within=150) == {"m": Declared(0.0, 0.0, 900)}
    assert declared([near], at=150, within=60)["m"].next_use == 0
    assert declared([near], at=200, within=60) == {}


def test_the_rate_ahead_is_that_of_the_part_in_reach() -> None:
    """Ten minutes into a ramp of an hour not all of the rate is there."""
    slow = only(part(0, 7200, rps=60, ramp=3600, confidence=0.0))
    assert declared([slow], at=0, within=600)["m"].rate == pytest.approx(10)


def test_a_window_without_a_rate_stands_for_its_chance() -> None:
    """So that a policy that only sees rates sees it too: 1 - exp(-rate * within) is the confidence."""
    (row,) = declared([only(part(0, 100, confidence=0.98))], at=0, within=60).values()
    assert -math.expm1(-row.rate * 60) == pytest.approx(0.98)
    assert math.isfinite(declared([only(part(0, 100))], at=0, within=60)["m"].rate)


def test_forecast_and_declaration_merge_by_the_higher() -> None:
    """Neither silences the other; without a declaration the forecast stays as it is."""
    forecast = Prospect(rate=5.0, next_use=30.0, confidence=0.6)
    assert merged(forecast, None) is forecast
    both = merged(forecast, Declared(chance=0.98, rate=2.0, next_use=10.0))
    assert (both.rate, both.next_use, both.confidence) == (5.0, 10.0, 0.98)
