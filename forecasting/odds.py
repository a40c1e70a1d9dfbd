"""Probabilities, log odds and rates, and the ways between them. Nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LIMIT = 30.0
"""|log odds| beyond which an exponential says nothing more."""
SURE = 1 - 1e-9
"""The highest probability that is turned into a rate: certainty would be an infinite one."""


def logit(p: Floats, clip: float) -> Floats:
    """Log odds, with p clipped to [clip, 1 - clip]."""
    q = np.clip(p, clip, 1.0 - clip)
    return np.log(q / (1.0 - q))


def expit(x: Floats) -> Floats:
    """Probability of log odds."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -LIMIT, LIMIT))), np.float64)


def rate_of(p: Floats, within: float) -> Floats:
    """The Poisson rate, requests per second, that gives a request within so many seconds with probability p."""
    if not within > 0:
        msg = f"within must be positive seconds, not {within!r}"
        raise ValueError(msg)
    return -np.log1p(-np.clip(p, 0.0, SURE)) / within


def chance_of(rate: Floats, within: float) -> Floats:
    """P(a request within so many seconds) at a Poisson rate."""
    return -np.expm1(-rate * max(within, 0.0))
