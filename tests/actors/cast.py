"""One small actor that can do everything a kernel test needs, and a stage to run it on."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from actors.actor import Actor, Ref, Reply, Request, Urgent
from actors.clock import LoopClock
from actors.errors import Busy
from actors.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.actor import Job
    from actors.events import Event


@dataclass(frozen=True)
class Note:
    """Write a word down."""

    word: str


@dataclass(frozen=True)
class Alarm(Urgent):
    """Write a word down, before anything ordinary."""

    word: str


@dataclass(frozen=True)
class Read(Request[tuple[str, ...]]):
    """Every word so far."""


@dataclass(frozen=True)
class Hold(Request[str]):
    """Answered by the next `Settle`."""


@dataclass(frozen=True)
class Settle:
    """Answer everybody who holds."""

    word: str


@dataclass(frozen=True)
class Decline(Request[str]):
    """Answered with `Busy`; `late` after the reply was deferred."""

    late: bool = False


@dataclass(frozen=True)
class Break(Request[str]):
    """Crash."""

    why: str = "broken on purpose"


@dataclass(frozen=True)
class Panic(Urgent):
    """Crash, before anything ordinary."""

    why: str = "panic"


@dataclass(frozen=True)
class Work:
    """Start a job of so many seconds that ends with a word, or raises it."""

    seconds: float
    word: str
    fails: bool = False
    stubborn: bool = False
    tells_cancelled: bool = True


@dataclass(frozen=True)
class CancelWork:
    """Cancel every job."""


class Scribe(Actor[Any]):
    """Writes down what it is told, in order."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self.journal = journal
        self.holding: list[Reply[str]] = []
        self.jobs: list[Job] = []

    def started(self) -> None:
        self.journal.append(f"life {self.me.incarnation}")

    def receive(self, message: Any) -> object:
        match message:
            case Note(word) | Alarm(word):
                self.journal.append(word)
            case Read():
                return tuple(self.journal)
            case Hold():
                self.holding.append(self.defer())
            case Settle(word):
                self.settle(word)
            case Decline(late):
                if late:
                    self.holding.append(self.defer())
                raise Busy("not now", retry_after=2.0)
            case Break(why) | Panic(why):
                raise ValueError(why)
            case Work():
                self.begin(message)
            case CancelWork():
                self.cancel()
        return None

    def settle(self, word: str) -> None:
        for reply in self.holding:
            reply.settle(word)
        self.holding.clear()

    def begin(self, order: Work) -> None:
        job = self.spawn(
            lambda: self.work(order),
            failed=lambda exc: Note(f"failed {exc}"),
            cancelled=Note(f"cancelled {order.word}") if order.tells_cancelled else None,
        )
        self.jobs.append(job)

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    async def work(self, order: Work) -> Any:
        with anyio.CancelScope(shield=order.stubborn):
            await anyio.sleep(order.seconds)
        if order.fails:
            raise OSError(order.word)
        return Note(f"done {order.word}")


@dataclass
class Stage:
    """A running scribe and what it wrote."""

    ref: Ref[Any]
    supervisor: Supervisor
    journal: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@asynccontextmanager
async def stage(*, intensity: int = 5, period: float = 30.0) -> AsyncIterator[Stage]:
    """Supervise one scribe called `scribe`, alive when the block begins."""
    journal: list[str] = []
    events: list[Event] = []
    async with Supervisor(emit=events.append, clock=LoopClock(), intensity=intensity, period=period) as supervisor:
        ref = supervisor.start("scribe", lambda: Scribe(journal))
        await anyio.sleep(0.001)
        yield Stage(ref, supervisor, journal, events)
