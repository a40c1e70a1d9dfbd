"""One-for-one supervision: replace an actor after a crash, at most so many times in so many seconds.

Mailbox and ref survive a restart, state does not. More crashes than the intensity allows end the process loudly.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import anyio

from actors.actor import STOP, Actor, Envelope, Ref, Reply
from actors.errors import ActorStopped
from actors.events import ActorRestarted

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from anyio.abc import TaskGroup

    from actors.clock import Clock
    from actors.ports import Emit

M = TypeVar("M")


class SupervisionFailed(RuntimeError):
    """An actor crashed more often than its supervisor tolerates."""


def one_line(exc: BaseException) -> str:
    """An exception, or the first leaf of a group, as one line for people."""
    while isinstance(exc, BaseExceptionGroup):
        exc = cast("BaseExceptionGroup[BaseException]", exc).exceptions[0]  # a group is never empty
    return f"{type(exc).__name__}: {exc}".splitlines()[0]


class Supervisor:
    """Owns the actors' tasks; use as an async context manager.

    `intensity` restarts of one actor within `period` seconds are tolerated.
    """

    def __init__(self, *, emit: Emit, clock: Clock, intensity: int = 5, period: float = 30.0) -> None:
        self._emit = emit
        self._clock = clock
        self._intensity = intensity
        self._period = period
        self._tasks: TaskGroup | None = None
        self._refs: list[Ref[Any]] = []

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        if exc is None:
            try:
                await self.stop()
            except BaseException as failed:  # noqa: BLE001 - the task group below re-raises it, with what caused it
                kind, exc, trace = type(failed), failed, failed.__traceback__
        if exc is not None:
            self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, exc, trace)

    def start(self, name: str, build: Callable[[], Actor[M]]) -> Ref[M]:
        """Start an actor under a name; `build` makes each incarnation's fresh state."""
        assert self._tasks is not None, "enter the supervisor first"
        ref: Ref[M] = Ref(name)
        self._refs.append(ref)
        self._tasks.start_soon(self._keep, ref, build)
        return ref

    async def stop(self) -> None:
        """Stop the actors in reverse order of their start; each finishes the messages it already has."""
        for ref in reversed(self._refs):
            if ref.mailbox.closed:
                continue
            done: Reply[None] = Reply()
            ref.mailbox.post(Envelope(STOP, done))
            await done
            ref.mailbox.close(ActorStopped(f"{ref.name} has stopped"))

    async def _keep(self, ref: Ref[M], build: Callable[[], Actor[M]]) -> None:
        try:
            await self._incarnate(ref, build)
        finally:
            # However it ended: nobody may go on waiting for an answer that no incarnation is left to give.
            ref.mailbox.close(ActorStopped(f"{ref.name} has stopped"))

    async def _incarnate(self, ref: Ref[M], build: Callable[[], Actor[M]]) -> None:
        crashes: deque[float] = deque(maxlen=self._intensity + 1)
        while True:
            try:
                await build().live(ref)
            except Exception as exc:
                now = self._clock.now()
                crashes.append(now)
                self._emit(ActorRestarted(now, ref.name, ref.incarnation, one_line(exc)))
                if len(crashes) > self._intensity and now - crashes[0] <= self._period:
                    ref.mailbox.close(ActorStopped(f"{ref.name} keeps crashing"))
                    raise SupervisionFailed(
                        f"{ref.name} crashed {len(crashes)} times in {self._period:g} s, last: {one_line(exc)}"
                    ) from exc
            else:
                return

    def snapshot(self) -> dict[str, dict[str, int | bool]]:
        """Per actor: alive, incarnation, mailbox depth."""
        return {
            ref.name: {
                "alive": ref.owner is not None,
                "incarnation": ref.incarnation,
                "mailbox_depth": ref.mailbox.depth,
            }
            for ref in self._refs
        }

    def __repr__(self) -> str:
        alive = sum(ref.owner is not None for ref in self._refs)
        return f"<Supervisor {alive}/{len(self._refs)} actors alive>"
