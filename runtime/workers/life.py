"""One life of a worker process: from its start, over its exit as the kernel reports it, to the last page and fd.

It decides nothing: whether there is another life is `process.py`'s business, and how it starts is `start.py`'s.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from actors.errors import WorkerDied
from runtime.workers.channel import FrontChannel
from runtime.workers.ring import FrontRing

if TYPE_CHECKING:
    from runtime.workers.channel import WorkerSetup
    from runtime.workers.start import Started, Starter

_EXIT_FOLLOWS = 0.5
"""Seconds that a worker which closed its sockets has to end by itself; its exit says more than a closed socket."""


class Life:
    """A worker process and both its channels. `exited` is set within a turn of the loop of its end."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._loop = asyncio.get_running_loop()
        self._setup = setup
        self._process: Started | None = None
        self._verdict = ""
        self.cause = ""
        self.exited = anyio.Event()
        self.channel: FrontChannel | None = None
        self._control, self._theirs = socket.socketpair()
        try:
            self.ring = FrontRing(slots=setup.slots, slot_bytes=setup.slot_bytes, on_broken=self.doom)
        except BaseException:
            self._control.close()
            self._theirs.close()
            raise

    async def begin(self, starter: Starter) -> None:
        """Start the process. Raises `OSError`; `bury` it then, too."""
        fds = (self.ring.memory_fd, self.ring.worker_bell.fileno(), self._theirs.fileno())
        process = self._process = await starter.start(self._setup, fds)
        self._theirs.close()
        self.ring.worker_bell.close()
        process.ended.add_done_callback(lambda ended: self._on_exit(ended.result()))
        if self._verdict:
            self._doom(self._verdict)  # ended before it began

    @property
    def pid(self) -> int:
        """Of the process, and of its group; 0 before it began."""
        return 0 if self._process is None else self._process.pid

    async def answers(self, timeout: float) -> bool:  # noqa: ASYNC109 - the limit belongs to the handshake, not to the caller
        """Wait for the worker's first words; False if it ended, or took over `timeout` seconds and was killed."""
        self.channel = await FrontChannel.open(self._control, self.doom)
        if self.exited.is_set():
            self.channel.lose(self.died())
        await asyncio.wait((self.channel.ready,), timeout=timeout)
        if not self.channel.ready.done():
            self.doom(f"did not answer within {timeout:g} s of its start")
            return False
        return not self.channel.ready.cancelled()

    def doom(self, cause: str) -> None:
        """Kill the whole group for a reason of ours. The first reason counts."""
        if cause == "closed its control channel":
            # The usual reason for a closed socket is an exit, which the kernel tells with its true cause.
            self._loop.call_later(_EXIT_FOLLOWS, self._doom, cause)
        else:
            self._doom(cause)

    def _doom(self, cause: str) -> None:
        if not self.exited.is_set():
            self._verdict = self._verdict or cause
            if self._process is not None:
                self._process.kill()

    def _on_exit(self, how: str) -> None:
        self.cause = self._verdict or how
        self.exited.set()
        self.ring.lose(self.died())
        if self.channel is not None:
            self.channel.lose(self.died())

    def died(self) -> WorkerDied:
        """Name the end, for a caller."""
        msg = f"the device worker of {self._setup.device} ended: {self.cause}"
        return WorkerDied(msg, retry_after=1.0)

    async def end(self, grace: float) -> None:
        """Ask to end with SIGTERM, kill the group after `grace` seconds; returns when the process is gone."""
        if self._process is None:
            self._verdict = self._verdict or "stopped"
            return
        if not self.exited.is_set():
            self._verdict = self._verdict or "stopped"
            self._process.kill(signal.SIGTERM)
            with anyio.move_on_after(grace):
                await self.exited.wait()
        self._doom("stopped")
        await self.exited.wait()

    async def bury(self) -> None:
        """Kill what is left and give every fd and page back; shield it."""
        if self._process is None:
            self.cause = self._verdict or "could not be started"
            self.ring.lose(self.died())
            self._theirs.close()
            self.ring.worker_bell.close()
        else:
            self._doom("stopped")
            await self.exited.wait()
            await self._process.bury()
        if self.channel is None:
            self._control.close()
        await to_thread.run_sync(self.ring.close)
        # A transport closes its socket on the next turn of the loop.
        await asyncio.sleep(0)

    def __repr__(self) -> str:
        return f"<Life {self._setup.device} pid {self.pid} {self.cause or 'runs'}>"
