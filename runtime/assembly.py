"""The composition root: the one file that knows every class. Reading it shows the product.

`assemble` builds a server from a configuration; `running.py` runs one until it is told to stop.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from actors.clock import LoopClock
from actors.device_cache import DeviceCache
from actors.dispatcher import Dispatcher, Refresh
from actors.errors import CorruptWeights, ForeloadError, NotReady, UnknownModel
from actors.events import ActorRestarted, RequestFinished, WorkerLost, WorkerStarted
from actors.host_cache import HostCache
from actors.messages import Lost, Rehold, Restored, Sampled
from actors.residency.model import Footprint, Rules
from actors.settings import Settings
from actors.supervisor import Supervisor
from actors.warm_list import WarmEntry, WarmList
from runtime.catalog.repository import Repository, Source, State
from runtime.catalog.served import Exceptions, ServedModels
from runtime.catalog.specs import SpecifiedHost
from runtime.footprints import Footprints
from runtime.foreseeing import start_forecaster
from runtime.history import History
from runtime.http.app import create_app
from runtime.http.auth import Key
from runtime.http.limits import Limits
from runtime.inference import Inference
from runtime.machine import capacity_of, compute_threads
from runtime.readout import Readout
from runtime.remoting import pace_of, permits_of
from runtime.server import VERSION, ServingBackend
from runtime.telemetry.readings import HostReading
from runtime.telemetry.wiring import Views
from runtime.tiers.background import SlabLaying
from runtime.tiers.calibrate import calibrate
from runtime.tiers.disk import DiskStore
from runtime.tiers.host import HostStore
from runtime.tiers.offload import ThreadOffload
from runtime.tiers.pressure import HostMemory
from runtime.tiers.remote import Remote, refusals
from runtime.vitals import Vitals
from runtime.workers.local import ThreadWorker
from runtime.workers.notes import noting
from runtime.workers.pipelines import PreprocessLimits
from runtime.workers.port import ArtefactSpec
from runtime.workers.process import DEFAULT_CORE, ProcessWorker
from runtime.workers.starters import Starters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from actors.actor import Ref
    from actors.messages import Command
    from actors.residency.model import Model, ModelKey, Ticket
    from forecasting.peaks import Labels
    from runtime.catalog.record import ModelRecord
    from runtime.config.schema import Config, Device
    from runtime.http.app import Front
    from runtime.telemetry.logs import Logs
    from runtime.tiers.calibrate import Floors
    from runtime.tiers.host import HostSnapshot
    from runtime.workers.start import Starter

CATALOG_POLL: Final = 2.0
"""Seconds between two looks at the model directories."""

FOOTPRINTS_SAVED: Final = 5.0
"""Seconds between two looks at whether measured sizes changed."""

OFFLOAD_THREADS: Final = 16
STUCK_LOAD_SLACK: Final = 60.0
FLUSH: Final = 3.0


@dataclass(slots=True)
class Assembly:
    """A running server's parts."""

    app: Front
    backend: ServingBackend
    devices: tuple[Ref[Command], ...]
    host: Ref[Command]
    workers: dict[str, ProcessWorker | ThreadWorker]
    views: Views
    clock: LoopClock


@asynccontextmanager
async def assemble(  # noqa: PLR0915 - one list, read from top to bottom
    config: Config, logs: Logs | None = None
) -> AsyncIterator[Assembly]:
    """Build everything and run it; HTTP is the caller's. Raises `ConfigError` or `OSError` if it can't start."""
    clock = LoopClock()
    views = Views(now=clock.now, version=VERSION, otlp=config.telemetry.otlp, logs=logs)
    emit = views.emit
    offload = ThreadOffload(OFFLOAD_THREADS)
    memory = HostMemory()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_flush, views)

        # The catalogue and the tiers below the devices.
        permits = permits_of(config.remote, os.environ)
        repository = Repository(
            tuple(config.repository),
            tuple(Source(each.name, each.source, each.version) for each in config.models),
            refusal=refusals(permits),
        )
        find = _finder(repository)
        disk = await offload(DiskStore, config.disk.path, config.disk.size)
        remote = Remote(
            disk,
            permits,
            connect=config.remote.timeouts.connect,
            pace=pace_of(config.remote),
            offload=offload,
            clock=clock,
            emit=emit,
        )
        stack.push_async_callback(_close, remote)
        far = _far(repository, remote)
        workers: dict[str, ProcessWorker | ThreadWorker] = {}

        def release(fingerprint: str) -> None:
            for worker in workers.values():
                worker.release_host(fingerprint)

        store = HostStore(
            disk, find, offload, release, config.host.mlock, remote, lock_limit=_lock_limit(config, memory)
        )
        host_place = SpecifiedHost(
            store,
            find,
            offload,
            json_depth=config.server.limits.json_depth,
            trust=config.trust,
            artefacts=ArtefactSpec(str(config.disk.path / "compiled"), config.disk.artefacts),
        )

        slabs = SlabLaying(disk, find, offload)

        # Device workers. They start now and say when they answer; the actors do not wait for them.
        refs: dict[str, Ref[Command]] = {}
        starters = await stack.enter_async_context(Starters(DEFAULT_CORE, _start_note))
        for device in config.devices:
            starter = await starters.of(device.id, device.start, device.allow)
            workers[device.id] = await stack.enter_async_context(
                _worker(
                    config,
                    device,
                    host=host_place,
                    slabs=slabs,
                    refs=refs,
                    clock=clock,
                    views=views,
                    starter=starter,
                )
            )

        # The actors.
        supervisor = await stack.enter_async_context(Supervisor(emit=emit, clock=clock))
        host_limits = _host_settings(config, capacity_of("host", config.host.memory, memory))
        host = supervisor.start(
            "host", lambda: HostCache(host_limits, residence=host_place, clock=clock, emit=emit, far=far)
        )
        for device in config.devices:
            refs[device.id] = supervisor.start(
                device.id,
                _device_cache(
                    config,
                    device,
                    capacity=capacity_of(device.id, device.memory, memory),
                    worker=workers[device.id],
                    host=host,
                    host_limits=host_limits,
                    clock=clock,
                    views=views,
                ),
            )
        devices = tuple(refs.values())
        emit.subscribe("rehold", {ActorRestarted: _rehold(devices)})
        seconds: dict[str, float] = {}
        footprints = await offload(Footprints, config.disk.path / "footprints.json")
        history = History(seconds, footprints)
        served = ServedModels(
            repository,
            rules=Rules(config.policy.ttl_idle, config.policy.ttl, config.policy.min_residency),
            exceptions=_exceptions(config),
            offload=offload,
            clock=clock,
            emit=emit,
            forget=_forgetting(views, history),
            seconds=seconds,
            far=remote.far,
            measured=footprints,
        )
        emit.subscribe("history", history.wants())
        dispatcher = supervisor.start(
            "dispatcher",
            lambda: Dispatcher(
                devices,
                catalog=served,
                clock=clock,
                unknown_ttl=config.policy.unknown_names.ttl,
                unknown_size=config.policy.unknown_names.size,
            ),
        )
        await dispatcher.ask(Refresh())
        entries = tuple(_warm_entry(each.model, each.required) for each in config.warm or ())
        warm = supervisor.start("warm list", lambda: WarmList(entries, dispatcher=dispatcher, clock=clock, emit=emit))

        # Foresight: counts requests, and asks the caches for what should be there before the next one.
        forecaster, journal = await start_forecaster(
            config,
            supervisor,
            dispatcher=dispatcher,
            devices=devices,
            host=host,
            labels=_labels(repository),
            offload=offload,
            clock=clock,
            emit=emit,
        )
        if journal is not None:
            stack.push_async_callback(journal.close)

        # What watches them, and what HTTP sees of them.
        floors = await offload(calibrate, config.disk.path)  # here, because the workers are still importing torch
        vitals = Vitals(
            (host, *devices),
            {name: worker.ping for name, worker in workers.items() if isinstance(worker, ProcessWorker)},
            clock=clock,
            observe=views.metrics.observe_lag,
            stuck_load=max(each.load_timeout for each in config.devices) + STUCK_LOAD_SLACK,
            moved=remote.moved,
        )
        readout = Readout(
            devices,
            host,
            supervisor=supervisor,
            memory=memory,
            policy=config.policy.model_dump(mode="json"),
            workers=workers,
            forecaster=forecaster,
            weights=lambda: _weights(store.snapshot(), slabs, floors),
        )
        views.read_from(readout.reading)
        if config.telemetry.access_log:
            emit.subscribe("access", {RequestFinished: _access})
        rounds = await stack.enter_async_context(anyio.create_task_group())
        # On the way out, before the actors: whatever they still load or run is only undone when its worker has ended.
        stack.push_async_callback(_end, workers.values())
        stack.callback(rounds.cancel_scope.cancel)
        inference = Inference(
            dispatcher,
            workers,
            clock=clock,
            emit=emit,
            spans=views.spans,
            tally=views.tally,
            tasks=rounds,
            explain=_explaining(repository),
            soft_wait=config.server.wait.soft,
            default_deadline=config.server.wait.default_deadline,
        )
        backend = ServingBackend(
            dispatcher=dispatcher,
            devices=devices,
            host=host,
            warm=warm,
            warm_said=config.warm is not None,
            inference=inference,
            repository=repository,
            history=history,
            vitals=vitals,
            readout=readout,
            views=views,
            offload=offload,
            strict_ready=config.server.model_ready == "resident",
            far=far,
        )
        app = create_app(
            backend,
            limits_of(config),
            trusted_hosts=config.server.trusted_hosts,
            keys=tuple(Key(each.name, each.hash, each.scopes) for each in config.server.keys),
        )
        rounds.start_soon(vitals.watch)
        for name, worker in workers.items():
            if isinstance(worker, ProcessWorker):
                rounds.start_soon(vitals.probe, name)
        rounds.start_soon(slabs.run)
        stack.push_async_callback(_keep, footprints, offload)
        rounds.start_soon(_keeping, footprints, offload)
        rounds.start_soon(_sample_memory, memory, config.host.pressure.interval, (host, *devices))
        rounds.start_soon(_poll, lambda: dispatcher.tell(Refresh()), CATALOG_POLL)
        yield Assembly(app, backend, devices, host, workers, views, clock)


async def _end(workers: Iterable[ProcessWorker | ThreadWorker]) -> None:
    """Stop the workers, all at once, whatever they are doing."""
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as ends:
            for worker in workers:
                ends.start_soon(worker.stop)


async def _close(remote: Remote) -> None:
    with anyio.CancelScope(shield=True):
        await remote.close()


async def _flush(views: Views) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(FLUSH + 0.5):
        await anyio.to_thread.run_sync(views.close, abandon_on_cancel=True)


# -- building ------------------------------------------------------------------------------------------


def _start_note(text: str) -> None:
    structlog.get_logger("foreload").warning("worker start", reason=text)


def _finder(repository: Repository) -> Callable[[Model], ModelRecord]:
    return lambda model: repository.find(model.name, model.version)


def _far(repository: Repository, remote: Remote) -> Callable[[Model], bool]:
    def far(model: Model) -> bool:
        try:
            return remote.far(repository.find(model.name, model.version))
        except UnknownModel:  # it left the catalogue a moment ago
            return False

    return far


def _worker(
    config: Config,
    device: Device,
    *,
    host: SpecifiedHost,
    slabs: SlabLaying,
    refs: dict[str, Ref[Command]],
    clock: LoopClock,
    views: Views,
    starter: Starter,
) -> ProcessWorker | ThreadWorker:
    """Build a device's worker; what happens to it is told to its cache and stated as a fact."""

    def ready(pid: int) -> None:
        views.emit(WorkerStarted(clock.now(), device.id, pid))
        if device.id in refs:
            refs[device.id].tell(Restored())

    def lost(pid: int, cause: str) -> None:
        views.emit(WorkerLost(clock.now(), device.id, pid, cause))
        if device.id in refs:
            refs[device.id].tell(Lost(cause))

    on_recipe = slabs.note if config.disk.slabs else None
    noted = noting(device.id, clock.now, views.emit)
    threads = device.threads or compute_threads(sum(each.id.startswith("cpu") for each in config.devices))
    pinned = device.pinned if device.id.startswith("cuda:") else 0
    slot_bytes = max(config.server.limits.body, config.server.limits.response)
    preprocess = PreprocessLimits(**config.preprocess.model_dump())
    if device.isolation == "thread":
        return ThreadWorker(
            device.id,
            resolve=host.resolve,
            on_ready=ready,
            on_lost=lost,
            on_recipe=on_recipe,
            allow=device.allow,
            threads=threads,
            pinned=pinned,
            slot_bytes=slot_bytes,
            preprocess=preprocess,
            on_note=noted,
        )
    return ProcessWorker(
        device.id,
        resolve=host.resolve,
        on_ready=ready,
        on_lost=lost,
        on_recipe=on_recipe,
        allow=device.allow,
        threads=threads,
        pinned=pinned,
        slots=device.slots,
        slot_bytes=slot_bytes,
        preprocess=preprocess,
        load_timeout=device.load_timeout,
        starter=starter,
        standby=device.start == "standby",
        skeletons=str(config.disk.path.absolute() / "skeletons") if config.disk.skeletons else "",
        on_note=noted,
    )


def _device_cache(
    config: Config,
    device: Device,
    *,
    capacity: int,
    worker: ProcessWorker | ThreadWorker,
    host: Ref[Command],
    host_limits: Settings,
    clock: LoopClock,
    views: Views,
) -> Callable[[], DeviceCache]:
    settings = replace(
        _common(config),
        capacity=capacity,
        headroom=device.headroom,
        count=device.count,
        parallel=device.loads_in_parallel,
    )
    host_tickets: dict[ModelKey, Ticket] = {}
    return lambda: DeviceCache(
        device.id,
        settings,
        residence=worker,
        host=host,
        keeps_host=device.id.startswith("cpu"),
        host_ceiling=host_limits.capacity - host_limits.headroom,
        host_tickets=host_tickets,
        clock=clock,
        emit=views.emit,
    )


def _weights(shown: HostSnapshot, slabs: SlabLaying, floors: Floors) -> HostReading:
    return HostReading(
        shown.mapped, shown.locked, shown.refused_locks, slabs.laid, slabs.failed, shown.speed, floors.populate
    )


def _lock_limit(config: Config, memory: HostMemory) -> int | None:
    amount = config.host.mlock_limit
    return None if amount is None else capacity_of("host", amount, memory)


def _host_settings(config: Config, capacity: int) -> Settings:
    return replace(
        _common(config),
        capacity=capacity,
        headroom=config.host.headroom,
        parallel=config.disk.loads_in_parallel,
        pulls=config.remote.pulls,
        shortest_first=True,
    )


def _common(config: Config) -> Settings:
    """What holds for every tier; capacity and the rest are each tier's own."""
    policy, limits = config.policy, config.server.limits
    return Settings(
        capacity=0,
        victims=policy.victims_per_load,
        fairness=policy.fairness,
        finish_orphans=policy.finish_orphan_loads,
        backoff_first=policy.backoff.first,
        backoff_limit=policy.backoff.limit,
        waiters=limits.waiters,
        waiters_per_model=limits.waiters_per_model,
        policy=policy.name,
        high=config.host.pressure.high,
        low=config.host.pressure.low,
    )


def _exceptions(config: Config) -> dict[tuple[str, str], Exceptions]:
    return {
        (each.name, each.version): Exceptions(
            each.pinned,
            each.priority,
            each.ttl_idle,
            each.ttl,
            Footprint(each.footprint.device, each.footprint.host) if each.footprint else None,
        )
        for each in config.models
    }


def _explaining(repository: Repository) -> Callable[[str, str | None, UnknownModel], ForeloadError]:
    """A model that is there but not complete, or was refused, is not unknown."""

    def explain(name: str, version: str | None, error: UnknownModel) -> ForeloadError:
        for shelf in repository.listing():
            named, _, numbered = shelf.label.partition("@")
            if shelf.record is None and named == name and version in {None, numbered}:
                if shelf.state is State.PENDING:
                    return NotReady(f"model '{name}' is not complete yet: {shelf.reason}", model=name, retry_after=2.0)
                if shelf.state is State.REJECTED:
                    return CorruptWeights(f"model '{name}' was refused: {shelf.reason}", model=name, retry_after=10.0)
        return error

    return explain


def _labels(repository: Repository) -> Callable[[], Labels]:
    """What the models' manifests say of them, for the selectors of scheduled peaks."""
    return lambda: {record.key: dict(record.manifest.labels) for record in repository.records()}


def _warm_entry(spelled: str, required: bool) -> WarmEntry:  # noqa: FBT001 - two fields of one setting
    name, _, version = spelled.partition("@")
    return WarmEntry(name, version or None, required)


def limits_of(config: Config) -> Limits:
    """What HTTP enforces, out of the configuration."""
    limits = config.server.limits
    return Limits(
        body=limits.body,
        headers=limits.headers,
        header_count=limits.header_count,
        url=limits.url,
        json_depth=limits.json_depth,
        chunks=limits.chunks,
        body_idle=limits.body_idle,
        header_idle=limits.header_idle,
        compared=limits.compared,
        connections=limits.connections,
    )


# -- small subscribers and rounds ------------------------------------------------------------------------


def _rehold(devices: tuple[Ref[Command], ...]) -> Callable[[ActorRestarted], None]:
    def restarted(event: ActorRestarted) -> None:
        if event.actor == "host":
            for ref in devices:
                ref.tell(Rehold())

    return restarted


def _forgetting(views: Views, history: History) -> Callable[[ModelKey], None]:
    def forget(key: ModelKey) -> None:
        history.forget(key)
        views.tally.forget(key)
        views.metrics.forget(key)

    return forget


def _access(event: RequestFinished) -> None:
    structlog.get_logger("foreload.access").info(
        "request", request=event.request, model=event.model, outcome=event.outcome, seconds=round(event.total, 6)
    )


async def _sample_memory(memory: HostMemory, interval: float, refs: tuple[Ref[Command], ...]) -> None:
    while True:
        await anyio.sleep(interval)
        try:
            sample = memory.sample()
        except OSError:  # no descriptor left to read /proc with: the last reading stands until there is one
            continue
        for ref in refs:
            ref.tell(Sampled(sample))


async def _keeping(footprints: Footprints, offload: ThreadOffload) -> None:
    while True:
        await anyio.sleep(FOOTPRINTS_SAVED)
        await offload(footprints.save)


async def _keep(footprints: Footprints, offload: ThreadOffload) -> None:
    with anyio.CancelScope(shield=True):
        await offload(footprints.save)


async def _poll(look: Callable[[], None], interval: float) -> None:
    while True:
        await anyio.sleep(interval)
        look()
