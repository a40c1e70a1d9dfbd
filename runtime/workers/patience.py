"""Waiting that a cancellation may not cut short, for work that goes on in another process or thread whatever we do.

Only waiting; what is waited for, and what it means, belongs to the caller.
"""

from __future__ import annotations

import asyncio
from typing import Any

from anyio import CancelScope


async def settled(future: asyncio.Future[Any], timeout: float | None = None) -> bool:  # noqa: ASYNC109 - a limit on patience that kills nothing by itself
    """Wait until `future` is done, or `timeout` seconds passed; tell whether it is done.

    Cancellations that arrive meanwhile are absorbed: call this only while another one is on its way out and will be
    re-raised. The future itself is never cancelled.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    # The scope keeps anyio from cancelling again on each turn; plain `Task.cancel` calls are absorbed one by one.
    with CancelScope(shield=True):
        while not future.done():
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return False
            try:
                await asyncio.wait((future,), timeout=left)
            except asyncio.CancelledError:
                continue
    return True
