"""Time to next use (TTN): when will the expected number of requests since now reach 0.7, and the rate that implies.

From bucket counts of past days, refitted daily, batched over models. The eviction signal for scheduled traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

ENOUGH = 0.7
"""Expected requests that count as the next use."""
NEVER = 3 * 86_400.0
FLOOR = 0.05
WEEK = 7
RECENT = 7
WEEKS = 3
REACH = 2
"""Buckets to each side of the moving average."""
DAYS = 3


@dataclass(frozen=True, slots=True, eq=False)
class NextUse:
    """`seconds[n, B]` until the next use, from the start of each bucket of the day; infinite if never requested.

    `rate[n, B]` is its inverse in requests per second, 0 if never.
    """

    bucket: float
    seconds: Floats
    rate: Floats

    def at(self, elapsed: float) -> tuple[Floats, Floats]:
        """Seconds and rate per model, `elapsed` seconds into the day."""
        column = min(max(int(elapsed // self.bucket), 0), self.rate.shape[1] - 1)
        return self.seconds[:, column], self.rate[:, column]


def expected(days: Floats, known: Bools | None = None) -> Floats:
    """Expected requests per bucket of today and tomorrow, `[n, 2B]`, from `days[n, D, B]`, the last being yesterday.

    Half the mean of the last 7 days, half that of up to 3 same weekdays (the first alone when there are none),
    smoothed over 5 buckets. `known[n, D, B]` leaves gaps out of every mean.
    """
    if days.ndim != DAYS or (known is not None and known.shape != days.shape):
        msg = f"days must be [models, days, buckets], known alike, not {days.shape}"
        raise ValueError(msg)
    seen = np.ones(days.shape, np.bool_) if known is None else known
    recent, _ = _mean(days[:, -RECENT:], seen[:, -RECENT:])
    halves: list[Floats] = []
    for ahead in range(2):
        same = [days.shape[1] - WEEK * week + ahead for week in range(1, WEEKS + 1)]
        same = [day for day in same if day >= 0]
        alike, any_known = _mean(days[:, same], seen[:, same])
        halves.append(np.where(any_known, 0.5 * recent + 0.5 * alike, recent))
    both = np.concatenate(halves, axis=1)
    width = 2 * REACH + 1
    padded = np.pad(both, ((0, 0), (REACH, REACH)), mode="edge")
    total = sum((padded[:, shift : shift + both.shape[1]] for shift in range(width)), np.zeros_like(both))
    return np.asarray(total / width, np.float64)


def _mean(days: Floats, known: Bools) -> tuple[Floats, Bools]:
    """Mean over days, 0 where none is known, and where any is."""
    seen = known.sum(axis=1)
    summed = np.where(known, days, 0.0).sum(axis=1)
    return np.asarray(summed / np.maximum(seen, 1), np.float64), np.asarray(seen > 0, np.bool_)


def next_use(rates: Floats, bucket: float) -> NextUse:
    """TTN for every bucket of today from expected requests `[n, 2B]` per bucket of `bucket` seconds."""
    models, length = rates.shape
    half = length // 2
    cumulative = np.zeros((models, length + 1))
    np.cumsum(rates, axis=1, out=cumulative[:, 1:])
    total = cumulative[:, -1]
    seconds = np.empty((models, half))
    start = np.arange(half, dtype=np.int64)
    for row in range(models):
        q = cumulative[row]
        goal = q[:half] + ENOUGH
        end: NDArray[np.int64] = np.asarray(q.searchsorted(goal), np.int64)
        reached: Bools = np.asarray(end <= length, np.bool_)
        end = np.asarray(np.minimum(end, length), np.int64)
        inside = (goal - q[end - 1]) / np.maximum(q[end] - q[end - 1], 1e-12)
        never = NEVER * ENOUGH / max(float(total[row]), FLOOR)
        seconds[row] = np.where(reached, (end - 1 + inside - start) * bucket, never)
    seconds[total <= 0] = np.inf
    rate = ENOUGH / np.maximum(seconds, bucket / 4)
    return NextUse(bucket, seconds, np.where(np.isfinite(seconds), rate, 0.0))
