"""All models as arrays, and where they are: what a tick of the forecaster looks at, without a loop over the fleet.

Rebuilt only when the catalogue changes; residents are few, so where models are is filled in per tick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from actors.residency.states import State
from forecasting.decision import value
from forecasting.refill import DEVICE, DISK, HOST, Scene

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from actors.load_times import LoadTimes
    from actors.residency.ledger import Ledger, Resident
    from actors.residency.model import Model, ModelKey
    from actors.tier_cache import TierCache
    from forecasting.sources import Estimate

Number = TypeVar("Number", np.float64, np.bool_)


class Fleet:
    """`models` in a fixed order; rows of all arrays follow it."""

    def __init__(self, models: Sequence[Model], times: LoadTimes) -> None:
        self.models = tuple(models)
        self.keys = tuple(model.key for model in models)
        self.rows: Mapping[ModelKey, int] = {key: row for row, key in enumerate(self.keys)}
        self.size = np.array([model.footprint.device for model in models], dtype=np.float64)
        self.host_cost = np.array([times.mean(model, on_host=True) for model in models], dtype=np.float64)
        self.disk_cost = np.array([times.mean(model, on_host=False) for model in models], dtype=np.float64)
        ttl = [model.rules.ttl_idle for model in models]
        alive = np.array([np.inf if each is None else each for each in ttl], dtype=np.float64)
        self.keep_alive = alive if np.isfinite(alive).any() else None
        self._order: NDArray[np.int64] | None = None
        self._ordered: tuple[str, ...] | None = None
        self._same = False
        self._held: dict[int, tuple[Ledger, int, NDArray[np.int64], list[Resident]]] = {}
        self._hosted: tuple[Ledger | None, int, NDArray[np.int64]] = (None, -1, np.zeros(0, np.int64))

    def relearn(self, key: ModelKey, times: LoadTimes) -> None:
        """A load of this model ended: its costs are known better."""
        row = self.rows.get(key)
        if row is not None:
            self.host_cost[row] = times.mean(self.models[row], on_host=True)
            self.disk_cost[row] = times.mean(self.models[row], on_host=False)

    def aligned(self, keys: tuple[str, ...], values: NDArray[Number]) -> NDArray[Number]:
        """Bring a column, in the order of `keys`, into the fleet's; models it does not know get zero."""
        if self._ordered is not keys or self._order is None:
            rows = {key: row for row, key in enumerate(keys)}
            self._order = np.array([rows.get(key, -1) for key in self.keys], dtype=np.int64)
            self._ordered = keys
            self._same = keys == self.keys
        if self._same:
            return values
        padded = np.zeros(len(values) + 1, values.dtype)
        padded[:-1] = values
        return padded[self._order]

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
            where[self._on_host(host.ledger)] = HOST
        here, residents = self._on_device(device.ledger)
        where[here] = DEVICE
        movable[here] = [row.movable(now) for row in residents]
        wanted = rate * (allowed | (where == DEVICE))
        score = value(keep, self.host_cost, self.size)
        nothing = np.zeros(len(self.keys), dtype=np.bool_)
        return Scene(wanted, self.size, self.host_cost, self.disk_cost, where, movable, score, nothing, self.keep_alive)

    def _on_device(self, ledger: Ledger) -> tuple[NDArray[np.int64], list[Resident]]:
        """All that a device holds, and their rows; looked up again when something has moved."""
        known = self._held.get(id(ledger))
        if known is None or known[:2] != (ledger, ledger.moves):
            residents = [row for row in ledger.rows() if row.key in self.rows]
            known = ledger, ledger.moves, np.array([self.rows[row.key] for row in residents], np.int64), residents
            self._held[id(ledger)] = known
        return known[2:]

    def _on_host(self, ledger: Ledger) -> NDArray[np.int64]:
        """Rows of the host's residents. It may have thousands, and seldom moves one between two looks."""
        if self._hosted[:2] != (ledger, ledger.moves):
            found = (self.rows.get(row.key, -1) for row in ledger.rows() if row.state is State.RESIDENT)
            rows = np.fromiter(found, np.int64)
            self._hosted = ledger, ledger.moves, rows[rows >= 0]
        return self._hosted[2]

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.keys)}>"
