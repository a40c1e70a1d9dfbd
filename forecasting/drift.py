"""When a forecast has stopped being right, and whether it was ever better than no forecast.

Belongs here: CUSUM on daily ratios, the level shift to rescale by, demotion, the noise gate. Never: repairing
anything; the caller rescales sums, demotes methods and switches prefetching off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forecasting.profile import DAY, MATRIX, Bools, Floats, Ints

SLACK, ALARM = 0.25, 1.0
"""CUSUM on log ratios: what a day may be off without counting, and the sum at which a drift is called."""
SHIFT_LOW, SHIFT_HIGH = 0.67, 1.5
MOST = 1.2
"""What one day can add to the sums, less the slack: below the alarm, so it takes two days to raise it."""
COVERAGE_LEAST, LOSS_MOST = 0.65, 1.1
WINDOW = 2 * DAY
"""Coverage of the 80 % interval is judged over 48 h."""
BREACHES = 2


def daily_ratio(seen: Floats, expected: Floats) -> Floats:
    """Log of counted over expected requests of a day, `[...]`; both drawn together by a handful of requests."""
    pull = 4.0 + 0.05 * expected
    return np.log((seen + pull) / (expected + pull))


@dataclass(frozen=True, slots=True)
class Cusum:
    """Two-sided cumulative sums per model, `[n]`: how far it has been above and below what was expected."""

    up: Floats
    down: Floats

    @classmethod
    def fresh(cls, models: int) -> Cusum:
        """Nothing accumulated yet."""
        return cls(np.zeros(models), np.zeros(models))

    def after(self, ratio: Floats) -> Cusum:
        """Both sums after one more day; NaN (a day of gaps) changes nothing, and one wild day raises no alarm."""
        step = np.clip(np.nan_to_num(ratio), -MOST, MOST)
        up, down = np.maximum(self.up + step - SLACK, 0.0), np.maximum(self.down - step - SLACK, 0.0)
        gap = np.isnan(ratio)
        return Cusum(np.where(gap, self.up, up), np.where(gap, self.down, down))

    @property
    def drifting(self) -> Ints:
        """1 above, -1 below, 0 within bounds; reset the sums after acting on it."""
        return np.where(self.up > ALARM, 1, np.where(self.down > ALARM, -1, 0)).astype(np.int64)

    def reset(self, rows: Bools) -> Cusum:
        """Start again for some models."""
        return Cusum(np.where(rows, 0.0, self.up), np.where(rows, 0.0, self.down))


def shift(ratios: Floats) -> Floats:
    """What to multiply the stored sums by, `[n]`, from the last two daily log ratios `[n, 2]`; 1 for no shift.

    Both days must have left [.67, 1.5] to the same side: a half-updated profile is worse than a rescaled one.
    """
    if ratios.ndim != MATRIX or ratios.shape[1:] != (2,):
        msg = f"ratios must be [models, 2], not {ratios.shape}"
        raise ValueError(msg)
    high = (ratios > np.log(SHIFT_HIGH)).all(axis=1)
    low = (ratios < np.log(SHIFT_LOW)).all(axis=1)
    factor = np.exp(np.where(high | low, ratios.mean(axis=1), 0.0))
    return np.where(np.isfinite(factor), factor, 1.0)


@dataclass(frozen=True, slots=True)
class Watch:
    """Consecutive breaches per model, `[n]`, of whatever method stands above `hier`."""

    breaches: Ints

    @classmethod
    def fresh(cls, models: int) -> Watch:
        """No breach yet."""
        return cls(np.zeros(models, np.int64))

    def after(self, coverage80: Floats, loss: Floats, hier_loss: Floats) -> Watch:
        """One more review: coverage over 48 h and losses `[n]`; a NaN pair can't be judged and changes nothing."""
        short = coverage80 < COVERAGE_LEAST
        worse = loss > LOSS_MOST * hier_loss
        judged = ~(np.isnan(coverage80) & (np.isnan(loss) | np.isnan(hier_loss)))
        counted = np.where(short | worse, self.breaches + 1, 0)
        return Watch(np.where(judged, counted, self.breaches).astype(np.int64))

    @property
    def demoted(self) -> Bools:
        """Who falls back to `hier`: two breaches in a row."""
        return self.breaches >= BREACHES


# -- is there anything to forecast? --------------------------------------------------------------------

SKILL_LEAST = 0.02
"""A forecast must beat the constant rate by this share of the loss."""
SKILL_SIGMA = 3.0
_LEAST_ORIGINS = 5


@dataclass(frozen=True, slots=True)
class Gate:
    """Backtest against a constant rate: the share of loss saved `[n]` and whether that is more than luck."""

    saved: Floats
    skilled: Bools

    @property
    def fleet(self) -> bool:
        """Whether prefetching by forecast may be on at all: somebody has skill."""
        return bool(self.skilled.any())


def poisson_loss(seen: Floats, rate: Floats) -> Floats:
    """Poisson deviance per bucket: a proper score for means, where absolute error would reward saying zero."""
    mean = np.maximum(rate, 1e-9)
    return 2 * (np.where(seen > 0, seen * np.log(np.maximum(seen, 1e-12) / mean), 0.0) - seen + mean)


def noise_gate(losses: Floats, constant: Floats) -> Gate:
    """Judge losses `[n, K]` at K origins (NaN: not judged) against those of a constant rate at the same ones.

    Skilled means at least five origins, 2 % less loss, and a mean saving of three standard errors: on pure Poisson
    noise a seasonal profile only adds its own estimation error, so it saves nothing and the gate stays shut.
    """
    if losses.shape != constant.shape or losses.ndim != MATRIX:
        msg = f"losses {losses.shape} and constant {constant.shape} must both be [models, origins]"
        raise ValueError(msg)
    judged = np.isfinite(losses) & np.isfinite(constant)
    gain = np.where(judged, np.where(judged, constant, 0.0) - np.where(judged, losses, 0.0), 0.0)
    count = judged.sum(axis=1)
    mean = gain.sum(axis=1) / np.maximum(count, 1)
    spread = (np.where(judged, gain - mean[:, None], 0.0) ** 2).sum(axis=1) / np.maximum(count - 1, 1)
    error = np.sqrt(spread / np.maximum(count, 1))
    total = np.where(judged, constant, 0.0).sum(axis=1)
    saved = np.where(total > 0, gain.sum(axis=1) / np.where(total > 0, total, 1.0), 0.0)
    skilled = (count >= _LEAST_ORIGINS) & (saved >= SKILL_LEAST) & (mean > SKILL_SIGMA * error)
    return Gate(saved, skilled)
