"""`ProcessWorker`: the device worker as a process, restarted whenever it ends on its own.

Who may be resident is decided elsewhere; how a process is started, watched and buried is `life.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

import anyio
from anyio import CancelScope

from actors.errors import Broken, LoadFailed, NotReady
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import ModelKey, Tier
from runtime.workers.channel import (
    Answered,
    Cancel,
    Evict,
    EvictDone,
    FrontChannel,
    Inventory,
    Listing,
    Load,
    LoadDone,
    LoadUndone,
    Ping,
    Pong,
    ReleaseHost,
    WorkerSetup,
)
from runtime.workers.life import Life
from runtime.workers.patience import settled
from runtime.workers.pipelines import Prepared, PreprocessLimits
from runtime.workers.standby import Standby
from runtime.workers.start import NotStarted, Spawner

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from actors.residency.model import Model
    from runtime.workers.port import Answer, Call, LoadSpec, Note
    from runtime.workers.start import Starter

DEFAULT_CORE = "runtime.worker.core:Core"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between lives, in seconds: none after a life of `healthy`, else `first`, doubled up to `most`."""

    first: float = 0.1
    most: float = 10.0
    healthy: float = 60.0

    def after(self, previous: float, lived: float) -> float:
        """The pause that follows `previous` (0 at first) and a life of `lived` seconds."""
        if lived >= self.healthy:
            return 0.0
        return min(previous * 2, self.most) or self.first


class ProcessWorker:
    """A `runtime.workers.port.DeviceWorker` in a process of its own; an async context manager.

    Entering starts it and does not wait: `on_ready(pid)` tells when a life answers, `on_lost(pid, cause)` that one
    ended on its own (0 if it could not even be started). Until then, and between lives, everything raises `NotReady`
    with a `retry_after`; what a dying worker owed raises `WorkerDied`. `resolve` says what a model is made of, and may
    raise a `ForeloadError`. `load_timeout` seconds without an answer to a load, an eviction or a question count as
    stalled, and end the worker; inference has no such limit. `on_recipe` is told what a first forward taught about the
    layout of a model's weights (`runtime.tiers.recipe`).

    `starter` decides how processes come about (default: exec). With `standby` a second one, which has its context and
    holds nothing, waits to take over. `skeletons` is a folder in which workers keep what they built; empty for none.
    """

    def __init__(
        self,
        device: str,
        *,
        resolve: Callable[[Model], LoadSpec],
        on_ready: Callable[[int], None],
        on_lost: Callable[[int, str], None],
        on_recipe: Callable[[Model, bytes], None] | None = None,
        allow: tuple[str, ...] = (),
        threads: int = 1,
        pinned: int = 0,
        slots: int = 64,
        slot_bytes: int = 64 << 20,
        load_timeout: float = 600.0,
        stop_grace: float = 2.0,
        start_timeout: float = 120.0,
        backoff: Backoff | None = None,
        preprocess: PreprocessLimits | None = None,
        core: str = DEFAULT_CORE,
        starter: Starter | None = None,
        standby: bool = False,
        skeletons: str = "",
        on_note: Callable[[Note], None] | None = None,
    ) -> None:
        self._setup = WorkerSetup(
            device=device,
            core=core,
            allow=allow,
            threads=threads,
            pinned=pinned,
            slots=slots,
            slot_bytes=slot_bytes,
            preprocess=preprocess or PreprocessLimits(),
            skeletons=skeletons,
        )
        self._starter = starter or Spawner()
        self.prepared = Prepared()
        self._resolve = resolve
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_recipe = on_recipe
        self._on_note = on_note
        self._load_timeout = load_timeout
        self._stop_grace = stop_grace
        self._start_timeout = start_timeout
        self._backoff = backoff or Backoff()
        self._standby = Standby(self._born, start_timeout, self._backoff.most) if standby else None
        self._tasks = anyio.create_task_group()
        self._life: Life | None = None
        self._answering = False
        self._stopping = False
        self._living = CancelScope()
        self._up = anyio.Event()
        self._over = anyio.Event()
        self._pause = 0.0
        self._models: dict[str, Model] = {}

    @property
    def device(self) -> str:
        """`cpu:0`, `cuda:1`."""
        return self._setup.device

    @property
    def pid(self) -> int:
        """Of the life that answers; 0 while there is none."""
        life = self._life
        return life.pid if life is not None and self._answering and not life.exited.is_set() else 0

    # -- lives ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._live)
        if self._standby is not None:
            self._tasks.start_soon(self._standby.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with CancelScope(shield=True):
            await self.stop()
        return await self._tasks.__aexit__(kind, error, trace)

    async def ready(self) -> None:
        """Wait until a life answers. Raises `NotReady` once it is stopped."""
        while not self.pid:
            if self._stopping:
                self._alive()
            await self._up.wait()

    async def stop(self) -> None:
        """End it for good: SIGTERM, SIGKILL to its whole group after the grace. `on_lost` is not called."""
        self._stopping = True
        if self._life is not None:
            await self._life.end(self._stop_grace)
        self._living.cancel()  # also ends one that is just being started
        await self._over.wait()
        if self._standby is not None:
            await self._standby.close()

    async def _live(self) -> None:
        with self._living:
            while not self._stopping:
                born = anyio.current_time()
                await self._one_life()
                self._pause = self._backoff.after(self._pause, anyio.current_time() - born)
                await anyio.sleep(self._pause)
        self._up.set()
        self._over.set()

    async def _born(self) -> Life:
        """A life whose process runs. Raises `OSError`, and leaves nothing."""
        life = Life(self._setup)
        try:
            await life.begin(self._starter)
        except BaseException:
            with CancelScope(shield=True):
                await life.bury()
            raise
        return life

    async def _next(self) -> tuple[Life, bool]:
        """The life that comes next, and whether it answers already. Raises `OSError`."""
        waiting = await self._standby.take() if self._standby is not None else None
        return (await self._born(), False) if waiting is None else (waiting, True)

    async def _one_life(self) -> None:
        try:
            life, answers = await self._next()
        except OSError as error:
            why = str(error) if isinstance(error, NotStarted) else type(error).__name__
            self._on_lost(0, f"could not be started: {why}")
            return
        self._life = life
        try:
            if answers or await life.answers(self._start_timeout):
                self._answering = True
                self._up.set()
                if self._on_note is not None and life.channel is not None:
                    life.channel.on_note = self._on_note
                self._on_ready(life.pid)
                if self._standby is not None:
                    self._standby.want()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(life.ring.trim)
                    await life.exited.wait()
                    tasks.cancel_scope.cancel()
            await life.exited.wait()
            if not self._stopping:
                unanswered = "" if self._answering else " before it was ready"
                self._on_lost(life.pid, life.cause + unanswered)
        finally:
            self._answering = False
            if self._up.is_set():
                self._up = anyio.Event()
            self._models.clear()
            with CancelScope(shield=True):
                await life.bury()
            self._life = None

    def _alive(self) -> tuple[Life, FrontChannel]:
        life = self._life
        if life is None or life.channel is None or not self._answering or life.exited.is_set():
            state = "is stopped" if self._stopping else "is starting"
            msg = f"the device worker of {self.device} {state}"
            raise NotReady(msg, retry_after=max(1.0, self._backoff.after(self._pause, 0.0)))
        return life, life.channel

    # -- the port ------------------------------------------------------------------------------------

    async def load(self, model: Model) -> LoadReport:
        """See `actors.ports.Residence.load`."""
        life, channel = self._alive()
        order = Load(channel.next_id(), self._resolve(model))
        try:
            answer = channel.ask(order)
        except Broken as error:
            raise LoadFailed(error.message, model=model.key, detail=error.detail) from error
        self._models[model.key] = model
        cause = f"stalled while loading {model.key}: no answer for {self._load_timeout:g} s"
        try:
            reply = await self._answer(life, answer, cause)
        except asyncio.CancelledError:
            channel.tell(Cancel(order.id))
            await self._undone(life, channel, model.key, answer, cause)
            raise
        except BaseException:
            self._forget(life, model.key)
            raise
        if isinstance(reply, LoadDone):
            self._starter.expect(order.spec.builder)
            if reply.recipe and self._on_recipe is not None:
                self._on_recipe(model, reply.recipe)
            return LoadReport(reply.resident, Tier.HOST, reply.steps)
        self._forget(life, model.key)
        if not isinstance(reply, LoadUndone):
            self._confused(life, reply)
        msg = "the load was undone by the worker"
        raise LoadFailed(msg, model=model.key)

    async def _undone(
        self, life: Life, channel: FrontChannel, key: str, answer: asyncio.Future[Answered], cause: str
    ) -> None:
        """Wait until nothing of a cancelled load is left, whoever wins the race; never raises."""
        if not await settled(answer, self._load_timeout):
            life.doom(cause)
            await settled(answer)
        if answer.exception() is None and isinstance(answer.result(), LoadDone):
            gone = channel.ask(Evict(channel.next_id(), key))
            if not await settled(gone, self._load_timeout) or gone.exception() is not None:
                life.doom(f"a cancelled load of {key} could not be undone")
                await settled(gone)
        self._forget(life, key)

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `actors.ports.Residence.evict`. Cancelled, it finishes first."""
        life, channel = self._alive()
        answer = channel.ask(Evict(channel.next_id(), key))
        cause = f"stalled while evicting {key}: no answer for {self._load_timeout:g} s"
        try:
            reply = await self._answer(life, answer, cause)
        except asyncio.CancelledError:
            if not await settled(answer, self._load_timeout):
                life.doom(cause)
                await settled(answer)
            if answer.exception() is None:
                self._forget(life, key)
            raise
        if not isinstance(reply, EvictDone):
            self._confused(life, reply)
        self._forget(life, key)
        return EvictReport(reply.returned, reply.leaked)

    async def inventory(self) -> tuple[Held, ...]:
        """See `actors.ports.Residence.inventory`."""
        life, channel = self._alive()
        answer = channel.ask(Inventory(channel.next_id()))
        reply = await self._answer(life, answer, f"stalled: no inventory for {self._load_timeout:g} s")
        if not isinstance(reply, Listing):
            self._confused(life, reply)
        return tuple(
            Held(self._models[held.key], held.resident, held.in_flight)
            for held in reply.held
            if held.key in self._models
        )

    def release_host(self, fingerprint: str) -> None:
        """See `port.DeviceWorker.release_host`."""
        life = self._life
        if life is not None and life.channel is not None:
            life.channel.tell_soon(ReleaseHost(fingerprint))

    async def ping(self) -> None:
        """Ask the control thread for a sign of life; `prepared` is what it said of shared work the last time."""
        life, channel = self._alive()
        answer = channel.ask(Ping(channel.next_id()))
        reply = await self._answer(life, answer, f"stalled: no answer to a ping for {self._load_timeout:g} s")
        if not isinstance(reply, Pong):
            self._confused(life, reply)
        self.prepared = reply.prepared

    async def infer(self, call: Call) -> Answer:
        """Run one inference; see `port.DeviceWorker`."""
        life, _ = self._alive()
        return await life.ring.call(call)

    # -- answers -------------------------------------------------------------------------------------

    async def _answer(self, life: Life, answer: asyncio.Future[Answered], stalled: str) -> Answered:
        # A doomed life fails its answers as soon as the kernel reports the exit.
        patience = asyncio.get_running_loop().call_later(self._load_timeout, life.doom, stalled)
        try:
            return await asyncio.shield(answer)
        finally:
            patience.cancel()

    def _forget(self, life: Life, key: str) -> None:
        if self._life is life:
            self._models.pop(key, None)

    @staticmethod
    def _confused(life: Life, reply: Answered) -> NoReturn:
        life.doom(f"broke the control protocol: {type(reply).__name__} was not asked for")
        msg = "the device worker gave an answer to another question"
        raise Broken(msg)

    def __repr__(self) -> str:
        return f"<ProcessWorker {self.device} {f'pid {self.pid}' if self.pid else 'down'}>"
