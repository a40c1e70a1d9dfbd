"""What is expected of every model now: live counters and the last fit, put together at decision time on the loop.

Belongs here: vectors over all models, under 2 ms for 10,000 of them. Never: fitting, histories, loops over models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from forecasting.fitted import BUCKET, DAY, MOST_RATE, USE_BUCKET, WORDS
from forecasting.ladder import Confidence
from forecasting.rates import AGE, COLUMNS, R_1H, R_6H
from forecasting.scenarios import ACTIVE, HORIZONS, IDLE, QUIET, SCENARIOS, WINDOW
from forecasting.sources import ENOUGH, Estimate, from_chances, from_rates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forecasting.counts import Counts
    from forecasting.fitted import Fitted

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

Way: TypeAlias = Literal["blend", "occurrence", "rate"]

STALE: Final = 12 * 3600.0
"""Seconds after which a fit says nothing about the present any more."""
_TRUST: Final = np.array([word.value01 for word in WORDS])
_GUESS: Final = Confidence.PRIOR.value01
_TTN, _AGE = COLUMNS.index("ttn"), COLUMNS.index("age")


def estimate(counts: Counts, fitted: Fitted | None, *, wall: float, monotonic: float, mode: Way = "blend") -> Estimate:
    """Rates, next use and confidence of `counts.keys`, as of `wall` (UTC) and `monotonic` seconds.

    Without a fit, with one over twelve hours old, and in mode `rate`: the 1-hour rate for both value rates, with
    little confidence. With one: λ_E is half the 6-hour rate and half that of the next use where seasons rule the
    fleet, else the 1-hour rate; λ_P is the pooled blend for models that passed the gate, else the 1-hour rate. Models
    that were not fitted follow the fleet's prior. In mode `occurrence` all come from the chances that the fit worked
    out, as long as they reach. Only `allowed` models may be loaded ahead.
    """
    rates, seen = counts.now(wall, monotonic)
    rates = np.clip(rates, 0.0, MOST_RATE)
    if np.isnan(rates.sum()):
        rates = np.nan_to_num(rates)
    if fitted is None or mode == "rate" or not _current(fitted, wall):
        return _recent(rates)
    rows = fitted.rows(counts.keys)
    known = rows >= 0
    if not known.any():
        return _recent(rates)
    age = np.maximum(wall - seen, 0.0)
    now = _Now(rates, age, known, np.where(known, rows, 0), wall)
    return (_by_chance(fitted, now) if mode == "occurrence" else None) or _blended(fitted, now)


def allowed(counts: Counts, fitted: Fitted | None, *, wall: float) -> Bools:
    """Which of `counts.keys` may be loaded ahead by what was learned: the gate is open, and theirs is too."""
    if fitted is None or not fitted.skill or not _current(fitted, wall):
        return np.zeros(len(counts.keys), np.bool_)
    rows = fitted.rows(counts.keys)
    return (rows >= 0) & fitted.skilled[np.where(rows >= 0, rows, 0)]


def _current(fitted: Fitted, wall: float) -> bool:
    # A clock set back by a little must not discard the fit; by half a day, it does.
    return abs(wall - fitted.at) <= STALE


def _recent(rates: Floats) -> Estimate:
    """Recency alone."""
    now = rates[:, R_1H]
    return from_rates(
        "rate",
        evict_rate=now,
        prefetch_rate=now,
        next_use=_wait(now),
        confidence=np.full(len(now), _GUESS),
    )


def _wait(rate: Floats) -> Floats:
    """Seconds until so many requests are expected that one counts as certain; infinite at rate 0."""
    return np.where(rate > 0, ENOUGH / np.maximum(rate, 1e-300), np.inf)


@dataclass(frozen=True, slots=True)
class _Now:
    """One look: live rates `[n, 5]`, seconds since the last request `[n]`, rows of the fit, and whose they are."""

    rates: Floats
    age: Floats
    known: Bools
    rows: Ints
    wall: float


def _blended(fitted: Fitted, now: _Now) -> Estimate:
    elapsed = (now.wall - fitted.origin) % DAY
    rows, known, weights = now.rows, now.known, fitted.weights
    use = fitted.use[:, min(int(elapsed // USE_BUCKET), fitted.use.shape[1] - 1)][rows].astype(np.float64)
    season = fitted.season[:, min(int(elapsed // BUCKET), fitted.season.shape[1] - 1)][rows].astype(np.float64)
    if not known.all():
        # A model without a fit of its own follows the fleet.
        use[~known], season[~known] = _wait(np.array([fitted.prior_rate(now.wall)]))[0], 0.0
    ttn = ENOUGH / np.maximum(use, USE_BUCKET / 4)
    learned = now.rates @ weights[: now.rates.shape[1]] + season + weights[_TTN] * ttn + weights[_AGE] / (now.age + AGE)
    recent = now.rates[:, R_1H]
    prefetch = np.minimum(np.where(known & fitted.skilled[rows] & fitted.skill, learned, recent), MOST_RATE)
    keep = 0.5 * now.rates[:, R_6H] + 0.5 * ttn if fitted.schedule else recent
    return from_rates("blend", evict_rate=keep, prefetch_rate=prefetch, next_use=use, confidence=_trust(fitted, now))


def _trust(fitted: Fitted, now: _Now) -> Floats:
    return np.where(now.known, _TRUST[fitted.confidence[now.rows]], _GUESS)


def _by_chance(fitted: Fitted, now: _Now) -> Estimate | None:
    """Looked up in the tables of the fit; None without tables, or when they are over."""
    table = fitted.tables.get("chances")
    first = int(fitted.at // 300 // 2)  # the first window that the fit did not see
    ahead = int(now.wall // WINDOW) - first
    if table is None or not 0 <= ahead < table.shape[2] or table.shape[:2] != (len(HORIZONS), SCENARIOS):
        return None
    # Windows between the last request and the one under way; -1 and 0 mean active.
    idle = int(now.wall // WINDOW) - np.floor((now.wall - now.age) / WINDOW) - 1
    since = np.clip(np.rint(np.log2(np.maximum(idle, 1))), 0, len(IDLE) - 1)
    case = np.where(idle > ahead - 1, QUIET, np.where(idle <= 0, ACTIVE, 2 + since)).astype(np.int64)
    said = table[:, case, ahead, now.rows].astype(np.float64)
    if not now.known.all():
        rate = np.maximum(now.rates[:, R_1H], fitted.prior_rate(now.wall))
        for place, horizon in enumerate(HORIZONS):
            said[place] = np.where(now.known, said[place], -np.expm1(-rate * horizon.span * WINDOW))
    return from_chances("occurrence", dict(zip(HORIZONS, said, strict=True)), WINDOW, _trust(fitted, now))
