"""Ends a wait early: a body that stands still, a client that left.

Belongs here: cancelling the request's own task and telling such a cancellation from anybody else's.
Never: a response, a decision about what a lost client's work is worth.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import Receive

R = TypeVar("R")

WATCH_AFTER: Final = 0.05
"""Seconds before a client is watched. A hit is over by then and pays for one timer instead of a task."""


class ClientLeft(Exception):
    """Nobody is there to take an answer."""


class Interrupt:
    """A callback that cancels the task it was made in, and knows afterwards whether the cancellation was its own.

    The mechanism of `asyncio.timeout`, at a third of the price and without a fixed deadline.
    """

    __slots__ = ("_before", "_task", "fired")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self.fired = False

    def __call__(self) -> None:
        """Cancel the task at the await it stands at."""
        if not self.fired:
            self.fired = True
            self._task.cancel()

    def mine(self) -> bool:
        """Take the cancellation back; True if nobody else asked for one meanwhile."""
        return self.fired and self._task.uncancel() <= self._before

    def __repr__(self) -> str:
        return f"<Interrupt {'fired' if self.fired else 'armed'}>"


async def while_present(receive: Receive, call: Awaitable[R]) -> R:
    """Await `call` and cancel it when the client leaves. Raises `ClientLeft`.

    The call runs in the request's own task, so scopes inside it nest as they should. The watcher is a task of its
    own rather than a task group because it starts from a timer; it never outlives this function.
    """
    loop = asyncio.get_running_loop()
    leave = Interrupt()
    watchers: list[asyncio.Task[None]] = []
    timer = loop.call_later(
        WATCH_AFTER, lambda: watchers.append(loop.create_task(_until_gone(receive, leave), name="client watch"))
    )
    try:
        result = await call
    except BaseException:
        # Not only CancelledError: a backend may turn the cancellation into an error of its own.
        if leave.mine():
            raise ClientLeft from None
        raise
    finally:
        timer.cancel()
        if watchers:
            watchers[0].cancel()
            await asyncio.wait(watchers)
    if leave.mine():
        raise ClientLeft
    return result


async def _until_gone(receive: Receive, leave: Interrupt) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:  # noqa: BLE001 - a transport that cannot be read has no client behind it
        leave()
    else:
        leave()
