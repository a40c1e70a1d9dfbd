"""Fitter side: the first days of this fleet's models, lined up by their first request, for the launch regression.

Belongs here: whose first day is taken, and the fleet's shape of the day. Never: features or fits (`training.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from forecasting.training import Windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

LEAST: Final = 30
"""First days of models that really appeared; with fewer, the first known days of the others stand in."""
MOST: Final = 120
"""First days that are learned from: some 17,000 windows."""


class Launches(NamedTuple):
    """`past` begins with each model's first active window, `begins[n]` are the week slots of those."""

    past: Windows
    begins: Ints
    real: int
    """How many of them are models that appeared, rather than ones that were there when counting began."""


def launches(past: Windows, born: Ints) -> Launches:
    """The first days of some models: `born[n]` is the window in which each was first seen, below 1 if before.

    The models that appeared first; the fleet is the prior for what a new model does, so all others fill up to `LEAST`
    as if they had appeared with their first active window.
    """
    active = past.counts > 0
    length = past.counts.shape[1]
    first: Ints = np.asarray(np.where(np.any(active, axis=1), np.argmax(active, axis=1), length), np.int64)
    seen = first < length
    real: Ints = np.flatnonzero(seen & (born > 0))[-MOST:]
    others: Ints = np.flatnonzero(seen & (born <= 0))[: max(LEAST - len(real), 0)]
    rows: Ints = np.concatenate((real, others))
    day = round(86_400.0 / past.window)
    due: Ints = np.expand_dims(first[rows], 1) + np.arange(day, dtype=np.int64)
    at: Ints = np.minimum(due, length - 1)
    known: Bools = np.logical_and(past.known[np.expand_dims(rows, 1), at], due < length)
    counts: Floats = np.where(known, past.counts[np.expand_dims(rows, 1), at], 0.0)
    begins: Ints = past.phase[first[rows]]
    return Launches(Windows(counts, known, np.arange(day, dtype=np.int64), past.window), begins, len(real))


def shape_of(past: Windows) -> Floats:
    """The fleet's P(active) per slot of the day, `[day]`, as `launch.fleet_shape` has it, without decay."""
    day = round(86_400.0 / past.window)
    slot = past.phase % day
    seen = np.bincount(slot, past.known.sum(axis=0), minlength=day)
    active = np.bincount(slot, ((past.counts > 0) & past.known).sum(axis=0), minlength=day)
    mean = active.sum() / seen.sum() if seen.sum() else 0.5
    return np.asarray((active + mean) / (seen + 1.0), np.float64)
