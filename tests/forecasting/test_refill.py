"""The refill tick: what it brings, what it spares, and how much of the channel it may use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forecasting.refill import DEVICE, DISK, HOST, Guards, Refill, Scene, Tokens, refill


def scene(*rows: tuple[float, float, int], forced: tuple[int, ...] = (), pinned: tuple[int, ...] = ()) -> Scene:
    """Rows of (rate, size, where); a host load costs 1 s, a disk load 4 s, and the score is rate per byte."""
    rate, size, where = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    count = len(rows)
    marked = np.zeros(count, dtype=np.bool_)
    marked[list(forced)] = True
    movable = np.ones(count, dtype=np.bool_)
    movable[list(pinned)] = False
    return Scene(
        rate,
        size,
        np.full(count, 1.0),
        np.full(count, 4.0),
        where.astype(np.int8),
        movable,
        rate / size,
        marked,
    )


def moved(at: Scene, *, free: float = 0.0, tokens: float = 100.0, guards: Guards | None = None) -> list[Refill]:
    """One tick with a bucket of so many seconds."""
    bucket = Tokens(share=1.0, tick=tokens)
    return refill(at, free=free, tokens=bucket, guards=guards)


def test_free_room_is_filled_with_what_is_wanted_most() -> None:
    """The most valuable per byte first, as long as it fits."""
    at = scene((0.01, 10, HOST), (0.05, 10, HOST), (0.02, 10, DISK))
    assert [(m.index, m.victims) for m in moved(at, free=20)] == [(2, ()), (1, ())]


def test_what_nobody_is_likely_to_ask_for_stays_away() -> None:
    """A chance below the floor within the window is no reason to load."""
    at = scene((0.01 / 600 * 0.9, 10, HOST), (0.02 / 600, 10, HOST))
    assert [m.index for m in moved(at, free=100)] == [1]


def test_a_resident_leaves_only_for_clearly_more() -> None:
    """The margin: 1.5 times the victim's loss, reckoned from disk."""
    almost = scene((0.01, 10, DEVICE), (0.059, 10, HOST))
    enough = scene((0.01, 10, DEVICE), (0.061, 10, HOST))
    assert moved(almost) == []
    assert [(m.index, m.victims) for m in moved(enough)] == [(1, (0,))]


def test_the_least_valuable_residents_leave_and_only_as_many_as_needed() -> None:
    """Victims ascend by score; each leaves once."""
    at = scene((0.003, 10, DEVICE), (0.001, 10, DEVICE), (0.002, 10, DEVICE), (0.5, 20, DISK), (0.4, 10, DISK))
    assert [(m.index, m.victims) for m in moved(at)] == [(4, (1,)), (3, (2, 0))]


def test_leased_and_pinned_residents_are_not_seen() -> None:
    """What may not move is no victim, whatever is gained."""
    assert moved(scene((0.0, 10, DEVICE), (9.0, 10, HOST), pinned=(0,))) == []


def test_what_does_not_fit_does_not_stop_the_others() -> None:
    """A giant is passed over."""
    assert [m.index for m in moved(scene((9.0, 1000, HOST), (0.1, 10, HOST)), free=10)] == [1]


def test_the_channel_is_only_half_for_guesses() -> None:
    """Tokens: five seconds of a ten-second tick, so one load from disk and no second."""
    at = scene((0.3, 10, DISK), (0.2, 10, DISK), (0.1, 10, HOST))
    bucket = Tokens()
    assert [m.index for m in refill(at, free=100, tokens=bucket)] == [0]
    assert bucket.left == pytest.approx(1.0)
    bucket.refill(10.0, longest=4.0)
    assert bucket.left == pytest.approx(5.0)


def test_a_full_bucket_lets_one_long_load_go() -> None:
    """Otherwise the largest model could never be fetched ahead."""
    bucket = Tokens(share=0.5, tick=2.0)
    assert bucket.affords(60.0)
    bucket.spend(60.0)
    assert not bucket.affords(60.0)
    bucket.refill(1_000.0, longest=60.0)
    assert bucket.affords(60.0)
    bucket.refill(-5.0, longest=60.0)
    assert bucket.left == 60.0


def test_a_required_peak_need_not_earn_its_place() -> None:
    """It bypasses the margin and the floor, and is never a victim; but not pins or leases."""
    at = scene((0.5, 10, DEVICE), (0.0, 10, HOST), forced=(1,))
    assert [(m.index, m.victims) for m in moved(at)] == [(1, (0,))]
    assert moved(scene((0.5, 10, DEVICE), (0.0, 10, HOST), forced=(1,), pinned=(0,))) == []
    assert moved(scene((0.0, 10, DEVICE), (9.0, 10, HOST), forced=(0,))) == []


def test_a_tick_looks_at_a_bounded_number_of_candidates() -> None:
    """The top of the list, not all of a fleet."""
    at = scene(*((0.1, 1.0, HOST) for _ in range(100)))
    assert len(moved(at, free=1_000, tokens=1_000)) == 64
    assert len(moved(at, free=1_000, tokens=1_000, guards=Guards(most=3))) == 3


def test_impossible_input_is_refused() -> None:
    """Columns of one length, a share of the channel between nothing and all."""
    with pytest.raises(ValueError, match="different lengths"):
        Scene(*(np.zeros(n) for n in (1, 2, 1, 1, 1, 1, 1, 1)))  # type: ignore[arg-type]
    for share, tick in ((0.0, 1.0), (1.1, 1.0), (0.5, 0.0)):
        with pytest.raises(ValueError, match="token bucket"):
            Tokens(share=share, tick=tick)


def test_what_leaves_by_itself_is_not_brought_back_for_less_than_it_is_held_for() -> None:
    """Idle for ten minutes at most: only what is asked for in more than half of such windows is worth loading ahead."""
    free = scene((0.5 / 600, 10, HOST), (0.9 / 600, 10, HOST))  # chances of .39 and .59
    assert {m.index for m in moved(free, free=100)} == {0, 1}
    kept = replace(free, keep_alive=np.full(2, 600.0))
    assert [m.index for m in moved(kept, free=100)] == [1]
