"""Fitter side: what is found for each model by itself: profile, next use, the gate, confidence; batched in chunks.

Runs in the fitting worker. Never: pooled fits, budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from forecasting.calendar import slots_of
from forecasting.calibration import Reliability, judge, total
from forecasting.daily import Days, by_day, held_out
from forecasting.drift import Gate, Watch, demotion, noise_gate
from forecasting.fitted import DAY, MOST_RATE, MOST_SLOT, MOST_USE, WORDS, sound
from forecasting.ladder import confidence
from forecasting.nextuse import expected, next_use
from forecasting.pooled import WEEK_DAYS
from forecasting.profile import FAST, SLOW, SPAN, faded, hier, pulled
from forecasting.rates import COLUMNS, Blend, seasonal

if TYPE_CHECKING:
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

JUDGED: Final = 250
"""Models whose held-out days are judged at once: some 50 MB."""
MONTH_DAYS: Final = 28
LUCK: Final = 0.02
"""Share of models that pass the gate on pure noise, at most (measured: under 1 %)."""
_QUARTERS: Final = round(DAY / 900)
_SEASON: Final = COLUMNS.index("s_week")


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of models: counts by 5 and 15 minutes, week sums and exposure `[n, 672]`, seconds since they appeared."""

    week: History
    month: History
    sums: NDArray[np.float32]
    exposure: NDArray[np.float32]
    age: Floats
    zone: tzinfo
    alarm: Ints
    """Of a level that drifts (`drift.drifting`)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a chunk came to, row by row; names as in `fitted.Fitted`. `losses[2, n, days]`: learned and constant."""

    profile: Floats
    fast: Ints
    season: Floats
    use: Floats
    gate: Gate
    losses: Floats
    words: Ints
    demoted: Bools
    earned: Bools
    absurd: Bools
    reliability: Reliability


def one_by_one(part: Part, weights: Floats, origin: float) -> Chunk:
    """Everything about some models that needs no other model; `weights` are the blend's."""
    blend = Blend(weights)
    sums, strange = sound(part.sums, MOST_SLOT)
    exposure, wild = sound(part.exposure, 1e3)
    profile, high = sound(hier(sums, exposure), MOST_SLOT)
    days = by_day(part.week, origin, part.zone, WEEK_DAYS)
    season, steep = sound(_season(days, blend), MOST_RATE)
    gate, losses, simple, reliability = _gate(days, blend)
    covered = coverage(part.month, profile, part.zone)
    watch, unknown = Watch.fresh(len(profile)), np.full(len(profile), np.nan)
    for review in covered:
        watch = watch.after(review, unknown, unknown)
    fallen, earned = demotion(losses[0], simple, part.alarm)
    words = [
        WORDS.index(confidence(float(age), skill=float(saved), coverage80=float(share)))
        for age, saved, share in zip(part.age, gate.saved, covered[1], strict=True)
    ]
    return Chunk(
        profile,
        _fast(part, profile),
        season,
        _use(by_day(part.month, origin, part.zone, MONTH_DAYS)),
        gate,
        losses,
        np.where(watch.demoted | fallen, np.minimum(words, 1), words).astype(np.int64),
        fallen,
        earned,
        strange | wild | high | steep,
        reliability,
    )


def _use(days: Days) -> Floats:
    """Seconds to the next use for each bucket of the next 24 hours; infinite: never."""
    if not days.counts.shape[1]:
        return np.full((len(days.counts), days.counts.shape[2]), np.inf)
    seconds = next_use(expected(days.counts, days.known), days.bucket).seconds
    return np.where(seconds <= MOST_USE, seconds, np.inf)


def _season(days: Days, blend: Blend) -> Floats:
    """The part of λ_P that depends on the time of day alone, without the next use, `[n, 288]`."""
    if not days.counts.shape[1] or not blend.weights.any():
        return np.zeros((len(days.counts), days.counts.shape[2]))
    weights = blend.weights[_SEASON : _SEASON + 3]
    return np.asarray(np.einsum("knb,k->nb", seasonal(days.counts, days.bucket), weights), np.float64)


def _fast(part: Part, profile: Floats) -> Ints:
    """Which of `profile.FAST` told the last two days' quarters best, an hour before."""
    found = np.full(len(profile), len(FAST) - 1, np.int64)
    past, length = part.month, part.month.counts.shape[1]
    if length < 4 * _QUARTERS:
        return found
    cut = slice(length - 4 * _QUARTERS, length)
    slots = slots_of(past.start + past.bucket * np.arange(length, dtype=np.float64)[cut], part.zone)
    counts, known = past.counts[:, cut], past.known[:, cut]
    usual = profile[:, slots]
    seen, due = np.where(known, counts, 0.0), np.where(known, usual, 0.0)
    asked = np.arange(2 * _QUARTERS, 4 * _QUARTERS - 4, 5)
    slow = _levels(seen, due, asked, SLOW.half_life)
    least = np.full(len(profile), np.inf)
    for place, fade in enumerate(FAST):
        if 2 * fade.half_life <= past.bucket:
            continue  # it would be the last bucket alone
        both = slow * _levels(seen, due, asked, fade.half_life, slow)
        missed = np.abs(counts[:, asked + 3] - usual[:, asked + 3] * both)
        loss = np.where(known[:, asked + 3], missed, 0.0).sum(axis=1)
        found = np.where(loss < least, place, found)
        least = np.minimum(least, loss)
    return np.asarray(found, np.int64)


def _levels(seen: Floats, due: Floats, asked: Ints, half_life: float, slow: Floats | None = None) -> Floats:
    """`profile.level` of quarters `[n, T]` at each instant asked for, from the two days before it, `[n, asked]`.

    `seen` and `due` are 0 where nothing is known; `slow` levels multiply what is due.
    """
    width = min(2 * _QUARTERS, int(np.ceil(SPAN * half_life / 900.0)) or 1)
    back = asked - 1 - np.arange(seen.shape[1], dtype=np.int64)[:, None]
    age: Floats = np.asarray(900.0 * back, np.float64)
    weight = np.where((back >= 0) & (back < width), faded(age, half_life), 0.0)
    expected = due @ weight
    return pulled(seen @ weight, expected if slow is None else expected * slow)


def _gate(days: Days, blend: Blend) -> tuple[Gate, Floats, Floats, Reliability]:
    """Whose held-out days were told better than by a constant rate, both losses, and the last day's calibration.

    The losses of the last hour's rate, which a demoted model follows, come third.
    """
    models, length = len(days.counts), int(days.counts.shape[1])
    losses, simple = np.full((2, models, WEEK_DAYS - 1), np.nan), np.full((models, WEEK_DAYS - 1), np.nan)
    if length < 2 or not blend.weights.any():  # noqa: PLR2004  # one day to look back on
        nobody: Bools = np.zeros(models, np.bool_)
        return Gate(np.zeros(models), nobody), losses, simple, total([])
    verdicts: list[Reliability] = []
    for first in range(0, models, JUDGED):
        rows = slice(first, first + JUDGED)
        held = held_out(Days(days.counts[rows], days.known[rows], days.bucket), blend)
        losses[0, rows, : length - 1], losses[1, rows, : length - 1] = held.learned, held.constant
        simple[rows, : length - 1] = held.recent
        verdicts.append(judge(held.said[held.known], held.came[held.known]))
    return noise_gate(losses[0], losses[1]), losses, simple, total(verdicts)


def _middle(values: Floats) -> Floats:
    """The 10 % and 90 % quantiles of each row's known values, `[2, n]`; `numpy.nanquantile` goes row by row."""
    ordered = np.sort(values, axis=1)  # NaN goes last
    last = np.isfinite(values).sum(axis=1) - 1
    place = np.array([[0.1], [0.9]]) * last
    below = place.astype(np.int64)
    rows = np.arange(len(values))
    low, high = ordered[rows, below], ordered[rows, np.minimum(below + 1, last)]
    return np.asarray(low + (high - low) * (place - below), np.float64)


def fleet_gate(losses: Floats, skilled: Bools) -> bool:
    """Whether the fleet has skill: all models together, each counting the same, or more of them than luck gives."""
    scale = np.nansum(losses[1], axis=1)
    used = scale > 0
    if not used.any():
        return False
    relative = losses[:, used] / scale[used][None, :, None]
    tested = np.isfinite(relative).any(axis=1)
    pooled = np.where(tested, np.nansum(relative, axis=1), np.nan)
    luck = LUCK * len(skilled)
    return noise_gate(pooled[:1], pooled[1:]).fleet or bool(skilled.sum() > luck + 3 * math.sqrt(luck))


def coverage(month: History, profile: Floats, zone: tzinfo) -> Floats:
    """Share of counts inside the 80 % interval of the days before: of the day before the last, and of the last one.

    `[2, n]`, NaN with less than two known days before. Intervals are residual quantiles of log1p counts.
    """
    length = month.counts.shape[1]
    found = np.full((2, len(profile)), np.nan)
    if length < 4 * _QUARTERS:
        return found
    cut = slice(max(length - 9 * _QUARTERS, 0), length)
    slots = slots_of(month.start + month.bucket * np.arange(length, dtype=np.float64)[cut], zone)
    off = np.log1p(month.counts[:, cut]) - np.log1p(profile[:, slots])
    off[~month.known[:, cut]] = np.nan
    for place, back in enumerate((2, 1)):
        first = off.shape[1] - back * _QUARTERS
        before, there = off[:, :first], off[:, first : first + _QUARTERS]
        enough = np.isfinite(before).sum(axis=1) >= 2 * _QUARTERS
        rows = np.flatnonzero(enough & np.isfinite(there).any(axis=1))
        if not rows.size:
            continue
        low, high = _middle(before[rows])
        inside = (there[rows] >= low[:, None] - 1e-9) & (there[rows] <= high[:, None] + 1e-9)
        known = np.isfinite(there[rows])
        found[place, rows] = (inside & known).sum(axis=1) / known.sum(axis=1)
    return found
