"""A device cache over a host cache on simulated hardware, checked after every message."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from actors import messages as m
from actors.clock import LoopClock
from actors.device_cache import DeviceCache
from actors.events import ActorRestarted
from actors.host_cache import HostCache
from actors.lease import Lease
from actors.messages import new_ticket
from actors.residency.model import Footprint, Model, ModelKey, Rules, Ticket, Tier, Trigger
from actors.settings import Settings
from actors.supervisor import Supervisor
from runtime.simulation.hardware import Costs, SimulatedPlace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.actor import Ref
    from actors.events import Event

DEVICE_COSTS = Costs(fixed=0.05, bandwidth=1e12, evict=0.001)
HOST_COSTS = Costs(fixed=0.1, bandwidth=1e12, evict=0.001)


def model(name: str, size: int = 10, *, fingerprint: str = "", load_seconds: float = 0.05, **rules: object) -> Model:
    """A model of so many bytes on both tiers."""
    return Model(
        name,
        "1",
        fingerprint or f"fp-{name}",
        Footprint(size, size),
        Rules(**rules),  # type: ignore[arg-type]
        load_seconds,
    )


class CheckedDevice(DeviceCache):
    """Proves its books after every message."""

    def receive(self, message: m.Command) -> object:
        result = super().receive(message)
        self.check()
        return result


class CheckedHost(HostCache):
    """Proves its books after every message."""

    def receive(self, message: m.Command) -> object:
        result = super().receive(message)
        self.check()
        return result


@dataclass
class Rig:
    """What a test talks to."""

    device: Ref[m.Command]
    host: Ref[m.Command]
    device_place: SimulatedPlace
    host_place: SimulatedPlace
    supervisor: Supervisor
    clock: LoopClock
    events: list[Event] = field(default_factory=list)

    @property
    def cache(self) -> CheckedDevice:
        """The living device cache."""
        assert isinstance(self.device.owner, CheckedDevice)
        return self.device.owner

    @property
    def host_cache(self) -> CheckedHost:
        """The living host cache."""
        assert isinstance(self.host.owner, CheckedHost)
        return self.host.owner

    def lease(self, wanted: Model, *, ticket: Ticket | None = None, **options: object) -> Lease:
        """A lease on the device."""
        ask = m.Acquire(wanted, ticket or new_ticket(), **options)  # type: ignore[arg-type]
        return Lease(self.device, ask)

    async def use(self, wanted: Model, seconds: float = 0.01, **options: object) -> m.Grant:
        """One request: lease, run, release."""
        async with self.lease(wanted, **options) as grant:
            await self.device_place.run(wanted.key, seconds)
            return grant

    async def ensure(self, wanted: Model, trigger: Trigger = Trigger.ADMIN, **options: object) -> None:
        """An explicit load."""
        await self.device.ask(m.Ensure(wanted, trigger, **options))  # type: ignore[arg-type]

    def story(self, *kinds: type, key: str | None = None) -> list[str]:
        """Names of the events of these kinds (all, if none is given), in order; of one model if a key is given."""
        return [
            type(each).__name__
            for each in self.events
            if (not kinds or isinstance(each, kinds)) and (key is None or getattr(each, "model", None) == key)
        ]

    def count(self, kind: type, tier: Tier = Tier.DEVICE) -> int:
        """How many events of a kind on a tier."""
        return sum(isinstance(each, kind) and getattr(each, "tier", tier) is tier for each in self.events)

    def resident(self) -> set[ModelKey]:
        """Keys resident on the device."""
        return set(self.device_place.held)

    async def settle(self, seconds: float = 1.0) -> None:
        """Let everything under way end."""
        await anyio.sleep(seconds)


@asynccontextmanager
async def rig(
    *,
    device: int = 30,
    host: int = 1000,
    device_costs: Costs = DEVICE_COSTS,
    host_costs: Costs = HOST_COSTS,
    seed: int = 0,
    intensity: int = 5,
    settings: dict[str, object] | None = None,
    host_settings: dict[str, object] | None = None,
    keeps_host: bool = True,
) -> AsyncIterator[Rig]:
    """Build and run one device over one host."""
    events: list[Event] = []
    clock = LoopClock()
    device_place = SimulatedPlace(device, Tier.HOST, device_costs, seed)
    host_place = SimulatedPlace(host, Tier.DISK, host_costs, seed + 1)
    device_limits = Settings(capacity=device, **(settings or {}))  # type: ignore[arg-type]
    host_limits = Settings(capacity=host, **{"parallel": 1, "shortest_first": True, **(host_settings or {})})  # type: ignore[arg-type]
    host_tickets: dict[ModelKey, Ticket] = {}

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, ActorRestarted) and event.actor == "host":
            device_ref.tell(m.Rehold())

    async with Supervisor(emit=emit, clock=clock, intensity=intensity) as supervisor:
        host_ref = supervisor.start(
            "host", lambda: CheckedHost(host_limits, residence=host_place, clock=clock, emit=events.append)
        )
        device_ref = supervisor.start(
            "cpu:0",
            lambda: CheckedDevice(
                "cpu:0",
                device_limits,
                residence=device_place,
                host=host_ref,
                keeps_host=keeps_host,
                host_ceiling=host,
                host_tickets=host_tickets,
                clock=clock,
                emit=events.append,
            ),
        )
        await anyio.sleep(0.001)
        yield Rig(device_ref, host_ref, device_place, host_place, supervisor, clock, events)
