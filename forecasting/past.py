"""What imported requests would have taught if they had been counted live: week sums and rows of the raw past.

Belongs here: the same rules as in `week` and `tiers`, over whole series at once. Never: reading logs, state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from forecasting.calendar import SLOT, WEEK, offsets_of, slots_of
from forecasting.tiers import FIVES, GAP, MINUTES, QUARTERS, UNSEEN, Row, encode, pack
from forecasting.week import CAP_PLUS, CAP_TIMES, PER_QUARTER, QUARTER_MINUTES, WEEKS_BACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.tiers import Tiers

_WEEK_SECONDS: Final = 604_800.0


@dataclass(frozen=True, slots=True)
class Past:
    """Imported requests by index: `cells` are (minutes ascending, counts) of the models at indices `order`.

    `size` is the number of indices; `known` tells for each minute from `start` on whether it was observed.
    """

    cells: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
    order: NDArray[np.int64]
    size: int
    known: NDArray[np.bool_]
    start: int

    def each(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
        """Minutes, counts and index of each model."""
        for (minutes, counts), index in zip(self.cells, self.order.tolist(), strict=True):
            yield minutes, counts, index


def weekly(past: Past, zone: tzinfo) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Week sums and exposure `[size, 672]`, winsorised, and the quarter that each slot stands at (-1: none).

    A model is exposed from its first request on: before, it may not have been served.
    """
    first = past.start // QUARTER_MINUTES
    share = _known_by(past, QUARTER_MINUTES) / QUARTER_MINUTES
    length = share.size
    utc = SLOT * np.arange(first, first + length, dtype=np.float64)
    slots = slots_of(utc, zone)
    at = np.full(WEEK, -1, np.int64)
    at[slots] = np.arange(first, first + length)  # of equal slots the last assignment stays
    weight = PER_QUARTER ** (at[slots] - np.arange(first, first + length)).astype(np.float64)
    earlier = _same_slot_before(utc, zone, first)

    sums, exposure = np.zeros((past.size, WEEK), np.float32), np.zeros((past.size, WEEK), np.float32)
    for minutes, counts, index in past.each():
        values = _summed(minutes // QUARTER_MINUTES - first, counts, length)
        seen = share.copy()
        seen[: int(minutes[0]) // QUARTER_MINUTES - first] = 0
        learned = np.minimum(values, _limit(values, seen, earlier))
        sums[index] = np.bincount(slots, learned * weight, WEEK)
        exposure[index] = np.bincount(slots, seen * weight, WEEK)
    return sums, exposure, at


def _summed(places: NDArray[np.int64], values: NDArray[np.generic], length: int) -> NDArray[np.float64]:
    """Values added up by place."""
    return np.bincount(places, values.astype(np.float64), length).astype(np.float64)


def _known_by(past: Past, minutes: int) -> NDArray[np.float64]:
    """Known minutes of each bucket, from the one that the start lies in."""
    buckets = (past.start + np.arange(past.known.size)) // minutes - past.start // minutes
    return _summed(buckets, past.known, 0)


def _same_slot_before(utc: NDArray[np.float64], zone: tzinfo, first: int) -> NDArray[np.int64]:
    """Places `[4, T]` of the same local slot 1 to 4 weeks earlier; negative: before the series."""
    here = offsets_of(utc, zone)
    found = np.full((WEEKS_BACK, utc.size), -1, np.int64)
    for weeks in range(1, WEEKS_BACK + 1):
        then = np.maximum(utc - weeks * _WEEK_SECONDS, 0)
        moved = then + here - offsets_of(then, zone)
        found[weeks - 1] = np.floor(moved / SLOT).astype(np.int64) - first
    return found


def _limit(values: NDArray[np.float64], seen: NDArray[np.float64], earlier: NDArray[np.int64]) -> NDArray[np.float64]:
    """Most that each quarter may add, as `Week` winsorises."""
    usable = seen > 0.5  # noqa: PLR2004 - half of the minutes
    scaled = np.where(usable, values / np.where(usable, seen, 1), np.nan)
    same = np.where(earlier >= 0, scaled[np.maximum(earlier, 0)], np.nan)
    same.sort(axis=0)  # what is unknown goes last
    passes = np.sum(~np.isnan(same), axis=0)
    column = np.arange(values.size)
    low, high = same[np.maximum(passes - 1, 0) // 2, column], same[np.minimum(passes // 2, WEEKS_BACK - 1), column]
    capped = (CAP_TIMES * (low + high) / 2 + CAP_PLUS) * seen
    return np.where(passes >= 2, capped, np.inf)  # noqa: PLR2004


def fill(tiers: Tiers, past: Past) -> None:
    """Write the rows before `tiers.end`, which has none yet."""
    end = tiers.end
    tiers.start(end)
    _fill_minutes(tiers, past)
    first_five = -(-max(end // 5 - FIVES, past.start // 5) // 3) * 3
    tiers.fives.extend(_rows(past, 5, first_five, end // 5))
    first = max(first_five // 3 - QUARTERS, past.start // QUARTER_MINUTES)
    tiers.quarters.extend(_rows(past, QUARTER_MINUTES, first, first_five // 3))


def _rows(past: Past, minutes: int, first: int, end: int) -> list[Row]:
    """Rows of the buckets `first` to `end`, of so many minutes each."""
    length = max(end - first, 0)
    codes = np.zeros((length, past.size), np.uint8)
    for stamps, counts, index in past.each():
        begin, stop = np.searchsorted(stamps, [first * minutes, end * minutes]).tolist()
        if begin < stop:
            codes[:, index] = encode(_summed(stamps[begin:stop] // minutes - first, counts[begin:stop], length))
    seen = np.zeros(length, np.int64)
    shares = _known_by(past, minutes).astype(np.int64)
    places = np.arange(shares.size) + past.start // minutes - first
    inside = (places >= 0) & (places < length)
    seen[places[inside]] = shares[inside]
    return [Row(codes[place], int(seen[place])).compressed() if seen[place] else GAP for place in range(length)]


def _fill_minutes(tiers: Tiers, past: Past) -> None:
    first = max(tiers.end - MINUTES, past.start)
    parts = [
        (minutes[begin:], counts[begin:], np.full(minutes.size - begin, index, np.int64))
        for minutes, counts, index in past.each()
        for begin in (int(np.searchsorted(minutes, first)),)
    ]
    stamp, number, place = (np.concatenate(column) for column in zip(*parts, strict=True))
    by_time = np.argsort(stamp, kind="stable")
    bounds = np.searchsorted(stamp[by_time], np.arange(first, tiers.end + 1))
    for step, minute in enumerate(range(first, tiers.end)):
        seen = minute - past.start < past.known.size and bool(past.known[minute - past.start])
        chosen = by_time[bounds[step] : bounds[step + 1]]
        row = np.zeros(past.size, np.int64)
        row[place[chosen]] = number[chosen]
        tiers.minutes.append(pack(row, known=True) if seen else UNSEEN)
