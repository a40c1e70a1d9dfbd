"""Which model a name means, and on which device it is to be served.

Owns the table of models and the memory for unknown names. Placement is advice read from the devices' caches:
whether a model really becomes resident is decided by the cache that is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from actors.actor import Actor, Ref, Reply, Request
from actors.errors import FetchFailed, ForeloadError, UnknownModel
from actors.messages import Command, Unload
from actors.residency.plan import ceiling
from actors.tier_cache import TierCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.clock import Clock
    from actors.ports import Catalog
    from actors.residency.model import Model, ModelKey


@dataclass(frozen=True, slots=True)
class Resolve(Request["Model"]):
    """Find a model that is not in the table, looking at the catalogue again. Raises `UnknownModel`."""

    name: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Refresh(Request[None]):
    """Look at the catalogue again; answered when that is done. Raises what the catalogue raises."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What the catalogue serves now."""

    models: Mapping[str, tuple[Model, ...]]


@dataclass(frozen=True, slots=True)
class RefreshBroke:
    """The catalogue could not be read; the last table stays."""

    error: Exception


Order: TypeAlias = Resolve | Refresh | Refreshed | RefreshBroke


class Dispatcher(Actor[Order]):
    """`unknown_ttl` seconds and `unknown_size` names bound what asking for names that nobody has may cost."""

    def __init__(
        self,
        devices: tuple[Ref[Command], ...],
        *,
        catalog: Catalog,
        clock: Clock,
        unknown_ttl: float = 2.0,
        unknown_size: int = 1024,
    ) -> None:
        super().__init__()
        self._devices = devices
        self._catalog = catalog
        self._clock = clock
        self._unknown_ttl = unknown_ttl
        self._unknown_size = unknown_size
        self._models: Mapping[str, tuple[Model, ...]] = {}
        self._exact: dict[tuple[str, str], Model] = {}
        self._all: tuple[Model, ...] = ()
        self._unknown: OrderedDict[tuple[str, str | None], float] = OrderedDict()
        self._asking: list[tuple[Resolve, Reply[Model]]] = []
        self._refreshing: list[Reply[None]] = []
        self._looking = False

    # -- synchronous questions, on the hit path ------------------------------------------------------

    def find(self, name: str, version: str | None = None) -> Model | None:
        """A model of the table; no version means the highest."""
        if version is not None:
            return self._exact.get((name, version))
        versions = self._models.get(name)
        return versions[-1] if versions else None

    def versions(self, name: str) -> tuple[Model, ...]:
        """Every version of a name, the lowest first."""
        return self._models.get(name, ())

    def models(self) -> tuple[Model, ...]:
        """Every model of the table; the same tuple until it changes."""
        return self._all

    def place(self, model: Model) -> Ref[Command]:
        """The device to ask for a model: where it is, or is coming; else where it fits with the most room left."""
        if len(self._devices) == 1:
            return self._devices[0]
        best: Ref[Command] | None = None
        room = (False, 0)
        for ref in self._devices:
            cache = ref.owner
            if not isinstance(cache, TierCache):
                continue
            if cache.holds(model.key):
                return ref
            offered = (
                model.footprint.on(cache.tier) <= ceiling(cache.ledger) and cache.up,
                cache.ledger.free if cache.up else ceiling(cache.ledger) - cache.ledger.capacity,
            )
            if best is None or offered > room:
                best, room = ref, offered
        return best or self._devices[0]

    def whereabouts(self, key: ModelKey) -> Ref[Command] | None:
        """The device that holds a model or is getting it."""
        for ref in self._devices:
            cache = ref.owner
            if isinstance(cache, TierCache) and cache.holds(key):
                return ref
        return None

    # -- messages ------------------------------------------------------------------------------------

    def started(self) -> None:
        """Read the catalogue first."""
        self._look()

    def receive(self, message: Order) -> object:
        """Handle one message."""
        match message:
            case Resolve():
                return self._resolve(message)
            case Refresh():
                self._refreshing.append(self.defer())
                self._look()
            case Refreshed(models):
                self._refreshed(models)
            case RefreshBroke(error):
                self._broke(error)
            case _:
                assert_never(message)
        return None

    def _resolve(self, ask: Resolve) -> Model | None:
        model = self.find(ask.name, ask.version)
        if model is not None:
            return model
        until = self._unknown.get((ask.name, ask.version))
        if until is not None and self._clock.now() < until:
            raise self._no(ask)
        self._asking.append((ask, self.defer()))
        self._look()
        return None

    def _look(self) -> None:
        if self._looking:
            return
        self._looking = True

        async def look() -> Order:
            return Refreshed(await self._catalog.refresh())

        self.spawn(look, failed=RefreshBroke)

    def _refreshed(self, models: Mapping[str, tuple[Model, ...]]) -> None:
        gone = self._exact.keys() - {(each.name, each.version) for versions in models.values() for each in versions}
        for name, version in gone:
            self._retire(self._exact[name, version])
        self._models = models
        self._exact = {(each.name, each.version): each for versions in models.values() for each in versions}
        every = tuple(self._exact.values())
        self._all = self._all if every == self._all else every
        for ask, reply in self._settled():
            model = self.find(ask.name, ask.version)
            if model is not None:
                reply.settle(model)
            else:
                self._remember(ask)
                reply.refuse(self._no(ask))
        for waiting in self._refreshing:
            waiting.settle(None)
        self._refreshing.clear()

    def _broke(self, error: Exception) -> None:
        # Nobody can say now whether there is such a model: that is no 404, and nothing to remember.
        cause = error if isinstance(error, ForeloadError) else FetchFailed("the catalogue could not be read")
        for _, reply in self._settled():
            reply.refuse(cause.again())
        for waiting in self._refreshing:
            waiting.refuse(cause.again())
        self._refreshing.clear()

    def _settled(self) -> list[tuple[Resolve, Reply[Model]]]:
        self._looking = False
        asking, self._asking = self._asking, []
        return asking

    def _retire(self, model: Model) -> None:
        """It is served no more: what is resident of it leaves when its last request is done."""
        for ref in self._devices:
            ref.tell(Unload(model.key, reason="removed"))

    def _remember(self, ask: Resolve) -> None:
        if self._unknown_size < 1:
            return
        self._unknown[ask.name, ask.version] = self._clock.now() + self._unknown_ttl
        self._unknown.move_to_end((ask.name, ask.version))
        while len(self._unknown) > self._unknown_size:
            self._unknown.popitem(last=False)

    def _no(self, ask: Resolve) -> UnknownModel:
        if ask.version is not None and ask.name in self._models:
            return UnknownModel(f"model '{ask.name}' has no version '{ask.version}'", model=ask.name)
        return UnknownModel(f"model '{ask.name}' is not known", model=ask.name)

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._exact)} models on {len(self._devices)} devices, {len(self._unknown)} unknown>"
