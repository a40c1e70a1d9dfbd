"""Requests per model: the increment on the request path, and what a minute's roll makes of it.

Belongs here: which index a model has, which minute a request counts for when clocks misbehave, decayed counters.
Never: reading a clock (wall and monotonic seconds come in), files (store), logs (history), fitted profiles.
"""

from __future__ import annotations

import math
from array import array
from datetime import UTC, tzinfo
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from forecasting import past
from forecasting.calendar import SLOT, offset_of
from forecasting.snapshot import (
    DECAY,
    HALF_LIVES,
    LIMIT,
    ClockJumped,
    CountsRestored,
    Fact,
    LevelShifted,
    Mask,
    OutageSeen,
    Snapshot,
    StoreSetAside,
)
from forecasting.tiers import UNSEEN, Tiers, pack, widened
from forecasting.week import QUARTER_MINUTES, Week

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from forecasting.history import Imported
    from forecasting.store import Saved
    from forecasting.tiers import History, Minute

__all__ = [
    "HALF_LIVES",
    "ClockJumped",
    "Counts",
    "CountsRestored",
    "Fact",
    "Full",
    "LevelShifted",
    "Mask",
    "OutageSeen",
    "Snapshot",
    "StoreSetAside",
]

Number = TypeVar("Number", np.float64, np.int64)

_JUMP: Final = 2.0
_OUTAGE_MINUTES: Final = 10
_REWIND_MINUTES: Final = 1440
_SLEW: Final = 0.01
_MASK_MEMORY: Final = 28 * 86_400.0
_PREPARES: Final = {8: 1, 11: 2, 13: 4}
"""Minutes of a quarter in which little else is due, and how many past weeks are looked at by then."""


class Full(LookupError):
    """No index is left for another model."""


class _Live(NamedTuple):
    """Who is counted, until somebody comes or goes: keys, their indices (all of them: `whole`), and their places."""

    keys: tuple[str, ...]
    rows: NDArray[np.int64]
    table: tuple[str | None, ...]
    places: Mapping[str, int]
    whole: bool

    def of(self, array: NDArray[Number]) -> NDArray[Number]:
        """These models, on the last axis; not a copy when all of them are counted."""
        return array[..., : len(self.table)] if self.whole else array[..., self.rows]


# -- the counter -------------------------------------------------------------------------------------


class Counts:
    """Counts of up to `limit` models in the local weeks of `zone`, from an anchor of wall and monotonic seconds."""

    def __init__(self, wall: float, monotonic: float, *, zone: tzinfo = UTC, limit: int = LIMIT) -> None:
        if not 0 < limit <= LIMIT:
            raise ValueError(f"limit must lie in 1..{LIMIT}, not {limit}")
        self.zone = zone
        self.limit = limit
        self._index: dict[str, int] = {}
        self._table: list[str | None] = []
        self._free: list[int] = []
        self._fixed: _Live | None = None
        # An increment of an array costs little more than one of a list, and numpy reads it where it lies.
        self._hits = array("q", bytes(8))
        self._fresh = np.frombuffer(self._hits, np.int64)
        self._born = np.zeros(0, np.int64)
        self._seen = np.zeros(0)
        self._decayed = np.zeros((len(HALF_LIVES), 0))
        self._minute = np.zeros(0, np.int64)  # requests of the open minute that were rolled already
        self._quarter = np.zeros(0, np.int64)
        self._quarter_known = 0
        self._void: set[int] = set()
        self._masks: list[Mask] = []
        self.tiers = Tiers()
        self.week = Week()
        # The first minute is seen in part only.
        self._partial = True
        self._anchor = wall - monotonic
        self._rolled = monotonic
        self.tiers.start(math.floor(wall / 60))
        self._began = self.tiers.end

    # -- the request path ----------------------------------------------------------------------------

    def hit(self, index: int) -> None:
        """One request for the model at an index that `index` gave. Under 250 ns."""
        self._hits[index] += 1

    def add(self, index: int, requests: int) -> None:
        """So many at once: a batch, or a replay."""
        self._hits[index] += requests

    def index(self, key: str) -> int:
        """The model's index, a new one for a model that has none. Raises Full if there are `limit` models."""
        found = self._index.get(key)
        if found is not None:
            return found
        if self._free:
            found = self._free.pop()
            self._wipe(found)
        elif len(self._table) < self.limit:
            found = len(self._table)
            self._table.append(None)
            self._grow()
        else:
            raise Full(f"{self.limit} models are counted already, none is left for another")
        self._table[found] = key
        self._index[key] = found
        self._born[found] = self.tiers.end
        self._fixed = None
        return found

    def forget(self, key: str) -> None:
        """The model is served no more; its index may be given to another. Unknown keys are ignored."""
        index = self._index.pop(key, None)
        if index is not None:
            self._table[index] = None
            self._free.append(index)
            self._fixed = None

    def _wipe(self, index: int) -> None:
        self._hits[index] = 0
        self._seen[index] = 0
        self._decayed[:, index] = 0
        self._minute[index] = 0
        self._quarter[index] = 0
        self.week.clear(index, -(-self.tiers.end // QUARTER_MINUTES))

    def _grow(self) -> None:
        """Room for the index just added; doubling, so that adding n models costs O(n)."""
        size = len(self._table)
        if size <= self._born.size:
            return
        room = min(max(64, 2 * len(self._hits), size), self.limit)
        self._born, self._minute, self._quarter = (
            widened(each, room) for each in (self._born, self._minute, self._quarter)
        )
        self._seen = np.concatenate([self._seen, np.zeros(room - self._seen.size)])
        self._fresh = self._born  # an array that is looked at cannot grow
        self._hits.frombytes(bytes(8 * (room - len(self._hits))))
        self._fresh = np.frombuffer(self._hits, np.int64)
        self._decayed = np.concatenate([self._decayed, np.zeros((len(HALF_LIVES), room - self._decayed.shape[1]))], 1)

    # -- time ----------------------------------------------------------------------------------------

    def roll(self, wall: float, monotonic: float) -> tuple[Fact, ...]:
        """Close the minutes that have passed; call it about each minute, at any time. Under 2 ms for 10,000 models.

        Time is the monotonic clock anchored to wall time. A drift of up to 2 s is followed slowly; a larger one is a
        jump (fault F67): the open minute and both 15-minute slots become gaps, minutes already closed are never
        counted again, and more than a day backwards means that the earlier clock was wrong. Raises ValueError for a
        wall time outside 1970..2199.
        """
        if not 0 <= wall < 7_258_118_400:  # noqa: PLR2004 - the year 2200
            raise ValueError(f"wall time must lie in the years 1970 to 2199, not {wall!r}")
        elapsed = max(monotonic - self._rolled, 0.0)
        self._rolled = max(monotonic, self._rolled)
        self._drain(elapsed, wall)
        drift = wall - (self._anchor + monotonic)
        facts: list[Fact] = []
        if abs(drift) > _JUMP:
            self._jump(wall, monotonic, facts)
            facts.append(ClockJumped(wall, drift))
        else:
            self._anchor += math.copysign(min(abs(drift), _SLEW * elapsed), drift)
        self._close(math.floor((self._anchor + monotonic) / 60), facts)
        return tuple(facts)

    def _drain(self, elapsed: float, wall: float) -> None:
        """Move what was hit since the last roll into the open minute and the decayed counters."""
        size = len(self._table)
        fresh = self._fresh[:size]
        came = fresh != 0
        some = bool(came.any())
        # Requests of the interval are as old as its middle, on average. Row by row, a row being what a cache holds.
        requests = fresh.astype(np.float64)
        for row, fade, gain in zip(
            self._decayed, np.exp(-DECAY * elapsed), np.exp(-DECAY * (elapsed / 2)), strict=True
        ):
            row[:size] *= fade
            if some:
                row[:size] += requests * gain
        if some:
            self._minute[:size] += fresh
            np.copyto(self._seen[:size], wall, where=came)
            fresh[:] = 0

    def _jump(self, wall: float, monotonic: float, facts: list[Fact]) -> None:
        """Close the open minute as unknown and go on from the new wall time."""
        self._void.add(self.tiers.end // QUARTER_MINUTES)
        self._anchor = wall - monotonic
        minute = math.floor(wall / 60)
        self._void.add(minute // QUARTER_MINUTES)
        if minute < self.tiers.end - _REWIND_MINUTES:
            self._rewind(minute)
        elif minute > self.tiers.end:
            self._write(known=False, counts=None, facts=facts)
            self._skip(minute, facts)
        self._partial = True

    def _rewind(self, minute: int) -> None:
        """Whatever the wrong clock dated at or after this minute is dropped; week sums keep what they learned."""
        self.tiers.rewind(minute)
        self._quarter[:] = 0
        self._quarter_known = 0
        np.minimum(self._born, minute, out=self._born)
        self._began = min(self._began, minute)

    def _close(self, minute: int, facts: list[Fact]) -> None:
        """Write all minutes before this one."""
        late = minute - self.tiers.end
        if late <= 0:
            return
        if late > _OUTAGE_MINUTES:  # nobody rolled: what was counted cannot be told apart
            self._write(known=False, counts=None, facts=facts)
            self._skip(minute, facts)
            return
        total = self._minute[: len(self._table)].copy()
        for step in range(late):
            share = total if late == 1 else total // late + (step < total % late)
            self._write(known=not self._partial, counts=share, facts=facts)
            self._partial = False

    def _write(self, *, known: bool, counts: NDArray[np.int64] | None, facts: list[Fact]) -> None:
        """The open minute ends, with all that was counted in it unless told otherwise."""
        size = len(self._table)
        if counts is None:
            counts = self._minute[:size].copy()
        self._minute[:size] -= counts
        self.tiers.push(pack(counts, known=known), counts)
        if known:
            self._quarter[:size] += counts
            self._quarter_known += 1
        self._turn(facts)

    def _skip(self, minute: int, facts: list[Fact]) -> None:
        start = self.tiers.end
        if minute - start >= QUARTER_MINUTES:
            # The quarter under way ends here; those that nobody saw teach nothing.
            self._finish(start // QUARTER_MINUTES, facts)
            self.tiers.skip(minute)
        else:
            while self.tiers.end < minute:
                self.tiers.skip(self.tiers.end + 1)
                self._turn(facts)
        if minute - start > _OUTAGE_MINUTES:
            facts.append(OutageSeen(60.0 * start, 60.0 * minute))

    def _turn(self, facts: list[Fact]) -> None:
        quarter, minute = divmod(self.tiers.end, QUARTER_MINUTES)
        if minute == 0:
            self._finish(quarter - 1, facts)
        elif minute in _PREPARES:
            self.week.prepare(quarter, len(self._table), self.tiers, self.zone, weeks=_PREPARES[minute])

    def _finish(self, quarter: int, facts: list[Fact]) -> None:
        """A quarter of an hour is over: teach its slot, unless a jump made it a gap."""
        size = len(self._table)
        if self._quarter_known and quarter not in self._void:
            known = np.full(size, self._quarter_known / QUARTER_MINUTES, np.float32)
            age = (quarter + 1) * QUARTER_MINUTES - self._born[:size]
            np.minimum(known, np.maximum(age, 0) / QUARTER_MINUTES, out=known, casting="same_kind")
            self._hide(quarter, known)
            known[[index for index in self._free if index < size]] = 0
            found = self.week.close(quarter, self._quarter[:size], known, self.tiers, self.zone)
            at = (quarter + 1) * SLOT
            for rows, factors in found:
                for place in range(rows.size):
                    key = self._table[int(rows[place])]
                    if key is not None:
                        facts.append(LevelShifted(at, key, float(factors[place])))
        self._void = {each for each in self._void if each > quarter}
        self._quarter[:] = 0
        self._quarter_known = 0

    # -- knowledge from elsewhere --------------------------------------------------------------------

    def load_history(self, imported: Imported) -> tuple[str, ...]:
        """Learn from a log what happened before counting began; each minute is learned once, whoever saw it.

        Gives the keys that found no index, the least used ones. Blocking, some seconds for 10,000 models.
        """
        imported = imported.before(self._began)
        if not imported.cells:
            return ()
        busiest = sorted(imported.cells, key=lambda key: -int(imported.cells[key][1].sum()))
        left_out: list[str] = []
        rows: dict[str, int] = {}
        for key in busiest:
            try:
                rows[key] = self.index(key)
            except Full:
                left_out.append(key)
        order = np.array(list(rows.values()), np.int64)
        log = past.Past([imported.cells[key] for key in rows], order, len(self._table), imported.known, imported.start)
        self.week.add(*past.weekly(log, self.zone))
        if not self.tiers.minutes:
            past.fill(self.tiers, log)
        now = self._anchor + self._rolled
        for minutes, counts, index in log.each():
            self._born[index] = min(int(self._born[index]), int(minutes[0]))
            self._seen[index] = max(float(self._seen[index]), 60.0 * float(minutes[-1]))
            age = np.maximum(now - 60.0 * minutes - 30.0, 0)
            self._decayed[:, index] += np.exp(-DECAY * age) @ counts
        self._began = imported.start
        return tuple(left_out)

    @classmethod
    def restore(
        cls, saved: Saved, wall: float, monotonic: float, *, zone: tzinfo = UTC, limit: int = LIMIT
    ) -> tuple[Counts, tuple[Fact, ...]]:
        """Go on from what a store holds: counters fade by the downtime, and the downtime is a gap."""
        then = saved.snapshot
        counts = cls(then.at, monotonic, zone=zone, limit=max(limit, len(then.table)) if then.table else limit)
        counts.limit = limit
        size = len(then.table)
        counts._table = list(then.table)
        counts._grow()
        counts._index = {key: index for index, key in enumerate(then.table) if key is not None}
        counts._free = [index for index, key in enumerate(then.table) if key is None]
        counts.tiers, counts.week = then.tiers.freeze(), then.week.freeze()
        counts._began = saved.began
        counts._born[:size] = then.born
        counts._decayed[:, :size], counts._seen[:size] = then.decayed, then.seen
        counts._quarter[:size], counts._quarter_known = then.open_counts, then.open_known
        ahead = offset_of(then.at, zone) - offset_of(then.at, then.zone)
        counts.week.rotate(round(ahead / SLOT))
        counts.week.recall(counts.tiers, zone)
        facts: list[Fact] = []
        counts._replay(saved.later, facts)
        end, counts._anchor = counts.tiers.end, wall - monotonic
        counts._decayed *= np.exp(-DECAY * max(wall - max(then.at, 60.0 * end), 0.0))
        minute = math.floor(wall / 60)
        if minute > end:
            counts._skip(minute, facts)
        elif minute < end - _REWIND_MINUTES:
            counts._rewind(minute)
        counts._partial = True
        facts.append(CountsRestored(wall, len(counts._index), max(wall - 60.0 * end, 0.0)))
        return counts, tuple(facts)

    def _replay(self, later: tuple[tuple[int, Minute], ...], facts: list[Fact]) -> None:
        """Count again what was journalled after the last checkpoint."""
        size = len(self._table)
        for minute, row in later:
            if minute < self.tiers.end:
                continue
            if minute > self.tiers.end:
                self._skip(minute, facts)
            fresh = row.counts(size)
            self._decayed *= np.exp(-DECAY * 60.0)
            self._decayed[:, :size] += fresh * np.exp(-DECAY * 30.0)
            self._seen[:size] = np.where(fresh > 0, 60.0 * (minute + 1), self._seen[:size])
            self._minute[:size] += fresh
            self._write(known=row.known, counts=None, facts=facts)

    # -- masks ---------------------------------------------------------------------------------------

    def mask(self, start: float, end: float, keys: Iterable[str] | None = None) -> None:
        """Keep profiles from learning in `[start, end)`: all models, or `keys`. Raw counts are kept all the same.

        Tell it before the window: what a slot has learned is not taken back. Raises ValueError for an empty window.
        """
        if not (math.isfinite(start) and math.isfinite(end) and start < end):
            raise ValueError(f"a window must end after it starts, unlike {start!r} to {end!r}")
        mask = Mask(start, end, None if keys is None else frozenset(keys))
        oldest = 60.0 * self.tiers.end - _MASK_MEMORY
        self._masks = [each for each in self._masks if each.end > oldest and each != mask]
        self._masks.append(mask)

    def _hide(self, quarter: int, known: NDArray[np.float32]) -> None:
        begin = quarter * SLOT
        for mask in self._masks:
            if mask.start < begin + SLOT and mask.end > begin:
                if mask.keys is None:
                    known[:] = 0
                else:
                    known[[self._index[key] for key in mask.keys if key in self._index]] = 0

    # -- reading -------------------------------------------------------------------------------------

    @property
    def keys(self) -> tuple[str, ...]:
        """Models counted now, the order of all arrays."""
        return self._live().keys

    @property
    def places(self) -> Mapping[str, int]:
        """Where each of `keys` stands in them."""
        return self._live().places

    def _live(self) -> _Live:
        if self._fixed is None:
            rows = [index for index, key in enumerate(self._table) if key is not None]
            keys = tuple(key for key in self._table if key is not None)
            places = MappingProxyType({key: place for place, key in enumerate(keys)})
            self._fixed = _Live(
                keys, np.array(rows, np.int64), tuple(self._table), places, len(rows) == len(self._table)
            )
        return self._fixed

    def rates(self, monotonic: float) -> NDArray[np.float64]:
        """Requests per second `[n, 5]` by half-life, as of now, the requests since the last roll included."""
        return np.stack([self.rate(row, monotonic) for row in range(len(HALF_LIVES))], axis=1)

    def rate(self, half_life: int, monotonic: float) -> NDArray[np.float64]:
        """One column of `rates`; `half_life` indexes `HALF_LIVES`."""
        live, elapsed, decay = self._live(), max(monotonic - self._rolled, 0.0), float(DECAY[half_life, 0])
        rate = live.of(self._decayed[half_life]) * (math.exp(-decay * elapsed) * decay)
        # An instant after the roll there is nothing new.
        if elapsed > 0 or self._fresh.any():
            rate += live.of(self._fresh) * (math.exp(-decay * (elapsed / 2)) * decay)
        return rate

    def last_seen(self, wall: float) -> NDArray[np.float64]:
        """UTC second of the last request per model, to the last roll; 0 for none yet, `wall` for one since then."""
        live = self._live()
        return np.where(live.of(self._fresh) != 0, wall, live.of(self._seen))

    def recent(self, minutes: int) -> History:
        """Exact counts of the last closed minutes, at most 1,440."""
        return self.tiers.by_minute(minutes, self._live().rows, self._born)

    def came(self, first: int, minutes: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which models were asked for in minutes from `first` on, and of which that is known: `[n]` each."""
        live = self._live()
        found = self.tiers.active(first, minutes, len(live.table))
        if found is None:
            nothing = np.zeros(len(live.rows), np.bool_)
            return nothing, nothing
        return found[live.rows], self._born[live.rows] <= first

    def closed(self, after: int) -> tuple[tuple[int, Minute], ...]:
        """Minutes written since the minute `after`, with their numbers: what a journal has to append."""
        count = min(max(self.tiers.end - after - 1, 0), len(self.tiers.minutes))
        first = self.tiers.end - count
        found = [self.tiers.minutes[place - count] for place in range(count)]
        return tuple((first + step, row) for step, row in enumerate(found) if row is not UNSEEN)

    def snapshot(self) -> Snapshot:
        """Everything, shared rather than copied; a fraction of a millisecond."""
        keys, rows, table, _, _ = self._live()
        size = len(table)
        return Snapshot(
            keys,
            rows,
            table,
            self._born[:size].copy(),
            self._anchor + self._rolled,
            self._decayed[:, :size].copy(),
            self._seen[:size].copy(),
            self.tiers.freeze(),
            self.week.freeze(),
            self._quarter[:size].copy(),
            self._quarter_known,
            tuple(self._masks),
            self.zone,
            self._began,
        )

    def __repr__(self) -> str:
        return f"<Counts of {len(self._index)} models to minute {self.tiers.end}>"
