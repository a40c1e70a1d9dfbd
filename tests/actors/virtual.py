"""Coroutine tests under virtual time: no thread, no socket, no second spent."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec

from runtime.simulation.loop import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

P = ParamSpec("P")


def virtual(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a coroutine test on a virtual loop of its own; a deadlock fails it."""

    @functools.wraps(test)
    def on_virtual_time(*args: P.args, **kwargs: P.kwargs) -> None:
        run(lambda: test(*args, **kwargs))

    return on_virtual_time
