"""The catalogue as actors see it: model directories plus the configuration's rules become `Model` values.

Implements `actors.ports.Catalog`. Looks at disks only through `Offload`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from actors.events import CatalogChanged
from actors.residency.model import Footprint, Model, ModelKey, Rules
from runtime.catalog.repository import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.clock import Clock
    from actors.ports import Emit, Offload
    from runtime.catalog.record import ModelRecord
    from runtime.catalog.repository import Repository

_FIXED_SECONDS: Final = 0.05
_BYTES_PER_SECOND: Final = 1e9
_REMOTE_BYTES_PER_SECOND: Final = 1e8
"""A first guess of what a load costs, until it was measured: a Retry-After and a tie between victims rest on it."""


class Measured(Protocol):
    """Bytes that were measured, by fingerprint; None for what was never there."""

    def device(self, fingerprint: str) -> int | None:
        """On a device."""
        ...

    def host(self, fingerprint: str) -> int | None:
        """In host memory."""
        ...


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What the configuration says about one model and not about all. None leaves the general rule."""

    pinned: bool = False
    priority: int = 0
    ttl_idle: float | None = None
    ttl: float | None = None
    footprint: Footprint | None = None


class ServedModels:
    """`rules` hold for all, `exceptions` by `(name, version)`. `forget` is told which keys left.

    `seconds` says what a load took when it was last seen, by fingerprint; `far` whether one needs the network;
    `measured` what a model was seen to need, which counts for more than what its manifest declares.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        rules: Rules,
        exceptions: Mapping[tuple[str, str], Exceptions],
        offload: Offload,
        clock: Clock,
        emit: Emit,
        forget: Callable[[ModelKey], None],
        seconds: Mapping[str, float],
        far: Callable[[ModelRecord], bool] = lambda _: False,
        measured: Measured | None = None,
    ) -> None:
        self._repository = repository
        self._rules = rules
        self._exceptions = exceptions
        self._offload = offload
        self._clock = clock
        self._emit = emit
        self._forget = forget
        self._seconds = seconds
        self._far = far
        self._measured = measured

    async def refresh(self) -> Mapping[str, tuple[Model, ...]]:
        """Look at the directories again; states what changed as events."""
        for change in await self._offload(self._repository.refresh):
            self._emit(CatalogChanged(self._clock.now(), change.label, change.state.value, change.reason))
            if change.state is State.REMOVED and change.was is not None:
                self._forget(change.was.key)
        models: defaultdict[str, list[Model]] = defaultdict(list)
        for record in self._repository.records():
            models[record.name].append(self._model(record))
        return {name: tuple(versions) for name, versions in models.items()}

    def _model(self, record: ModelRecord) -> Model:
        own = self._exceptions.get((record.name, record.version), Exceptions())
        footprint = own.footprint or self._footprint(record)
        rules = Rules(
            ttl_idle=self._rules.ttl_idle if own.ttl_idle is None else own.ttl_idle,
            ttl=self._rules.ttl if own.ttl is None else own.ttl,
            min_residency=self._rules.min_residency,
            pinned=own.pinned,
            priority=own.priority,
        )
        rate = _REMOTE_BYTES_PER_SECOND if self._far(record) else _BYTES_PER_SECOND
        guess = _FIXED_SECONDS + record.weights_bytes / rate
        seconds = self._seconds.get(record.fingerprint, guess)
        return Model(record.name, record.version, record.fingerprint, footprint, rules, seconds)

    def _footprint(self, record: ModelRecord) -> Footprint:
        """Measured where it was seen, else declared, else the size of its weights."""
        declared, measured = record.manifest.footprint, self._measured
        device = measured.device(record.fingerprint) if measured else None
        host = measured.host(record.fingerprint) if measured else None
        if device is None:
            device = declared.device if declared else record.weights_bytes
        if host is None:
            host = declared.host if declared else record.weights_bytes
        return Footprint(device, host)

    def __repr__(self) -> str:
        return f"<ServedModels of {self._repository!r}>"
