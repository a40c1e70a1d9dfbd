"""A whole server's residency with a forecaster, on virtual time and simulated hardware."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING

import anyio

from actors import messages as m
from actors.dispatcher import Dispatcher, Refresh
from actors.ears import Ears
from actors.forecaster import Forecaster, ForecastSettings
from actors.foresight import Foresight
from actors.lease import Lease
from actors.load_times import LoadTimes
from actors.residency.model import Tier
from actors.settings import Settings
from actors.supervisor import Supervisor
from forecasting.counts import Counts
from forecasting.peaks import Peak
from forecasting.recurrence import Once
from forecasting.standing import Standing
from runtime.simulation.clock import SimulatedClock
from runtime.simulation.hardware import Costs, SimulatedPlace
from runtime.telemetry.fanout import Fanout
from tests.simulation.rig import CheckedDevice, CheckedHost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from actors.actor import Ref
    from actors.dispatcher import Order
    from actors.events import Event
    from actors.forecaster import ForecastMessage
    from actors.ports import Fitting
    from actors.residency.model import Model, ModelKey, Ticket

MORNING = datetime(2026, 12, 1, 8, 0, tzinfo=UTC)


def at(clock: str, *, day: int = 1) -> datetime:
    """A time of the rig's first days, in UTC."""
    hour, minute = clock.split(":")
    return datetime(2026, 12, day, int(hour), int(minute), tzinfo=UTC)


def peak(name: str, start: str, *models: str, duration: float = 3_600.0, zone: tzinfo = UTC, **more: object) -> Peak:
    """A single declared window that starts on the rig's first day."""
    return Peak(name, Once(at(start)), zone, duration, models=models, **more)  # type: ignore[arg-type]


class Shelf:
    """A catalogue of fixed models."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = {model.name: (model,) for model in models}

    async def refresh(self) -> Mapping[str, tuple[Model, ...]]:
        """See `Catalog.refresh`."""
        return self.models


@dataclass
class Theatre:
    """What a test talks to."""

    clock: SimulatedClock
    device: Ref[m.Command]
    host: Ref[m.Command]
    dispatcher: Ref[Order]
    forecaster: Ref[ForecastMessage]
    place: SimulatedPlace
    counts: Counts
    foresight: Foresight
    emit: Fanout
    events: list[Event] = field(default_factory=list)

    @property
    def mind(self) -> Forecaster:
        """The living forecaster."""
        assert isinstance(self.forecaster.owner, Forecaster)
        return self.forecaster.owner

    def resident(self) -> set[str]:
        """Keys on the device."""
        return {str(key) for key in self.place.held}

    async def until(self, clock: str, *, day: int = 1) -> None:
        """Let time pass."""
        await anyio.sleep(max((at(clock, day=day) - self.clock.wall()).total_seconds(), 0.0))

    async def use(self, model: Model, seconds: float = 0.01) -> m.Grant:
        """One request, heard by the forecaster as it would be in the server."""
        from actors.events import RequestArrived

        self.emit(RequestArrived(self.clock.now(), "r", model.key))
        async with Lease(self.device, m.Acquire(model, m.new_ticket())) as grant:
            await self.place.run(model.key, seconds)
            return grant

    def told(self, kind: type) -> list[Event]:
        """Events of one kind."""
        return [each for each in self.events if isinstance(each, kind)]


@asynccontextmanager
async def theatre(
    models: Sequence[Model],
    *peaks: Peak,
    device: int = 30,
    host: int = 1_000,
    start: datetime = MORNING,
    costs: Costs | None = None,
    fitting: Fitting | None = None,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    control: float = 0.0,
    parallel: int = 4,
    seed: int = 0,
    policy: str = "lru",
    **settings: object,
) -> AsyncIterator[Theatre]:
    """Build and run one device with a forecaster."""
    clock = SimulatedClock(start)
    emit = Fanout()
    events: list[Event] = []
    emit.subscribe("log", events.append)
    costs = costs or Costs(fixed=5.0, bandwidth=1e12, evict=0.01)
    device_place = SimulatedPlace(device, Tier.HOST, costs, seed)
    host_place = SimulatedPlace(host, Tier.DISK, costs, seed + 1)
    tickets: dict[ModelKey, Ticket] = {}
    counts = Counts(clock.wall().timestamp(), clock.now())
    times, foresight = LoadTimes(), Foresight(share=control, wall=lambda: clock.wall().timestamp())
    standing = Standing()
    async with Supervisor(emit=emit, clock=clock) as supervisor:
        limits = Settings(capacity=host, parallel=1, shortest_first=True)
        host_ref = supervisor.start("host", lambda: CheckedHost(limits, residence=host_place, clock=clock, emit=emit))
        device_ref = supervisor.start(
            "cpu:0",
            lambda: CheckedDevice(
                "cpu:0",
                Settings(capacity=device, policy=policy, parallel=parallel),
                residence=device_place,
                host=host_ref,
                keeps_host=True,
                host_ceiling=host,
                host_tickets=tickets,
                clock=clock,
                emit=emit,
            ),
        )
        dispatcher = supervisor.start(
            "dispatcher", lambda: Dispatcher((device_ref,), catalog=Shelf(models), clock=clock)
        )
        await dispatcher.ask(Refresh())
        forecaster = supervisor.start(
            "forecaster",
            lambda: Forecaster(
                ForecastSettings(**settings),  # type: ignore[arg-type]
                counts=counts,
                times=times,
                foresight=foresight,
                standing=standing,
                peaks=tuple(peaks),
                labels=lambda: labels or {},
                dispatcher=dispatcher,
                devices=(device_ref,),
                host=host_ref,
                fitting=fitting,
                journal=None,
                clock=clock,
                emit=emit,
            ),
        )
        emit.subscribe("load times", times.wants())
        emit.subscribe("foresight", foresight.wants())
        emit.subscribe("ears", Ears(forecaster, counts, now=clock.now).wants())
        await anyio.sleep(0.01)
        yield Theatre(
            clock, device_ref, host_ref, dispatcher, forecaster, device_place, counts, foresight, emit, events
        )
