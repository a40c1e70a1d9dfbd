"""All models as arrays, and where they are: what a tick of the forecaster looks at, without a loop over the fleet.

Rebuilt only when the catalogue changes; residents are few, so where models are is filled in per tick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from actors.residency.states import State
from forecasting.refill import DEVICE, DISK, HOST, Scene

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from actors.load_times import LoadTimes
    from actors.residency.model import Model, ModelKey
    from actors.tier_cache import TierCache
    from forecasting.sources import Estimate

    Floats = NDArray[np.float64]


class Fleet:
    """`models` in a fixed order; rows of all arrays follow it."""

    def __init__(self, models: Sequence[Model], times: LoadTimes) -> None:
        self.models = tuple(models)
        self.keys = tuple(model.key for model in models)
        self.rows: Mapping[ModelKey, int] = {key: row for row, key in enumerate(self.keys)}
        self.size = np.array([model.footprint.device for model in models], dtype=np.float64)
        self.host_cost = np.array([times.mean(model, on_host=True) for model in models], dtype=np.float64)
        self.disk_cost = np.array([times.mean(model, on_host=False) for model in models], dtype=np.float64)
        self._order: NDArray[np.int64] | None = None
        self._ordered: tuple[str, ...] | None = None

    def relearn(self, key: ModelKey, times: LoadTimes) -> None:
        """A load of this model ended: its costs are known better."""
        row = self.rows.get(key)
        if row is not None:
            self.host_cost[row] = times.mean(self.models[row], on_host=True)
            self.disk_cost[row] = times.mean(self.models[row], on_host=False)

    def aligned(self, keys: tuple[str, ...], values: Floats) -> Floats:
        """Bring an estimate's column, in the order of `keys`, into the fleet's; models it does not know get zero."""
        if self._ordered is not keys or self._order is None:
            rows = {key: row for row, key in enumerate(keys)}
            self._order = np.array([rows.get(key, -1) for key in self.keys], dtype=np.int64)
            self._ordered = keys
        padded: Floats = np.append(values, 0.0)
        found: Floats = padded[self._order]
        return found

    def rows_of(self, keys: tuple[str, ...], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows are those of the chosen `keys`."""
        names = {key for key, one in zip(keys, chosen.tolist(), strict=True) if one}
        found: NDArray[np.bool_] = np.fromiter((key in names for key in self.keys), np.bool_, len(self.keys))
        return found

    def scene(
        self,
        device: TierCache,
        host: TierCache | None,
        *,
        keys: tuple[str, ...],
        estimate: Estimate,
        allowed: NDArray[np.bool_],
        now: float,
    ) -> Scene:
        """One device's scene: rates where prefetching is allowed, and who may leave."""
        where = np.full(len(self.keys), DISK, dtype=np.int8)
        movable = np.zeros(len(self.keys), dtype=np.bool_)
        rate = self.aligned(keys, estimate.prefetch_rate)
        keep = self.aligned(keys, estimate.evict_rate)
        if host is not None:
            for row in host.ledger.rows():
                if row.state is State.RESIDENT and row.key in self.rows:
                    where[self.rows[row.key]] = HOST
        for row in device.ledger.rows():
            at = self.rows.get(row.key)
            if at is None:
                continue
            where[at] = DEVICE
            movable[at] = (
                row.state is State.RESIDENT
                and row.idle
                and not row.pinned
                and not row.held(now)
                and now - row.loaded_at >= row.model.rules.min_residency
            )
        wanted = np.where(allowed | (where == DEVICE), rate, 0.0)
        score = keep * self.host_cost / np.maximum(self.size, 1.0)
        nothing = np.zeros(len(self.keys), dtype=np.bool_)
        return Scene(wanted, self.size, self.host_cost, self.disk_cost, where, movable, score, nothing)

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.keys)}>"
