"""Where an outlook's numbers come from: two interchangeable estimates of the same value rates, and their outlook.

The pooled blend (rates) and the occurrence model (probabilities) meet here by λ = -ln(1 - p)/t. Which one serves is
decided by replay, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from forecasting.odds import SURE, chance_of, rate_of
from forecasting.outlook import Outlook, Prospect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from forecasting.activity import Horizon

    Floats = NDArray[np.float64]
    Numbers = NDArray[np.floating]

ENOUGH = 0.7
"""Expected requests that count as the next use, as in `nextuse.py`."""
SOON = 600.0
"""Seconds for which a prefetch pays."""
NEXT = 3600.0
"""Seconds whose probability orders victims."""
SURELY = float(-np.log1p(-SURE))
"""Most requests that a probability stands for."""
_MOST = float(np.finfo(np.float64).max)


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
    hazards: Numbers = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        n = self.rate.shape
        for name in ("rate", "evict_rate", "prefetch_rate", "confidence", "next_use"):
            value: Floats = getattr(self, name)
            most = np.inf if name == "next_use" else _MOST
            # A NaN fails both comparisons, so one pass over each end finds it.
            if value.shape != n or not (value.min(initial=0.0) >= 0 and value.max(initial=0.0) <= most):
                msg = f"{name} of source {self.source!r} must be {n} finite numbers, none negative"
                raise ValueError(msg)
        if len(self.times) and self.hazards.shape != (len(self.times), *n):
            msg = f"hazards of source {self.source!r} must be {(len(self.times), *n)}, not {self.hazards.shape}"
            raise ValueError(msg)

    def expected(self, within: float) -> Numbers:
        """Requests expected within so many seconds, `[n]`: the hazard."""
        return _expected(self.times, self.hazards, self.rate, within)

    def chance(self, within: float) -> Floats:
        """P(any request within so many seconds), `[n]`."""
        return np.asarray(-np.expm1(-self.expected(within)), np.float64)

    def patched(self, rows: NDArray[np.int64], part: Estimate) -> Estimate:
        """The same, but for these rows, which are as in `part`; its curve must have the same times."""
        if part.times != self.times:
            msg = f"times of a part must be {self.times}, not {part.times}"
            raise ValueError(msg)
        names = ("rate", "evict_rate", "prefetch_rate", "next_use", "confidence", "hazards")
        arrays = {name: getattr(self, name).copy() for name in names}
        for name, array in arrays.items():
            array[..., rows] = getattr(part, name)
        return Estimate(self.source, times=self.times, **arrays)

    def outlook(
        self, keys: Sequence[str], origin: float, valid: float, places: Mapping[str, int] | None = None
    ) -> Outlook:
        """The frozen value for policies; builds a model's `Prospect` when it is asked for.

        `places` is where each key stands, for a caller who knows it already.
        """
        known = {key: place for place, key in enumerate(keys)} if places is None else places
        if len(keys) != len(self.rate) or len(known) != len(keys):
            msg = f"{len(keys)} keys, {len(known)} places for {len(self.rate)} models"
            raise ValueError(msg)
        return Outlook(origin, Prospects(known, self), valid)


class Prospects(Mapping[str, Prospect]):
    """An estimate by model key, whose row `rows` tells."""

    __slots__ = ("_estimate", "_rows")

    def __init__(self, rows: Mapping[str, int], estimate: Estimate) -> None:
        self._rows = rows
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
    expected = {h: rate_of(stated, h.span * window) * (h.span * window) for h, stated in p.items()}
    return from_hazards(source, expected, window, confidence)


def from_hazards(source: str, expected: Mapping[Horizon, Numbers], window: float, confidence: Floats) -> Estimate:
    """The same from expected requests, `-ln(1 - p)`, in place of probabilities; in single precision if they are."""
    times, hazards = _joined(expected, window)
    rate = hazards[-1].astype(np.float64) / times[-1]
    # What a chance within so long says is the hazard by then, so no logarithm has to be taken and undone.
    soon, after = (
        np.minimum(_expected(times, hazards, rate, within).astype(np.float64), SURELY) / within
        for within in (SOON, NEXT)
    )
    return Estimate(source, rate, after, soon, _reach(times, hazards, ENOUGH), confidence, times, hazards)


def curve(p: Mapping[Horizon, Floats], window: float) -> tuple[tuple[float, ...], Numbers]:
    """Expected requests by time: rising times `[k]` and hazards `[k, n]`, put together from windows ahead.

    Between two windows the rate is interpolated. A longer window never says less than a shorter one that it holds.
    """
    return _joined({h: rate_of(stated, h.span * window) * (h.span * window) for h, stated in p.items()}, window)


def _joined(expected: Mapping[Horizon, Numbers], window: float) -> tuple[tuple[float, ...], Numbers]:
    """`curve`, from the expected requests of each horizon."""
    if not expected:
        msg = "a curve needs the chance of at least one horizon"
        raise ValueError(msg)
    ordered = sorted(expected, key=lambda horizon: (horizon.lead + horizon.span, horizon.lead))
    times: list[float] = []
    hazards: list[Numbers] = []
    rate: Numbers | None = None
    for horizon in ordered:
        first, last = horizon.lead * window, (horizon.lead + horizon.span) * window
        stated = expected[horizon]
        within = stated / (last - first)
        at = times[-1] if times else 0.0
        if first > at:
            between = within if rate is None else 0.5 * (rate + within)
            between = between * (first - at)
            hazards.append(between + hazards[-1] if times else between)
            times.append(first)
            at = first
        if last > at:
            # What the windows before have said of this window's first part is taken off it.
            reached = hazards[-1] if times else np.zeros_like(stated)
            share = stated if first == at else np.maximum(stated - (reached - _value(times, hazards, first)), 0.0)
            times.append(last)
            hazards.append(reached + share)
        rate = within
    return tuple(times), np.stack(hazards)


def _value(times: Sequence[float], hazards: Sequence[Numbers], at: float) -> Numbers | float:
    """The curve at an instant that it reaches."""
    if at <= 0:
        return 0.0
    low, below = 0.0, np.zeros_like(hazards[0])
    for high, above in zip(times, hazards, strict=True):
        if at <= high:
            return below + (above - below) * ((at - low) / (high - low))
        low, below = high, above
    return below


def _expected(times: Sequence[float], hazards: Numbers, rate: Floats, within: float) -> Numbers:
    """The curve at any instant; beyond its end it goes on with a rate."""
    low = 0.0
    below: Numbers = np.zeros_like(rate)
    for high, above in zip(times, hazards, strict=True):
        if within == high:
            here: Numbers = above
            return here
        if within < high:
            part: Numbers = below + (above - below) * (max(within - low, 0.0) / (high - low))
            return part
        low, below = high, above
    beyond: Numbers = below + rate * max(within - low, 0.0)
    return beyond


def _reach(times: Sequence[float], hazards: Numbers, goal: float) -> Floats:
    """When each model's curve reaches `goal`; beyond its end it goes on with its mean rate."""
    end, last = times[-1], hazards[-1].astype(np.float64)
    found, low, below = np.zeros_like(hazards[0]), 0.0, np.zeros_like(hazards[0])
    # Row by row: a matrix of all stretches would not fit a cache.
    for high, above in zip(times, hazards, strict=True):
        # The part of a stretch that is over when the goal is reached: all of one before it, none of one after it.
        more = above - below
        part = goal - below
        part /= np.maximum(more, 1e-12, out=more)
        part *= high - low
        found += np.clip(part, 0.0, high - low, out=part)
        low, below = high, above
    with np.errstate(divide="ignore"):
        reached: Floats = found + (goal * end / np.minimum(last, goal) - end)
        return reached


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


__all__ = [
    "Estimate",
    "Prospects",
    "chance_of",
    "combined",
    "curve",
    "from_chances",
    "from_hazards",
    "from_rates",
    "highest",
]
