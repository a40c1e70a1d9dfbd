"""Which estimator a model has earned by its history, and in which word its forecast may be trusted.

Belongs here: the table of rungs and the words. Never: the estimators themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from forecasting.backtest import SPECIALISTS
from forecasting.candidates import ACTIVE_SHARE, NAIVE_DAY, NAIVE_WEEK
from forecasting.profile import DAY, HOUR

if TYPE_CHECKING:
    from collections.abc import Sequence

SPARSE_SHARE = 0.05
"""Below this share of active hours a count forecast says nothing that its probability doesn't."""
_COVERED = (0.7, 0.95)
_SKILL_HIGH = 0.05


class Confidence(StrEnum):
    """How far a forecast may be trusted, in the words that people see."""

    PRIOR = "prior"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def value01(self) -> float:
        """The same as a number in 0..1, for `Prospect.confidence`."""
        return {"prior": 0.1, "low": 0.3, "medium": 0.6, "high": 0.9}[self.value]


class Rung(StrEnum):
    """The estimators by the history they need."""

    PRIOR = "prior"
    YOUNG = "young"
    DAILY = "daily"
    WEEKLY = "weekly"
    SPECIAL = "special"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class Step:
    """What is used for one model: families of candidates (none: no count model), and whether they are mixed."""

    rung: Rung
    families: tuple[str, ...]
    mixed: bool
    harmonic: bool = False


_COMMON = ("hier", "hier+lvl", NAIVE_DAY, NAIVE_WEEK, "level", "typical", "median")


def step_of(history: float, active_share: float, *, chosen: bool = False) -> Step:
    """The rung for so many seconds of history and such a share of active hours.

    `chosen` says that the model is among the top K by rate times cold cost, and may try the specialists.
    Raises `ValueError` for a negative history or a share outside 0..1 (NaN included).
    """
    if not history >= 0:
        msg = f"history must not be negative, not {history!r}"
        raise ValueError(msg)
    if not 0 <= active_share <= 1:
        msg = f"active_share must lie in 0..1, not {active_share!r}"
        raise ValueError(msg)
    if history < HOUR:
        return Step(Rung.PRIOR, ("prior",), mixed=False)
    if history < DAY:
        return Step(Rung.YOUNG, ("young",), mixed=False)
    if active_share < SPARSE_SHARE:
        return Step(Rung.SPARSE, (), mixed=False)
    if history < 7 * DAY:
        return Step(Rung.DAILY, ("hier+lvl",), mixed=False)
    harmonic = active_share >= ACTIVE_SHARE
    families = (*_COMMON, "harm+lvl") if harmonic else _COMMON
    if history >= 14 * DAY and chosen:
        return Step(Rung.SPECIAL, (*families, *SPECIALISTS), mixed=True, harmonic=harmonic)
    return Step(Rung.WEEKLY, families, mixed=True, harmonic=harmonic)


def confidence(history: float, *, skill: float | None = None, coverage80: float | None = None) -> Confidence:
    """The word for a forecast.

    `skill` is 1 - Brier / climatology's Brier over the last days and `coverage80` that of the 80 % interval; None or
    NaN when not measured yet. A forecast that has no skill or covers badly is `low`, however long its history.
    """
    if history < HOUR:
        return Confidence.PRIOR
    if history < 7 * DAY or skill is None or not skill > 0:
        return Confidence.LOW
    if coverage80 is None or not _COVERED[0] <= coverage80:
        return Confidence.LOW
    if skill >= _SKILL_HIGH and history >= 14 * DAY and coverage80 <= _COVERED[1]:
        return Confidence.HIGH
    return Confidence.MEDIUM


def top(keys: Sequence[str], rates: Sequence[float], cold: Sequence[float], most: int) -> tuple[str, ...]:
    """The `most` keys by requests per second times cold-start seconds, best first; ties by name, idle ones never."""
    ranked = sorted(zip(keys, rates, cold, strict=True), key=lambda one: (-one[1] * one[2], one[0]))
    return tuple(key for key, rate, seconds in ranked if rate * seconds > 0)[: max(most, 0)]
