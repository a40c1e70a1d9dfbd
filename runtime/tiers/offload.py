"""Blocking work in threads, behind the `Offload` port.

Belongs here: the limiter. Never: the work itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from runtime.workers.turns import patiently

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class ThreadOffload:
    """Runs work in threads, `limit` pieces at a time; further ones wait in order.

    A limiter of its own, so that slow disks never keep anyio's default threads from others. Cancelling waits for the
    piece that runs: what it changed has to be known before it can be undone. So pieces are short.
    """

    def __init__(self, limit: int) -> None:
        self._limiter = anyio.CapacityLimiter(limit)

    async def __call__(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` in a thread and return its result."""
        return await anyio.to_thread.run_sync(patiently, partial(work, *args, **kwargs), limiter=self._limiter)

    def __repr__(self) -> str:
        return f"<ThreadOffload {self._limiter.borrowed_tokens}/{self._limiter.total_tokens:g}>"
