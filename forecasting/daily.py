"""Past days at the same local time, and what a learned rate would have saved on them. Arrays in, arrays out.

Belongs here: alignment of histories by local days, the held-out days of the pooled blend. Never: fitting, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting.calendar import offsets_of
from forecasting.cells import history as decayed_history
from forecasting.drift import poisson_loss
from forecasting.nextuse import expected, next_use
from forecasting.rates import COLUMNS, Blend, columns, seasonal

if TYPE_CHECKING:
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

DAY = 86_400.0
STRIDE = 7
"""Buckets between two questions of a held-out day; it shares no factor with an hour, so that all minutes get a turn."""
AHEAD = 600.0
HEDGE = 0.05
"""Share of the constant rate in what is judged: a rate of exactly 0 would have an infinite loss."""
_TTN = COLUMNS.index("ttn")


@dataclass(frozen=True, slots=True)
class Days:
    """`counts[n, D, B]` requests per bucket, the last day being the 24 h before `origin`; `known` alike.

    Bucket b of each day is at the same local time as `origin` + b buckets.
    """

    counts: Floats
    known: Bools
    bucket: float


def by_day(past: History, origin: float, zone: tzinfo, most: int) -> Days:
    """Up to `most` days that begin in the history; what it does not hold is unknown and 0."""
    per = round(DAY / past.bucket)
    ahead: Floats = origin + past.bucket * np.arange(per, dtype=np.float64)
    here = offsets_of(ahead, zone)
    length = past.counts.shape[1]
    days = max(min(most, int((origin - past.start) // DAY)), 0)
    index = np.zeros((days, per), np.int64)
    for back in range(1, days + 1):
        then: Floats = np.asarray(np.maximum(ahead - back * DAY, 0.0), np.float64)
        index[days - back] = np.floor((then + here - offsets_of(then, zone) - past.start) / past.bucket)
    inside = (index >= 0) & (index < length)
    index = np.where(inside, index, 0)
    if not length:
        empty = np.zeros((len(past.counts), 0, per))
        return Days(empty, empty > 0, past.bucket)
    known = past.known[:, index] & inside
    return Days(np.where(known, past.counts[:, index], 0.0), known, past.bucket)


@dataclass(frozen=True, slots=True)
class Held:
    """Losses `[n, days]` of the blend and of a constant rate on held-out days, and the last day's chances.

    `said[n, q]` are chances of a request within 10 minutes, `came` alike; `known` which of them can be judged.
    """

    learned: Floats
    constant: Floats
    said: Floats
    came: Bools
    known: Bools


def held_out(days: Days, blend: Blend) -> Held:
    """Ask both on every day but the first, each time with what was known before."""
    models, length, buckets = days.counts.shape
    ahead = max(round(AHEAD / days.bucket), 1)
    flat = days.counts.reshape(models, -1)
    known = np.concatenate((np.zeros((models, 1)), days.known.reshape(models, -1).cumsum(axis=1)), axis=1)
    total = np.concatenate((np.zeros((models, 1)), flat.cumsum(axis=1)), axis=1)
    decayed, age = decayed_history(flat, days.bucket)
    learned, constant = (np.full((models, max(length - 1, 0)), np.nan) for _ in range(2))
    said, came, judged = np.zeros((models, 0)), np.zeros((models, 0), np.bool_), np.zeros((models, 0), np.bool_)
    for day in range(1, length):
        last = buckets - ahead + 1 if day == length - 1 else buckets
        place = np.arange(day * 3 % STRIDE, last, STRIDE)
        at = day * buckets + place
        rate = _blended(days, blend, day, place, decayed[at], age[at])
        # The constant: everything before this day, and half a request, so that it is never 0.
        steady = (total[:, day * buckets] + 0.5) / (known[:, day * buckets] * days.bucket + AHEAD)
        seen = total[:, at + ahead] - total[:, at]
        judged = (known[:, at + ahead] - known[:, at]) == ahead
        hedged = (1 - HEDGE) * rate + HEDGE * steady[:, None]
        for store, stated in ((learned, hedged), (constant, np.repeat(steady[:, None], len(place), axis=1))):
            loss = np.where(judged, poisson_loss(seen, stated * AHEAD), 0.0).sum(axis=1)
            store[:, day - 1] = np.where(judged.any(axis=1), loss, np.nan)
        said, came = -np.expm1(-hedged * AHEAD), seen > 0
    return Held(learned, constant, said, came, judged)


def _blended(days: Days, blend: Blend, day: int, place: NDArray[np.int64], decayed: Floats, age: Floats) -> Floats:
    """λ_P at places of one day, `[n, q]`; `decayed[q, 5, n]` and `age[q, n]` as they stood there."""
    before = days.counts[:, :day]
    season = seasonal(before, days.bucket)[:, :, place]
    ttn = np.zeros(season.shape[1:])
    if blend.weights[_TTN] > 0:
        ttn = next_use(expected(before, days.known[:, :day]), days.bucket).rate[:, place]
    rate = np.empty(season.shape[1:])
    for q in range(len(place)):
        rate[:, q] = blend.rate(columns(decayed[q].T, season[:, :, q], ttn[:, q], age[q]))
    return rate
