"""The zygote process: imports what workers need, then makes workers by copying itself.

Belongs here: imports, fork, reaping. Never: models, operators' modules, threads, OpenMP, CUDA. Whatever ran here ran
in every worker that is copied from it, and a lock or a pool that exists at a fork is broken in the copy.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_char_p, c_int
from typing import TYPE_CHECKING

import msgspec

from runtime.worker.main import EXIT_BROKEN, die_with, serve
from runtime.workers.births import (
    BrokenPacket,
    Bury,
    Ended,
    Fork,
    Forked,
    NotForked,
    Prepare,
    Standing,
    Unfit,
    ZygoteSetup,
    orders,
    receive,
    send,
)
from runtime.workers.device_loop import report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType
    from typing import NoReturn

    from runtime.workers.channel import WorkerSetup

_PR_SET_NAME = 15
_THREAD_ENDS = 1.0
"""Seconds from the last line of a thread to its end in the kernel's books, at most."""
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def unfit(patience: float = 0.0) -> str:
    """Why no copy may be made of this process; empty if one may. A thread that is ending gets `patience` seconds."""
    deadline = time.monotonic() + patience
    while (threads := len(os.listdir("/proc/self/task"))) != 1:  # noqa: PTH208 - a count
        if time.monotonic() >= deadline:
            return f"{threads} threads run in it"
        time.sleep(0.001)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was initialised in it"
    return ""


@contextmanager
def no_blas_threads() -> Iterator[None]:
    """Keep OpenBLAS (numpy's, scipy's) from starting its threads while it is imported; for good, in copies too."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLAS_THREADS]
        else:
            os.environ[_BLAS_THREADS] = before


def rehearse(core: ModuleType | None) -> None:
    """Let a core's module import what it would import with its first model, if it offers that."""
    try:
        getattr(core, "rehearse", lambda: None)()
    except Exception as error:  # noqa: BLE001 - the worker will meet it again, and say so to whoever waits
        report("zygote_rehearsal_failed", error)


def import_kinds(kinds: Sequence[str]) -> None:
    """Import `transformers` with these model types. What can't be imported is left to the worker, who says why."""
    builders = importlib.import_module("runtime.worker.builders")
    for kind in kinds:
        try:
            builders.import_kind(kind)
        except Exception as error:  # noqa: BLE001 - third-party imports may raise anything
            report("zygote_import_failed", error, kind=kind)


class Zygote:
    """Serves orders until the front is gone; one thread but for imports, none but one when it forks."""

    def __init__(self, front: socket.socket) -> None:
        self._front = front
        self._core: ModuleType | None = None
        self._kinds: deque[tuple[str, ...]] = deque()
        self._importing: threading.Thread | None = None
        self._imported = os.eventfd(0, os.EFD_CLOEXEC)
        self._held_up: deque[tuple[Fork, list[int]]] = deque()
        self._workers: dict[int, int] = {}  # pidfd -> pid; an ended one is kept, unwatched, until it is buried
        self._poll = select.poll()
        self._poll.register(front, select.POLLIN)
        self._poll.register(self._imported, select.POLLIN)

    def stand(self, setup: ZygoteSetup) -> bool:
        """Import everything and say whether copies can be made."""
        try:
            with no_blas_threads():
                self._core = importlib.import_module(setup.core.partition(":")[0])
                import_kinds(setup.kinds)
            why = unfit()
        except Exception as error:  # noqa: BLE001 - the front must hear of it, whatever it is
            report("zygote_failed", error)
            why = f"{type(error).__name__} while importing"
        settle()
        send(self._front, Unfit(why) if why else Standing())
        return not why

    def serve(self) -> None:
        """Take orders and watch workers."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._imported:
                    self._prepared()
                elif fd != self._front.fileno():
                    self._ended(fd)
                elif not self._take():
                    return

    def _take(self) -> bool:
        received = receive(self._front, orders)
        if received is None:
            return False
        order, fds = received
        match order:
            case Fork():
                self._held_up.append((order, fds))
                self._catch_up()
            case Prepare(kinds):
                self._kinds.append(kinds)
                self._catch_up()
            case Bury(pid):
                self._bury(pid)
        return True

    def _catch_up(self) -> None:
        """Fork what waits, or else import what waits; never both at once."""
        if self._importing is not None:
            return
        while self._held_up:
            self._fork(*self._held_up.popleft())
        if self._kinds:
            # On a thread, so that the end of a worker is told meanwhile; it is gone again before the next fork.
            self._importing = threading.Thread(target=self._prepare, args=(self._kinds.popleft(),))
            self._importing.start()

    def _prepare(self, kinds: tuple[str, ...]) -> None:
        try:
            with no_blas_threads():
                rehearse(self._core)
                import_kinds(kinds)
        finally:
            os.eventfd_write(self._imported, 1)

    def _prepared(self) -> None:
        os.eventfd_read(self._imported)
        if self._importing is not None:
            self._importing.join()
            self._importing = None
        settle()
        if why := unfit(_THREAD_ENDS):
            send(self._front, Unfit(why))
        self._catch_up()

    def _fork(self, order: Fork, fds: list[int]) -> None:
        zygote = os.getpid()
        try:
            if why := unfit():
                send(self._front, Unfit(why))
            elif pid := self._forked():
                self._watch(pid)
                send(self._front, Forked(order.id, pid), (self._descriptor(pid),))
                return
            else:
                self._become(order.setup, zygote, fds)
        except OSError as error:
            why = os.strerror(error.errno or 0)
        finally:
            for fd in fds:
                os.close(fd)
        send(self._front, NotForked(order.id, why))

    def _watch(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # no descriptor left: nobody would know of its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._workers[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def _descriptor(self, pid: int) -> int:
        return next(fd for fd, held in self._workers.items() if held == pid)

    @staticmethod
    def _forked() -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        return os.fork()

    def _become(self, setup: WorkerSetup, zygote: int, fds: list[int]) -> NoReturn:
        """Be a worker from here on: in a session of its own, and with nothing of the zygote's but its imports."""
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._front.close()
            for fd in (self._imported, *self._workers):
                os.close(fd)
            for _, other in self._held_up:
                for fd in other:
                    os.close(fd)
            _name(f"worker {setup.device}")
            _diverge()
            memory, bell, control = fds
            serve(msgspec.structs.replace(setup, parent=zygote, memory_fd=memory, bell_fd=bell, control_fd=control))
        finally:
            os._exit(EXIT_BROKEN)

    def _ended(self, pidfd: int) -> None:
        """Say how a worker ended, after ending what is left of its group; its number stays taken until it is buried."""
        pid = self._workers.get(pidfd)
        found = None if pid is None else os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if pid is None or found is None:
            return  # buried a moment ago, and the descriptor perhaps a living worker's by now
        self._poll.unregister(pidfd)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        send(self._front, Ended(pid, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status))

    def _bury(self, pid: int) -> None:
        if pid not in self._workers.values():
            return
        pidfd = self._descriptor(pid)
        del self._workers[pidfd]
        with suppress(KeyError):  # if the front did not wait to be told of its end
            self._poll.unregister(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        os.close(pidfd)


def settle() -> None:
    """Collect what imports left and keep the collector away from the rest: it would write to every page of it."""
    gc.collect()
    gc.freeze()


def _name(name: str) -> None:
    """What process lists show; the command line stays the zygote's."""
    prctl = CDLL(None).prctl
    prctl.argtypes = (c_int, c_char_p)
    prctl(_PR_SET_NAME, name.encode())


def _diverge() -> None:
    """Give the copy random numbers of its own; Python's `random` sees to itself, and torch's seed is fixed anyway."""
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed()


def main() -> NoReturn:
    """Entry of `python -m runtime.worker.zygote '<ZygoteSetup as JSON>'`."""
    # The front decides when it ends; a service manager's SIGTERM for all is the front's and the workers' business.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    setup = msgspec.json.decode(sys.argv[1], type=ZygoteSetup)
    die_with(setup.parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _name("zygote")
    code = 0
    try:
        zygote = Zygote(socket.socket(fileno=setup.orders_fd))
        if zygote.stand(setup):
            zygote.serve()
    except (BrokenPacket, OSError) as error:
        report("zygote_broken", error)
        code = EXIT_BROKEN
    os._exit(code)


if __name__ == "__main__":
    main()
