"""How sure: quantiles of a count by a hurdle (asked for at all?) and log-scale residuals, made honest per class.

Belongs here: recalibration of probabilities, locations, residual quantiles. Never: point forecasts' choice.
A negative binomial covers 45 % where it should cover 80 %: counts of models are far burstier than that.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forecasting.profile import DAY, Bools, Floats, Ints, faded, leads

if TYPE_CHECKING:
    from collections.abc import Sequence

GRID = np.arange(1, 100) / 100.0
"""Levels at which residual quantiles are kept."""
_LOCATION_HALF_LIFE = 4 * DAY
_RESIDUAL_DAYS = 5
_CALIBRATION_DAYS = 4
_PULL = 1.5
_OWN = 15.0
_BINS = 100


# -- probabilities -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calibration:
    """A monotone map from said to seen probabilities, by the centres of its bins."""

    said: Floats
    seen: Floats

    def of(self, chance: Floats) -> Floats:
        """Recalibrated probabilities of any shape; unchanged when nothing was learned."""
        if not self.said.size:
            return chance
        return np.interp(chance, self.said, self.seen)


def calibration(said: Floats, came: Bools) -> Calibration:
    """Isotonic regression over 100 bins of pooled predictions; both arrays of one shape."""
    bins = np.clip((said.ravel() * _BINS).astype(np.int64), 0, _BINS - 1)
    weight = np.bincount(bins, minlength=_BINS).astype(np.float64)
    used = weight > 0
    if not used.any():
        return Calibration(np.empty(0), np.empty(0))
    centre = np.bincount(bins, said.ravel(), _BINS)[used] / weight[used]
    share = np.bincount(bins, came.ravel().astype(np.float64), _BINS)[used] / weight[used]
    return Calibration(centre, _isotonic(share, weight[used]))


def _isotonic(values: Floats, weights: Floats) -> Floats:
    library: Any = importlib.import_module("scipy.optimize")
    return np.asarray(library.isotonic_regression(values, weights=weights).x, np.float64)


def chances(active: Bools, known: Bools, origin: int, horizon: int, day: int) -> Floats:
    """P(active) `[n, horizon]` for bins from `origin`: .7 slot of the day + .3 yesterday, recalibrated.

    `active` and `known` are `[n, T]`; `day` bins make a day. A stand-in where no occurrence model has been fitted.
    """
    raw = _raw_chances(active, known, origin, horizon, day)
    said: list[Floats] = []
    came: list[Bools] = []
    for back in range(1, _CALIBRATION_DAYS + 1):
        start = origin - back * day
        if start < day:
            break
        there = known[:, start : start + day]
        said.append(_raw_chances(active, known, start, day, day)[there])
        came.append(active[:, start : start + day][there])
    if not said:
        return raw
    return calibration(np.concatenate(said), np.concatenate(came)).of(raw)


def _raw_chances(active: Bools, known: Bools, origin: int, horizon: int, day: int) -> Floats:
    age = leads(origin, DAY / day)[::-1]
    weight = known[:, :origin] * faded(age, _LOCATION_HALF_LIFE)
    slot = np.arange(origin) % day
    seen, passes = _by_slot(weight * active[:, :origin], slot, day), _by_slot(weight, slot, day)
    mean = (seen.sum(axis=1) + 0.5) / (passes.sum(axis=1) + 1.0)
    profile = (seen + 0.5 * mean[:, None]) / (passes + 0.5)
    ahead = np.arange(origin, origin + horizon)
    source = ahead - day * (1 + (ahead - origin) // day)
    inside = source >= 0
    before = np.where(inside, source, 0)
    yesterday = np.where(known[:, before] & inside, active[:, before], profile[:, ahead % day])
    blend: Floats = 0.7 * profile[:, ahead % day] + 0.3 * yesterday
    return blend


def _by_slot(values: Floats, slot: Ints, day: int) -> Floats:
    """Sums over the bins of each slot of the day, `[n, day]`."""
    result = np.zeros((len(values), day))
    for row, own in enumerate(values):
        result[row] = np.bincount(slot, own, day)
    return result


# -- counts given that there are some ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hurdle:
    """Distributions of counts: `chance[n, H]` of any, `location[n, H]` of the log count, residuals `grid[n, 99]`."""

    chance: Floats
    location: Floats
    grid: Floats

    def quantiles(self, levels: Sequence[float]) -> Floats:
        """`[n, H, Q]`, not decreasing in the level: zero up to 1 - chance, exp(location + residual) beyond."""
        wanted = np.array(levels)
        if wanted.size and not (wanted.min() > 0 and wanted.max() < 1):
            msg = f"levels must lie between 0 and 1, not {list(levels)}"
            raise ValueError(msg)
        chance = np.clip(self.chance, 1e-9, 1.0)[:, :, None]
        inner = (wanted - (1 - chance)) / chance
        result: Floats = np.zeros(inner.shape)
        for row in range(len(result)):
            residual: Floats = np.asarray(np.interp(inner[row], GRID, self.grid[row]), np.float64)
            size = np.exp(np.minimum(self.location[row][:, None] + residual, 700.0))
            result[row] = np.where(inner[row] > 0, size, 0.0)
        return result


def hurdle(
    counts: Floats,
    known: Bools,
    *,
    origin: int,
    chance: Floats,
    day: int,
    kinds: Ints,
) -> Hurdle:
    """Distributions of the bins from `origin` on, whose P(any) is `chance[n, H]`; `counts` and `known` are `[n, T]`.

    Residuals are those of the last five days against the location as it stood before each of them; own quantiles
    are mixed with those of the model's class (`kinds[n]`) by n / (n + 15).
    """
    ahead: Ints = np.arange(origin, origin + chance.shape[1], dtype=np.int64) % day
    place = _locations(counts, known, origin, day)[:, ahead]
    residuals = np.full((len(counts), _RESIDUAL_DAYS * day), np.nan)
    for back in range(1, _RESIDUAL_DAYS + 1):
        start = origin - back * day
        if start < day:
            break
        cut = slice(start, start + day)
        before = _locations(counts, known, start, day)[:, np.arange(start, start + day) % day]
        seen = known[:, cut] & (counts[:, cut] > 0) & np.isfinite(before)
        gap = np.log(np.maximum(counts[:, cut], 1e-9)) - before
        residuals[:, (back - 1) * day : back * day] = np.where(seen, gap, np.nan)
    return Hurdle(chance, np.nan_to_num(place), grids(residuals, kinds))


def _locations(counts: Floats, known: Bools, origin: int, day: int) -> Floats:
    """Decayed mean log count of active bins and what its slot of the day adds, `[n, day]`; NaN if never active."""
    age = leads(origin, DAY / day)[::-1]
    active = known[:, :origin] & (counts[:, :origin] > 0)
    weight = active * faded(age, _LOCATION_HALF_LIFE)
    logs = np.where(active, np.log(np.maximum(counts[:, :origin], 1e-9)), 0.0)
    total = weight.sum(axis=1)
    mean = np.where(total > 0, (weight * logs).sum(axis=1) / np.maximum(total, 1e-300), np.nan)
    slot = np.arange(origin) % day
    off = weight * (logs - np.nan_to_num(mean)[:, None])
    return mean[:, None] + _by_slot(off, slot, day) / (_by_slot(weight, slot, day) + _PULL)


def grids(residuals: Floats, kinds: Ints) -> Floats:
    """Quantiles of each row of `residuals[n, R]` (NaN: none) on `GRID`, drawn to its class where it has few."""
    result = np.zeros((len(residuals), len(GRID)))
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        pool = residuals[rows][~np.isnan(residuals[rows])]
        common = np.quantile(pool, GRID) if pool.size else np.zeros(len(GRID))
        for row in rows:
            own = residuals[row][~np.isnan(residuals[row])]
            share = own.size / (own.size + _OWN)
            result[row] = share * np.quantile(own, GRID) + (1 - share) * common if own.size else common
    return result


def around(centre: Floats, grid: Floats, levels: Sequence[float]) -> Floats:
    """Quantiles `[n, H, Q]` around any forecast `[n, H]`: residual quantiles `[n, 99]` of log1p counts added to it."""
    wanted = np.array(levels, np.float64)
    offset = np.zeros((len(grid), len(wanted)))
    for row, own in enumerate(grid):
        offset[row] = np.interp(wanted, GRID, own)
    logs = np.log1p(np.maximum(centre, 0.0))[:, :, None] + offset[:, None, :]
    result: Floats = np.expm1(np.minimum(logs, 700.0))
    return np.maximum(result, 0.0)
