"""Virtual time: an asyncio loop that jumps to the next deadline when nothing is runnable.

A loop with nothing runnable and no deadline is a deadlock and raises. `asyncio.sleep`, anyio timeouts and task
groups run on it unmodified; threads and sockets do not belong here.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

R = TypeVar("R")


class Stalled(RuntimeError):
    """Everybody waits and not even a timer is left."""


class _Clockwork(selectors.BaseSelector):
    """A selector that never waits: it moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[number] = key  # only the loop's own wake-up pipe; nothing else may wait for files
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled(f"deadlock at virtual {self.now:.6f} s: nothing is runnable and no timer is left")
        if timeout > 0:
            self.now += timeout
        return []

    def get_map(self) -> Any:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """Virtual seconds from zero. With a `seed`, runnable callbacks of one turn run in a seeded random order."""

    def __init__(self, seed: int | None = None) -> None:
        self._clockwork = _Clockwork()
        super().__init__(self._clockwork)
        self._random = random.Random(seed) if seed is not None else None  # noqa: S311 - a schedule, not a secret

    def time(self) -> float:
        """Virtual seconds."""
        return self._clockwork.now

    def _run_once(self) -> None:
        # A step of virtual time must not vanish in the rounding of a large clock, or nothing would ever be due.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._clockwork.now))
        ready = self._ready  # type: ignore[attr-defined]
        if self._random is not None and len(ready) > 1:
            shuffled = list(ready)
            self._random.shuffle(shuffled)
            ready.clear()
            ready.extend(shuffled)
        super()._run_once()  # type: ignore[misc]

    def run_in_executor(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # whatever it is given, it refuses
        """Refuse: a thread would bring real time in."""
        raise RuntimeError("no threads under virtual time; use the Offload port")


def run(main: Callable[[], Awaitable[R]], *, seed: int | None = None) -> R:
    """Run a coroutine function to its end under virtual time and close the loop."""

    async def entry() -> R:
        return await main()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(entry())
