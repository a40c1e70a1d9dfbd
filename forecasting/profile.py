"""How many requests, from week-slot sums: the shrunken weekly profile and the level that moves it up and down.

Belongs here: array arithmetic over all models at once, model axis first. Never: clocks, calendars, storage, or
anything fitted by an optimiser. Source of the formulas: the hierarchical core of `DESIGN.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Floats: TypeAlias = NDArray[np.float64]
Rates: TypeAlias = NDArray[np.float32]
"""Expected requests per slot pass, `[n, slots of the week]`; float32 because ten thousand of them stay in memory."""
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

DAYS = 7
PER_DAY = 96
MATRIX = 2
"""Axes of everything here: models first."""
CHUNK = 1000
"""Models per step: float64 work of one step stays below 50 MB at 672 slots."""
HOUR, DAY = 3600.0, 86400.0

_SLOT_PSEUDO = 0.5
_DOW_PSEUDO = 0.3
_CELL_PSEUDO = 1.0
_SMOOTH_MINUTES = 15.0
_PRIOR_SLOTS = 8.0
"""How many slot passes of the fleet's level a young model's own count is weighed against: two hours."""


def hier(sums: NDArray[np.floating], exposure: NDArray[np.floating], *, per_day: int = PER_DAY) -> Rates:
    """Shrunken weekly profile, `[n, 7 * per_day]` requests per slot pass.

    `sums` are decayed counts per week slot and `exposure` decayed passes of that slot, both `[n, 7 * per_day]`.
    Slot of the day is pulled to the mean by half a pass, day of the week to 1 by three tenths of a day, each slot
    of the week to their product by one pass; then smoothed over 15 minutes to both sides. With little history it
    collapses to a daily profile or to a constant by itself; with none it is zero.
    """
    _check(sums, exposure, per_day)
    result = np.empty(sums.shape, np.float32)
    for first in range(0, len(sums), CHUNK):
        part = slice(first, first + CHUNK)
        result[part] = _hier(sums[part].astype(np.float64), exposure[part].astype(np.float64), per_day)
    return result


def base(sums: Floats, exposure: Floats, per_day: int) -> Floats:
    """Slot of the day times day of the week, `[n, 7 * per_day]`: what a single slot of the week is pulled to."""
    mean = sums.sum(axis=1) / np.maximum(exposure.sum(axis=1), 1e-9)
    days = (len(sums), DAYS, per_day)
    counts, passes = sums.reshape(days), exposure.reshape(days)
    slot = (counts.sum(axis=1) + _SLOT_PSEUDO * mean[:, None]) / (passes.sum(axis=1) + _SLOT_PSEUDO)
    pull = (_DOW_PSEUDO * per_day * mean + 1e-9)[:, None]
    expected = np.einsum("nwd,nd->nw", passes, slot)
    factor = (counts.sum(axis=2) + pull) / (expected + pull)
    product: Floats = factor[:, :, None] * slot[:, None, :]
    return product.reshape(sums.shape)


def _hier(sums: Floats, exposure: Floats, per_day: int) -> Floats:
    cells = (sums + _CELL_PSEUDO * base(sums, exposure, per_day)) / (exposure + _CELL_PSEUDO)
    return smooth(cells, int(_SMOOTH_MINUTES * 60 * per_day / DAY))


def smooth(rates: Floats, radius: int) -> Floats:
    """Triangular average over `radius` slots to both sides, around the end of the week; the weekly sum is kept."""
    if radius < 1:
        return rates
    total = np.zeros_like(rates)
    for shift in range(-radius, radius + 1):
        total += (radius + 1 - abs(shift)) * np.roll(rates, shift, axis=1)
    return total / (radius + 1) ** 2


def _check(sums: NDArray[np.floating], exposure: NDArray[np.floating], per_day: int) -> None:
    if sums.shape != exposure.shape or sums.ndim != MATRIX or sums.shape[1] != DAYS * per_day:  # a matrix
        msg = f"sums {sums.shape} and exposure {exposure.shape} must both be [models, {DAYS * per_day}]"
        raise ValueError(msg)
    for name, array in (("sums", sums), ("exposure", exposure)):
        # min() is NaN when any element is, so one pass finds both faults.
        if array.size and not (array.min() >= 0 and np.isfinite(array.max())):
            msg = f"{name} must be finite and not negative"
            raise ValueError(msg)


# -- models without a past ---------------------------------------------------------------------------


def fleet_prior(
    profiles: Rates,
    labels: Sequence[Mapping[str, str]],
    wanted: Mapping[str, str],
    *,
    expected: float | None = None,
) -> Floats:
    """What a new model is expected to do, `[slots]` requests per slot pass.

    The mean of the models that carry all `wanted` labels; with no such model or no labels the median of the fleet.
    `expected` (requests per slot pass, from the configuration) sets the weekly mean and keeps only the shape.
    """
    if len(labels) != len(profiles):
        msg = f"{len(labels)} sets of labels for {len(profiles)} profiles"
        raise ValueError(msg)
    same = [i for i, own in enumerate(labels) if wanted and all(own.get(k) == v for k, v in wanted.items())]
    prior: Floats
    if same:
        prior = np.asarray(profiles[same].mean(axis=0), np.float64)
    elif len(profiles):
        prior = np.asarray(np.median(profiles, axis=0), np.float64)
    else:
        prior = np.zeros(profiles.shape[1:])
    if expected is None:
        return prior
    if not (np.isfinite(expected) and expected >= 0):
        msg = f"expected must be finite and not negative, not {expected!r}"
        raise ValueError(msg)
    return expected * shape_of(fleet_shape(profiles) if prior.sum() <= 0 else prior)


def fleet_shape(profiles: Rates) -> Floats:
    """Mean weekly shape of the fleet, `[slots]` with mean 1: every model counts the same, however busy."""
    busy = profiles[profiles.sum(axis=1) > 0]
    if not len(busy):
        return np.ones(profiles.shape[1:])
    relative: Rates = busy / busy.mean(axis=1, keepdims=True)
    return shape_of(np.asarray(relative.mean(axis=0), np.float64))


def shape_of(rates: Floats) -> Floats:
    """The same weekly curve with mean 1; a curve of zeros becomes flat."""
    mean = float(rates.mean())
    return rates / mean if mean > 0 else np.ones(rates.shape)


def young(sums: Floats, exposure: Floats, prior: Floats) -> Floats:
    """A model of a few hours: the prior's shape at the model's own level, `[n, slots]`.

    The level is (own count + two hours of prior) / (expected count + two hours of prior): Gamma-Poisson shrinkage.
    """
    expected = (exposure * prior).sum(axis=1)
    pull = _PRIOR_SLOTS * prior.mean() + 0.5
    own: Floats = (sums.sum(axis=1) + pull) / (expected + pull)
    return own[:, None] * prior


# -- the level ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fade:
    """A level: its memory (`half_life`) and how fast its effect wears off with the lead (`decay`), in seconds."""

    half_life: float
    decay: float

    def power(self, lead: Floats) -> Floats:
        """Exponent of the level at each lead in seconds: 1 now, towards 0 far ahead."""
        return np.exp(-lead / self.decay)


def faded(age: Floats, half_life: float) -> Floats:
    """Weight of something so old: halved with each half-life; both in the same unit."""
    return np.exp2(-age / half_life)


def leads(horizon: int, bucket: float) -> Floats:
    """Seconds from the origin to the end of each bucket ahead, `[horizon]`."""
    return np.arange(1, horizon + 1).astype(np.float64) * bucket


SLOW = Fade(12 * HOUR, 72 * HOUR)
FAST = (Fade(5 * 60.0, 3 * HOUR), Fade(15 * 60.0, 3 * HOUR), Fade(HOUR, 3 * HOUR))
"""Candidates: an hour is too slow for smooth gauges, five minutes too nervous for small counts."""
SPAN = 6
"""Half-lives that are looked at: what is older weighs less than 2 %."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Where the models stand against their profile: factors `[n]`, slow first, fast relative to the slow one."""

    slow: Floats
    fast: Floats
    fade: Fade

    def at(self, lead: Floats) -> Floats:
        """Factor on the profile, `[n, leads]`, for leads in seconds."""
        logs = np.log(self.slow)[:, None] * SLOW.power(lead) + np.log(self.fast)[:, None] * self.fade.power(lead)
        return np.exp(logs)


def level(counts: Floats, expected: Floats, known: Bools, *, bucket: float, half_life: float) -> Floats:
    """Decayed counts over decayed expectation, `[n]`; the last column is the newest bucket.

    `counts`, `expected` and `known` are `[n, T]`; gaps count on neither side. Both sums are pulled together by
    a quarter of the weighted mean and half a request, so an idle model's level moves slowly and is never 0/0.
    """
    width = min(counts.shape[1], int(np.ceil(SPAN * half_life / bucket)) or 1)
    weight = known[:, -width:] * faded(leads(width, bucket)[::-1] - bucket, half_life)
    seen = (weight * counts[:, -width:]).sum(axis=1)
    due = (weight * expected[:, -width:]).sum(axis=1)
    return pulled(seen, due)


def pulled(seen: Floats, due: Floats) -> Floats:
    """Ratio of two decayed sums of requests, pulled to 1: what a store that keeps only the sums calls."""
    pull = 0.25 * due + 0.5
    return (seen + pull) / (due + pull)


def levels(counts: Floats, expected: Floats, known: Bools, *, bucket: float, fade: Fade) -> Levels:
    """Slow level, and fast level against profile times slow level; arrays as for `level`."""
    slow = level(counts, expected, known, bucket=bucket, half_life=SLOW.half_life)
    fast = level(counts, expected * slow[:, None], known, bucket=bucket, half_life=fade.half_life)
    return Levels(slow, fast, fade)
