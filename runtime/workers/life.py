"""One life of a worker process: from exec, over its exit as the kernel reports it, to the last page and fd.

It decides nothing: whether there is another life is `process.py`'s business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio import to_thread

from actors.errors import WorkerDied
from runtime.workers.channel import FrontChannel, WorkerSetup
from runtime.workers.ring import FrontRing
from runtime.workers.spawn import kill_group, reap_group, spawn, words

if TYPE_CHECKING:
    import subprocess

_EXIT_FOLLOWS = 0.5
"""Seconds that a worker which closed its sockets has to end by itself; its exit says more than a closed socket."""


class Life:
    """A started worker process and both its channels. `exited` is set within a turn of the loop of its end."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._loop = asyncio.get_running_loop()
        self._device = setup.device
        self._verdict = ""
        self.cause = ""
        self.exited = anyio.Event()
        self.channel: FrontChannel | None = None
        self.ring = FrontRing(slots=setup.slots, slot_bytes=setup.slot_bytes, on_broken=self.doom)
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                fds = (self.ring.memory_fd, self.ring.worker_bell.fileno(), theirs.fileno())
                told = msgspec.structs.replace(
                    setup, parent=os.getpid(), memory_fd=fds[0], bell_fd=fds[1], control_fd=fds[2]
                )
                self._process = self._spawn(told, fds)
                self._pidfd = self._watch()
        except BaseException:
            self._control.close()
            self.ring.lose(WorkerDied("the device worker could not be started"))
            self.ring.close()
            raise
        self.ring.worker_bell.close()

    @staticmethod
    def _spawn(setup: WorkerSetup, fds: tuple[int, int, int]) -> subprocess.Popen[bytes]:
        return spawn("runtime.worker.main", [msgspec.json.encode(setup).decode()], pass_fds=fds)

    def _watch(self) -> int:
        try:
            pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            kill_group(self._process.pid)
            self._process.wait()
            raise
        self._loop.add_reader(pidfd, self._on_exit)
        return pidfd

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

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
            kill_group(self.pid)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Before the leader is collected: as long as it is a zombie, its group's number can't be given to others.
        kill_group(self.pid)
        returncode = self._process.wait()
        self.cause = self._verdict or words(returncode)
        self.exited.set()
        self.ring.lose(self.died())
        if self.channel is not None:
            self.channel.lose(self.died())

    def died(self) -> WorkerDied:
        """Name the end, for a caller."""
        msg = f"the device worker of {self._device} ended: {self.cause}"
        return WorkerDied(msg, retry_after=1.0)

    async def end(self, grace: float) -> None:
        """Ask to end with SIGTERM, kill the group after `grace` seconds; returns when the process is gone."""
        if not self.exited.is_set():
            self._verdict = self._verdict or "stopped"
            kill_group(self.pid, signal.SIGTERM)
            with anyio.move_on_after(grace):
                await self.exited.wait()
        self._doom("stopped")
        await self.exited.wait()

    async def bury(self) -> None:
        """Kill what is left and give every fd and page back; shield it."""
        if not self.exited.is_set():
            self._doom("stopped")
            await self.exited.wait()
        await reap_group(self.pid)
        os.close(self._pidfd)
        if self.channel is None:
            self._control.close()
        await to_thread.run_sync(self.ring.close)
        # A transport closes its socket on the next turn of the loop.
        await asyncio.sleep(0)

    def __repr__(self) -> str:
        return f"<Life {self._device} pid {self.pid} {self.cause or 'runs'}>"
