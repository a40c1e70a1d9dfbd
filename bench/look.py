"""One look of the real forecaster: 10,000 models, full tiers, on virtual time.

Belongs here: the actors around it, and what a look costs. Part of `bench.tick`, which has the counts and the fit.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import anyio
import numpy as np

from actors.device_cache import DeviceCache
from actors.dispatcher import Dispatcher, Refresh
from actors.forecaster import FitCame, Forecaster, ForecastSettings, Ticked
from actors.foresight import Foresight
from actors.host_cache import HostCache
from actors.load_times import LoadTimes
from actors.residency.model import Footprint, Model, Rules, Tier
from actors.settings import Settings
from actors.supervisor import Supervisor
from bench.counts import MODELS, START
from forecasting.peaks import Peak
from forecasting.recurrence import Once
from forecasting.standing import Standing
from runtime.simulation.clock import SimulatedClock
from runtime.simulation.hardware import Costs, SimulatedPlace
from runtime.simulation.loop import run
from runtime.telemetry.fanout import Fanout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from actors.forecaster import ForecastMessage
    from actors.residency.model import ModelKey, Ticket
    from bench.counts import Traffic
    from forecasting.counts import Counts
    from forecasting.estimate import Way
    from forecasting.fitted import Fitted

GIB: Final = 1 << 30
DEVICE, HOST = 150 * GIB, 700 * GIB
"""For some 400 models, and four times as many."""
TICK: Final = 10.0
FIRST: Final = 12
"""Looks that are not counted: what is known of models is laid out once after a fit."""


class Timed(Forecaster):
    """Remembers what each look cost, in CPU milliseconds."""

    spent: list[float]

    def receive(self, message: ForecastMessage) -> object:
        """One message."""
        began = time.thread_time()
        result = super().receive(message)
        if isinstance(message, Ticked):
            self.spent.append((time.thread_time() - began) * 1e3)
        return result


class Shelf:
    """A catalogue of fixed models."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = {model.name: (model,) for model in models}

    async def refresh(self) -> Mapping[str, tuple[Model, ...]]:
        """See `Catalog.refresh`."""
        return self._models


def models() -> list[Model]:
    """As many as are counted, 6 MB to 2 GB."""
    random = np.random.default_rng(1)
    sizes = (np.exp(random.uniform(np.log(0.006), np.log(2.0), MODELS)) * GIB).astype(np.int64).tolist()
    return [
        Model(f"model-{at}", "1", f"f{at}", Footprint(size, size), Rules(), size / GIB) for at, size in enumerate(sizes)
    ]


def _nothing() -> dict[ModelKey, Ticket]:
    return {}


def filled(place: SimulatedPlace, some: Sequence[Model]) -> int:
    """Hold as many of these as there is room for; how many."""
    for number, model in enumerate(some):
        if sum(size for _, size in place.held.values()) + model.footprint.device > place.capacity:
            return number
        place.held[model.key] = model, model.footprint.device
    return len(some)


async def looked(
    counts: Counts, traffic: Traffic, fitted: Fitted, *, at: float, number: int, source: Way, declared: int
) -> list[float]:
    """CPU milliseconds of each of so many looks, `at` seconds after the counts began; so many windows are declared."""
    await anyio.sleep(at)
    clock = SimulatedClock(datetime.fromtimestamp(START, UTC))
    every, emit, tickets = models(), Fanout(), _nothing()
    costs = Costs(fixed=0.05, bandwidth=4e9)
    device, host = SimulatedPlace(DEVICE, Tier.HOST, costs), SimulatedPlace(HOST, Tier.DISK, costs)
    order = [every[row] for row in np.random.default_rng(2).permutation(MODELS).tolist()]
    filled(host, order[filled(device, order) :])
    windows = tuple(
        Peak(
            f"w{k}", Once(datetime.fromtimestamp(START + at + 3600 + 60 * k, UTC)), UTC, 600.0, models=(order[-k].key,)
        )
        for k in range(1, declared + 1)
    )
    Timed.spent = []
    async with Supervisor(emit=emit, clock=clock) as supervisor:
        host_ref = supervisor.start(
            "host", lambda: HostCache(Settings(capacity=HOST, parallel=1), residence=host, clock=clock, emit=emit)
        )
        device_ref = supervisor.start(
            "cpu:0",
            lambda: DeviceCache(
                "cpu:0", Settings(capacity=DEVICE), residence=device, host=host_ref, keeps_host=False,
                host_ceiling=HOST, host_tickets=tickets, clock=clock, emit=emit,
            ),
        )  # fmt: skip
        names = supervisor.start("names", lambda: Dispatcher((device_ref,), catalog=Shelf(every), clock=clock))
        await names.ask(Refresh())
        forecaster = supervisor.start(
            "forecaster",
            lambda: Timed(
                # It plans and reports only, so that each look finds the same tiers.
                ForecastSettings(act=False, source=source, tick=TICK), counts=counts, times=LoadTimes(),
                foresight=Foresight(share=0.02, wall=lambda: clock.wall().timestamp()), standing=Standing(),
                peaks=windows, labels=dict, dispatcher=names, devices=(device_ref,), host=host_ref,
                fitting=None, journal=None, clock=clock, emit=emit,
            ),
        )  # fmt: skip
        await anyio.sleep(0.1)
        forecaster.tell(FitCame(fitted))
        for tick in range(number + FIRST):
            for index, requests in enumerate(traffic.draw(int(at // 300) + tick // 30, 1)):
                if requests and (index + tick) % 6 == 0:
                    counts.add(index, requests)
            await anyio.sleep(TICK)
    return Timed.spent[FIRST:]


def looks(
    counts: Counts, traffic: Traffic, fitted: Fitted, *, at: float, number: int, source: Way, declared: int
) -> list[float]:
    """The same, from outside an event loop."""
    return run(lambda: looked(counts, traffic, fitted, at=at, number=number, source=source, declared=declared))
