"""Poisson regression on day and week harmonics for all models at once, from their week-slot sums.

Belongs here: one batched iteratively reweighted least squares. Never: levels, raw histories, single-model fits.
Slot sums are sufficient statistics for any day/week-periodic Poisson model, so nothing else is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting.profile import CHUNK, DAYS, PER_DAY, Floats, Rates, base

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forecasting.profile import Ints

DAY_HARMONICS = 8
WEEK_HARMONICS = 18
COARSE = 24
"""Slots per day that suffice for these harmonics (hourly): four times cheaper than quarter hours."""
RIDGE = 1.0
_STEP = 2.0
_ROUNDS = 25
_TOLERANCE = 1e-6
_FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class Harmonic:
    """Fitted coefficients `[n, p]` of log requests per hour-of-week style slot, and what they were fitted on."""

    beta: Floats
    per_day: int
    dispersion: Floats

    def rates(self, per_day: int = PER_DAY) -> Rates:
        """Expected requests per slot pass, `[n, 7 * per_day]`, for any finer or equal slot."""
        design = _design(per_day, self.per_day)
        scale = self.per_day / per_day
        result = np.empty((len(self.beta), DAYS * per_day), np.float32)
        for first in range(0, len(self.beta), CHUNK):
            part = slice(first, first + CHUNK)
            result[part] = scale * np.exp(self.beta[part] @ design.T)
        return result


def harmonics() -> Ints:
    """Cycles per week of the terms: 18 weekly ones without those that are daily anyway, then 8 daily ones."""
    weekly = [k for k in range(1, 2 * WEEK_HARMONICS) if k % DAYS][:WEEK_HARMONICS]
    return np.array(weekly + [DAYS * k for k in range(1, DAY_HARMONICS + 1)], np.int64)


def _design(per_day: int, fitted: int) -> Floats:
    """Intercept, cosines, sines, `[slots, p]`; the phase is a slot's centre, measured from the fitted slots' first."""
    hours = (np.arange(DAYS * per_day) + 0.5) / (DAYS * per_day) - 0.5 / (DAYS * fitted)
    angle = 2 * np.pi * hours[:, None] * harmonics()[None, :]
    return np.hstack([np.ones((len(hours), 1)), np.cos(angle), np.sin(angle)])


def coarsen(
    sums: NDArray[np.floating], exposure: NDArray[np.floating], *, per_day: int, to: int
) -> tuple[Floats, Floats]:
    """The same history in fewer slots, float64: counts add up, passes average."""
    if per_day % to:
        msg = f"{per_day} slots a day can't be merged to {to}"
        raise ValueError(msg)
    shape = (len(sums), DAYS * to, per_day // to)
    return sums.reshape(shape).sum(axis=2, dtype=np.float64), exposure.reshape(shape).mean(axis=2, dtype=np.float64)


def fit(
    sums: NDArray[np.floating],
    exposure: NDArray[np.floating],
    *,
    per_day: int = PER_DAY,
    coarse: int | None = COARSE,
    ridge: float = RIDGE,
    scaled: bool = True,
) -> Harmonic:
    """Fit every model; arrays as for `profile.hier`.

    Counts and passes are divided by the model's dispersion, so that bursts weigh no more than the evidence in them
    and the ridge bites where history is thin. Steps are clipped to 2 in every coefficient. A model without any
    request gets a rate of (almost) zero everywhere.
    """
    slots = per_day if coarse is None or coarse >= per_day else coarse
    width = len(harmonics()) * 2 + 1
    beta, dispersion = np.empty((len(sums), width)), np.ones(len(sums))
    for first in range(0, len(sums), CHUNK):
        part = slice(first, first + CHUNK)
        counts, passes = coarsen(sums[part], exposure[part], per_day=per_day, to=slots)
        if scaled:
            dispersion[part] = spread(counts, passes, slots)
        scale = dispersion[part][:, None]
        beta[part] = _irls(counts / scale, passes / scale, slots, ridge)
    return Harmonic(beta, slots, dispersion)


def spread(sums: Floats, exposure: Floats, per_day: int) -> Floats:
    """Pearson dispersion `[n]` of the slot sums around slot of day times day of week; at least 1 (Poisson)."""
    expected = exposure * base(sums, exposure, per_day)
    used = expected > _FLOOR
    pearson = np.where(used, (sums - expected) ** 2 / np.maximum(expected, _FLOOR), 0.0).sum(axis=1)
    freedom = np.maximum(used.sum(axis=1) - per_day - DAYS, per_day // 2)
    scatter: Floats = pearson / freedom
    return np.maximum(scatter, 1.0)


def _irls(sums: Floats, exposure: Floats, per_day: int, ridge: float) -> Floats:
    design = _design(per_day, per_day)
    penalty = np.full(design.shape[1], ridge)
    penalty[0] = 1e-9  # never singular, even for a model that was never observed
    beta = np.zeros((len(sums), design.shape[1]))
    total = exposure.sum(axis=1)
    beta[:, 0] = np.log(np.maximum(sums.sum(axis=1), 1e-3) / np.maximum(total, 1e-3))
    gram = _Gram(per_day)
    live = np.flatnonzero((sums.sum(axis=1) > 0) & (total > 0))
    for _ in range(_ROUNDS):
        mean = exposure[live] * np.exp(np.clip(beta[live] @ design.T, -30.0, 30.0))
        slope = (sums[live] - mean) @ design - penalty * beta[live]
        curve = gram.of(mean)
        curve[:, np.arange(len(penalty)), np.arange(len(penalty))] += penalty
        step = np.clip(np.linalg.solve(curve, slope[:, :, None])[:, :, 0], -_STEP, _STEP)
        beta[live] += step
        live = live[np.abs(step).max(axis=1) > _TOLERANCE]
        if not len(live):
            break
    return beta


class _Gram:
    """`X' diag(w) X` for the harmonic design, from one Fourier transform of the weights.

    Products of sines and cosines are sines and cosines of sums and differences of frequencies, so each entry is
    half the sum of two Fourier coefficients; no `[slots, p, p]` product is ever formed.
    """

    def __init__(self, per_day: int) -> None:
        order = harmonics()
        self._size = DAYS * per_day
        self._width = len(order)
        self._minus = np.abs(order[:, None] - order[None, :])
        self._sign = np.sign(order[:, None] - order[None, :])
        self._plus = order[:, None] + order[None, :]
        self._order = order

    def of(self, weights: Floats) -> Floats:
        """`[n, p, p]` for weights `[n, slots]`."""
        if self._plus.max() >= self._size:
            msg = "too few slots for these harmonics"
            raise ValueError(msg)
        full = np.fft.fft(weights, axis=1)
        cos, sin = np.ascontiguousarray(full.real), np.ascontiguousarray(-full.imag)
        k = self._width
        gram = np.empty((len(weights), 2 * k + 1, 2 * k + 1))
        gram[:, 0, 0] = cos[:, 0]
        gram[:, 0, 1 : k + 1] = gram[:, 1 : k + 1, 0] = cos[:, self._order]
        gram[:, 0, k + 1 :] = gram[:, k + 1 :, 0] = sin[:, self._order]
        near, far = cos[:, self._minus], cos[:, self._plus]
        gram[:, 1 : k + 1, 1 : k + 1] = 0.5 * (near + far)
        gram[:, k + 1 :, k + 1 :] = 0.5 * (near - far)
        mixed = 0.5 * (sin[:, self._plus] - self._sign * sin[:, self._minus])
        gram[:, 1 : k + 1, k + 1 :] = mixed
        gram[:, k + 1 :, 1 : k + 1] = mixed.transpose(0, 2, 1)
        return gram
