"""The host tier on a CPU: weights files mapped, populated and kept, so that binding them costs a pointer.

Belongs here: what is in memory and the order of bringing and leaving. Never: which model may come (that is the actor's
decision), nor any blocking call on the loop; all of those go through `Offload`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from actors.errors import Invalid, NotReady
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import Tier
from runtime.tiers.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from actors.ports import Offload
    from actors.residency.model import Model, ModelKey
    from runtime.catalog.record import ModelRecord
    from runtime.tiers.disk import Admission, DiskStore


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """Models in memory, their bytes, how many of those are locked, and how often locking was refused."""

    models: int
    mapped: int
    locked: int
    refused_locks: int


@dataclass(frozen=True, slots=True)
class _Resident:
    model: Model
    path: Path
    mapping: Mapping


class HostStore:
    """Weights in this machine's memory; implements `actors.ports.Residence`.

    `find` gives the record of a model, `release` tells the workers that a fingerprint's weights are leaving.
    With `mlock` the pages are locked as far as RLIMIT_MEMLOCK goes; beyond it they are kept like any others.
    """

    def __init__(
        self,
        disk: DiskStore,
        find: Callable[[Model], ModelRecord],
        offload: Offload,
        release: Callable[[str], Awaitable[None]],
        mlock: bool,  # noqa: FBT001 -- a setting by position, as the composition root reads it
    ) -> None:
        self._disk = disk
        self._find = find
        self._offload = offload
        self._release = release
        self._mlock = mlock
        self._held: dict[ModelKey, _Resident] = {}
        self._refused_locks = 0

    async def load(self, model: Model) -> LoadReport:
        """Bring a model's weights into memory: admit to disk, map, populate.

        Raises `Broken`, `NeverFits` or `NotReady`; then, and when cancelled, nothing stays held.
        """
        started = anyio.current_time()
        held = self._held.get(model.key)
        if held is not None and held.model.fingerprint == model.fingerprint:
            return LoadReport(held.mapping.size, Tier.HOST)
        admission = self._disk.begin(self._record(model))
        mapping: Mapping | None = None
        try:
            path = await self._admit(admission)
            admitted = anyio.current_time()
            mapping = Mapping(path)
            await self._offload(mapping.open)
            mapped = anyio.current_time()
            await self._populate(mapping)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._offload(_undo, admission, mapping)
            raise
        # From here on nothing awaits until it is in the books, so a cancellation cannot fall in between.
        self._held[model.key] = _Resident(model, path, mapping)
        finished = anyio.current_time()
        if held is not None:
            with anyio.CancelScope(shield=True):
                await self._drop(held)
        steps = (("admit", admitted - started), ("map", mapped - admitted), ("populate", finished - mapped))
        return LoadReport(mapping.size, Tier.DISK, steps)

    async def evict(self, key: ModelKey) -> EvictReport:
        """Tell the workers, then unmap. Zero bytes for a model that is not held."""
        held = self._held.pop(key, None)
        returned = 0
        if held is not None:
            with anyio.CancelScope(shield=True):  # half an eviction would be a leak
                returned = await self._drop(held)
        return EvictReport(returned)

    async def inventory(self) -> tuple[Held, ...]:
        """What is mapped now."""
        return tuple(Held(held.model, held.mapping.size) for held in self._held.values())

    def path_of(self, model: Model) -> Path:
        """The file that a worker maps, for as long as the model is held here. Raises `NotReady`."""
        held = self._held.get(model.key)
        if held is None or held.model.fingerprint != model.fingerprint:
            raise NotReady("the weights are not in host memory", model=model.name)
        return held.path

    def snapshot(self) -> HostSnapshot:
        """Advisory numbers for people."""
        mappings = [held.mapping for held in self._held.values()]
        return HostSnapshot(
            models=len(mappings),
            mapped=sum(mapping.size for mapping in mappings),
            locked=sum(mapping.size for mapping in mappings if mapping.locked),
            refused_locks=self._refused_locks,
        )

    async def _admit(self, admission: Admission) -> Path:
        while not await self._offload(admission.step):
            pass
        assert admission.path is not None
        return admission.path

    async def _populate(self, mapping: Mapping) -> None:
        offset = 0
        while offset < mapping.size:
            offset = await self._offload(mapping.populate, offset)
        if self._mlock and not await self._offload(mapping.lock):
            self._refused_locks += 1

    def _record(self, model: Model) -> ModelRecord:
        try:
            record = self._find(model)
        except Invalid as error:
            raise NotReady("the model left the catalogue", model=model.name) from error
        if record.fingerprint != model.fingerprint:
            raise NotReady("the model's files changed and are being looked at", model=model.name)
        return record

    async def _drop(self, held: _Resident) -> int:
        try:
            # Two names may have the same weights and code; the workers keep them until the last one leaves.
            if all(other.model.fingerprint != held.model.fingerprint for other in self._held.values()):
                await self._release(held.model.fingerprint)
        finally:
            size = await self._offload(held.mapping.close)
            await self._offload(self._disk.let_go, held.path)
        return size

    def __repr__(self) -> str:
        shown = self.snapshot()
        return f"<HostStore {shown.models} models {shown.mapped} B>"


def _undo(admission: Admission, mapping: Mapping | None) -> None:
    if mapping is not None:
        mapping.close()
    admission.undo()
