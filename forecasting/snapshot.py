"""What counting tells: facts, and a frozen view of all that is counted.

Belongs here: values that other threads, the store and the fitter may hold. Never: anything that changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from forecasting.week import QUARTER_MINUTES

if TYPE_CHECKING:
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.tiers import History, Tiers
    from forecasting.week import Day, Week

LIMIT: Final = 65_536
"""Most models that can be counted."""

HALF_LIVES: Final = (600.0, 3600.0, 6 * 3600.0, 86_400.0, 3 * 86_400.0)
"""Seconds; `Snapshot.rates` has one column for each (policy 6.1)."""

DECAY: Final = math.log(2) / np.array(HALF_LIVES)[:, None]
"""Natural decay per second of each counter, `[5, 1]`."""

# -- facts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """The wall clock moved by `seconds` against the monotonic one at `at` (UTC, the new wall time)."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class OutageSeen:
    """Nothing was counted from `start` to `end` (UTC): unknown, not zero."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LevelShifted:
    """Two daily ratios left their band: the week sums of `key` were multiplied by `factor`."""

    at: float
    key: str
    factor: float


@dataclass(frozen=True, slots=True)
class StoreSetAside:
    """The file of counts could not be used (damaged, or from a newer release) and was renamed to `path`."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CountsRestored:
    """Counting goes on at `at` with `models` known; nothing was counted for `downtime` seconds."""

    at: float
    models: int
    downtime: float


Fact: TypeAlias = ClockJumped | OutageSeen | LevelShifted | StoreSetAside | CountsRestored


@dataclass(frozen=True, slots=True)
class Mask:
    """A window that profiles must not learn from (a promotion): UTC seconds, some keys or all (`None`)."""

    start: float
    end: float
    keys: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is counted, frozen at the end of a minute; safe to read in another thread.

    `keys` are the models, arrays have them in that order; `rows` are their indices, `born` the first minute of each.
    `table` is the key of every index, or None; `began` is the first minute that anything is known of. `decayed`
    `[5, indices]` holds counters as of `at` (UTC).
    """

    keys: tuple[str, ...]
    rows: NDArray[np.int64]
    table: tuple[str | None, ...]
    born: NDArray[np.int64]
    at: float
    decayed: NDArray[np.float64]
    seen: NDArray[np.float64]
    tiers: Tiers
    week: Week
    open_counts: NDArray[np.int64]
    open_known: int
    masks: tuple[Mask, ...]
    zone: tzinfo
    began: int

    def sums(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Week sums and exposure, each `[n, 672]`, decayed to the snapshot's minute. Slow: not on the loop."""
        sums, exposure = self.week.matrix(self.tiers.end // QUARTER_MINUTES, len(self.table))
        if self.rows.size == len(self.table):
            return sums, exposure
        return sums[self.rows], exposure[self.rows]

    def rates(self, elapsed: float = 0.0) -> NDArray[np.float64]:
        """Requests per second `[n, 5]` by half-life (`HALF_LIVES`), `elapsed` seconds after `at`, if none arrived."""
        rates: NDArray[np.float64] = self.decayed[:, self.rows] * np.exp(-DECAY * max(elapsed, 0.0)) * DECAY
        return rates.T

    def recent(self, minutes: int) -> History:
        """Exact counts of the last minutes, at most 1,440."""
        return self.tiers.by_minute(minutes, self.rows, self.born)

    def history(self, bucket: int = 900) -> History:
        """Counts of 900-second buckets (28 days) or 300-second ones (8 days); masked windows are unknown."""
        found = self.tiers.by_bucket(bucket, self.rows, self.born)
        begins = np.arange(found.counts.shape[1], dtype=np.float64) * found.bucket + found.start
        for mask in self.masks:
            hidden = (begins < mask.end) & (begins + found.bucket > mask.start)
            chosen = np.array([mask.keys is None or key in mask.keys for key in self.keys], np.bool_)
            found.known[np.ix_(chosen, hidden)] = False
        found.counts[~found.known] = 0
        return found

    def days(self) -> tuple[Day, ...]:
        """Up to 28 local days: requests seen, and expected by the week sums, per *index* (`rows`)."""
        return tuple(self.week.days)
