"""Building the forecaster: counts from the last run, the journal, the fitting worker, the actor and its ears.

A part of the composition root, in a file of its own because a server without foresight is a whole server too.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

from actors.ears import Ears
from actors.forecaster import Forecaster, ForecastSettings
from actors.foresight import Foresight
from actors.load_times import LoadTimes
from forecasting.counts import Counts
from forecasting.standing import Standing
from forecasting.store import STORE, Store, StoreFailed
from runtime.config.preload_peaks import peaks_of
from runtime.fitting.worker import FittingWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from actors.actor import Ref
    from actors.clock import Clock
    from actors.dispatcher import Order
    from actors.forecaster import ForecastMessage
    from actors.messages import Command
    from actors.ports import Offload
    from actors.supervisor import Supervisor
    from forecasting.peaks import Labels
    from forecasting.snapshot import Snapshot
    from forecasting.tiers import Minute
    from runtime.config.schema import Config
    from runtime.telemetry.fanout import Fanout

_log: Final = logging.getLogger("foreload.forecast")


class FileJournal:
    """The counts' file as `actors.ports.Journal`: every call in a thread."""

    def __init__(self, store: Store, offload: Offload) -> None:
        self._store = store
        self._offload = offload

    async def append(self, snapshot: Snapshot, minutes: tuple[tuple[int, Minute], ...]) -> None:
        """See `Journal.append`."""
        await self._offload(self._store.append, snapshot.table, snapshot.born, minutes)

    async def checkpoint(self, snapshot: Snapshot) -> None:
        """See `Journal.checkpoint`."""
        await self._offload(self._store.checkpoint, snapshot)

    async def close(self) -> None:
        """Let the file go."""
        await self._offload(self._store.close)


async def start_forecaster(
    config: Config,
    supervisor: Supervisor,
    *,
    dispatcher: Ref[Order],
    devices: tuple[Ref[Command], ...],
    host: Ref[Command],
    labels: Callable[[], Labels],
    offload: Offload,
    clock: Clock,
    emit: Fanout,
) -> tuple[Ref[ForecastMessage], FileJournal | None]:
    """Start it with what the last run counted. A file that can't be used costs its counts, never the start."""
    zone = ZoneInfo(config.preload.defaults.timezone or "UTC")
    counts, journal = Counts(clock.wall().timestamp(), clock.now(), zone=zone), None
    if config.forecast.keep:
        counts, journal = await _reopened(config.disk.path / STORE, counts, offload, clock)
    times = LoadTimes()
    foresight = Foresight(share=config.forecast.control, wall=lambda: clock.wall().timestamp())
    standing = Standing()
    settings = replace(
        ForecastSettings(),
        act=config.preload.defaults.mode == "act",
        learned=config.forecast.learned,
        source=config.forecast.source,
        tick=config.forecast.tick,
        refit=config.forecast.refit,
        fraction=config.preload.defaults.max_gpu_fraction,
        share=config.forecast.channel_share,
    )
    fitting = FittingWorker(budget=config.forecast.fit_deadline) if config.forecast.learned else None
    peaks = peaks_of(config.preload)
    ref = supervisor.start(
        "forecaster",
        lambda: Forecaster(
            settings,
            counts=counts,
            times=times,
            foresight=foresight,
            standing=standing,
            peaks=peaks,
            labels=labels,
            dispatcher=dispatcher,
            devices=devices,
            host=host,
            fitting=fitting,
            journal=journal,
            clock=clock,
            emit=emit,
        ),
    )
    emit.subscribe("load times", times.wants())
    emit.subscribe("foresight", foresight.wants())
    emit.subscribe("forecaster", Ears(ref, counts, now=clock.now).wants())
    return ref, journal


async def _reopened(path: Path, fresh: Counts, offload: Offload, clock: Clock) -> tuple[Counts, FileJournal | None]:
    """What the last run counted, and where to go on writing; `fresh` counts if there is nothing to go on from."""
    try:
        store, told = await offload(Store.open, path)
        saved, more = await offload(store.load)
    except StoreFailed as error:
        _log.warning("counts are not kept: %s", error)
        return fresh, None
    for fact in (*told, *more):
        _log.warning("counts of the last run: %r", fact)
    if saved is None:
        return fresh, FileJournal(store, offload)
    counts, gaps = Counts.restore(saved, clock.wall().timestamp(), clock.now(), zone=fresh.zone)
    for fact in gaps:
        _log.info("counts of the last run: %r", fact)
    return counts, FileJournal(store, offload)
