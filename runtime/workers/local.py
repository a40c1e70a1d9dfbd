"""`ThreadWorker`: a core in this process, for debugging and for embedding. It contains nothing: a crash is yours.

The same port as `process.py`. Importing it stays cheap; the core's module is imported when it is entered.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from actors.errors import ForeloadError, LoadFailed, NotReady, OutOfMemory, TooLarge, WorkerDied
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import ModelKey, Tier
from runtime.workers.bells import SkipBell
from runtime.workers.device_loop import CorePort, DeviceLoop, Loaded, core_of, recipe_in, release_host, report
from runtime.workers.patience import settled
from runtime.workers.pipelines import Prepared, PreprocessLimits
from runtime.workers.port import Answer, Laid
from runtime.workers.process import DEFAULT_CORE
from runtime.workers.ring import RingCall
from runtime.workers.turns import patient, short_slice

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from actors.residency.model import Model
    from runtime.workers.port import Call, LoadSpec, Note

P = ParamSpec("P")
R = TypeVar("R")
LOAD_THREADS = 4


class _Queue:
    """An `Inbox` between the loop's thread and the device thread. A slot is the call's number, never used again."""

    def __init__(self, deliver: Callable[[list[tuple[int, Answer | ForeloadError]]], None]) -> None:
        self._deliver = deliver
        self._bells: deque[RingCall | SkipBell] = deque()
        self._answered: deque[tuple[int, Answer | ForeloadError]] = deque()
        self._rung = threading.Event()

    def put(self, bell: RingCall | SkipBell) -> None:
        self._bells.append(bell)
        self._rung.set()

    def wait(self, timeout: float | None) -> list[RingCall | SkipBell]:
        if timeout != 0:
            self._rung.wait(timeout)
        self._rung.clear()
        bells = []
        while self._bells:
            bells.append(self._bells.popleft())
        return bells

    def wake(self) -> None:
        self._rung.set()

    def answer(self, slot: int, generation: int, answer: Answer | Laid) -> None:  # noqa: ARG002 - slots are never reused here
        if isinstance(answer, Laid):
            answer = Answer(b"".join(answer.body), answer.json_length, answer.timings)
        self._answered.append((slot, answer))

    def fail(self, slot: int, generation: int, error: ForeloadError) -> None:  # noqa: ARG002 - the same
        self._answered.append((slot, error))

    def flush(self) -> None:
        outcomes = []
        while self._answered:
            outcomes.append(self._answered.popleft())
        if outcomes:
            self._deliver(outcomes)


class ThreadWorker:
    """A `runtime.workers.port.DeviceWorker` on threads of this process; an async context manager.

    `on_ready(0)` tells that the core stands, `on_lost(0, cause)` that its device thread ended on its own; there is no
    second life. A stalled load can't be killed here, so there is no `load_timeout`.
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
        slot_bytes: int = 64 << 20,
        preprocess: PreprocessLimits | None = None,
        core: str = DEFAULT_CORE,
        on_note: Callable[[Note], None] | None = None,
    ) -> None:
        self._device = device
        self._resolve = resolve
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_recipe = on_recipe
        self._on_note = on_note
        self._allow = allow
        self._threads = threads
        self._pinned = pinned
        self._slot_bytes = slot_bytes
        self._preprocess = preprocess or PreprocessLimits()
        self._where = core
        self._inbox = _Queue(self._deliver)
        self._core: CorePort | None = None
        self._turns: DeviceLoop | None = None
        self._down: ForeloadError = NotReady(f"the device worker of {device} is starting", retry_after=1.0)
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._left: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        self._models: dict[str, Model] = {}

    @property
    def device(self) -> str:
        """`cpu:0`, `cuda:1`."""
        return self._device

    @property
    def pid(self) -> int:
        """0: a thread."""
        return 0

    @property
    def prepared(self) -> Prepared:
        """What was shared of the work on inputs that come as files."""
        return Prepared() if self._core is None else self._core.prepared()

    # -- life ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._releasing: asyncio.Future[None] = self._loop.create_future()
        self._releasing.set_result(None)
        self._loads = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="load", initializer=patient)
        # One thread, so that evictions and questions never run beside each other.
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="control", initializer=patient)
        try:
            self._core = await self._loop.run_in_executor(
                self._orders,
                partial(core_of, pinned=self._pinned, preprocess=self._preprocess),
                self._where,
                self._device,
                self._allow,
                self._threads,
            )
        except BaseException:
            self._loads.shutdown(wait=False)
            self._orders.shutdown(wait=False)
            raise
        if (heard := self._on_note) is not None:
            self._core.listen(self._telling(heard))
        self._turns = DeviceLoop(self._core, self._inbox)
        self._thread = threading.Thread(target=self._run, args=(self._turns,), name="device", daemon=True)
        self._thread.start()
        self._on_ready(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Raise `NotReady` unless the core stands."""
        self._alive()

    async def stop(self) -> None:
        """End the device thread after the batch under way, and the load threads after their loads."""
        if self._turns is None:
            return
        turns, self._turns = self._turns, None
        turns.end()
        self._fail(NotReady(f"the device worker of {self._device} is stopped"))
        await settled(asyncio.ensure_future(asyncio.to_thread(self._join)))
        self._core = None

    def _telling(self, heard: Callable[[Note], None]) -> Callable[[Note], None]:
        loop = self._loop

        def tell(note: Note) -> None:
            with suppress(RuntimeError):  # the loop is gone: so is whoever listened
                loop.call_soon_threadsafe(heard, note)

        return tell

    def _join(self) -> None:
        self._thread.join()
        self._loads.shutdown()
        self._orders.shutdown()

    def _run(self, turns: DeviceLoop) -> None:
        short_slice()
        try:
            cause = "" if turns.run() else "its core only fails"
        except Exception as error:  # noqa: BLE001 - the last frame of the device thread
            report("worker_failed", error)
            cause = f"its core failed: {type(error).__name__}"
        if cause:
            self._loop.call_soon_threadsafe(self._lose, cause)

    def _lose(self, cause: str) -> None:
        if self._turns is None:
            return
        self._fail(WorkerDied(f"the device worker of {self._device} ended: {cause}"))
        self._core = None
        self._on_lost(0, cause)

    def _fail(self, error: ForeloadError) -> None:
        self._down = error
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error.again())
        for left in self._left.values():
            if not left.done():
                left.set_result(None)
        self._calls.clear()
        self._left.clear()

    def _alive(self) -> CorePort:
        if self._core is None or self._turns is None:
            raise self._down.again()
        return self._core

    # -- the port ------------------------------------------------------------------------------------

    async def load(self, model: Model) -> LoadReport:
        """See `actors.ports.Residence.load`."""
        if not self._releasing.done():  # orders keep their order, here across two pools
            await asyncio.wait((self._releasing,))
        core, spec, cancelled = self._alive(), self._resolve(model), threading.Event()
        self._models[model.key] = model
        work = self._loop.run_in_executor(self._loads, _load, core, spec, cancelled)
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            cancelled.set()
            await settled(work)
            if work.exception() is None:
                await settled(gone := self._loop.run_in_executor(self._orders, core.evict, model.key))
                gone.exception()
            self._models.pop(model.key, None)
            raise
        if work.exception() is not None:
            self._models.pop(model.key, None)
        loaded = work.result()
        if self._on_recipe is not None and (recipe := recipe_in(loaded)):
            self._on_recipe(model, recipe)
        return LoadReport(loaded.resident, Tier.HOST, tuple((name, took) for name, took in loaded.steps))

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `actors.ports.Residence.evict`. Cancelled, it finishes first."""
        evicted = await self._order(self._alive().evict, key)
        self._models.pop(key, None)
        return EvictReport(evicted.returned, evicted.leaked)

    async def inventory(self) -> tuple[Held, ...]:
        """See `actors.ports.Residence.inventory`."""
        listed = await self._order(self._alive().inventory)
        return tuple(
            Held(self._models[one.key], one.resident, one.in_flight) for one in listed if one.key in self._models
        )

    def release_host(self, fingerprint: str) -> None:
        """See `port.DeviceWorker.release_host`."""
        if self._core is not None and self._turns is not None:
            self._releasing = self._loop.run_in_executor(self._orders, release_host, self._core, fingerprint)

    async def infer(self, call: Call) -> Answer:
        """Run one inference; see `port.DeviceWorker`. Raises `TooLarge` like a ring, for a body or an answer."""
        self._alive()
        self._check(len(call.body), "body", call.key)
        self._number += 1
        number = self._number
        answer = self._calls[number] = self._loop.create_future()
        # A copy, because the core may write into what a ring would give it.
        body = memoryview(bytearray(call.body))
        self._inbox.put(RingCall(number, 0, call.key, call.json_length, body))
        try:
            result: Answer = await answer
        except asyncio.CancelledError:
            if number in self._calls:
                left = self._left[number] = self._loop.create_future()
                self._inbox.put(SkipBell(number, 0))
                await settled(left)
            raise
        self._check(len(result.body), "answer", call.key)
        return result

    # -- threads -------------------------------------------------------------------------------------

    async def _order(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        done = self._loop.run_in_executor(self._orders, lambda: work(*args, **kwargs))
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            await settled(done)
            done.exception()
            raise
        return done.result()

    def _deliver(self, outcomes: list[tuple[int, Answer | ForeloadError]]) -> None:
        self._loop.call_soon_threadsafe(self._settle, outcomes)

    def _settle(self, outcomes: list[tuple[int, Answer | ForeloadError]]) -> None:
        for number, outcome in outcomes:
            future = self._calls.pop(number, None)
            left = self._left.pop(number, None)
            if left is not None and not left.done():
                left.set_result(None)
            if future is None or future.done():
                continue
            if isinstance(outcome, ForeloadError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _check(self, size: int, what: str, model: str) -> None:
        limit = self._slot_bytes
        if size > limit:
            msg = f"the {what} has {size} bytes, the limit is {limit}"
            raise TooLarge(msg, model=model, detail={"bytes": size, "limit": limit})

    def __repr__(self) -> str:
        return f"<ThreadWorker {self._device} {'up' if self._core is not None else 'down'}, {len(self._calls)} open>"


def _load(core: CorePort, spec: LoadSpec, cancelled: threading.Event) -> Loaded:
    """On a load thread: whatever goes wrong leaves as a `ForeloadError`."""
    try:
        return core.load(spec, cancelled.is_set)
    except ForeloadError:
        raise
    except MemoryError as error:
        msg = "the host ran out of memory"
        raise OutOfMemory(msg, model=spec.key) from error
    except Exception as error:
        if not cancelled.is_set():
            report("order_failed", error, model=spec.key)
        msg = f"unexpected {type(error).__name__} in the worker; its log has more"
        raise LoadFailed(msg, model=spec.key) from error
