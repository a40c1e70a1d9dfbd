"""The count forecasts that compete for a model: profiles, levels and the naive ones, from one panel of histories.

Belongs here: forecasts of many models from one origin. Never: judging them (`backtest.py`), weighing them
(`choose.py`), or anything that needs a fit per model (`specialists.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting import harmonic
from forecasting.profile import DAY, DAYS, FAST, HOUR, MATRIX, SLOW, Fade, Levels, faded, hier, leads, level, levels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forecasting.profile import Bools, Floats, Ints

HALF_LIFE = 14 * DAY
"""Memory of the week-slot sums."""
FLAT = (15 * 60.0, HOUR, 6 * HOUR, 24 * HOUR)
"""Half-lives of the profile-free levels; the backtest picks one of each kind."""
ACTIVE_SHARE = 0.3
"""Below this share of active hours a harmonic fit sees too few slots with a request."""

NAIVE_DAY, NAIVE_WEEK = "naive day", "naive week"


@dataclass(frozen=True, slots=True)
class Panel:
    """Histories of several models on one grid of buckets.

    `counts[n, T]` requests per bucket, `known[n, T]` False in gaps, `phase[T + horizon]` the slot of the local week
    of each bucket, also of those still to come; `bucket` in seconds, `per_day` slots in a day.
    """

    counts: Floats
    known: Bools
    phase: Ints
    bucket: float
    per_day: int

    def __post_init__(self) -> None:
        if self.counts.ndim != MATRIX or self.counts.shape != self.known.shape:  # a matrix
            msg = f"counts {self.counts.shape} and known {self.known.shape} must both be [models, buckets]"
            raise ValueError(msg)
        if not (self.bucket > 0 and DAY % self.bucket == 0):
            msg = f"bucket must divide a day, not {self.bucket!r} s"
            raise ValueError(msg)
        seen = self.counts[self.known]
        if seen.size and not (seen.min() >= 0 and np.isfinite(seen.max())):
            msg = "counts must be finite and not negative where they are known"
            raise ValueError(msg)
        if self.phase.size and not (self.phase.min() >= 0 and self.phase.max() < DAYS * self.per_day):
            msg = f"phase must lie in 0..{DAYS * self.per_day - 1}"
            raise ValueError(msg)

    @property
    def day(self) -> int:
        """Buckets in 24 hours."""
        return round(DAY / self.bucket)

    @property
    def share(self) -> float:
        """Buckets in a slot (below 1 when buckets are longer): turns requests per slot into requests per bucket."""
        return self.bucket * self.per_day / DAY

    def take(self, rows: Ints) -> Panel:
        """The same panel for some of its models."""
        return Panel(self.counts[rows], self.known[rows], self.phase, self.bucket, self.per_day)

    def active(self, origin: int) -> Floats:
        """Share of known hours with a request up to `origin`, `[n]`."""
        per = max(1, round(HOUR / self.bucket))
        hours = origin // per
        if not hours:
            return np.zeros(len(self.counts))
        cut = slice(origin - hours * per, origin)
        shape = (len(self.counts), hours, per)
        seen = (np.where(self.known[:, cut], self.counts[:, cut], 0.0)).reshape(shape).sum(axis=2) > 0
        known = self.known[:, cut].reshape(shape).any(axis=2)
        share: Floats = seen.sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        return share


@dataclass(frozen=True, slots=True)
class Sums:
    """Decayed week-slot sums and passes at an origin, both `[n, slots]`."""

    origin: int
    counts: Floats
    passes: Floats


def slot_sums(panel: Panel, origins: Sequence[int]) -> Iterator[Sums]:
    """The sums at each origin, oldest first; each bucket is read once."""
    slots = DAYS * panel.per_day
    counts, passes = np.zeros((len(panel.counts), slots)), np.zeros((len(panel.counts), slots))
    at = 0
    for origin in sorted(origins):
        decay = 0.5 ** ((origin - at) * panel.bucket / HALF_LIFE)
        fresh, pieces = _added(panel, at, origin)
        counts, passes = counts * decay + fresh, passes * decay + pieces
        at = origin
        yield Sums(origin, counts, passes)


def _added(panel: Panel, first: int, last: int) -> tuple[Floats, Floats]:
    slots = DAYS * panel.per_day
    counts, passes = np.zeros((len(panel.counts), slots)), np.zeros((len(panel.counts), slots))
    if last <= first:
        return counts, passes
    phase = panel.phase[first:last]
    order = np.argsort(phase, kind="stable")
    here, starts = np.unique(phase[order], return_index=True)
    age = leads(last - first, panel.bucket)[::-1]
    weight = panel.known[:, first:last] * faded(age, HALF_LIFE)
    seen = np.where(panel.known[:, first:last], panel.counts[:, first:last], 0.0)
    counts[:, here] = np.add.reduceat((weight * seen)[:, order], starts, axis=1)
    passes[:, here] = panel.share * np.add.reduceat(weight[:, order], starts, axis=1)
    return counts, passes


# -- the forecasts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forecasts:
    """Requests per bucket from one origin: `values[n, candidates, horizon]`, NaN where a candidate has no answer."""

    names: tuple[str, ...]
    values: Floats

    def of(self, name: str) -> Floats:
        """One candidate's forecast, `[n, horizon]`."""
        return self.values[:, self.names.index(name)]


def groups(names: Sequence[str]) -> tuple[str, ...]:
    """The family of each candidate: variants of one family differ in a half-life, and only the best one competes."""
    return tuple(name.split("/", 1)[0] for name in names)


def candidates(panel: Panel, sums: Sums, horizon: int) -> Forecasts:
    """All cheap candidates from `sums.origin`, up to `horizon` buckets ahead."""
    origin = sums.origin
    lead = leads(horizon, panel.bucket)
    found: dict[str, Floats] = {}
    flat = hier(sums.counts, sums.passes, per_day=panel.per_day).astype(np.float64)
    found["hier"] = flat[:, panel.phase[origin : origin + horizon]] * panel.share
    found |= _levelled("hier+lvl", panel, flat, origin, lead)
    found |= _harmonic(panel, sums, lead)
    found[NAIVE_DAY] = _lagged(panel, origin, horizon, panel.day)
    found[NAIVE_WEEK] = _lagged(panel, origin, horizon, DAYS * panel.day)
    found["median"] = _median(panel, origin, horizon)
    found |= _flat(panel, origin, horizon)
    return Forecasts(tuple(found), np.stack(list(found.values()), axis=1))


def _levelled(name: str, panel: Panel, profile: Floats, origin: int, lead: Floats) -> dict[str, Floats]:
    """One profile under the slow level and each of the fast ones."""
    first = max(0, origin - round(6 * SLOW.half_life / panel.bucket))
    known = panel.known[:, first:origin]
    counts = np.where(known, panel.counts[:, first:origin], 0.0)
    expected = profile[:, panel.phase[first:origin]] * panel.share
    ahead = profile[:, panel.phase[origin : origin + len(lead)]] * panel.share
    # A level looks back, so a fast one shorter than a bucket would be the last bucket alone.
    return {
        f"{name}/{_words(fade.half_life)}": ahead
        * levels(counts, expected, known, bucket=panel.bucket, fade=fade).at(lead)
        for fade in FAST
        if fade.half_life * 2 > panel.bucket
    } | {f"{name}/slow": ahead * _slow(counts, expected, known, panel.bucket).at(lead)}


def _slow(counts: Floats, expected: Floats, known: Bools, bucket: float) -> Levels:
    """The slow level alone."""
    slow = level(counts, expected, known, bucket=bucket, half_life=SLOW.half_life)
    return Levels(slow, np.ones_like(slow), Fade(HOUR, HOUR))


def _harmonic(panel: Panel, sums: Sums, lead: Floats) -> dict[str, Floats]:
    """Harmonic profile under a level, for models with enough active hours and a week of history."""
    shape = (len(panel.counts), len(lead))
    names = [f"harm+lvl/{_words(f.half_life)}" for f in FAST if f.half_life * 2 > panel.bucket] + ["harm+lvl/slow"]
    found = {name: np.full(shape, np.nan) for name in names}
    rows = np.flatnonzero(panel.active(sums.origin) >= ACTIVE_SHARE)
    if sums.origin < DAYS * panel.day or not len(rows):
        return found
    coarse = harmonic.COARSE if panel.per_day % harmonic.COARSE == 0 else None
    fitted = harmonic.fit(sums.counts[rows], sums.passes[rows], per_day=panel.per_day, coarse=coarse)
    profile = fitted.rates(panel.per_day).astype(np.float64)
    for name, values in _levelled("harm+lvl", panel.take(rows), profile, sums.origin, lead).items():
        found[name][rows] = values
    return found


def _lagged(panel: Panel, origin: int, horizon: int, lag: int) -> Floats:
    """What was counted a whole number of `lag` buckets earlier; NaN in gaps and before the history."""
    step = np.arange(horizon)
    source = origin + step - lag * (1 + step // lag)
    inside = source >= 0
    source = np.where(inside, source, 0)
    return np.where(panel.known[:, source] & inside, panel.counts[:, source], np.nan)


def _median(panel: Panel, origin: int, horizon: int) -> Floats:
    """Median of the same time on the last seven days; NaN unless all of them are known."""
    past = np.stack([_lagged(panel, origin - k * panel.day, horizon, panel.day) for k in range(DAYS)])
    return np.median(past, axis=0)


def _flat(panel: Panel, origin: int, horizon: int) -> dict[str, Floats]:
    """Decayed mean per bucket and decayed mean of logarithms, the same for every lead.

    The second one is a typical bucket rather than a mean: on bursty traffic most buckets lie far below the mean.
    """
    found: dict[str, Floats] = {}
    for half_life in FLAT:
        first = max(0, origin - int(np.ceil(6 * half_life / panel.bucket)))
        age = leads(origin - first, panel.bucket)[::-1] - panel.bucket
        weight = panel.known[:, first:origin] * faded(age, half_life)
        counts = np.where(panel.known[:, first:origin], panel.counts[:, first:origin], 0.0)
        total = weight.sum(axis=1)
        for name, values in (("level", counts), ("typical", np.log1p(counts))):
            summed = (weight * values).sum(axis=1)
            mean = np.where(total > 0, summed / np.maximum(total, 1e-12), np.nan)
            flat = mean if name == "level" else np.expm1(mean)
            found[f"{name}/{_words(half_life)}"] = np.repeat(flat[:, None], horizon, axis=1)
    return found


def _words(seconds: float) -> str:
    return f"{seconds / HOUR:g}h" if seconds >= HOUR else f"{seconds / 60:g}m"
