"""Week-slot sums: what a model usually gets in each 15 minutes of the local week, as decayed sums and exposure.

Belongs here: the sufficient statistics of every weekly profile and what keeps them honest: winsorising, exposure,
daily ratios and the rescaling after a level shift. Columns are replaced, never changed, so a snapshot shares them.
Never: raw history (tiers), clocks, a fitted profile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from forecasting.calendar import SLOT, WEEK, day_of, offset_of, slot_of
from forecasting.tiers import decode, encode

if TYPE_CHECKING:
    from datetime import date, tzinfo

    from numpy.typing import NDArray

    from forecasting.tiers import Tiers

HALF_LIFE: Final = 14 * 86_400.0
DAYS: Final = 28
"""Local days whose totals are kept beside what the profile expected."""

QUARTER_MINUTES: Final = 15
PER_QUARTER: Final = 2.0 ** (-SLOT / HALF_LIFE)
WEEKS_BACK: Final = 4
_WEEK_SECONDS: Final = 604_800
CAP_TIMES: Final = 4.0
CAP_PLUS: Final = 10.0
_TWO_DAYS: Final = 200
"""Passes that two local days have at most, both with an extra hour."""

_SHIFT_LOW: Final = 0.67
_SHIFT_HIGH: Final = 1.5
_SHIFT_LIMIT: Final = 10.0
_SHIFT_COUNT: Final = 50.0
_SHIFT_SIGMA: Final = 4.0
_SHIFTS: Final = 32
_GAIN_LIMIT: Final = 1000.0


_NONE: Final = np.zeros(0, np.float32)


class Day(NamedTuple):
    """One local day: requests seen, and what the profile expected in the same slots, per model index."""

    date: date
    actual: NDArray[np.float32]
    expected: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shift:
    """The sums of the models at `rows` are to be multiplied by `factors`.

    `added` is what the two days that proved the shift had put into each slot's sum, in codes: that part is at the new
    level already.
    """

    rows: NDArray[np.int64]
    factors: NDArray[np.float32]
    added: dict[int, NDArray[np.uint8]]

    def apply(self, column: NDArray[np.float32], slot: int) -> None:
        """Rescale one column in place."""
        inside = self.rows < column.size
        rows = self.rows[inside]
        added = self.added.get(slot)
        fresh = np.float32(0) if added is None else np.minimum(decode(added[inside]), column[rows])
        column[rows] = (column[rows] - fresh) * self.factors[inside] + fresh


class _Usual(NamedTuple):
    """What the same local slot of so many `weeks` before the pass at `quarter` held, per model index.

    Least, greatest and total of `passes` passes, as of the shifts by then.
    """

    quarter: int = -1
    shifted: int = 0
    weeks: int = 0
    low: NDArray[np.float32] = _NONE
    high: NDArray[np.float32] = _NONE
    total: NDArray[np.float32] = _NONE
    passes: NDArray[np.float32] = _NONE
    limit: NDArray[np.float32] = _NONE
    """Most that the pass may add, once all weeks were looked at."""


class _Pass(NamedTuple):
    """What one pass put into a slot."""

    quarter: int
    date: date
    slot: int
    codes: NDArray[np.uint8]


def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded: full range, 8 bits of precision, an error of at most 0.4 %."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 that the upper halves stand for; what is wider already is taken as it is."""
    if halves.dtype != np.uint16:
        return halves.astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _floats() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(slots=True)
class Week:
    """Sums and exposure per slot, each as of the quarter (15 minutes since the epoch) in `at`; -1: never passed.

    Sums are held as upper halves of float32 (`widen`).
    A column covers the indices that existed when it was written; later ones are zero. `epoch` changes when columns
    changed other than by a pass. `applied[slot]` counts the shifts, of all `shifted` ever, that the column has seen.
    """

    sums: list[NDArray[np.uint16]] = field(default_factory=lambda: [np.zeros(0, np.uint16)] * WEEK)
    exposure: list[NDArray[np.float16]] = field(default_factory=lambda: [np.zeros(0, np.float16)] * WEEK)
    at: NDArray[np.int64] = field(default_factory=lambda: np.full(WEEK, -1, np.int64))
    applied: NDArray[np.int64] = field(default_factory=lambda: np.zeros(WEEK, np.int64))
    shifts: deque[Shift] = field(default_factory=deque[Shift])
    shifted: int = 0
    epoch: int = 0
    recent: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_TWO_DAYS))
    days: deque[Day] = field(default_factory=lambda: deque(maxlen=DAYS))
    today: date | None = None
    actual: NDArray[np.float32] = field(default_factory=_floats)
    expected: NDArray[np.float32] = field(default_factory=_floats)
    gain: NDArray[np.float32] = field(default_factory=_floats)
    gain_until: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """What counts in rows before `gain_until` are worth today; 0: they belong to a former owner of the index."""
    _usual: _Usual = field(default_factory=_Usual)

    def __post_init__(self) -> None:
        """Columns given as float32 are narrowed: read as halves they would be nonsense."""
        if any(column.dtype != np.uint16 for column in self.sums):
            self.sums = [narrow(widen(column)) for column in self.sums]

    def close(
        self, quarter: int, counts: NDArray[np.int64], known: NDArray[np.float32], tiers: Tiers, zone: tzinfo
    ) -> tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...]:
        """Learn one pass of 15 minutes: `counts` and the share `known` (0..1) of it per model index.

        Gives the level shifts that the end of a local day proved: indices and factors.
        """
        utc = quarter * SLOT
        slot, size = slot_of(utc, zone), counts.size
        found = self._turn_day(day_of(utc, zone), size)
        sums, exposure = self.column(slot, size)
        weighed = exposure > 0.1  # noqa: PLR2004 - less than two minutes ever seen expects nothing
        usual = np.divide(sums, exposure, out=np.zeros(size, np.float32), where=weighed)
        self.actual += np.where(weighed & (known > 0), counts, 0)
        self.expected += usual * known

        self.prepare(quarter, size, tiers, zone)
        limit = np.where(known > 0, _padded(self._usual.limit, size, np.inf)[:size], 0) * known
        learned = np.minimum(counts, limit).astype(np.float32)
        fade = np.float32(self.fade(slot, quarter))
        self.sums[slot] = narrow(sums * fade + learned)
        self.exposure[slot] = self._shared(slot, (exposure * fade + known).astype(np.float16))
        self.at[slot] = quarter
        self.applied[slot] = self.shifted
        self.recent.append(_Pass(quarter, day_of(utc, zone), slot, encode(np.rint(learned))))
        return found

    def prepare(self, quarter: int, size: int, tiers: Tiers, zone: tzinfo, *, weeks: int = WEEKS_BACK) -> None:
        """See what the pass at a quarter may add, some minutes before it ends, a few weeks back at a time.

        No tick has everything to do then; what was not prepared is done when the quarter closes.
        """
        if self._usual[:2] != (quarter, self.shifted):
            low, high = np.full(size, np.inf, np.float32), np.zeros(size, np.float32)
            self._usual = _Usual(quarter, self.shifted, 0, low, high, high.copy(), high.copy())
        for back in range(self._usual.weeks + 1, weeks + 1):
            self._look_back(back, tiers, zone)
            if back == WEEKS_BACK:
                self._usual = self._usual._replace(limit=self._limit())

    def _shared(self, slot: int, exposure: NDArray[np.float16]) -> NDArray[np.float16]:
        """The column of the slot before if it says the same: most do, and half of all memory would go into copies."""
        before = self.exposure[slot - 1]
        return before if np.array_equal(before.view(np.uint16), exposure.view(np.uint16)) else exposure

    def share(self) -> None:
        """Keep equal columns of exposure once."""
        for slot in range(WEEK):
            self.exposure[slot] = self._shared(slot, self.exposure[slot])

    def fade(self, slot: int, quarter: int) -> float:
        """What is left at a quarter of a slot's sums as stored."""
        at = int(self.at[slot])
        return 0.0 if at < 0 else float(PER_QUARTER ** max(quarter - at, 0))

    def column(self, slot: int, size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of a slot's sums and exposure as of its last pass, shifts applied, for `size` indices."""
        sums, exposure = np.zeros(size, np.float32), np.zeros(size, np.float32)
        stored = widen(self.sums[slot][:size])
        sums[: stored.size] = stored
        exposure[: stored.size] = self.exposure[slot][:size]
        missed = self.shifted - int(self.applied[slot])
        for shift in list(self.shifts)[-missed:] if missed else ():
            shift.apply(sums, slot)
        return sums, exposure

    def matrix(self, quarter: int, size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Sums and exposure `[size, 672]` as they stand at a quarter. Takes tens of milliseconds for 10,000 models."""
        sums = np.zeros((size, WEEK), np.float32)
        exposure = np.zeros((size, WEEK), np.float32)
        for slot in range(WEEK):
            if self.at[slot] >= 0:
                fade = np.float32(self.fade(slot, quarter))
                one, other = self.column(slot, size)
                sums[:, slot] = one * fade
                exposure[:, slot] = other * fade
        return sums, exposure

    def clear(self, index: int, quarter: int) -> None:
        """The index gets a new owner, whose first own quarter is this one."""
        for slot in range(WEEK):
            if index < self.sums[slot].size:
                self.sums[slot][index] = 0
                self.exposure[slot][index] = 0
        for shift in self.shifts:
            shift.factors[shift.rows == index] = 1
        for totals in (self.actual, self.expected, *(part for day in self.days for part in (day.actual, day.expected))):
            if index < totals.size:
                totals[index] = 0
        self.gain, self.gain_until = _padded(self.gain, index + 1, 1), _padded_ints(self.gain_until, index + 1)
        self.gain[index], self.gain_until[index] = 0, quarter
        self._usual = _Usual()
        self.epoch += 1

    def add(self, sums: NDArray[np.float32], exposure: NDArray[np.float32], at: NDArray[np.int64]) -> None:
        """Add imported sums `[size, 672]`, each slot as of the quarter `at`, to what is there. Both decay alike."""
        size = sums.shape[0]
        for slot in np.flatnonzero(at >= 0).tolist():
            mine, passes = self.column(slot, max(size, self.sums[slot].size))
            latest = max(int(at[slot]), int(self.at[slot]))
            fade = np.float32(self.fade(slot, latest))
            theirs = np.float32(PER_QUARTER ** (latest - int(at[slot])))
            mine, passes = mine * fade, passes * fade
            mine[:size] += sums[:, slot] * theirs
            passes[:size] += exposure[:, slot] * theirs
            self.sums[slot], self.exposure[slot] = narrow(mine), passes.astype(np.float16)
            self.at[slot], self.applied[slot] = latest, self.shifted
        self.epoch += 1

    def rotate(self, slots: int) -> None:
        """The zone has changed: what was learned at a slot belongs so many slots later."""
        if slots % WEEK:
            order = [(slot - slots) % WEEK for slot in range(WEEK)]
            self.sums = [self.sums[slot] for slot in order]
            self.exposure = [self.exposure[slot] for slot in order]
            self.at, self.applied = self.at[order], self.applied[order]
            self.epoch += 1

    def recall(self, tiers: Tiers, zone: tzinfo) -> None:
        """Remember the passes of the last two days from the raw past (a restart has forgotten them)."""
        self.recent.clear()
        end = tiers.end // QUARTER_MINUTES
        for quarter in range(end - _TWO_DAYS, end):
            counts, known = tiers.quarter(quarter)
            if known and quarter >= 0:
                utc = quarter * SLOT
                self.recent.append(_Pass(quarter, day_of(utc, zone), slot_of(utc, zone), encode(counts)))

    def freeze(self) -> Week:
        """A copy that shares the columns."""
        return Week(
            self.sums.copy(),
            self.exposure.copy(),
            self.at.copy(),
            self.applied.copy(),
            self.shifts.copy(),
            self.shifted,
            self.epoch,
            self.recent.copy(),
            self.days.copy(),
            self.today,
            self.actual.copy(),
            self.expected.copy(),
            self.gain.copy(),
            self.gain_until.copy(),
        )

    # -- what keeps it honest ------------------------------------------------------------------------

    def _look_back(self, weeks: int, tiers: Tiers, zone: tzinfo) -> None:
        """Take in the pass of so many weeks before. Those from before a level shift count at the level after it."""
        usual = self._usual
        self._usual = usual._replace(weeks=weeks)
        size, utc = usual.low.size, usual.quarter * SLOT - weeks * _WEEK_SECONDS
        if utc < 0:
            return
        here = offset_of(usual.quarter * SLOT, zone)
        earlier = int((utc + here - offset_of(utc, zone)) // SLOT)
        values, known = tiers.quarter(earlier)
        if known < 8:  # noqa: PLR2004 - more than half of 15
            return
        values = values[:size]
        kept = values.size
        if known < QUARTER_MINUTES:
            values *= np.float32(QUARTER_MINUTES / known)
        shifted = earlier < self.gain_until[:kept]
        if shifted.any():
            values[: shifted.size][shifted] *= self.gain[:kept][shifted]
        for array, take in ((usual.low, np.minimum), (usual.high, np.maximum), (usual.total, np.add)):
            take(array[:kept], values, out=array[:kept])
        usual.passes[:kept] += 1

    def _limit(self) -> NDArray[np.float32]:
        """Most that a pass may add: 4 x the median of the same local slot in the last 4 weeks, + 10 (forecasting 7).

        Without two such passes there is no limit.
        """
        quarter, _, _, low, high, total, passes, _ = self._usual
        # Of three or four the middle is what remains without the least and the most.
        inner = passes > 2  # noqa: PLR2004
        middle = np.where(inner, total - low - high, total) / np.maximum(np.where(inner, passes - 2, passes), 1)
        limit = np.where(passes >= 2, CAP_TIMES * middle + CAP_PLUS, np.inf).astype(np.float32)  # noqa: PLR2004
        # Rows from before an index got its owner are somebody else's habit.
        kept = min(limit.size, self.gain.size)
        limit[:kept][(self.gain[:kept] == 0) & (self.gain_until[:kept] > quarter - WEEKS_BACK * WEEK)] = np.inf
        return limit

    def _turn_day(self, day: date, size: int) -> tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...]:
        """Begin a local day; the one that ended may prove, with the one before, that a level has shifted."""
        found: tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...] = ()
        if self.today is not None and day > self.today:
            self.days.append(Day(self.today, self.actual, self.expected))
            found = self._shift()
            self.actual, self.expected = _floats(), _floats()
        if self.today is None or day > self.today:
            self.today = day
        self.actual, self.expected = _padded(self.actual, size, 0), _padded(self.expected, size, 0)
        self.gain, self.gain_until = _padded(self.gain, size, 1), _padded_ints(self.gain_until, size)
        return found

    def _shift(self) -> tuple[tuple[NDArray[np.int64], NDArray[np.float32]], ...]:
        """Rescale the sums of models whose last two daily ratios both left [.67, 1.5] on the same side."""
        if len(self.days) < 2:  # noqa: PLR2004 - days
            return ()
        older, newer = self.days[-2], self.days[-1]
        size = older.actual.size
        actual = older.actual + newer.actual[:size]
        expected = older.expected + newer.expected[:size]
        up, down = (np.ones(size, np.bool_) for _ in range(2))
        for day in (older, newer):
            seen, usual = day.actual[:size], day.expected[:size]
            # Few requests have wild ratios by chance alone.
            sure = (np.maximum(seen, usual) >= _SHIFT_COUNT) & (np.abs(seen - usual) > _SHIFT_SIGMA * np.sqrt(usual))
            up &= sure & (seen > _SHIFT_HIGH * usual) & (usual > 0)
            down &= sure & (seen < _SHIFT_LOW * usual)
        rows = np.flatnonzero(up | down)
        if not rows.size:
            return ()
        ratio = np.maximum(actual[rows], 1) / np.maximum(expected[rows], 1)
        factors = np.clip(ratio, 1 / _SHIFT_LIMIT, _SHIFT_LIMIT).astype(np.float32)
        self._record(rows, factors, older.date)
        # The two days have been used: the next shift needs two of its own.
        self.days[-1].expected[rows] = self.days[-1].actual[rows]
        return ((rows, factors),)

    def _record(self, rows: NDArray[np.int64], factors: NDArray[np.float32], since: date) -> None:
        """Columns are rescaled when next touched; only what the days since then added must be remembered now."""
        passes = [one for one in self.recent if one.date >= since]
        added: dict[int, NDArray[np.uint8]] = {}
        for one in passes:
            part = np.zeros(rows.size, np.uint8)
            inside = rows < one.codes.size
            part[inside] = one.codes[rows[inside]]
            # A slot passed twice keeps both passes.
            added[one.slot] = encode(decode(added[one.slot]) + decode(part)) if one.slot in added else part
        self.shifts.append(Shift(rows, factors, added))
        self.shifted += 1
        self.epoch += 1
        before = np.where(self.gain_until[rows] > 0, self.gain[rows], 1)
        self.gain[rows] = np.clip(before * factors, 1 / _GAIN_LIMIT, _GAIN_LIMIT)
        self.gain_until[rows] = min((one.quarter for one in passes), default=0)
        while len(self.shifts) > _SHIFTS or (self.shifts and self._seen_by_all()):
            self._settle()

    def _seen_by_all(self) -> bool:
        """Whether no column waits for the oldest shift."""
        return bool(np.all(self.applied[self.at >= 0] > self.shifted - len(self.shifts)))

    def _settle(self) -> None:
        """Let the oldest shift go: columns that have not seen it yet see it now."""
        oldest = self.shifted - len(self.shifts)
        for slot in np.flatnonzero((self.applied <= oldest) & (self.at >= 0)).tolist():
            column = widen(self.sums[slot])
            self.shifts[0].apply(column, slot)
            self.sums[slot] = narrow(column)
        self.applied = np.maximum(self.applied, oldest + 1)
        self.shifts.popleft()


def _padded(array: NDArray[np.float32], size: int, fill: float) -> NDArray[np.float32]:
    if array.size >= size:
        return array
    grown = np.full(size, fill, np.float32)
    grown[: array.size] = array
    return grown


def _padded_ints(array: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    if array.size >= size:
        return array
    grown = np.zeros(size, np.int64)
    grown[: array.size] = array
    return grown
