"""What is expected of every model now: live counters and the last fit, put together at decision time on the loop.

Belongs here: vectors over all models, under 2 ms for 10,000 of them. Never: fitting, histories, loops over models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from forecasting.fitted import BUCKET, DAY, MOST_RATE, USE_BUCKET, WORDS
from forecasting.ladder import Confidence
from forecasting.rates import AGE, COLUMNS, R_1H, R_6H
from forecasting.sources import ENOUGH, Estimate, from_rates

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
    that were not fitted follow the fleet's prior. Only `allowed` models may be loaded ahead.
    """
    rates = np.nan_to_num(counts.rates(monotonic), nan=0.0, posinf=MOST_RATE, neginf=0.0)
    rates = np.clip(rates, 0.0, MOST_RATE)
    if fitted is None or mode == "rate" or not _current(fitted, wall):
        return _recent(rates)
    rows = fitted.rows(counts.keys)
    known = rows >= 0
    safe = np.where(known, rows, 0)
    return _blended(counts, fitted, rates, wall, known, safe) if len(fitted.keys) else _recent(rates)


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


def _blended(counts: Counts, fitted: Fitted, rates: Floats, wall: float, known: Bools, rows: Ints) -> Estimate:
    elapsed = (wall - fitted.origin) % DAY
    use_column = min(int(elapsed // USE_BUCKET), fitted.use.shape[1] - 1)
    season_column = min(int(elapsed // BUCKET), fitted.season.shape[1] - 1)
    # A model without a fit of its own: the fleet's curve.
    slot = fitted.prior_rate(wall)
    use = np.where(known, fitted.use[rows, use_column], _wait(np.array(slot)))
    ttn = np.where(np.isfinite(use), ENOUGH / np.maximum(use, USE_BUCKET / 4), 0.0)
    season = np.where(known, fitted.season[rows, season_column], 0.0)
    age = np.maximum(wall - counts.last_seen(wall), 0.0)
    learned = rates @ fitted.weights[: rates.shape[1]] + season
    learned += fitted.weights[_TTN] * ttn + fitted.weights[_AGE] / (age + AGE)
    skilled = known & fitted.skilled[rows] & fitted.skill
    recent = rates[:, R_1H]
    prefetch = np.minimum(np.where(skilled, learned, recent), MOST_RATE)
    keep = 0.5 * rates[:, R_6H] + 0.5 * ttn if fitted.schedule else recent
    trust = np.where(known, _TRUST[fitted.confidence[rows]], _GUESS)
    return from_rates("blend", evict_rate=keep, prefetch_rate=prefetch, next_use=use, confidence=trust)
