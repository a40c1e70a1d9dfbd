"""Where an outlook's numbers come from: two interchangeable estimates of the same value rates, and their outlook.

The pooled blend (rates) and the occurrence model (probabilities) meet here by λ = -ln(1 - p)/t. Which one serves is
decided by replay, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forecasting.odds import chance_of, rate_of
from forecasting.outlook import Outlook, Prospect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from forecasting.activity import Horizon

    Floats = NDArray[np.float64]

ENOUGH = 0.7
"""Expected requests that count as the next use, as in `nextuse.py`."""
SOON = 600.0
"""Seconds for which a prefetch pays."""
NEXT = 3600.0
"""Seconds whose probability orders victims."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """One source's view of every model: rates, seconds to the next use, and confidence, `[n]` each.

    `hazards[k, n]` is the expected number of requests within `times[k]` seconds, which rises with k; may be empty.
    """

    source: str
    rate: Floats
    evict_rate: Floats
    prefetch_rate: Floats
    next_use: Floats
    confidence: Floats
    times: tuple[float, ...] = ()
    hazards: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        n = self.rate.shape
        for name in ("rate", "evict_rate", "prefetch_rate", "confidence", "next_use"):
            value: Floats = getattr(self, name)
            finite = value if name != "next_use" else np.where(np.isposinf(value), 0.0, value)
            if value.shape != n or not np.all(np.isfinite(finite)) or not np.all(finite >= 0):
                msg = f"{name} of source {self.source!r} must be {n} finite numbers, none negative"
                raise ValueError(msg)
        if len(self.times) and self.hazards.shape != (len(self.times), *n):
            msg = f"hazards of source {self.source!r} must be {(len(self.times), *n)}, not {self.hazards.shape}"
            raise ValueError(msg)

    def chance(self, within: float) -> Floats:
        """P(any request within so many seconds), `[n]`."""
        at, reached = 0.0, np.zeros_like(self.rate)
        for until, hazard in zip(self.times, self.hazards, strict=True):
            if within <= until:
                part = (hazard - reached) * max(within - at, 0.0) / (until - at)
                return np.asarray(-np.expm1(-(reached + part)), np.float64)
            at, reached = until, hazard
        return np.asarray(-np.expm1(-(reached + self.rate * max(within - at, 0.0))), np.float64)

    def outlook(self, keys: Sequence[str], origin: float, valid: float) -> Outlook:
        """The frozen value for policies; builds a model's `Prospect` when it is asked for."""
        if len(keys) != len(self.rate):
            msg = f"{len(keys)} keys for {len(self.rate)} models"
            raise ValueError(msg)
        return Outlook(origin, Prospects(keys, self), valid)


class Prospects(Mapping[str, Prospect]):
    """An estimate by model key."""

    __slots__ = ("_estimate", "_rows")

    def __init__(self, keys: Sequence[str], estimate: Estimate) -> None:
        self._rows = {key: row for row, key in enumerate(keys)}
        self._estimate = estimate

    def __getitem__(self, key: str) -> Prospect:
        row, e = self._rows[key], self._estimate
        return Prospect(
            rate=float(e.rate[row]),
            next_use=float(e.next_use[row]),
            confidence=min(float(e.confidence[row]), 1.0),
            evict_rate=float(e.evict_rate[row]),
            prefetch_rate=float(e.prefetch_rate[row]),
            chances=tuple(zip(e.times, (-np.expm1(-e.hazards[:, row])).tolist(), strict=True)) if e.times else (),
            source=e.source,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows


def from_rates(
    source: str, *, evict_rate: Floats, prefetch_rate: Floats, next_use: Floats, confidence: Floats
) -> Estimate:
    """An estimate of rates, such as the blend's: chances are Poisson at λ_P."""
    return Estimate(source, prefetch_rate, evict_rate, prefetch_rate, next_use, confidence)


def from_chances(source: str, p: Mapping[Horizon, Floats], window: float, confidence: Floats) -> Estimate:
    """An estimate of probabilities, such as the occurrence model's, for horizons in windows of `window` seconds.

    λ_P is what makes the next 10 minutes' chance come true, λ_E the next hour's. The next use is when .7 requests are
    expected.
    """
    times, hazards = curve(p, window)
    last = hazards[-1] / times[-1]
    estimate = Estimate(source, last, last, last, _reach(times, hazards, ENOUGH), confidence, times, hazards)
    soon, after = rate_of(estimate.chance(SOON), SOON), rate_of(estimate.chance(NEXT), NEXT)
    return Estimate(source, last, after, soon, estimate.next_use, confidence, times, hazards)


def curve(p: Mapping[Horizon, Floats], window: float) -> tuple[tuple[float, ...], Floats]:
    """Expected requests by time: rising times `[k]` and hazards `[k, n]`, put together from windows ahead.

    Between two windows the rate is interpolated. A longer window never says less than a shorter one that it holds.
    """
    if not p:
        msg = "a curve needs the chance of at least one horizon"
        raise ValueError(msg)
    ordered = sorted(p, key=lambda horizon: (horizon.lead + horizon.span, horizon.lead))
    times: list[float] = []
    hazards: list[Floats] = []
    rate: Floats | None = None
    for horizon in ordered:
        first, last = horizon.lead * window, (horizon.lead + horizon.span) * window
        expected = rate_of(p[horizon], last - first) * (last - first)
        at, reached = (times[-1], hazards[-1]) if times else (0.0, np.zeros_like(expected))
        within = expected / (last - first)
        if first > at:
            between = within if rate is None else 0.5 * (rate + within)
            reached, at = reached + between * (first - at), first
            times.append(at)
            hazards.append(reached)
        if last > at:
            # What the windows before have said of this window's first part is taken off it.
            share = np.maximum(expected - (reached - _value(times, hazards, first)), 0.0)
            times.append(last)
            hazards.append(reached + share)
        rate = within
    return tuple(times), np.stack(hazards)


def _value(times: Sequence[float], hazards: Sequence[Floats], at: float) -> Floats:
    """The curve at an instant that it reaches."""
    low, below = 0.0, np.zeros_like(hazards[0]) if hazards else np.zeros(())
    for high, above in zip(times, hazards, strict=True):
        if at <= high:
            return np.asarray(below + (above - below) * (at - low) / (high - low), np.float64)
        low, below = high, above
    return np.asarray(below, np.float64)


def _reach(times: Sequence[float], hazards: Floats, goal: float) -> Floats:
    """When each model's curve reaches `goal`; beyond its end it goes on with its mean rate."""
    mean: Floats = np.asarray(hazards[-1] / times[-1], np.float64)
    found: Floats = np.asarray(np.maximum(goal / np.maximum(mean, 1e-300), times[-1]), np.float64)
    low, below = 0.0, np.zeros_like(hazards[0])
    done = np.zeros(below.shape, np.bool_)
    for high, above in zip(times, hazards, strict=True):
        here = ~done & (above >= goal)
        share = (goal - below) / np.maximum(above - below, 1e-12)
        found = np.asarray(np.where(here, low + share * (high - low), found), np.float64)
        done |= here
        low, below = high, above
    return np.asarray(np.where(hazards[-1] > 0, found, np.inf), np.float64)


def combined(evict: Estimate, prefetch: Estimate) -> Estimate:
    """λ_E and the next use from one source, λ_P and everything else from another."""
    return Estimate(
        f"{evict.source}/{prefetch.source}", prefetch.rate, evict.evict_rate, prefetch.prefetch_rate, evict.next_use,
        prefetch.confidence, prefetch.times, prefetch.hazards,
    )  # fmt: skip


def highest(one: Estimate, other: Estimate) -> Estimate:
    """The higher of two estimates, number by number; chances are taken from whichever says more at each time."""
    times = tuple(sorted({*one.times, *other.times}))
    hazards = [np.maximum(*(-np.log1p(-np.minimum(e.chance(t), 1 - 1e-12)) for e in (one, other))) for t in times]
    return Estimate(
        f"{one.source}|{other.source}",
        np.maximum(one.rate, other.rate),
        np.maximum(one.evict_rate, other.evict_rate),
        np.maximum(one.prefetch_rate, other.prefetch_rate),
        np.minimum(one.next_use, other.next_use),
        np.maximum(one.confidence, other.confidence),
        times,
        np.stack(hazards) if times else np.zeros((0, 0)),
    )


__all__ = ["Estimate", "Prospects", "chance_of", "combined", "curve", "from_chances", "from_rates", "highest"]
