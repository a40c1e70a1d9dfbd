"""What the workers need to know of models that are on the host tier: one `LoadSpec` each, made when it got there.

Wraps the host tier, so that spelling a spec (which reads a file) is never done on the loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import msgspec

from actors.errors import Invalid, LoadFailed, NotReady
from runtime.catalog.record import load_spec
from runtime.workers.port import ArtefactSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from actors.ports import EvictReport, Held, LoadReport, Offload
    from actors.residency.model import Model, ModelKey
    from runtime.catalog.record import ModelRecord
    from runtime.workers.port import LoadSpec


REMEMBERED = 1024
"""Specs of models that left, so that one that comes back needs no file read; a few kilobytes each."""


_NOWHERE = ArtefactSpec()


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
    """A host tier that also answers `resolve(model)`; implements `actors.ports.Residence`.

    `trust` names the models (`name` or `name@version`) whose files may run code, if their manifests say so as well;
    `artefacts` is where workers keep what they compile.
    """

    def __init__(
        self,
        host: Shelf,
        find: Callable[[Model], ModelRecord],
        offload: Offload,
        *,
        json_depth: int,
        trust: Collection[str] = (),
        artefacts: ArtefactSpec = _NOWHERE,
    ) -> None:
        self._host = host
        self._find = find
        self._offload = offload
        self._json_depth = json_depth
        self._trust = frozenset(trust)
        self._artefacts = artefacts
        self._specs: dict[ModelKey, LoadSpec] = {}
        self._spelled: OrderedDict[tuple[ModelKey, str, Path], LoadSpec] = OrderedDict()

    def resolve(self, model: Model) -> LoadSpec:
        """The spec of a model that is on the host tier. Raises `NotReady` if it is not."""
        spec = self._specs.get(model.key)
        if spec is None or spec.fingerprint != model.fingerprint:
            raise NotReady(f"{model.key} is not on the host tier", model=model.name, retry_after=1.0)
        return spec

    async def load(self, model: Model) -> LoadReport:
        """See `Residence.load`. Raises `LoadFailed` for a file that can run code and may not, before it is read."""
        self._trusted(model)
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
            known = msgspec.structs.replace(
                spec, json_depth=self._json_depth, trusted=self._trusted(model), artefacts=self._artefacts
            )
            self._spelled[name] = known
            while len(self._spelled) > REMEMBERED:
                self._spelled.popitem(last=False)
        self._spelled.move_to_end(name)
        return known

    def _trusted(self, model: Model) -> bool:
        try:
            manifest = self._find(model).manifest
        except Invalid:
            return False  # it left the catalogue; the host tier says so
        if manifest.trust is None:
            return False
        if self._trust.isdisjoint((model.name, model.key)):
            raise LoadFailed(
                f"the file can run code (engine {manifest.engine}), which the server's `trust` does not allow",
                model=model.name,
            )
        return True

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        self._specs.pop(key, None)
        return await self._host.evict(key)

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        return await self._host.inventory()

    def __repr__(self) -> str:
        return f"<SpecifiedHost {len(self._specs)} specs>"
