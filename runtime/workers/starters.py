"""Which way each device's workers start; the zygotes that this takes, and their end.

Belongs here: the choice. How each way works is `start.py` and `zygotes.py`.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from runtime.workers.start import Spawner
from runtime.workers.zygotes import Zygotes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from runtime.workers.start import Starter


class Starters:
    """Starters of all devices; an async context manager that outlives their workers. `notify` hears of fallbacks."""

    def __init__(self, core: str, notify: Callable[[str], None]) -> None:
        self._core = core
        self._notify = notify
        self._stack = AsyncExitStack()
        self._zygotes: dict[tuple[frozenset[str], bool], Zygotes] = {}

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def of(self, device: str, start: str, allow: Iterable[str]) -> Starter:
        """The starter of a device: `zygote`, or `auto` on a CPU, forks; everything else execs.

        Devices that may run the same modules share a zygote, others do not: see `Zygotes`. Nothing starts yet.
        """
        if start not in {"auto", "zygote"} or not device.startswith("cpu") or sys.platform != "linux":
            return Spawner()
        trust = frozenset(allow), start == "zygote"
        if trust not in self._zygotes:
            zygotes = Zygotes(self._core, notify=self._notify, insist=trust[1])
            self._zygotes[trust] = await self._stack.enter_async_context(zygotes)
        return self._zygotes[trust]

    def __repr__(self) -> str:
        return f"<Starters {len(self._zygotes)} zygotes>"
