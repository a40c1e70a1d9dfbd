"""The turn of a device thread, the same in a worker process and in a thread: take calls, submit them, step the core.

`CorePort` is what it needs of `runtime.worker.core`. No torch here, no sockets, no event loop.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from actors.errors import ForeloadError, InferenceFailed
from runtime.workers.bells import SkipBell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.workers.pipelines import Prepared, PreprocessLimits
    from runtime.workers.port import Answer, Laid, LoadSpec, Note
    from runtime.workers.ring import RingCall

FAILED_STEPS = 3
"""Steps that may fail in a row before the loop ends: a core that only fails would otherwise spin for ever."""


class Loaded(Protocol):
    """How a load went; see `channel.LoadDone`."""

    @property
    def resident(self) -> int:
        """Bytes measured."""
        ...

    @property
    def steps(self) -> Sequence[tuple[str, float]]:
        """Phases in order with their seconds."""
        ...

    @property
    def reused(self) -> bool:
        """True if an existing skeleton was bound."""
        ...


def recipe_in(loaded: Loaded) -> bytes:
    """The recipe of a slab that a load gave; a core that knows of none need not have the field."""
    return getattr(loaded, "recipe", b"")


class Evicted(Protocol):
    """How an eviction went, in bytes."""

    @property
    def returned(self) -> int:
        """Bytes measured as free again."""
        ...

    @property
    def leaked(self) -> int:
        """Bytes that stay away."""
        ...


class Resident(Protocol):
    """One model that the core holds."""

    @property
    def key(self) -> str:
        """`name@version`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of what it is made of."""
        ...

    @property
    def resident(self) -> int:
        """Bytes measured."""
        ...

    @property
    def in_flight(self) -> int:
        """Calls submitted and not answered."""
        ...


class Submission(Protocol):
    """A call that the core took."""

    def cancel(self) -> object:
        """Leave it out if it has not started. True: `done` will never be called for it; otherwise it will."""
        ...


class CorePort(Protocol):
    """The models of one device. `submit` and `step` belong to the device thread, the rest to any."""

    def load(self, spec: LoadSpec, cancelled: Callable[[], bool]) -> Loaded:
        """Make a model callable. Raises `ForeloadError`, or anything once `cancelled()`; nothing is left then."""
        ...

    def evict(self, key: str) -> Evicted:
        """Let go of it."""
        ...

    def release_host(self, fingerprint: str) -> None:
        """Drop the mapping of its weights."""
        ...

    def inventory(self) -> Sequence[Resident]:
        """What is held."""
        ...

    def listen(self, tell: Callable[[Note], None]) -> None:
        """Hear of compilations, from any thread."""
        ...

    def submit(
        self,
        key: str,
        body: memoryview,
        json_length: int | None,
        done: Callable[[Answer | Laid | ForeloadError], None],
    ) -> Submission:
        """Take a call; `done` is told once, from any thread. Raises `ForeloadError` instead."""
        ...

    def attend(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, once `step` has something to run that neither a call nor `due` announced."""
        ...

    def prepared(self) -> Prepared:
        """How much work on inputs that come as files was shared."""
        ...

    def due(self) -> float | None:
        """Seconds until `step` has something to run: 0 now, more while a batch fills, None without calls."""
        ...

    def step(self) -> None:
        """Run one batch. An exception with a true `fatal` says that the device can't go on."""
        ...


class Inbox(Protocol):
    """Where calls come from and answers go: a ring, or a queue between threads."""

    def wait(self, timeout: float | None) -> Sequence[RingCall | SkipBell]:
        """All bells there are; None waits for one, or for `wake`."""
        ...

    def wake(self) -> None:
        """End a `wait` from outside."""
        ...

    def answer(self, slot: int, generation: int, answer: Answer | Laid) -> None:
        """Answer a call."""
        ...

    def fail(self, slot: int, generation: int, error: ForeloadError) -> None:
        """Answer a call with an error."""
        ...

    def flush(self) -> None:
        """Deliver what was answered."""
        ...


def core_of(
    where: str,
    device: str,
    allow: tuple[str, ...],
    threads: int,
    *,
    pinned: int = 0,
    preprocess: PreprocessLimits | None = None,
    skeletons: str = "",
) -> CorePort:
    """Build the core named `package.module:factory`. Raises whatever importing or building it raises."""
    module, _, name = where.partition(":")
    factory = getattr(importlib.import_module(module), name)
    more: dict[str, object] = {}
    if pinned:  # only a device with memory of its own has any use for it, and only its core takes it
        more["pinned"] = pinned
    if skeletons:
        more["skeletons"] = skeletons
    return cast("CorePort", factory(device, allow=allow, threads=threads, preprocess=preprocess, **more))


def report(event: str, error: BaseException | None = None, **fields: object) -> None:
    """Write one JSON line for an operator to standard error."""
    line: dict[str, object] = {"event": event, "level": "error", **fields}
    if error is not None:
        line["error"] = f"{type(error).__name__}: {error}"
        line["traceback"] = "".join(traceback.format_exception(error))
    sys.stderr.write(json.dumps(line, default=str) + "\n")
    sys.stderr.flush()


def release_host(core: CorePort, fingerprint: str) -> None:
    """Drop the mapping of weights that left the host tier. Never raises: nobody waits for it, and orders follow."""
    try:
        core.release_host(fingerprint)
    except Exception as error:  # noqa: BLE001 - a core may raise what it likes
        report("release_failed", error, fingerprint=fingerprint)


class DeviceLoop:
    """Runs on the device thread until `end`, or until the core can't go on."""

    def __init__(self, core: CorePort, inbox: Inbox) -> None:
        self._core = core
        self._inbox = inbox
        self._open: dict[tuple[int, int], Submission | None] = {}
        self._thread = 0
        self._ending = threading.Event()
        core.attend(inbox.wake)

    def end(self) -> None:
        """Stop after the batch under way; safe from any thread and from a signal."""
        self._ending.set()
        self._inbox.wake()

    def run(self) -> bool:
        """Serve. True if it was told to end, False if the core can't go on; whatever `wait` raises goes through."""
        self._thread = threading.get_ident()
        failed = 0
        while not self._ending.is_set():
            for bell in self._inbox.wait(self._core.due()):
                if isinstance(bell, SkipBell):
                    self._skip(bell)
                else:
                    self._submit(bell)
            failed = 0 if self._step() else failed + 1
            self._inbox.flush()
            if failed >= FAILED_STEPS:
                return self._ending.is_set()
        return True

    def _step(self) -> bool:
        due = self._core.due()
        if due is None or due > 0:
            return True
        try:
            self._core.step()
        except Exception as error:
            # The device thread must outlive a surprise that the core can live with.
            fatal = bool(getattr(error, "fatal", False))
            report("step_failed", error, fatal=fatal)
            if fatal:
                raise
            return False
        return True

    def _submit(self, call: RingCall) -> None:
        name = (call.slot, call.generation)
        self._open[name] = None
        try:
            submission = self._core.submit(call.key, call.body, call.json_length, partial(self._done, name))
        except ForeloadError as error:
            self._done(name, error)
        except Exception as error:  # noqa: BLE001 - one bad call must not end the others
            report("submit_failed", error, model=call.key)
            self._done(name, InferenceFailed("the worker could not take the call", model=call.key))
        else:
            if name in self._open:
                self._open[name] = submission

    def _skip(self, bell: SkipBell) -> None:
        name = (bell.slot, bell.generation)
        submission = self._open.get(name)
        if submission is not None and submission.cancel() is True:
            # Nobody reads the answer, but the slot has to come back.
            self._done(name, InferenceFailed("cancelled before it started"))

    def _done(self, name: tuple[int, int], outcome: Answer | Laid | ForeloadError) -> None:
        try:
            del self._open[name]
        except KeyError:
            return
        if isinstance(outcome, ForeloadError):
            self._inbox.fail(*name, outcome)
        else:
            self._inbox.answer(*name, outcome)
        if threading.get_ident() != self._thread:
            self._inbox.flush()

    def __repr__(self) -> str:
        return f"<DeviceLoop {len(self._open)} open>"
