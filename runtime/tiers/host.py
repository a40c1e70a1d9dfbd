"""The host tier on a CPU: weights files mapped, populated and kept, so that binding them costs a pointer.

Belongs here: what is in memory and the order of bringing and leaving. Never: which model may come (that is the actor's
decision), nor any call on the loop that may block; all of those go through `Offload`.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from actors.errors import CorruptWeights, ForeloadError, Invalid, NotReady
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import Tier
from runtime.tiers.locking import Locker
from runtime.tiers.mapping import Mapping
from runtime.tiers.remote import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Mapping as MappingOf
    from pathlib import Path

    from actors.ports import Offload
    from actors.residency.model import Model, ModelKey
    from runtime.catalog.record import ModelRecord
    from runtime.tiers.disk import Admission, DiskStore
    from runtime.tiers.remote import Remote
    from runtime.tiers.verify import Identity

QUICK: Final = 0.0003
"""Seconds of paging in that make unmapping fit for the loop; it takes a fraction of them."""


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """Models in memory, their bytes, how many of those are locked, and how often locking was refused.

    `speed` is bytes per second of the last time that weights were brought into memory, 0 before.
    """

    models: int
    mapped: int
    locked: int
    refused_locks: int
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class _Resident:
    model: Model
    path: Path
    mapping: Mapping
    fetched: Fetched


class HostStore:
    """Weights in this machine's memory; implements `actors.ports.Residence`.

    `find` gives the record of a model, `release` tells the workers that a fingerprint's weights are leaving, `remote`
    brings files that are not in a model's directory.
    With `mlock` the pages are locked as far as `lock_limit` bytes and RLIMIT_MEMLOCK go; beyond it they are kept like
    any others.
    """

    def __init__(  # noqa: PLR0917 -- the parts it is made of, each once, in the composition root
        self,
        disk: DiskStore,
        find: Callable[[Model], ModelRecord],
        offload: Offload,
        release: Callable[[str], object],
        mlock: bool,  # noqa: FBT001 -- a setting by position, as the composition root reads it
        remote: Remote | None = None,
        *,
        lock_limit: int | None = None,
    ) -> None:
        self._disk = disk
        self._find = find
        self._offload = offload
        self._release = release
        self._locker = Locker(lock_limit) if mlock else None
        self._remote = remote
        self._held: dict[ModelKey, _Resident] = {}
        self._sound: set[Identity] = set()
        self._speed = 0.0

    async def load(self, model: Model) -> LoadReport:
        """Bring a model's weights into memory: fetch, admit to disk, map, populate.

        Raises `Broken`, `NeverFits` or `NotReady`; then, and when cancelled, nothing stays held.
        """
        held = self._held.get(model.key)
        if held is not None and held.model.fingerprint == model.fingerprint:
            return LoadReport(held.mapping.size, Tier.HOST)
        record = self._record(model)
        began = anyio.current_time()
        fetched = await self._fetch(model, record)
        fetch = {"fetch": anyio.current_time() - began} if fetched.far else {}
        arrival = _Arrival(self._disk, self._disk.begin(record, fetched.paths), self._locker, self._sound)
        try:
            while not await self._offload(arrival.step):
                pass
            if fetched.held and record.manifest.pickled:
                # What it was converted to is mapped; the pickle itself may leave the disk.
                config = record.manifest.builder.config if record.manifest.builder is not None else None
                await self._offload(self._let_go, fetched, but=config or "")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._offload(self._undo, arrival, fetched)
            raise
        # From here on nothing awaits until it is in the books, so a cancellation cannot fall in between.
        mapping = arrival.mapping
        self._held[model.key] = _Resident(model, arrival.path, mapping, fetched)
        self._speed = mapping.size / max(arrival.taken["populate"], 1e-9)
        if held is not None:
            with anyio.CancelScope(shield=True):
                await self._drop(held)
        steps = (*fetch.items(), *arrival.taken.items())
        return LoadReport(mapping.size, Tier.REMOTE if fetched.far else Tier.DISK, steps)

    async def evict(self, key: ModelKey) -> EvictReport:
        """Tell the workers, and unmap. Zero bytes for a model that is not held."""
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

    def files_of(self, model: Model) -> MappingOf[str, Path]:
        """Where its other files lie, as far as they came from elsewhere; as long as `path_of`. Raises `NotReady`."""
        self.path_of(model)
        return self._held[model.key].fetched.paths

    def snapshot(self) -> HostSnapshot:
        """Advisory numbers for people."""
        mappings = [held.mapping for held in self._held.values()]
        return HostSnapshot(
            models=len(mappings),
            mapped=sum(mapping.size for mapping in mappings),
            locked=sum(mapping.size for mapping in mappings if mapping.locked),
            refused_locks=self._locker.refused if self._locker else 0,
            speed=self._speed,
        )

    async def _fetch(self, model: Model, record: ModelRecord) -> Fetched:
        if not record.manifest.sources:
            return Fetched()
        if self._remote is None:
            raise NotReady("its files are elsewhere, and there is no remote tier", model=model.name)
        try:
            return await self._remote.fetch(model, record)
        except ForeloadError as error:
            error.model = model.name
            raise

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
                self._release(held.model.fingerprint)
        finally:
            # A hop to a thread costs the loop more than this does where the page table is short.
            quick = held.mapping.paging <= QUICK
            size = self._unmap(held) if quick else await self._offload(self._unmap, held)
        return size

    def _unmap(self, held: _Resident) -> int:
        try:
            return _closed(held.mapping, self._locker)
        finally:
            self._disk.let_go(held.path)
            self._let_go(held.fetched)

    def _undo(self, arrival: _Arrival, fetched: Fetched) -> None:
        arrival.undo()
        self._let_go(fetched)

    def _let_go(self, fetched: Fetched, *, but: str = "") -> None:
        if self._remote is not None:
            self._remote.let_go(fetched, but=but)

    def __repr__(self) -> str:
        shown = self.snapshot()
        return f"<HostStore {shown.models} models {shown.mapped} B>"


class _Arrival:
    """One load, step by step, for threads. What follows on a quick step is done in the same one.

    A hop to a thread costs the loop more than most of these steps do: each of their system calls hands the GIL over
    and back, and that is time in which the loop answers nobody.
    """

    def __init__(self, disk: DiskStore, admission: Admission, locker: Locker | None, sound: set[Identity]) -> None:
        self._disk = disk
        self._admission = admission
        self._locker = locker
        self._sound = sound
        self._next = self._admit
        self._offset = 0
        self._mapping: Mapping | None = None
        self.taken = dict.fromkeys(("admit", "map", "populate"), 0.0)

    @property
    def path(self) -> Path:
        """The admitted file, once `step` said True."""
        assert self._admission.path is not None
        return self._admission.path

    @property
    def mapping(self) -> Mapping:
        """The populated mapping, once `step` said True."""
        assert self._mapping is not None
        return self._mapping

    def step(self) -> bool:
        """Some tens of milliseconds of work at most; True when all of it is in memory."""
        return self._next()

    def undo(self) -> None:
        """Give everything back, whatever was reached."""
        if self._mapping is not None:
            _closed(self._mapping, self._locker)
        self._admission.undo()

    def _admit(self) -> bool:
        with self._timed("admit"):
            if not self._admission.step():
                return False
        with self._timed("map"):
            self._mapping = Mapping(self.path)
            self._mapping.open()
        self._next = self._populate
        return self._populate()

    def _populate(self) -> bool:
        """A slab's checksums are compared the first time that this process sees it."""
        mapping = self.mapping
        verify = mapping.checked and mapping.identity not in self._sound
        try:
            with self._timed("populate"):
                self._offset = mapping.populate(self._offset, verify=verify)
        except CorruptWeights:
            if mapping.checked:  # our own copy is damaged; the next load makes a new one from the original
                self._disk.condemn(self.path)
            raise
        if self._offset < mapping.size:
            return False
        if verify and mapping.identity is not None:
            self._sound.add(mapping.identity)
        if self._locker is not None:
            self._locker.lock(mapping)
        return True

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.taken[name] += time.perf_counter() - began


def _closed(mapping: Mapping, locker: Locker | None) -> int:
    locked = mapping.locked
    size = mapping.close()
    if locked and locker is not None:
        locker.unlocked(size)
    return size
