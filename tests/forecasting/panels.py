"""Synthetic panels for the forecasting tests."""

from __future__ import annotations

import numpy as np

from forecasting.candidates import Panel


def panel(counts: np.ndarray, *, bucket: float = 3600.0, known: np.ndarray | None = None) -> Panel:
    """Hourly by default, from a Monday midnight, slots as long as buckets, a day of phases to come."""
    counts = np.atleast_2d(counts).astype(np.float64)
    day = round(86400 / bucket)
    phase = np.arange(counts.shape[1] + day, dtype=np.int64) % (7 * day)
    return Panel(counts, np.ones(counts.shape, np.bool_) if known is None else known, phase, bucket, day)


def wave(days: int, *, day: int = 24, models: int = 1, seed: int = 0, weekend: float = 0.5) -> np.ndarray:
    """Poisson counts around a daily wave that is lower on Saturdays and Sundays, `[models, days * day]`."""
    draw = np.random.default_rng(seed)
    at = np.arange(days * day)
    rate = 100 * (1.2 + np.sin(2 * np.pi * at / day)) * np.where(at // day % 7 >= 5, weekend, 1.0)
    return draw.poisson(np.repeat(rate[None], models, axis=0)).astype(np.float64)
