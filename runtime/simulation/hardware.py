"""Simulated places behind the ports: a cost model on virtual time, with failures on request.

Product code, not a test double: replay and the deterministic tests run the same actors over it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from actors.errors import CorruptWeights, ForeloadError, OutOfMemory, WorkerDied
from actors.ports import EvictReport, Held, LoadReport, MemorySample
from actors.residency.model import Model, ModelKey, Tier

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: `fixed` plus bytes / `bandwidth` (bytes per second), spread by ±`noise` of itself."""

    fixed: float = 0.03
    bandwidth: float = 10e9
    noise: float = 0.0
    evict: float = 0.001

    def load(self, size: int, rng: random.Random) -> float:
        """One load's seconds."""
        return (self.fixed + size / self.bandwidth) * (1 + self.noise * rng.uniform(-1, 1))


class ContractBroken(AssertionError):
    """An actor used a port in a way the port forbids."""


@dataclass(slots=True)
class SimulatedPlace:
    """A tier that holds models in `capacity` bytes and takes virtual time for it.

    `fault(model)` may return an error that the load raises half-way. `measure(model)` is what it really needs.
    Raises `ContractBroken` when it is used against `actors.ports.Residence`, or filled beyond `capacity`.
    """

    capacity: int
    source: Tier
    costs: Costs = Costs()
    seed: int = 0
    fault: Callable[[Model], ForeloadError | None] = lambda _model: None
    measure: Callable[[Model], int] | None = None
    held: dict[ModelKey, tuple[Model, int]] = field(default_factory=dict)
    moving: dict[ModelKey, int] = field(default_factory=dict)
    in_flight: dict[ModelKey, int] = field(default_factory=dict)
    loads: int = 0
    evictions: int = 0
    most: int = 0
    most_at_once: int = 0
    life: int = 0
    _rng: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)  # noqa: S311 - a schedule, not a secret

    @property
    def used(self) -> int:
        """Bytes held or in motion."""
        return sum(size for _, size in self.held.values()) + sum(self.moving.values())

    async def load(self, model: Model) -> LoadReport:
        """See `Residence.load`."""
        if model.key in self.held or model.key in self.moving:
            raise ContractBroken(f"second load of {model.key} at once")
        size = self._size(model)
        if self.used + size > self.capacity:
            raise OutOfMemory(f"{model.key} does not fit", model=model.name)
        self.loads += 1
        self.moving[model.key] = size
        self.most = max(self.most, self.used)
        self.most_at_once = max(self.most_at_once, len(self.moving))
        seconds = self.costs.load(size, self._rng)
        life = self.life
        try:
            await anyio.sleep(seconds / 2)
            self._still(life)
            self._strike(model)
            await anyio.sleep(seconds / 2)
            self._still(life)
        except BaseException:
            # Undoing takes time too, and is not interrupted.
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.costs.evict)
            if life == self.life:
                del self.moving[model.key]
            raise
        del self.moving[model.key]
        self.held[model.key] = (model, size)
        return LoadReport(size, self.source, (("copy", seconds),))

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        if self.in_flight.get(key):
            raise ContractBroken(f"{key} evicted in use")
        if key in self.moving:
            raise ContractBroken(f"{key} evicted while it moves")
        if key not in self.held:
            return EvictReport(0)
        self.evictions += 1
        _, size = self.held.pop(key)
        self.moving[key] = size
        life = self.life
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self.costs.evict)
        self._still(life)
        del self.moving[key]
        return EvictReport(size)

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        await anyio.lowlevel.checkpoint()
        return tuple(Held(model, size, self.in_flight.get(key, 0)) for key, (model, size) in self.held.items())

    async def run(self, key: ModelKey, seconds: float) -> None:
        """One inference, which must find its model here from start to end."""
        if key not in self.held:
            raise ContractBroken(f"inference on {key}, which is not here")
        self.in_flight[key] = self.in_flight.get(key, 0) + 1
        life = self.life
        try:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(seconds)
            self._still(life)
            if key not in self.held:
                raise ContractBroken(f"{key} left during an inference")
        finally:
            if life == self.life:
                self.in_flight[key] -= 1

    def _strike(self, model: Model) -> None:
        if (error := self.fault(model)) is not None:
            raise error

    def _still(self, life: int) -> None:
        if life != self.life:
            raise WorkerDied("the simulated place ended")

    def lose(self) -> None:
        """The place ends, like a killed process: everything in it is gone, and who waits for it hears of it."""
        self.life += 1
        self.held.clear()
        self.moving.clear()
        self.in_flight.clear()

    def _size(self, model: Model) -> int:
        return self.measure(model) if self.measure else model.footprint.on(self._tier)

    @property
    def _tier(self) -> Tier:
        return Tier.DEVICE if self.source is Tier.HOST else Tier.HOST


@dataclass(slots=True)
class SimulatedMemory:
    """Host memory that says what it is told to."""

    limit: int
    available: int

    def sample(self) -> MemorySample:
        """See `Memory.sample`."""
        return MemorySample(self.limit, self.available)


def sometimes(chance: float, seed: int) -> Callable[[Model], ForeloadError | None]:
    """A fault that strikes a load with a probability."""
    rng = random.Random(seed)  # noqa: S311

    def strike(model: Model) -> ForeloadError | None:
        return CorruptWeights("simulated corruption", model=model.name) if rng.random() < chance else None

    return strike
