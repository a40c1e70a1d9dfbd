"""`FittingWorker`: each round of fitting in a fresh process, with a wall deadline, and its answer checked.

Whatever becomes of the process (dead, slow, absurd), the caller hears `Broken` and nothing else changes. Never:
fitting, keeping a fit.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
from anyio import to_thread

from actors.errors import Broken
from forecasting.fitted import Absurd, Fitted
from runtime.fitting.order import Order
from runtime.fitting.parcel import Garbled, packed, read_arrays, write_arrays
from runtime.workers.heap import give_back
from runtime.workers.spawn import kill_group, reap_group, spawn, words

if TYPE_CHECKING:
    import subprocess

    from forecasting.snapshot import Snapshot

MODULE: Final = "runtime.fitting.main"
PER_MODEL: Final = 32 << 10
"""Bytes that an answer may have for each model, beside `LEAST_ROOM`."""
LEAST_ROOM: Final = 4 << 20
_PIECE: Final = 1 << 20
_LAST_WORDS: Final = 2.0
"""Seconds between the end of the answer and that of the process."""


class FittingWorker:
    """An `actors.ports.Fitting`. `budget` seconds are what a round may use; `grace` more, and it is killed.

    `memory` limits the address space of the process in bytes; `top` models may try the `specialists`.
    """

    def __init__(
        self,
        *,
        budget: float = 60.0,
        grace: float = 30.0,
        memory: int = 4 << 30,
        top: int = 50,
        specialists: bool = True,
        module: str = MODULE,
    ) -> None:
        if not (budget > 0 and grace > 0 and memory > 0):
            raise ValueError(f"impossible limits: budget={budget!r} grace={grace!r} memory={memory!r}")
        self._budget = budget
        self._grace = grace
        self._memory = memory
        self._top = top
        self._specialists = specialists
        self._module = module
        self._turn = anyio.Lock()
        self._limiter = anyio.CapacityLimiter(1)
        self.pid = 0
        """Of the process of the round under way; 0 between rounds."""

    async def fit(self, snapshot: Snapshot) -> Fitted:
        """One round; a second one waits for it. Raises `Broken`. Cancelled, it ends the process first."""
        async with self._turn:
            round_ = _Round(self, snapshot)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(round_.stop_when_cancelled)
                    fitted = await to_thread.run_sync(round_.run, limiter=self._limiter)
                    tasks.cancel_scope.cancel()
            finally:
                round_.close()
                if round_.group:
                    with anyio.CancelScope(shield=True):
                        await reap_group(round_.group)
            if isinstance(fitted, Broken):
                raise fitted
            return fitted

    def order(self, source: int, answer: int) -> Order:
        """What the process is told."""
        return Order(
            parent=os.getpid(),
            source=source,
            answer=answer,
            budget=self._budget,
            memory=self._memory,
            top=self._top,
            specialists=self._specialists,
        )

    @property
    def module(self) -> str:
        """What is run."""
        return self._module

    @property
    def limit(self) -> float:
        """Wall seconds of a round."""
        return self._budget + self._grace

    def __repr__(self) -> str:
        return f"<FittingWorker {f'pid {self.pid}' if self.pid else 'idle'}>"


class _Round:
    """One process, run from one thread: a parent-death signal follows the thread, so it must outlive the process."""

    def __init__(self, owner: FittingWorker, snapshot: Snapshot) -> None:
        self._owner = owner
        self._snapshot = snapshot
        self._stopped, self._stop = os.pipe()
        self.group = 0

    async def stop_when_cancelled(self) -> None:
        """Sleep until the round is over or nobody wants it any more."""
        try:
            await anyio.sleep_forever()
        finally:
            os.write(self._stop, b".")

    def close(self) -> None:
        """Let go of what wakes the thread, once it has ended."""
        os.close(self._stop)
        os.close(self._stopped)

    def run(self) -> Fitted | Broken:
        """Blocking. What went wrong is returned: an exception group would hide it from the caller."""
        try:
            return self._run()
        finally:
            give_back()  # the counts went through this thread's heap on their way out, and the answer on its way in

    def _run(self) -> Fitted | Broken:
        try:
            content = self._content()
        except OSError as error:
            return Broken(f"the fitting worker could not be run: {type(error).__name__}")
        if isinstance(content, Broken):
            return content
        try:
            fitted = Fitted.from_arrays(read_arrays(content))
        except (Garbled, Absurd) as error:
            return Broken(f"the fitting worker's answer is of no use: {error}")
        if not set(fitted.keys) <= set(self._snapshot.keys) or fitted.at != self._snapshot.at:
            return Broken("the fitting worker answered for other counts")
        return fitted

    def _content(self) -> bytes | Broken:
        source = os.memfd_create("counts", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(source), "wb") as file:
                write_arrays(file, packed(self._snapshot))
            reader, writer = os.pipe()
            try:
                try:
                    order = self._owner.order(source, writer)
                    process = spawn(self._owner.module, [order.text()], pass_fds=(source, writer))
                finally:
                    os.close(writer)
                return self._heard(process, reader)
            finally:
                os.close(reader)
        finally:
            os.close(source)

    def _heard(self, process: subprocess.Popen[bytes], reader: int) -> bytes | Broken:
        """Everything it says until it closes the pipe, and its end."""
        self.group = self._owner.pid = process.pid
        try:
            content = self._read(reader)
            if isinstance(content, bytes):
                _await_exit(process.pid)
        finally:
            # The whole group, before its first process is reaped and the number may be given to another.
            kill_group(process.pid)
            code = process.wait()
            self._owner.pid = 0
        if isinstance(content, bytes) and code != 0:
            return Broken(f"the fitting worker died: {words(code)}")
        return content

    def _read(self, reader: int) -> bytes | Broken:
        most = LEAST_ROOM + PER_MODEL * len(self._snapshot.keys)
        until = time.monotonic() + self._owner.limit
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        content = bytearray()
        while (left := until - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            if self._stopped in ready:
                return Broken("the fitting worker was stopped")
            if reader in ready:
                piece = os.read(reader, _PIECE)
                if not piece:
                    return bytes(content)
                content += piece
                if len(content) > most:
                    return Broken(f"the fitting worker said more than {most} bytes")
        return Broken(f"the fitting worker took longer than {self._owner.limit:g} s")


def _await_exit(pid: int) -> None:
    """Wait a little for a process that has said all it had to say, without reaping it."""
    with suppress(OSError):
        watch = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            poll.poll(_LAST_WORDS * 1000)
        finally:
            os.close(watch)
