"""The raw past in three grains: a day of exact minutes, 8 days of 5-minute counts, 28 days of 15-minute counts.

Belongs here: rows of counts, how compactly they are held, reading them back as arrays with a mask of what is unknown.
Rows never change once written, so a snapshot shares them. Never: seasons, clocks, names of models.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

MINUTES: Final = 1440
FIVES: Final = 8 * 288
QUARTERS: Final = 20 * 96 + 8
"""Rows kept of each grain; the last follow where the 5-minute rows end, so that 28 days and two hours are covered."""

_FRESH: Final = 288
_EXACT: Final = 32
_TOP: Final = 2.0**26
_STEP: Final = float(np.log2(_TOP / _EXACT)) / (255 - _EXACT)
_VALUES: Final = np.concatenate([np.arange(_EXACT), np.rint(_EXACT * 2 ** (_STEP * np.arange(256 - _EXACT)))])
_VALUES32: Final = _VALUES.astype(np.float32)
_BYTE: Final = 255
_WORD: Final = 65_535
_FORGOTTEN: Final = (FIVES + 3 * QUARTERS) * 5


def encode(counts: NDArray[np.int64] | NDArray[np.float64] | NDArray[np.float32]) -> NDArray[np.uint8]:
    """Counts in one byte each: exact to 32, then within 3.4 %, at most 2**26."""
    codes = np.minimum(counts, _EXACT - 1).astype(np.uint8)
    large = np.flatnonzero(counts >= _EXACT)
    if large.size:
        steps = np.log2(counts[large] / _EXACT) / _STEP
        codes[large] = np.rint(np.minimum(steps, 255 - _EXACT)).astype(np.uint8) + _EXACT
    return codes


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The counts that codes stand for."""
    return _VALUES32[codes]


@dataclass(frozen=True, slots=True)
class Row:
    """Counts per model index of one bucket; `known` of its minutes were observed. Absent indices are zero.

    A row that is seldom read is kept compressed, at a third of the size on public traffic (`bench/counts.py`).
    """

    content: NDArray[np.uint8] | bytes
    known: int

    @property
    def codes(self) -> NDArray[np.uint8]:
        """One code a model."""
        content = self.content
        return np.frombuffer(zlib.decompress(content), np.uint8) if isinstance(content, bytes) else content

    def compressed(self) -> Row:
        """The same in less memory; some 40 us to read for 10,000 models."""
        content = self.content
        if isinstance(content, bytes) or not content.size:
            return self
        return Row(zlib.compress(content.tobytes(), 1), self.known)


@dataclass(frozen=True, slots=True)
class Minute:
    """Exact counts per model index of one minute; the few that do not fit `narrow` are listed.

    A minute that is not `known` was not observed from end to end: its counts are a lower bound, its zeros say nothing.
    """

    narrow: NDArray[np.uint8] | NDArray[np.uint16]
    known: bool
    wide: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None

    def counts(self, size: int) -> NDArray[np.int64]:
        """Exact counts of the first `size` indices."""
        found = np.zeros(size, np.int64)
        kept = min(size, self.narrow.size)
        found[:kept] = self.narrow[:kept]
        if self.wide is not None:
            inside = self.wide[0] < size
            found[self.wide[0][inside]] = self.wide[1][inside]
        return found


_NOTHING: Final = np.zeros(0, np.uint8)
UNSEEN: Final = Minute(_NOTHING, known=False)
GAP: Final = Row(_NOTHING, 0)


def pack(counts: NDArray[np.int64], *, known: bool) -> Minute:
    """The most compact exact form of a minute: one byte a model unless an eighth of them is hot."""
    hot = np.flatnonzero(counts > _BYTE)
    if not hot.size:
        return Minute(counts.astype(np.uint8), known)
    if 8 * hot.size <= counts.size:
        return Minute(counts.astype(np.uint8), known, (hot.astype(np.int32), counts[hot]))
    hot = np.flatnonzero(counts > _WORD)
    wide = (hot.astype(np.int32), counts[hot]) if hot.size else None
    return Minute(counts.astype(np.uint16), known, wide)


@dataclass(frozen=True, slots=True)
class History:
    """Counts of consecutive buckets: `counts[n, T]` per bucket, `known[n, T]`, models in the order asked for.

    `start` is the first bucket's UTC instant, `bucket` its seconds. A bucket observed for at least half of its minutes
    is scaled up to all of them; any other is unknown, and so is all before a model was first counted.
    """

    start: float
    bucket: float
    counts: NDArray[np.float64]
    known: NDArray[np.bool_]


class Laid(NamedTuple):
    """Rows of one grain: `codes[T, indices]`, and the share of each row that is known."""

    codes: NDArray[np.uint8]
    share: NDArray[np.float64]


@dataclass(slots=True)
class Tiers:
    """`end` is the first minute (since the epoch) that is not yet written; `born` is kept by the owner."""

    end: int = 0
    minutes: deque[Minute] = field(default_factory=lambda: deque(maxlen=MINUTES))
    fives: deque[Row] = field(default_factory=deque[Row])
    quarters: deque[Row] = field(default_factory=lambda: deque(maxlen=QUARTERS))
    open_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    open_known: int = 0
    generation: int = 0
    """Changes when rows were replaced other than by time passing."""
    laid: Mapping[int, Laid] = field(default_factory=dict[int, "Laid"])
    """Rows laid out for reading, by bucket: see `laid_out`."""

    def start(self, minute: int) -> None:
        """Nothing is known before this minute."""
        self.generation += 1
        self.end = minute
        self.minutes.clear()
        self.fives.clear()
        self.quarters.clear()
        self.open_counts = np.zeros(0, np.int64)
        self.open_known = 0

    def push(self, minute: Minute, counts: NDArray[np.int64]) -> None:
        """Write the next minute: its row, and the same counts as an array."""
        self.minutes.append(minute)
        self.open_counts = widened(self.open_counts, counts.size)
        self.open_counts[: counts.size] += counts
        self.open_known += minute.known
        self._advance()

    def skip(self, to: int) -> None:
        """Minutes up to `to` were not observed."""
        if to - self.end > _FORGOTTEN:
            self.start(to)
        while self.end < to:
            self.minutes.append(UNSEEN)
            self._advance()

    def _advance(self) -> None:
        self.end += 1
        if self.end % 5 == 0:
            self.fives.append(Row(encode(self.open_counts), self.open_known) if self.open_known else GAP)
            self.open_counts = np.zeros(self.open_counts.size, np.int64)
            self.open_known = 0
        elif self.end % 5 == 2 and len(self.fives) > _FRESH:  # noqa: PLR2004 - a minute in which nothing else is due
            self.fives[-_FRESH - 1] = self.fives[-_FRESH - 1].compressed()
        elif self.end % 5 == 4:  # noqa: PLR2004 - another one
            self._coarsen()

    def _coarsen(self) -> None:
        """What is 8 days old goes on in rows of 15 minutes, each compressed a while after it was made."""
        if self.quarters and not isinstance(self.quarters[-1].content, bytes) and self.quarters[-1].content.size:
            self.quarters[-1] = self.quarters[-1].compressed()
            return
        # Three that begin a quarter leave together; a first few before a full quarter leave unheard.
        while len(self.fives) > FIVES and (self.end // 5 - len(self.fives)) % 3:
            self.fives.popleft()
        if len(self.fives) >= FIVES + 3:
            self.quarters.append(merged([self.fives.popleft() for _ in range(3)]))

    def rewind(self, to: int) -> None:
        """The clock was wrong by more than a day: whatever was written for minutes from `to` on never happened."""
        self.generation += 1
        for _ in range(min(self.end - to, len(self.minutes))):
            self.minutes.pop()
        for _ in range(min(self.end // 5 - to // 5, len(self.fives))):
            self.fives.pop()
        if not self.fives:
            self.start(to)
        self.end = to
        self.open_counts = np.zeros(self.open_counts.size, np.int64)
        self.open_known = 0

    def quarter(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Counts in the 15 minutes that begin at `index * 900` seconds, and how many of them are known.

        Nothing, and none, if they are no longer or not yet held.
        """
        first_five = self.end // 5 - len(self.fives)
        place = 3 * index - first_five
        if 0 <= place <= len(self.fives) - 3:
            return _summed([self.fives[place + step] for step in range(3)])
        place = index - (-(-first_five // 3) - len(self.quarters))
        return _summed([self.quarters[place]] if 0 <= place < len(self.quarters) else [])

    def freeze(self) -> Tiers:
        """A copy that shares the rows."""
        return Tiers(
            self.end,
            self.minutes.copy(),
            self.fives.copy(),
            self.quarters.copy(),
            self.open_counts.copy(),
            self.open_known,
            self.generation,
        )

    def by_minute(self, length: int, rows: NDArray[np.int64], born: NDArray[np.int64]) -> History:
        """The last `length` minutes (at most a day) of the models at indices `rows`, born at minute `born[rows]`."""
        length = min(length, len(self.minutes))
        size = int(rows.max(initial=-1)) + 1
        counts = np.zeros((rows.size, length))
        seen = np.zeros(length, np.bool_)
        for place, row in enumerate(islice(self.minutes, len(self.minutes) - length, None)):
            counts[:, place] = row.counts(size)[rows]
            seen[place] = row.known
        start = self.end - length
        known = seen & (np.arange(start, self.end) >= born[rows][:, None])
        return History(60.0 * start, 60.0, counts * known, known)

    def active(self, first: int, length: int, size: int) -> NDArray[np.bool_] | None:
        """Which of the first `size` indices were asked for in these minutes; None unless all of them were observed."""
        place = first - (self.end - len(self.minutes))
        rows = list(islice(self.minutes, max(place, 0), max(place + length, 0)))
        if place < 0 or len(rows) < length or not all(row.known for row in rows):
            return None
        found = np.zeros(size, np.bool_)
        for row in rows:
            kept = row.narrow[:size]
            found[: kept.size] |= kept != 0
            if row.wide is not None:
                found[row.wide[0][row.wide[0] < size]] = True
        return found

    def by_bucket(self, bucket: int, rows: NDArray[np.int64], born: NDArray[np.int64]) -> History:
        """All complete buckets of 300 s (8 days) or 900 s (28 days), as `by_minute`. Raises ValueError for others."""
        if bucket not in (300, 900):
            raise ValueError(f"bucket must be 300 or 900 seconds, not {bucket!r}")
        minutes = bucket // 60
        codes, share = self.laid[bucket] if bucket in self.laid else self._lay(bucket, int(rows.max(initial=-1)) + 1)
        start = (self.end // minutes - len(share)) * minutes
        # Transposed while it is one byte a count, not eight.
        counts = np.asarray(_VALUES.take(np.ascontiguousarray(codes[:, rows].T)), np.float64)
        usable = share >= 0.5  # noqa: PLR2004 - half
        known = usable & (start + minutes * np.arange(len(share)) >= born[rows][:, None])
        if not (known.all() and (share == 1).all()):
            counts *= known / np.where(usable, share, 1.0)
        return History(60.0 * start, float(bucket), counts, known)

    def laid_out(self, size: int) -> Tiers:
        """The same for `size` indices with rows unpacked, for who reads them again and again: 5 KB an index."""
        same = self.freeze()
        same.laid = {bucket: self._lay(bucket, size) for bucket in (300, 900)}
        return same

    def _lay(self, bucket: int, size: int) -> Laid:
        found = list(self.fives) if bucket == 300 else list(self._all_quarters())  # noqa: PLR2004 - five minutes
        codes = np.zeros((len(found), size), np.uint8)
        for place, row in enumerate(found):
            here = row.codes[:size]
            codes[place, : here.size] = here
        return Laid(codes, np.array([row.known for row in found], np.float64) / (bucket // 60))

    def _all_quarters(self) -> Iterator[Row]:
        yield from self.quarters
        first = self.end // 5 - len(self.fives)
        fives = islice(self.fives, -first % 3, None)
        while len(three := list(islice(fives, 3))) == 3:  # noqa: PLR2004 - five-minute rows of a quarter
            yield merged(three)


def _summed(rows: list[Row]) -> tuple[NDArray[np.float32], int]:
    """Counts and known minutes of several rows together."""
    total = np.zeros(0, np.float32)
    for row in rows:
        if row is not GAP:
            counts = decode(row.codes)
            if counts.size < total.size:
                counts, total = total, counts
            counts[: total.size] += total
            total = counts
    return total, sum(row.known for row in rows)


def merged(rows: list[Row]) -> Row:
    """Several rows as one."""
    counts, known = _summed(rows)
    return Row(encode(counts), known) if known else GAP


def widened(array: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The array itself, or a longer copy padded with zeros."""
    if array.size >= size:
        return array
    grown = np.zeros(size, np.int64)
    grown[: array.size] = array
    return grown
