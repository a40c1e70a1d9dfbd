"""Request rates that price residency: decayed counters, and the pooled blend of decayed and same-time-of-day rates.

Rates are requests per second. Counts requests, never loads. `cells.py` finds the blend's ten weights in the fitting
worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DAY = 86_400.0
HALF_LIVES = (600.0, 3600.0, 21_600.0, DAY, 3 * DAY)
"""Seconds: 10 min, 1 h, 6 h, 1 day, 3 days."""
R_600, R_1H, R_6H = 0, 1, 2
COLUMNS = ("r_600", "r_1h", "r_6h", "r_1d", "r_3d", "s_week", "s_yesterday", "s_week_ago", "ttn", "age")
AGE = 600.0
BACK, FORWARD = 2, 4
"""Buckets around the same time of day that make a seasonal rate."""
WEEK = 7
LN2 = float(np.log(2.0))


class Decayed:
    """Exponentially decayed request counters, `[n, 5]`, one column per half-life."""

    __slots__ = ("counts", "last", "stamp")

    def __init__(self, models: int) -> None:
        self.counts = np.zeros((models, len(HALF_LIVES)))
        self.stamp = np.zeros(models)
        """Up to when each row is decayed, epoch seconds."""
        self.last = np.full(models, -np.inf)
        """Last request, epoch seconds."""

    def __len__(self) -> int:
        return len(self.stamp)

    def __repr__(self) -> str:
        return f"<Decayed {len(self)} models>"

    def hit(self, row: int, at: float, requests: float = 1.0) -> None:
        """Count requests of one model; an instant in its past counts as now, so a clock that steps back is safe."""
        now = max(at, float(self.stamp[row]))
        self.counts[row] = self.counts[row] * 2.0 ** (-(now - self.stamp[row]) / _HALF) + requests
        self.stamp[row] = now
        self.last[row] = now

    def fold(self, counts: Floats, at: float) -> None:
        """Count a batch `[n]` of requests that came just before `at`."""
        if counts.shape != self.stamp.shape or not np.all(np.isfinite(counts)) or not np.all(counts >= 0):
            msg = f"counts must be {len(self)} finite numbers, none negative"
            raise ValueError(msg)
        now = np.maximum(self.stamp, at)
        self.counts = self.counts * self._fade(now) + counts[:, None]
        self.stamp = now
        self.last = np.where(counts > 0, now, self.last)

    def rates(self, at: float) -> Floats:
        """Rates at decision time, `[n, 5]`: n·2^(-Δt/h)·ln 2/h."""
        return self.counts * self._fade(np.maximum(self.stamp, at)) * (LN2 / _HALF)

    def age(self, at: float) -> Floats:
        """Seconds since the last request; infinite when there was none."""
        return np.maximum(at - self.last, 0.0)

    def _fade(self, now: Floats) -> Floats:
        return np.asarray(2.0 ** (-(now - self.stamp)[:, None] / _HALF), np.float64)


_HALF = np.array(HALF_LIVES)


def seasonal(days: Floats, bucket: float) -> Floats:
    """S7, S1 and S7w for a whole day, `[3, n, B]`, from `days[n, D, B]` that end with yesterday.

    Mean of the last 7 days, yesterday, and a week ago, each over buckets b - 2 to b + 4, as rates; a week ago is 0
    with less than a week of days. The neighbours of a day's edge come from the days beside it.
    """
    if days.shape[1] < 1:
        msg = f"a season needs at least one day, not {days.shape}"
        raise ValueError(msg)
    enough, days = days.shape[1] >= WEEK, days[:, -WEEK - 1 :]
    models, length, buckets = days.shape
    flat = np.concatenate((np.zeros((models, 1)), np.cumsum(days.reshape(models, -1), axis=1)), axis=1)
    first = np.arange(length * buckets, dtype=np.int64)
    low, high = np.clip(first - BACK, 0, None), np.clip(first + FORWARD + 1, None, length * buckets)
    rate = ((flat[:, high] - flat[:, low]) / ((high - low) * bucket)).reshape(days.shape)
    found = np.zeros((3, models, buckets))
    found[0] = rate[:, -WEEK:].mean(axis=1)
    found[1] = rate[:, -1]
    if enough:
        found[2] = rate[:, -WEEK]
    return found


def columns(decayed: Floats, season: Floats, ttn: Floats, age: Floats) -> Floats:
    """The blend's ten `COLUMNS`, `[n, 10]`, from rates `[n, 5]`, seasonal rates `[3, n]`, TTN rate and age `[n]`."""
    return np.concatenate((decayed, season.T, ttn[:, None], (1.0 / (age + AGE))[:, None]), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """Ten weights, none negative, shared by all models."""

    weights: Floats

    def __post_init__(self) -> None:
        w = self.weights
        if w.shape != (len(COLUMNS),) or not np.all(np.isfinite(w)) or not np.all(w >= 0):
            msg = f"a blend has {len(COLUMNS)} finite weights, none negative"
            raise ValueError(msg)

    def rate(self, x: Floats) -> Floats:
        """Requests per second of each row of `columns`."""
        return np.asarray(x @ self.weights, np.float64)

    def explain(self) -> dict[str, float]:
        """Weight by column."""
        return dict(zip(COLUMNS, self.weights.tolist(), strict=True))
