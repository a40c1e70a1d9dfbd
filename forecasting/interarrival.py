"""When does an idle model come back: histograms of gaps between active windows, and the hazard they imply.

Batched over models. A gap of 1 joins neighbouring active windows. Never reads ahead: only gaps that have ended count.
Method: Shahrad et al., Serverless in the Wild (2020), with a hazard in place of its percentiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]

PRIOR = 0.5
"""Pseudo gaps; they return at the model's own rate."""


class Gaps:
    """Gap histograms of `models` models. Gaps are in windows, up to `limit`; longer ones share one overflow bin."""

    __slots__ = ("_hazard", "counts", "limit")

    def __init__(self, models: int, limit: int) -> None:
        if models < 0 or limit < 1:
            msg = f"impossible histogram: {models} models, gaps up to {limit}"
            raise ValueError(msg)
        self.limit = limit
        self.counts = np.zeros((models, limit + 1), np.float32)
        """Gaps seen, `[models, limit + 1]`; column g - 1 holds gaps of g windows, the last one the overflow."""
        self._hazard = np.zeros((models, limit + 1), np.float32)

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"<Gaps {len(self)} models, {self.counts.sum():.0f} gaps up to {self.limit}>"

    def observe(self, rows: Rows, gaps: NDArray[np.int32]) -> None:
        """Count one ended gap for each of these models (each at most once in a call)."""
        self.counts[rows, np.clip(gaps, 1, self.limit + 1) - 1] += 1

    def refresh(self, rows: Rows, rate: Floats, keep: float = 1.0) -> None:
        """Recompute the hazard of some models; `rate` is their share of active windows.

        `keep` first shrinks what was counted so far, so that old habits fade.
        """
        counts = self.counts[rows] * np.float32(keep)
        self.counts[rows] = counts
        self._hazard[rows] = hazard(counts, rate)

    def chance(self, rows: Rows, gap: NDArray[np.int32], span: int = 1) -> Floats:
        """P(the gap ends within `span` windows, the first of which would make it `gap` windows long)."""
        survives = np.ones(len(rows))
        for step in range(span):
            survives *= 1.0 - self._hazard[rows, np.clip(gap + step, 1, self.limit + 1) - 1]
        return 1.0 - survives

    def take(self, rows: Rows) -> Gaps:
        """The same for some models, in this order; -1 asks for a new, empty one."""
        other = Gaps(len(rows), self.limit)
        known = rows >= 0
        other.counts[known] = self.counts[rows[known]]
        other._hazard[known] = self._hazard[rows[known]]  # its own class
        return other


def hazard(counts: NDArray[np.float32], rate: Floats) -> NDArray[np.float32]:
    """P(a gap ends with g windows | it lasted so long), `[models, limit + 1]`, from counts of the same shape.

    Counts are smoothed .25/.5/.25; the hazard is (G[g] + .5 rate) / (survivors[g] + .5). The overflow bin is
    taken as spread over as many windows again.
    """
    limit = counts.shape[1] - 1
    inner = counts[:, :limit]
    padded = np.concatenate((inner[:, :1], inner, inner[:, -1:]), axis=1)
    smooth = np.concatenate((0.25 * padded[:, :-2] + 0.5 * inner + 0.25 * padded[:, 2:], counts[:, -1:]), axis=1)
    survivors = np.cumsum(smooth[:, ::-1], axis=1)[:, ::-1]
    ended = smooth.copy()
    ended[:, -1] /= limit
    prior = np.float32(PRIOR) * rate.astype(np.float32)[:, None]
    return np.asarray(np.clip((ended + prior) / (survivors + np.float32(PRIOR)), 0.0, 1.0), np.float32)
