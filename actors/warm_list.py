"""The models that should be resident now: loaded at boot, in order, within the room that is free.

A broken entry is reported and tried again later; it never wedges those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

import anyio

from actors.actor import Actor, Ref
from actors.dispatcher import Dispatcher, Resolve
from actors.errors import ForeloadError
from actors.events import WarmSettled
from actors.messages import Ensure
from actors.residency.model import ModelKey, Trigger, key_of

if TYPE_CHECKING:
    from actors.clock import Clock
    from actors.dispatcher import Order
    from actors.ports import Emit

RETRY = 5.0
"""Seconds until a failed entry is tried again, unless its error names another pause."""


@dataclass(frozen=True, slots=True)
class WarmEntry:
    """One model of the list; no version means the highest."""

    name: str
    version: str | None = None
    required: bool = True


@dataclass(frozen=True, slots=True)
class Came:
    """An entry is resident."""

    index: int
    key: ModelKey


@dataclass(frozen=True, slots=True)
class Missed:
    """An entry could not be made resident."""

    index: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Again:
    """Time to try an entry once more."""

    index: int


WarmMessage: TypeAlias = Came | Missed | Again


@dataclass(frozen=True, slots=True)
class WarmState:
    """How far the list is: entries that were resident at least once, and why the others are not."""

    done: bool
    missing: tuple[str, ...]
    causes: tuple[str, ...]


class WarmList(Actor[WarmMessage]):
    """Asks for the entries one after another; `snapshot()` says whether every required one came."""

    def __init__(self, entries: tuple[WarmEntry, ...], *, dispatcher: Ref[Order], clock: Clock, emit: Emit) -> None:
        super().__init__()
        self._entries = entries
        self._dispatcher = dispatcher
        self._clock = clock
        self._emit = emit
        self._came: set[int] = set()
        self._causes: dict[int, str] = {}
        self._retry_only: set[int] = set()

    def started(self) -> None:
        """Begin with the first."""
        self._bring(0)

    def receive(self, message: WarmMessage) -> object:
        """Handle one message."""
        match message:
            case Came(index, key):
                self._came.add(index)
                self._causes.pop(index, None)
                self._emit(WarmSettled(self._clock.now(), key, self._entries[index].required, ready=True))
                self._next(index)
            case Missed(index, error):
                self._missed(index, error)
            case Again(index):
                self._bring(index)
            case _:
                assert_never(message)
        return None

    def snapshot(self) -> WarmState:
        """What is still missing of the required entries."""
        missing = [
            (entry.name, self._causes.get(index, "loading"))
            for index, entry in enumerate(self._entries)
            if entry.required and index not in self._came
        ]
        return WarmState(not missing, tuple(name for name, _ in missing), tuple(cause for _, cause in missing))

    def _missed(self, index: int, error: Exception) -> None:
        entry = self._entries[index]
        cause = error.code if isinstance(error, ForeloadError) else type(error).__name__
        if self._causes.get(index) != cause:
            key = self._key(entry)
            self._emit(WarmSettled(self._clock.now(), key, entry.required, ready=False, cause=f"{cause}: {error}"))
        self._causes[index] = cause
        pause = getattr(error, "retry_after", None) or RETRY

        async def later() -> WarmMessage:
            await anyio.sleep(pause)
            return Again(index)

        self.spawn(later, failed=lambda exc: Missed(index, exc))
        self._next(index)

    def _key(self, entry: WarmEntry) -> ModelKey:
        """The model that was tried; as the entry names it if there is none."""
        owner = self._dispatcher.owner
        model = owner.find(entry.name, entry.version) if isinstance(owner, Dispatcher) else None
        if model is not None:
            return model.key
        return ModelKey(entry.name) if entry.version is None else key_of(entry.name, entry.version)

    def _next(self, index: int) -> None:
        """The first pass goes through the list in order; what is tried again later goes by itself."""
        if index in self._retry_only:
            return
        self._retry_only.add(index)
        if index + 1 < len(self._entries):
            self._bring(index + 1)

    def _bring(self, index: int) -> None:
        if index >= len(self._entries):
            return
        entry = self._entries[index]

        async def bring() -> WarmMessage:
            owner = self._dispatcher.owner
            model = owner.find(entry.name, entry.version) if isinstance(owner, Dispatcher) else None
            if model is None:
                model = await self._dispatcher.ask(Resolve(entry.name, entry.version))
            owner = self._dispatcher.owner
            if not isinstance(owner, Dispatcher):
                raise ForeloadError("the dispatcher is restarting", retry_after=0.5)
            await owner.place(model).ask(Ensure(model, Trigger.WARM))
            return Came(index, model.key)

        self.spawn(bring, failed=lambda exc: Missed(index, exc))

    def __repr__(self) -> str:
        return f"<WarmList {len(self._came)}/{len(self._entries)} resident>"
