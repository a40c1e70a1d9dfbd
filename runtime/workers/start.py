"""Ways to start a worker process, behind one port; the plain way: exec a fresh interpreter.

Belongs here: what a started process is to the front, and `Spawner`. Never: rings, channels, restarts.
The other way, forking from a process that imported everything already, is `zygote.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Protocol

import msgspec

from runtime.workers.spawn import kill_group, reap_group, spawn, words

if TYPE_CHECKING:
    import subprocess
    from typing import TypeAlias

    from runtime.workers.channel import WorkerSetup
    from runtime.workers.port import BuilderSpec

    Descriptors: TypeAlias = tuple[int, int, int]
    """Of the ring's memory, the worker's bell and its control socket; the caller's, who closes them."""


class NotStarted(OSError):
    """A process could not be started; the text says why and may be shown."""


class Started(Protocol):
    """A worker process. `ended` says in words how it ended, within a turn of the loop of its end."""

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        ...

    @property
    def ended(self) -> asyncio.Future[str]:
        """Never fails; do not cancel it."""
        ...

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal its whole group. Nothing happens once it has ended."""
        ...

    async def bury(self) -> None:
        """After `ended`: collect what is left of its group and close what is open; shield it."""
        ...


class Starter(Protocol):
    """Starts worker processes; they end with the front, however that ends."""

    async def start(self, setup: WorkerSetup, fds: Descriptors) -> Started:
        """Start one, which inherits copies of `fds` and nothing else. Raises `OSError`; cancelled, it leaves none."""
        ...

    def expect(self, builder: BuilderSpec) -> None:
        """Say what a worker has just built, for those that come after it. Returns at once."""
        ...


class Spawner:
    """Starts each worker as a fresh interpreter."""

    async def start(self, setup: WorkerSetup, fds: Descriptors) -> Started:
        """See `Starter.start`."""
        told = msgspec.structs.replace(setup, parent=os.getpid(), memory_fd=fds[0], bell_fd=fds[1], control_fd=fds[2])
        # On the loop's own thread: a worker dies with the thread that started it.
        return Spawned(spawn("runtime.worker.main", [msgspec.json.encode(told).decode()], pass_fds=fds))

    def expect(self, builder: BuilderSpec) -> None:
        """Nothing outlives a spawned worker."""

    def __repr__(self) -> str:
        return "<Spawner>"


class Spawned:
    """A child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self.ended: asyncio.Future[str] = self._loop.create_future()
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            kill_group(process.pid)
            process.wait()
            raise
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        """See `Started.pid`."""
        return self._process.pid

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Before the leader is collected: as long as it is a zombie, its group's number can't be given to others.
        kill_group(self.pid)
        self.ended.set_result(words(self._process.wait()))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """See `Started.kill`."""
        if not self.ended.done():
            kill_group(self.pid, number)

    async def bury(self) -> None:
        """See `Started.bury`."""
        await reap_group(self.pid)
        os.close(self._pidfd)

    def __repr__(self) -> str:
        return f"<Spawned pid {self.pid} {self.ended.result() if self.ended.done() else 'runs'}>"
