"""Does a stated probability come true as often as stated: Brier score, calibration error, reliability, online.

Belongs here: judging forecasts after the fact, over a rolling window, and a recalibration from it. Never: making them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Rows = NDArray[np.int64]

BINS = 20
SEGMENTS = 24
"""Parts of the rolling window; it forgets one at a time."""
PSEUDO = 500.0
"""Forecasts that speak against recalibrating a bin at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """What came of forecasts: number, sum and true ones per bin of stated probability, and the squared errors."""

    count: Floats
    stated: Floats
    true: Floats
    squared: float

    @property
    def n(self) -> float:
        """Forecasts judged."""
        return float(self.count.sum())

    @property
    def brier(self) -> float:
        """Mean squared error; NaN before the first forecast."""
        return self.squared / self.n if self.n else float("nan")

    @property
    def climatology(self) -> float:
        """Brier score of always stating the observed frequency."""
        share = float(self.true.sum()) / self.n if self.n else float("nan")
        return share * (1 - share)

    @property
    def ece(self) -> float:
        """Expected calibration error: mean distance between stated and observed, bins weighted by their forecasts."""
        return float(np.abs(self.stated - self.true).sum()) / self.n if self.n else float("nan")

    def table(self) -> tuple[tuple[float, float, int], ...]:
        """For each bin that has any: mean stated probability, observed frequency, forecasts."""
        return tuple(
            (float(stated / n), float(true / n), int(n))
            for n, stated, true in zip(self.count, self.stated, self.true, strict=True)
            if n
        )

    def recalibrate(self, p: Floats, pseudo: float = PSEUDO) -> Floats:
        """Isotonic regression of what came true on what was stated, shrunk towards leaving p alone."""
        middle = (np.arange(len(self.count)) + 0.5) / len(self.count)
        weight = self.count + pseudo
        if not weight.all():
            return p
        x = (self.stated + pseudo * middle) / weight
        y = _isotonic((self.true + pseudo * x) / weight, weight)
        return np.interp(p, np.concatenate(([0.0], x, [1.0])), np.concatenate(([0.0], y, [1.0])))


def judge(p: Floats, came: Bools, bins: int = BINS) -> Reliability:
    """Score forecasts p in 0..1 against what came. Raises `ValueError` on anything that is no probability."""
    if p.shape != came.shape or not np.all((p >= 0) & (p <= 1)):
        msg = f"probabilities must lie in 0..1 and match their outcomes: {p.shape} and {came.shape}"
        raise ValueError(msg)
    flat, true = p.ravel(), came.ravel().astype(np.float64)
    index = np.minimum((flat * bins).astype(np.int64), bins - 1)
    return Reliability(
        count=np.bincount(index, minlength=bins).astype(np.float64),
        stated=np.bincount(index, flat, minlength=bins).astype(np.float64),
        true=np.bincount(index, true, minlength=bins).astype(np.float64),
        squared=float(((flat - true) ** 2).sum()),
    )


def total(parts: Sequence[Reliability], bins: int = BINS) -> Reliability:
    """Several judgements as one."""
    empty = np.zeros(bins)
    return Reliability(
        count=sum((part.count for part in parts), empty),
        stated=sum((part.stated for part in parts), empty),
        true=sum((part.true for part in parts), empty),
        squared=sum(part.squared for part in parts),
    )


class Calibration:
    """Rolling judgement of one horizon's forecasts, for the fleet and per class; `period` seconds are remembered."""

    def __init__(self, classes: Sequence[str] = (), period: float = 86_400.0, bins: int = BINS) -> None:
        if not period > 0 or bins < 1:
            msg = f"impossible window: {period!r} s, {bins} bins"
            raise ValueError(msg)
        self.classes = tuple(classes)
        self.bins = bins
        self._step = period / SEGMENTS
        self._parts: deque[tuple[int, str, Reliability]] = deque()

    def __repr__(self) -> str:
        fleet = self.fleet()
        return f"<Calibration n={fleet.n:.0f} brier={fleet.brier:.4f} ece={fleet.ece:.4f}>"

    def add(self, at: float, p: Floats, came: Bools, classes: Rows | None = None) -> None:
        """Judge one batch at an instant; `classes` indexes `self.classes` per forecast. Old segments leave."""
        segment = int(at // self._step)
        groups = (
            [("", p, came)]
            if classes is None
            else [(name, p[classes == index], came[classes == index]) for index, name in enumerate(self.classes)]
        )
        for name, stated, true in groups:
            if len(stated):
                self._parts.append((segment, name, judge(stated, true, self.bins)))
        while self._parts and self._parts[0][0] <= segment - SEGMENTS:
            self._parts.popleft()

    def fleet(self) -> Reliability:
        """All classes together."""
        return total([part for _, _, part in self._parts], self.bins)

    def of(self, name: str) -> Reliability:
        """One class."""
        return total([part for _, kind, part in self._parts if kind == name], self.bins)


class Docket:
    """Forecasts that wait for their windows to be over, in the order in which they were made."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, int, tuple[str, ...], Floats]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def file(self, first: int, span: int, keys: tuple[str, ...], p: Floats) -> None:
        """Remember what was stated of `keys` about windows `first` to `first + span - 1` (any running number)."""
        self._open.append((first, span, keys, p))

    def due(self, closed: int) -> list[tuple[int, int, tuple[str, ...], Floats]]:
        """Take those whose last window is `closed` or earlier: first window, span, of whom, what was stated."""
        found: list[tuple[int, int, tuple[str, ...], Floats]] = []
        while self._open and self._open[0][0] + self._open[0][1] - 1 <= closed:
            found.append(self._open.popleft())
        return found


def _isotonic(y: Floats, weight: Floats) -> Floats:
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]  # ships no types

    result: Any = isotonic_regression(y, weights=weight)
    return np.asarray(result.x, np.float64)
