"""Fitter side: blend or occurrence? What each would have cost on a day that neither was fitted on, and which it is.

Belongs here: the same questions put to both, priced by the rule that loads are decided by. Never: fitting a source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from forecasting.cells import cells, fit_blend
from forecasting.daily import AHEAD, blended, by_day
from forecasting.decision import keep, spent
from forecasting.fitted import DAY, SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

PRICES: Final = (5.0, 10.0, 20.0, 50.0, 100.0)
"""A cold start in windows held for nothing: what one costs nobody knows, so both are judged at several prices."""
MARGIN: Final = 0.02
"""Share by which occurrence has to be cheaper: a choice that flips with each round serves nobody."""
CELLS: Final = 20_000
LEAST_DAYS: Final = 3


def cost(p: Floats, came: Bools) -> float:
    """Cost of holding and loading by these chances, relative to the better of always and never; the mean over prices.

    Below 1 the chances are worth something. NaN where nothing can be lost: no request, or one in every window.
    """
    if came.all() or not came.any():
        return float("nan")
    idle = np.ones(p.shape)
    found: list[float] = []
    for price in PRICES:
        cold = np.full(p.shape, price)
        plain = min(spent(np.full(p.shape, hold), came, cold, idle) for hold in (True, False))
        found.append(spent(keep(p, cold, idle), came, cold, idle) / plain)
    return float(np.mean(found))


def blend_chances(past: History, end: float, zone: tzinfo) -> Floats | None:
    """P(any request within 10 minutes) by the blend at every bucket of the day before `end` (UTC), `[n, buckets]`.

    Its weights are fitted on the days before that one. None without enough of them.
    """
    days = by_day(past, end, zone, round((end - past.start) / DAY))
    before = days.counts[:, :-1]
    if days.counts.shape[1] < LEAST_DAYS or not before.any():
        return None
    try:
        blend = fit_blend(*cells(before, days.bucket, most=CELLS))
    except (ValueError, RuntimeError, np.linalg.LinAlgError):
        return None
    rate = blended(days, blend)[:, -days.counts.shape[2] :]
    return np.asarray(-np.expm1(-np.maximum(rate, 0.0) * AHEAD), np.float64)


def chosen(numbers: Mapping[str, float], *, possible: bool) -> str:
    """The source to serve with, by `cost_<source>`; `possible` says that occurrence could be looked up."""
    blend, occurrence = (numbers.get(f"cost_{source}", float("nan")) for source in SOURCES)
    # A NaN compares false: what cannot be judged changes nothing.
    return "occurrence" if possible and occurrence < (1 - MARGIN) * blend else "blend"
