"""A histogram for the hit path: fixed bounds, a bisection and two additions.

Nothing else. prometheus_client's own costs ten times as much per observation, which the hit path pays three times.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.samples import Exemplar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.core import HistogramMetricFamily


class Buckets:
    """Counts of observations at or below each bound, as Prometheus wants them; values and bounds in one unit."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Count one observation, and keep it as its bucket's example if its trace is recorded."""
        self.observe(value)
        if trace_id:
            self._exemplars[bisect_left(self._bounds, value)] = Exemplar({"trace_id": trace_id}, value)

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self._counts)

    def spell(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add these buckets to a family under some label values."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for index, (bound, count) in enumerate(zip(bounds, accumulate(self._counts), strict=True)):
            exemplar = self._exemplars.get(index)
            rows.append((bound, count) if exemplar is None else (bound, count, exemplar))
        family.add_metric(labels, rows, self._total)

    def __repr__(self) -> str:
        return f"<Buckets n={self.count} sum={self._total:.6g}>"
