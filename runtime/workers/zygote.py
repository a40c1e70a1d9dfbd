"""The front's hold on a zygote: a process that imported what workers need, and of which workers are copies.

Belongs here: one zygote (`Zygote`) and its workers (`Forkling`). Never: when to have one (`zygotes.py`).
The process itself is `runtime/worker/zygote.py`; what the two say to each other is `births.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio import CancelScope

from runtime.workers.births import (
    BrokenPacket,
    Bury,
    Ended,
    Fork,
    Forked,
    NotForked,
    Order,
    Prepare,
    Report,
    Standing,
    Unfit,
    ZygoteSetup,
    receive,
    reports,
    send,
)
from runtime.workers.patience import settled
from runtime.workers.spawn import kill_group, reap_group, spawn, words
from runtime.workers.start import NotStarted, Spawned

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.workers.channel import WorkerSetup
    from runtime.workers.start import Descriptors

MODULE = "runtime.worker.zygote"
_TOLD_SOON = 0.4
"""Seconds that a zygote may take to say how a worker ended, after the kernel said that it did; within `life`'s 0.5."""
_FORKED_SOON = 30.0
"""Seconds that a standing zygote may take for one fork; behind an import it can be some, on a busy machine many."""
_FORKED_SOON_SUSPECT = 3.0
"""The same for one that was silent when it had something to say."""


class Forkling:
    """A worker that a zygote made: not our child, but ours to kill and to watch. A `start.Started`."""

    def __init__(self, zygote: Zygote, pid: int, pidfd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._zygote = zygote
        self._pidfd = pidfd
        self.pid = pid
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # How it ended is its parent's to say; one that is gone or stuck can't.
        self._loop.call_later(0 if self._zygote.gone else _TOLD_SOON, self._untold)

    def _untold(self) -> None:
        if self.ended.done():
            return
        kill_group(self.pid)
        self._zygote.suspect = True
        self.tell(self._zygote.gone or "for a reason that its zygote does not tell")

    def tell(self, how: str) -> None:
        """Say how it ended, in words; the first word counts."""
        if not self.ended.done():
            self._loop.remove_reader(self._pidfd)
            self.ended.set_result(how)

    def orphan(self) -> None:
        """Its zygote is gone, and the kernel ends it too; what became of it is known in a moment."""
        self.kill()
        if not self.ended.done() and select.select([self._pidfd], [], [], 0)[0]:
            self._on_exit()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """See `Started.kill`."""
        if self.ended.done():
            return
        kill_group(self.pid, number)
        with suppress(ProcessLookupError):  # it may not have made its group yet
            signal.pidfd_send_signal(self._pidfd, number)

    def drop(self) -> None:
        """Nobody wants it: end it and let go of it, without waiting."""
        self.kill()
        self.ended.add_done_callback(lambda _: self._let_go())

    def _let_go(self) -> None:
        self._zygote.bury(self.pid)
        os.close(self._pidfd)

    async def bury(self) -> None:
        """See `Started.bury`. Only now its number may be given to another process."""
        self._let_go()
        await reap_group(self.pid)

    def __repr__(self) -> str:
        return f"<Forkling pid {self.pid} {self.ended.result() if self.ended.done() else 'runs'}>"


class Zygote:
    """One zygote process. `gone` says in words that, and how, it ended; empty while it runs. `unfit`: it never will do.

    `standing` becomes None when copies can be made, or the reason why none can. Raises `OSError` if it can't start.
    """

    def __init__(self, core: str, kinds: tuple[str, ...], on_retired: Callable[[str, bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_retired = on_retired
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Forkling]] = {}
        self._workers: dict[int, Forkling] = {}
        self.prepared = False
        self.suspect = False
        self.retired = False
        self.unfit = ""
        self.gone = ""
        self.standing: asyncio.Future[str | None] = self._loop.create_future()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                told = ZygoteSetup(core=core, parent=os.getpid(), orders_fd=theirs.fileno(), kinds=kinds)
                # On the loop's own thread: it dies with the thread that started it, and its workers with it.
                self._process = Spawned(
                    spawn(MODULE, [msgspec.json.encode(told).decode()], pass_fds=(theirs.fileno(),))
                )
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._on_report)
        self._process.ended.add_done_callback(lambda ended: self._on_gone(ended.result()))

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    # -- orders --------------------------------------------------------------------------------------

    async def fork(self, setup: WorkerSetup, fds: Descriptors) -> Forkling:
        """Make a worker. Raises `OSError`; cancelled, it leaves none."""
        number = next(self._ids)
        future = self._pending[number] = self._loop.create_future()
        patience = _FORKED_SOON_SUSPECT if self.suspect else _FORKED_SOON
        try:
            self._send(Fork(number, setup), fds)
            with anyio.fail_after(patience):
                return await asyncio.shield(future)
        except TimeoutError:
            self.retire("it did not answer")
            msg = f"its zygote made no copy within {patience:g} s"
            raise NotStarted(msg) from None
        except asyncio.CancelledError:
            # What comes later than this is dropped by `_take`.
            if await settled(future, _TOLD_SOON) and future.exception() is None:
                unwanted = future.result()
                unwanted.drop()
                await settled(unwanted.ended)
            raise
        finally:
            self._pending.pop(number, None)
            self._end_if_idle()

    def prepare(self, kinds: tuple[str, ...]) -> None:
        """Import what building needs, and `transformers` models of these types, beside what its workers do."""
        self.prepared = True
        with suppress(OSError):
            self._send(Prepare(kinds))

    def bury(self, pid: int) -> None:
        """Have an ended worker collected; the last one of a retired zygote ends it."""
        self._workers.pop(pid, None)
        if not self.gone:
            with suppress(OSError):
                self._send(Bury(pid))
        self._end_if_idle()

    def retire(self, why: str, *, unfit: bool = False) -> None:
        """Make no more copies, and end with the last worker; `unfit` if that is for what it imported."""
        if not self.retired:
            self.retired = True
            self._on_retired(why, unfit)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.retired and not self._workers and not self._pending:
            self._process.kill()

    def _send(self, order: Order, fds: tuple[int, ...] = ()) -> None:
        if self.gone:
            raise NotStarted(self.gone)
        send(self._socket, order, fds)

    # -- reports -------------------------------------------------------------------------------------

    def _on_report(self) -> None:
        try:
            received = receive(self._socket, reports)
        except BlockingIOError:
            return
        except (BrokenPacket, OSError) as error:
            self._loop.remove_reader(self._socket.fileno())
            self.retire(f"broke the protocol: {error}")
            self._process.kill()
            return
        if received is None:
            self._loop.remove_reader(self._socket.fileno())
            self._process.kill()
            return
        self._take(*received)

    def _take(self, report: Report, fds: list[int]) -> None:
        self.suspect = False
        match report:
            case Standing():
                if not self.standing.done():
                    self.standing.set_result(None)
            case Unfit(reason):
                if self.standing.done():
                    self.retire(reason, unfit=True)
                else:
                    self.unfit = reason
                    self.standing.set_result(reason)
            case Forked(number, pid):
                self._made(number, pid, fds)
            case NotForked(number, reason):
                self._settle(number, NotStarted(reason))
            case Ended(pid, code):
                if (ended := self._workers.get(pid)) is not None:
                    ended.tell(words(code))
                else:
                    self.bury(pid)

    def _made(self, number: int, pid: int, fds: list[int]) -> None:
        """Hold on to a new worker, or end it if there is no descriptor for it or nobody waits for it."""
        if not fds:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # `Ended` follows, and its number is its own until then
            self._settle(number, NotStarted("no descriptor is free"))
            return
        worker = self._workers[pid] = Forkling(self, pid, fds[0])
        if not self._settle(number, worker):
            worker.drop()

    def _settle(self, number: int, outcome: Forkling | NotStarted) -> bool:
        """Answer a `fork`; False if nobody waits for it any more."""
        future = self._pending.get(number)
        if future is None or future.done():
            return False
        if isinstance(outcome, NotStarted):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return True

    def _on_gone(self, how: str) -> None:
        self.retired = True
        self.gone = f"its zygote ended: {how}"
        self._loop.remove_reader(self._socket.fileno())
        self._drain()
        self._socket.close()
        if not self.standing.done():
            self.standing.set_result(self.gone)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(NotStarted(self.gone))
                future.exception()  # whoever asked may have left
        for worker in list(self._workers.values()):
            worker.orphan()

    def _drain(self) -> None:
        """Take what it said before it ended: a worker made by its last act must be known, to be ended."""
        with suppress(BrokenPacket, OSError):
            while (received := receive(self._socket, reports)) is not None:
                self._take(*received)

    async def close(self) -> None:
        """End it and whatever it made; returns when it is gone."""
        self._process.kill()
        await settled(self._process.ended)
        with CancelScope(shield=True):
            await self._process.bury()

    def __repr__(self) -> str:
        return f"<Zygote pid {self.pid} {self.gone or f'{len(self._workers)} workers'}>"
