"""A second life that waits: its process stands, its core has its device context, and it holds no model.

Belongs here: having one ready, and handing it over. Never: deciding when a worker needs a next life.
For devices whose context takes seconds and cannot be forked (CUDA); what it costs is a context's memory, all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from anyio import CancelScope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from runtime.workers.life import Life


class Standby:
    """Keeps one life ready from the first `want` on.

    One that was taken, or died waiting, is replaced after `pause` seconds: what took over has models to load first.
    `born` gives a life whose process runs, or raises `OSError`; `patience` seconds is how long it may take to answer.
    """

    def __init__(self, born: Callable[[], Awaitable[Life]], patience: float, pause: float) -> None:
        self._born = born
        self._patience = patience
        self._pause = pause
        self._wanted = anyio.Event()
        self._settled = anyio.Event()
        self._settled.set()
        self._taken = anyio.Event()
        self._ready: Life | None = None
        self._scope = CancelScope()
        self._over = anyio.Event()

    @property
    def pid(self) -> int:
        """Of the life that waits; 0 while there is none."""
        return 0 if self._ready is None else self._ready.pid

    def want(self) -> None:
        """Have one from now on; not before the first life answers, which must not share its start with another."""
        self._wanted.set()

    async def take(self) -> Life | None:
        """The life that waits, which is the caller's from now on; one that is being started is waited for."""
        await self._settled.wait()
        life, self._ready = self._ready, None
        if life is not None:
            self._taken.set()
            if life.exited.is_set():  # between two turns of the loop; `run` buries only what is its own
                with CancelScope(shield=True):
                    await life.bury()
                return None
        return life

    async def close(self) -> None:
        """End it for good; returns when nothing is left of it."""
        self._scope.cancel()
        await self._over.wait()

    async def run(self) -> None:
        """Keep one ready, until `close`."""
        try:
            with self._scope:
                await self._wanted.wait()
                while True:
                    self._settled = anyio.Event()
                    try:
                        await self._keep_one()
                    finally:
                        self._settled.set()
                    await anyio.sleep(self._pause)
        finally:
            self._over.set()

    async def _keep_one(self) -> None:
        """Start one and let it wait until it is taken or lost."""
        self._taken = anyio.Event()
        try:
            life = await self._born()
        except OSError:
            return
        try:
            if await life.answers(self._patience):
                self._ready = life
                self._settled.set()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._until_exit, life, tasks.cancel_scope)
                    await self._taken.wait()
                    tasks.cancel_scope.cancel()
        finally:
            if not self._taken.is_set():
                self._ready = None
                with CancelScope(shield=True):
                    await life.bury()

    @staticmethod
    async def _until_exit(life: Life, scope: CancelScope) -> None:
        await life.exited.wait()
        scope.cancel()

    def __repr__(self) -> str:
        return f"<Standby {f'pid {self.pid}' if self.pid else 'none'}>"
