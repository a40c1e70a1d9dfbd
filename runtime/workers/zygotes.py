"""Starting workers by forking: a zygote when first needed, another when it ends, exec where it is impossible.

Belongs here: `Zygotes`, the `start.Starter` of CPU devices. One zygote and its workers are `zygote.py`.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Self

import anyio
from anyio import CancelScope

from runtime.workers.start import NotStarted, Spawner
from runtime.workers.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from runtime.workers.channel import WorkerSetup
    from runtime.workers.port import BuilderSpec
    from runtime.workers.start import Descriptors, Started

_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_MOST_KINDS = 64


class Zygotes:
    """Starts workers by forking a zygote, which is started when first needed and replaced when it ends; a `Starter`.

    An async context manager: leaving it ends the zygote. Where forking is impossible, or fails, the worker is spawned
    instead and `notify` hears why; with `insist` it isn't started at all. Use one per set of modules that workers may
    run: a worker's code can reach the process it was copied from, and so must not be of another trust than that.
    """

    def __init__(
        self,
        core: str,
        *,
        notify: Callable[[str], None],
        insist: bool = False,
        start_timeout: float = 120.0,
    ) -> None:
        self._core = core
        self._notify = notify
        self._insist = insist
        self._start_timeout = start_timeout
        self._spawner = Spawner()
        self._turn = anyio.Lock()
        self._current: Zygote | None = None
        self._all: list[Zygote] = []
        self._kinds: list[str] = []
        self._prepares = True
        self._impossible = ""

    @property
    def pid(self) -> int:
        """Of the zygote that makes the next copy; 0 while there is none."""
        return self._current.pid if self._current is not None and not self._current.gone else 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            for zygote in self._all:
                await zygote.close()
        self._all.clear()
        self._current = None

    async def start(self, setup: WorkerSetup, fds: Descriptors) -> Started:
        """See `Starter.start`."""
        try:
            zygote = await self._standing()
            return await zygote.fork(setup, fds)
        except OSError as error:
            if self._insist:
                raise
            if not self._impossible:  # which was told already
                self._notify(f"a worker of {setup.device} is spawned: {error}")
            return await self._spawner.start(setup, fds)

    def expect(self, builder: BuilderSpec) -> None:
        """See `Starter.expect`: have a library imported by now that the next worker would have to import."""
        new = self._new_kind(builder)
        self._kinds += new
        zygote = self._current
        if self._prepares and zygote is not None and not zygote.retired and (new or not zygote.prepared):
            # Only now, after the first load: beside it, these imports would have made somebody wait.
            zygote.prepare(tuple(new))

    def _new_kind(self, builder: BuilderSpec) -> list[str]:
        kind = builder.config.get("model_type")
        if builder.kind != "transformers" or not isinstance(kind, str) or not _KIND.fullmatch(kind):
            return []
        return [] if not self._prepares or kind in self._kinds or len(self._kinds) >= _MOST_KINDS else [kind]

    async def _standing(self) -> Zygote:
        """The zygote, started if there is none. Raises `OSError`."""
        async with self._turn:  # one start serves all who wait
            if self._impossible:
                raise NotStarted(self._impossible)
            await self._forget_gone()
            if self._current is None or self._current.retired:
                self._current = Zygote(self._core, tuple(self._kinds), self._retired)
                self._all.append(self._current)
            zygote = self._current
            done, _ = await asyncio.wait((zygote.standing,), timeout=self._start_timeout)
            if not done:
                zygote.retire(f"it did not stand within {self._start_timeout:g} s")
            elif (reason := zygote.standing.result()) is not None:
                if zygote.unfit:
                    self._impossible = f"no zygote is possible here: {reason}"
                    self._notify(self._impossible)
                raise NotStarted(reason)
            if zygote.retired:
                raise NotStarted(zygote.gone or "its zygote was given up")
            return zygote

    def _retired(self, why: str, unfit: bool) -> None:  # noqa: FBT001 - a callback
        self._notify(f"a zygote is given up: {why}")
        if unfit:  # the next one imports less
            self._prepares = False
            self._kinds.clear()

    async def _forget_gone(self) -> None:
        for zygote in [each for each in self._all if each.gone]:
            self._all.remove(zygote)
            await zygote.close()

    def __repr__(self) -> str:
        return f"<Zygotes {self._current or 'none'}{' impossible' if self._impossible else ''}>"
