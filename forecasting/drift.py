"""When a forecast has stopped being right, and whether it was ever better than no forecast.

Belongs here: CUSUM on daily ratios, demotion, the noise gate. Never: acting on it; the caller demotes models and
switches prefetching off. Levels that shift are repaired in `week.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting.profile import DAY, MATRIX, Bools, Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Iterable

SLACK, ALARM = 0.25, 1.0
"""CUSUM on log ratios: what a day may be off without counting, and the sum at which a drift is called."""
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
        """1 above, -1 below, 0 within bounds."""
        return np.where(self.up > ALARM, 1, np.where(self.down > ALARM, -1, 0)).astype(np.int64)


def drifting(days: Iterable[tuple[Floats, Floats]], models: int) -> Ints:
    """1, -1 or 0 per model, `[models]`, after so many days of counted and expected requests (`[n]`, oldest first).

    A day that expected nothing is none to judge by: the model was too new, or nothing was known. What a shift of the
    level has repaired expects what came, and so adds nothing.
    """
    sums = Cusum.fresh(models)
    for actual, expected in days:
        seen, usual = (np.pad(each, (0, models - len(each))) for each in (actual, expected))
        sums = sums.after(np.where(usual > 0, daily_ratio(seen, usual), np.nan))
    return sums.drifting


def demotion(learned: Floats, simple: Floats, alarm: Ints) -> tuple[Bools, Bools]:
    """Who is to follow the simpler estimate, and who has earned the learned one back, `[n]` each.

    From their losses on past days, `[n, days]`, oldest first (NaN: not judged), and the alarm of `drifting`. A model
    falls after two breaches in a row, or after one while its level drifts; two good days without an alarm are needed
    to come back, so that it does not change with every fit.
    """
    watch, good = Watch.fresh(len(learned)), np.zeros(len(learned), np.int64)
    unknown = np.full(len(learned), np.nan)
    for mine, other in zip(learned.T, simple.T, strict=True):
        watch = watch.after(unknown, mine, other)
        judged = np.isfinite(mine) & np.isfinite(other)
        good = np.where(judged, np.where(mine <= other, good + 1, 0), good)
    fallen = watch.demoted | ((alarm != 0) & (watch.breaches > 0))
    return fallen, (good >= BREACHES) & (alarm == 0)


@dataclass(frozen=True, slots=True)
class Watch:
    """Consecutive breaches per model, `[n]`, of whatever stands above the simpler estimate."""

    breaches: Ints

    @classmethod
    def fresh(cls, models: int) -> Watch:
        """No breach yet."""
        return cls(np.zeros(models, np.int64))

    def after(self, coverage80: Floats, loss: Floats, simple_loss: Floats) -> Watch:
        """One more review: coverage over 48 h and losses `[n]`; a NaN pair can't be judged and changes nothing."""
        short = coverage80 < COVERAGE_LEAST
        worse = loss > LOSS_MOST * simple_loss
        judged = ~(np.isnan(coverage80) & (np.isnan(loss) | np.isnan(simple_loss)))
        counted = np.where(short | worse, self.breaches + 1, 0)
        return Watch(np.where(judged, counted, self.breaches).astype(np.int64))

    @property
    def demoted(self) -> Bools:
        """Who falls back to the simpler estimate: two breaches in a row."""
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
