"""The way of one inference: name to model, model to lease, lease to worker, and the facts about it.

No HTTP, no tensor bytes looked at, no decision about residency.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final

import anyio

from actors.dispatcher import Dispatcher, Resolve
from actors.errors import DeadlineExceeded, ForeloadError, NotReady, UnknownModel
from actors.events import RequestArrived, RequestFinished
from actors.lease import Lease
from actors.messages import Acquire, new_ticket
from runtime.http.identity import trace_of
from runtime.http.port import Served
from runtime.workers.port import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anyio.abc import TaskGroup

    from actors.actor import Ref
    from actors.clock import Clock
    from actors.dispatcher import Order
    from actors.messages import Command, Grant
    from actors.ports import Emit
    from actors.residency.model import Model
    from runtime.telemetry.spans import Spans
    from runtime.telemetry.tally import Tally
    from runtime.workers.port import Answer, DeviceWorker

MOMENT: Final = 0.02
"""Seconds for which the owner of a wait is left to end it itself: it knows what was waited for."""


class Inference:
    """`soft_wait` seconds is how long a request waits for a cold model; `default_deadline` is for those without one.

    `tasks` holds forwards whose callers were told that their deadline had passed; `explain` knows better than "unknown"
    of models that are there but not complete.
    """

    def __init__(
        self,
        dispatcher: Ref[Order],
        workers: Mapping[str, DeviceWorker],
        *,
        clock: Clock,
        emit: Emit,
        spans: Spans,
        tally: Tally,
        tasks: TaskGroup,
        explain: Callable[[str, str | None, UnknownModel], ForeloadError],
        soft_wait: float,
        default_deadline: float | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._workers = workers
        self._now = clock.now
        self._emit = emit
        self._spans = spans
        self._tally = tally
        self._tasks = tasks
        self._explain = explain
        self._soft_wait = soft_wait
        self._default_deadline = default_deadline
        self._open: set[str] = set()
        self._again = itertools.count(2)

    async def find(self, name: str, version: str | None) -> Model:
        """The model of a name, after a look at the catalogue if need be. Raises `UnknownModel`."""
        owner = self._dispatcher.owner
        model = owner.find(name, version) if isinstance(owner, Dispatcher) else None
        if model is not None:
            return model
        try:
            return await self._dispatcher.ask(Resolve(name, version))
        except UnknownModel as error:
            raise self._explain(name, version, error) from None

    async def run(
        self,
        name: str,
        version: str | None,
        body: bytes,
        json_length: int | None,
        *,
        request_id: str,
        timeout: float | None,  # noqa: ASYNC109 - the caller's own deadline, part of the protocol
        priority: int,
        traceparent: str,
        tracestate: str,
    ) -> Served:
        """See `Backend.infer`."""
        model = await self.find(name, version)
        arrived = self._now()
        request = self._unique(request_id)
        # HTTP derives the same id for an error's body, from what the caller sent.
        chosen = trace_of(request_id, traceparent)
        trace_id = self._spans.begin(request, traceparent, tracestate, model.key, chosen)
        self._emit(RequestArrived(arrived, request, model.key))
        limit = timeout if timeout is not None else self._default_deadline
        deadline = None if limit is None else arrived + limit
        ask = Acquire(model, new_ticket(), request, deadline, arrived + self._soft_wait, priority)
        outcome = "cancelled"
        grant: Grant | None = None
        answer: Answer | None = None
        try:
            grant, answer = await self._leased(ask, Call(model.key, body, json_length))
            outcome = "ok"
            return Served(answer, model.name, model.version, grant.found, grant.result, grant.waited, trace_id)
        except ForeloadError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self._open.discard(request)
            self._finish(request, model, outcome, arrived=arrived, grant=grant, answer=answer)

    async def _leased(self, ask: Acquire, call: Call) -> tuple[Grant, Answer]:
        owner = self._dispatcher.owner
        if not isinstance(owner, Dispatcher):
            raise NotReady("the dispatcher is restarting", retry_after=1.0)
        cache = owner.place(ask.model)
        worker = self._workers[cache.name]
        if ask.deadline is not None:
            return await self._timed(cache, worker, ask, call)
        async with Lease(cache, ask) as grant:
            return grant, await worker.infer(call)

    async def _timed(self, cache: Ref[Command], worker: DeviceWorker, ask: Acquire, call: Call) -> tuple[Grant, Answer]:
        """The same with a deadline: the caller is told in time, while the lease stays with the forward under way."""
        assert ask.deadline is not None
        done: asyncio.Future[tuple[Grant, Answer]] = asyncio.get_running_loop().create_future()
        work = anyio.CancelScope()

        async def run() -> None:
            with work:
                try:
                    async with Lease(cache, ask) as grant:
                        found = grant, await worker.infer(call)
                except Exception as error:  # noqa: BLE001 - it is the caller's to raise
                    if not done.done():
                        done.set_exception(error)
                else:
                    if not done.done():
                        done.set_result(found)

        self._tasks.start_soon(run)
        try:
            async with asyncio.timeout_at(ask.deadline + MOMENT):
                return await done
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request's own deadline passed while {ask.model.key} was running", model=ask.model.name
            ) from None
        finally:
            work.cancel()

    def _finish(
        self, request: str, model: Model, outcome: str, *, arrived: float, grant: Grant | None, answer: Answer | None
    ) -> None:
        now = self._now()
        waited = grant.waited if grant is not None else 0.0
        if answer is None:
            self._emit(RequestFinished(now, request, model.key, outcome, now - arrived, waited))
            return
        times = answer.timings
        self._tally.record(model.key, times, True)
        self._emit(
            RequestFinished(
                now,
                request,
                model.key,
                outcome,
                now - arrived,
                waited,
                times.queue / 1e9,
                times.infer / 1e9,
                times.batch,
            )
        )

    def _unique(self, request_id: str) -> str:
        """The caller's id, told apart from the same id still under way: events need one name per request."""
        request = request_id
        while request in self._open:
            request = f"{request_id}.{next(self._again)}"
        self._open.add(request)
        return request

    def __repr__(self) -> str:
        return f"<Inference {len(self._open)} under way>"
