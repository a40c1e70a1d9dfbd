"""Fleets whose requests are known: pure noise, a daily peak. Only for tests of fitting and estimating."""

from __future__ import annotations

from datetime import UTC, tzinfo
from typing import TYPE_CHECKING

import numpy as np

from forecasting.counts import Counts
from forecasting.history import Imported

if TYPE_CHECKING:
    from numpy.typing import NDArray

END = 1_760_313_600 // 60
"""A Monday's midnight in UTC, in minutes."""


def noise(models: int, days: int, *, seed: int = 3) -> dict[str, NDArray[np.int64]]:
    """Poisson requests per minute at a constant rate."""
    rng = np.random.default_rng(seed)
    rates = rng.choice([0.01, 0.1, 0.5], models)
    return {f"noise-{row}@1": rng.poisson(rate, days * 1440) for row, rate in enumerate(rates)}


def daily(models: int, days: int, *, seed: int = 4, hours: int = 3) -> dict[str, NDArray[np.int64]]:
    """Busy for a few hours at the same time of each day, silent else."""
    rng = np.random.default_rng(seed)
    minute = np.arange(days * 1440)
    found: dict[str, NDArray[np.int64]] = {}
    for row in range(models):
        busy = (minute - rng.integers(0, 1440)) % 1440 < hours * 60
        found[f"daily-{row}@1"] = rng.poisson(0.3 * busy)
    return found


def counted(
    fleet: dict[str, NDArray[np.int64]], *, zone: tzinfo = UTC, end: int = END, monotonic: float = 0.0
) -> Counts:
    """Counts that have seen this fleet up to `end`, as from a log."""
    length = max((len(minutes) for minutes in fleet.values()), default=0)
    start = end - length
    cells = {
        key: (start + np.flatnonzero(minutes), minutes[minutes > 0]) for key, minutes in fleet.items() if minutes.any()
    }
    counts = Counts(60.0 * end, monotonic, zone=zone)
    counts.load_history(Imported(start, end, np.ones(length, np.bool_), cells))
    for key in fleet:
        counts.index(key)
    return counts
