"""Past days at the same local time, and what a learned rate would have saved on them. Arrays in, arrays out.

Belongs here: alignment of histories by local days, the held-out days of the pooled blend. Never: fitting, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting.calendar import offsets_of
from forecasting.drift import poisson_loss
from forecasting.nextuse import expected, next_use
from forecasting.rates import AGE, BACK, COLUMNS, FORWARD, HALF_LIVES, WEEK

if TYPE_CHECKING:
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.rates import Blend
    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

DAY = 86_400.0
HOUR = 3_600.0
STRIDE = 7
"""Buckets between two questions of a held-out day; it shares no factor with an hour, so that all minutes get a turn."""
AHEAD = 600.0
HEDGE = 0.05
"""Share of the constant rate in what is judged: a rate of exactly 0 would have an infinite loss."""
LEAST_TTN = 0.1
"""Share of all weights below which the next use is left out of the backtest: it is most of the work."""
_BLOCK = 100.0
"""Half-lives that are summed at once: 2**100 is far from the range's end."""
_SEASON, _TTN, _AGE = (COLUMNS.index(name) for name in ("s_week", "ttn", "age"))


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
    """Losses `[n, days]` of the blend, a constant and the last hour's rate on held-out days; the last day's chances.

    `said[n, q]` are chances of a request within 10 minutes, `came` alike; `known` which of them can be judged.
    """

    learned: Floats
    constant: Floats
    recent: Floats
    said: Floats
    came: Bools
    known: Bools


def held_out(days: Days, blend: Blend) -> Held:
    """Ask both on every day but the first, each time with what was known before."""
    models, length, buckets = days.counts.shape
    if length < 2:  # noqa: PLR2004  # one day to look back on
        nothing = np.zeros((models, 0))
        return Held(nothing, nothing, nothing, nothing, nothing > 0, nothing > 0)
    ahead = max(round(AHEAD / days.bucket), 1)
    total, known = _running(days.counts), _running(days.known)
    rate = blended(days, blend)
    hour = decayed(days.counts.reshape(models, -1), days.bucket, HOUR)
    learned, constant, recent = (np.full((models, length - 1), np.nan) for _ in range(3))
    said, seen, judged = rate, rate, days.known
    for day in range(1, length):
        last = buckets - ahead + 1 if day == length - 1 else buckets
        at = day * buckets + np.arange(day * 3 % STRIDE, last, STRIDE, dtype=np.int64)
        # The constant: everything before this day, and half a request, so that it is never 0.
        steady = (total[:, day * buckets] + 0.5) / (known[:, day * buckets] * days.bucket + AHEAD)
        seen = total[:, at + ahead] - total[:, at]
        judged = known[:, at + ahead] - known[:, at] == ahead
        said = ((1 - HEDGE) * rate[:, at] + HEDGE * steady[:, None]) * AHEAD
        some = judged.any(axis=1)
        simple = ((1 - HEDGE) * hour[:, at - 1] + HEDGE * steady[:, None]) * AHEAD
        flat = np.broadcast_to(steady[:, None] * AHEAD, said.shape)
        for losses, stated in ((learned, said), (constant, flat), (recent, simple)):
            loss = np.where(judged, poisson_loss(seen, stated), 0.0).sum(axis=1)
            losses[:, day - 1] = np.where(some, loss, np.nan)
    return Held(learned, constant, recent, np.asarray(-np.expm1(-said), np.float64), seen > 0, judged)


def _running(values: NDArray[np.generic]) -> Floats:
    """Running sums over the buckets of all days, `[n, D * B + 1]`, from 0."""
    flat = values.reshape(len(values), -1)
    found = np.zeros((len(flat), flat.shape[1] + 1))
    np.cumsum(flat, axis=1, out=found[:, 1:])
    return found


def blended(days: Days, blend: Blend) -> Floats:
    """λ_P at the start of every bucket, `[n, D * B]`; nothing of the first day."""
    flat = days.counts.reshape(len(days.counts), -1)
    rate = np.zeros(flat.shape)
    for weight, half_life in zip(blend.weights, HALF_LIVES, strict=False):
        if weight > 0:
            rate[:, 1:] += weight * decayed(flat, days.bucket, half_life)[:, :-1]
    place = np.arange(flat.shape[1])
    latest = np.maximum.accumulate(np.where(flat > 0, place, -1), axis=1)[:, :-1]
    age = np.where(latest < 0, np.inf, (place[1:] - latest - 0.5) * days.bucket)
    rate[:, 1:] += blend.weights[_AGE] / (age + AGE)
    models, length, buckets = days.counts.shape
    shaped = rate.reshape(models, length, buckets)
    shaped[:, 1:] += _seasons(days, blend)
    if blend.weights[_TTN] >= LEAST_TTN * blend.weights.sum():
        for day in range(1, length):
            ttn = next_use(expected(days.counts[:, :day], days.known[:, :day]), days.bucket).rate
            shaped[:, day] += blend.weights[_TTN] * ttn
    return rate


def decayed(flat: Floats, bucket: float, half_life: float) -> Floats:
    """Decayed rate at the end of each bucket, `[n, T]`, in requests per second."""
    fade = 2.0 ** (-bucket / half_life)
    found = np.empty(flat.shape)
    carry = np.zeros(len(flat))
    # Sums of what is scaled up by its age, scaled down again, in blocks over which that loses nothing. A filter of
    # scipy does as much work, and importing it costs a second in every fitting process.
    block = max(int(_BLOCK * half_life / bucket), 1)
    for start in range(0, flat.shape[1], block):
        here = slice(start, min(start + block, flat.shape[1]))
        down = fade ** np.arange(here.stop - start)
        part = np.cumsum(flat[:, here] / down, axis=1, out=found[:, here])
        part += (carry * (fade * bucket / (1 - fade)))[:, None]
        part *= down * ((1 - fade) / bucket)
        carry = part[:, -1].copy()
    return found


def _seasons(days: Days, blend: Blend) -> Floats:
    """The seasonal part for every day but the first, `[n, D - 1, B]`, each from the days before.

    The buckets after the same time of yesterday may be today's first: they are over by then.
    """
    models, length, buckets = days.counts.shape
    total = _running(days.counts)
    first = np.arange(length * buckets, dtype=np.int64)
    low, high = np.maximum(first - BACK, 0), np.minimum(first + FORWARD + 1, length * buckets)
    rate = ((total[:, high] - total[:, low]) / ((high - low) * days.bucket)).reshape(days.counts.shape)
    week, yesterday, week_ago = blend.weights[_SEASON : _SEASON + 3]
    summed = np.cumsum(rate, axis=1)
    found = np.zeros((models, length - 1, buckets))
    for day in range(1, length):
        since = max(day - WEEK, 0)
        before = summed[:, day - 1] - (summed[:, since - 1] if since else 0.0)
        found[:, day - 1] = week * before / (day - since) + yesterday * rate[:, day - 1]
        if day >= WEEK:
            found[:, day - 1] += week_ago * rate[:, day - WEEK]
    return found
