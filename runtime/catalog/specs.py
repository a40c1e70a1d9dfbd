"""What the workers need to know of models that are on the host tier: one `LoadSpec` each, made when it got there.

Wraps the host tier, so that spelling a spec (which reads a file) is never done on the loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import msgspec

from actors.errors import NotReady
from runtime.catalog.record import load_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from actors.ports import EvictReport, Held, LoadReport, Offload
    from actors.residency.model import Model, ModelKey
    from runtime.catalog.record import ModelRecord
    from runtime.workers.port import LoadSpec


REMEMBERED = 1024
"""Specs of models that left, so that one that comes back needs no file read; a few kilobytes each."""


class Shelf(Protocol):
    """The host tier as this wrapper needs it: a `Residence` that knows where the bytes lie."""

    async def load(self, model: Model) -> LoadReport:
        """See `Residence.load`."""
        ...

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        ...

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        ...

    def path_of(self, model: Model) -> Path:
        """The immutable file that holds a resident model's weights."""
        ...

    def files_of(self, model: Model) -> Mapping[str, Path]:
        """Where a resident model's other files lie, as far as they came from elsewhere."""
        ...


class SpecifiedHost:
    """A host tier that also answers `resolve(model)`; implements `actors.ports.Residence`."""

    def __init__(self, host: Shelf, find: Callable[[Model], ModelRecord], offload: Offload, *, json_depth: int) -> None:
        self._host = host
        self._find = find
        self._offload = offload
        self._json_depth = json_depth
        self._specs: dict[ModelKey, LoadSpec] = {}
        self._spelled: OrderedDict[tuple[ModelKey, str, Path], LoadSpec] = OrderedDict()

    def resolve(self, model: Model) -> LoadSpec:
        """The spec of a model that is on the host tier. Raises `NotReady` if it is not."""
        spec = self._specs.get(model.key)
        if spec is None or spec.fingerprint != model.fingerprint:
            raise NotReady(f"{model.key} is not on the host tier", model=model.name, retry_after=1.0)
        return spec

    async def load(self, model: Model) -> LoadReport:
        """See `Residence.load`."""
        report = await self._host.load(model)
        try:
            self._specs[model.key] = await self._spell(model)
        except BaseException:
            await self._host.evict(model.key)
            raise
        return report

    async def _spell(self, model: Model) -> LoadSpec:
        name = (model.key, model.fingerprint, self._host.path_of(model))
        known = self._spelled.get(name)
        if known is None:
            spec = await self._offload(load_spec, self._find(model), name[-1], self._host.files_of(model))
            known = msgspec.structs.replace(spec, json_depth=self._json_depth)
            self._spelled[name] = known
            while len(self._spelled) > REMEMBERED:
                self._spelled.popitem(last=False)
        self._spelled.move_to_end(name)
        return known

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        self._specs.pop(key, None)
        return await self._host.evict(key)

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        return await self._host.inventory()

    def __repr__(self) -> str:
        return f"<SpecifiedHost {len(self._specs)} specs>"
