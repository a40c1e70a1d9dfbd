"""The worker process: the main thread is the device thread, one thread takes control orders, a few load.

It owns signals, descriptors and threads of this process. Models are the core's; torch is imported by it alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from actors.errors import ForeloadError, OutOfMemory
from actors.errors import LoadFailed as LoadError
from runtime.workers.bells import BrokenBell
from runtime.workers.channel import (
    BrokenFrame,
    Cancel,
    Evict,
    EvictDone,
    Failed,
    HeldModel,
    Inventory,
    Listing,
    Load,
    LoadDone,
    LoadUndone,
    Ping,
    Pong,
    Ready,
    ReleaseHost,
    Stop,
    WorkerChannel,
    WorkerSetup,
)
from runtime.workers.device_loop import CorePort, DeviceLoop, core_of, recipe_in, release_host, report
from runtime.workers.fault import Fault
from runtime.workers.heap import keep_pages, spare_collections
from runtime.workers.ring import FrontGone, WorkerRing
from runtime.workers.turns import patient, short_slice, short_turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

    from runtime.workers.channel import Order, Reply

LOAD_THREADS = 4
EXIT_BROKEN = 70
"""The core can't go on, or the front broke the protocol (`EX_SOFTWARE`)."""
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the front ends, however it ends; exit now if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


class Control:
    """Takes orders on a thread of its own until the front is gone or says stop; then it calls `end`."""

    def __init__(self, core: CorePort, channel: WorkerChannel, end: Callable[[], None]) -> None:
        self._core = core
        self._channel = channel
        self._end = end
        self._loads: dict[int, threading.Event] = {}
        self._pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="load", initializer=patient)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Say hello and take orders."""
        self._core.listen(self._channel.write)
        self._channel.write(Ready(os.getpid()))
        self._thread.start()

    def _run(self) -> None:
        patient()
        try:
            while (order := self._channel.read()) is not None and not isinstance(order, Stop):
                self._take(order)
        except (BrokenFrame, msgspec.DecodeError) as error:
            report("control_broken", error)
        finally:
            self._end()

    def _take(self, order: Order) -> None:
        match order:
            case Load():
                cancelled = self._loads[order.id] = threading.Event()
                self._pool.submit(self._load, order, cancelled)
            case Cancel():
                if (cancelled_load := self._loads.get(order.load)) is not None:
                    cancelled_load.set()
            case ReleaseHost():
                release_host(self._core, order.fingerprint)
            case Evict() | Inventory() | Ping():
                # One thread, so these never run beside each other.
                self._channel.write(self._guarded(order.id, lambda: self._answer(order)))
            case Stop():
                self._end()

    def _answer(self, order: Evict | Inventory | Ping) -> Reply:
        match order:
            case Evict():
                evicted = self._core.evict(order.key)
                return EvictDone(order.id, evicted.returned, evicted.leaked)
            case Inventory():
                held = self._core.inventory()
                return Listing(
                    order.id, tuple(HeldModel(one.key, one.fingerprint, one.resident, one.in_flight) for one in held)
                )
            case Ping():
                return Pong(order.id, self._core.prepared())

    def _load(self, order: Load, cancelled: threading.Event) -> None:
        def work() -> Reply:
            if cancelled.is_set():
                return LoadUndone(order.id)
            loaded = self._core.load(order.spec, cancelled.is_set)
            return LoadDone(
                order.id,
                loaded.resident,
                tuple((name, took) for name, took in loaded.steps),
                loaded.reused,
                recipe_in(loaded),
            )

        reply = self._guarded(order.id, work, cancelled, order.spec.key)
        self._loads.pop(order.id, None)
        self._channel.write(reply)

    @staticmethod
    def _guarded(
        name: int, work: Callable[[], Reply], cancelled: threading.Event | None = None, model: str | None = None
    ) -> Reply:
        """Turn whatever `work` raises into a reply; a front that gets none would wait for its whole time limit."""
        try:
            return work()
        except ForeloadError as error:
            return Failed(name, Fault.of(error))
        except MemoryError as error:
            report("order_failed", error, model=model)
            return Failed(name, Fault.of(OutOfMemory("the host ran out of memory", model=model)))
        except Exception as error:  # noqa: BLE001 - a core may raise what it likes once a load is cancelled
            if cancelled is not None and cancelled.is_set():
                return LoadUndone(name)
            report("order_failed", error, model=model)
            message = f"unexpected {type(error).__name__} in the worker; its log has more"
            return Failed(name, Fault.of(LoadError(message, model=model)))


def _leave(code: int) -> NoReturn:
    # Interpreter and torch teardown can hang or crash beside running threads, and frees nothing the kernel would not.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(setup: WorkerSetup) -> int:
    """Serve until told to end; the exit code."""
    keep_pages()
    ring = WorkerRing(memory_fd=setup.memory_fd, bell_fd=setup.bell_fd, slots=setup.slots, slot_bytes=setup.slot_bytes)
    channel = WorkerChannel(socket.socket(fileno=setup.control_fd))
    core = core_of(
        setup.core,
        setup.device,
        setup.allow,
        setup.threads,
        pinned=setup.pinned,
        preprocess=setup.preprocess,
        skeletons=setup.skeletons,
    )
    loop = DeviceLoop(core, ring)

    def on_term(_number: int, _frame: FrameType | None) -> None:
        loop.end()

    signal.signal(signal.SIGTERM, on_term)
    short_turns()
    spare_collections()
    Control(core, channel, loop.end).start()
    short_slice()
    try:
        return 0 if loop.run() else EXIT_BROKEN
    except FrontGone:
        return 0
    except BrokenBell as error:
        report("ring_broken", error)
        return EXIT_BROKEN


def serve(setup: WorkerSetup) -> NoReturn:
    """Be a worker process from here on, whoever started it; `setup.parent` is the process to die with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the front decides
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    die_with(setup.parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold weights and inputs
    try:
        code = run(setup)
    except Exception as error:  # noqa: BLE001 - the last frame of the process: say why, then leave
        report("worker_failed", error)
        code = EXIT_BROKEN
    _leave(code)


def main() -> NoReturn:
    """Entry of `python -m runtime.worker.main '<WorkerSetup as JSON>'`."""
    serve(msgspec.json.decode(sys.argv[1], type=WorkerSetup))


if __name__ == "__main__":
    main()
