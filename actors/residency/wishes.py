"""What is wanted but not there: one wish per model (single flight), its waiters, and their order.

Pure books, like the ledger: no decision about room, no clock, no I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.residency.model import Trigger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.actor import Job, Reply
    from actors.messages import Grant
    from actors.residency.ledger import Resident
    from actors.residency.model import Model, ModelKey, Ticket

RANK = {Trigger.DEMAND: 0, Trigger.ADMIN: 0, Trigger.RECOVERY: 1, Trigger.WARM: 2, Trigger.PREFETCH: 3}
"""Lower goes first. Someone waits for the first two."""

PATIENCE_OF_AGE = 30.0
"""Seconds after which a wish is served in order of age even where the shortest goes first."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One ticket in the queue. Times in loop seconds."""

    ticket: Ticket
    request: str
    reply: Reply[Grant]
    since: float
    deadline: float | None
    patience: float | None

    @property
    def due(self) -> float:
        """The earlier of deadline and patience; infinite if there is neither."""
        return min(math.inf if end is None else end for end in (self.deadline, self.patience))


@dataclass(slots=True, eq=False)
class Watcher:
    """Someone who wants a model resident without leasing it."""

    reply: Reply[None]
    trigger: Trigger
    expires: float | None
    pin: bool | None
    hold_until: float | None = None
    firm: bool = False


@dataclass(slots=True, eq=False)
class Wish:
    """A model that should become resident. `load` names its load, also while that still waits for room."""

    load: str
    model: Model
    trigger: Trigger
    priority: int
    order: int
    since: float
    request: str = ""
    waiters: dict[Ticket, Waiter] = field(default_factory=dict["Ticket", Waiter])
    watchers: list[Watcher] = field(default_factory=list[Watcher])
    row: Resident | None = None
    job: Job | None = None
    started: float = 0.0
    kept: bool = False
    """It goes on without anybody: a waiter ran out of the server's patience, or a lost resident comes back."""
    given_up: bool = False
    lost: bool = False
    """The place ended under its load."""
    anticipated: bool = False
    """It began ahead of demand; a demand joining it is a late prefetch."""
    retried: bool = False
    far: bool = False
    """Its load began as one from beyond this machine."""
    victims: frozenset[ModelKey] | None = None
    """While only foresight wants it: the sole residents that may leave for it."""
    blocked: str = ""

    @property
    def key(self) -> ModelKey:
        """The model's key."""
        return self.model.key

    @property
    def loading(self) -> bool:
        """Its load is under way (or being undone)."""
        return self.row is not None

    @property
    def urgent(self) -> bool:
        """Someone waits for it."""
        return RANK[self.trigger] == 0

    @property
    def wanted(self) -> bool:
        """Anybody still wants it, or it is kept for the server's own sake."""
        return bool(self.waiters or self.watchers or self.kept)

    def __repr__(self) -> str:
        doing = "loading" if self.loading else f"queued {self.blocked}".strip()
        return f"<Wish {self.load} {self.key} {self.trigger} {doing} waiters={len(self.waiters)}>"


class Wishes:
    """Every wish, by model; the waiters, by ticket; the deadlines, by time."""

    def __init__(self, *, shortest_first: bool = False) -> None:
        self._shortest_first = shortest_first
        self._by_key: dict[ModelKey, Wish] = {}
        self._by_load: dict[str, Wish] = {}
        self._by_ticket: dict[Ticket, Wish] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._numbers = itertools.count()

    def of(self, key: ModelKey) -> Wish | None:
        """The live wish for a model (a given-up load is none)."""
        return self._by_key.get(key)

    def waited_by(self, ticket: Ticket) -> Wish | None:
        """The wish that a ticket waits for."""
        return self._by_ticket.get(ticket)

    def under(self, load: str) -> Wish | None:
        """The wish whose load this is, given up or not."""
        return self._by_load.get(load)

    def make(
        self, load: str, model: Model, trigger: Trigger, *, now: float, priority: int = 0, request: str = ""
    ) -> Wish:
        """Begin a wish; there must be none for this model."""
        assert model.key not in self._by_key, model.key
        wish = Wish(load, model, trigger, priority, next(self._numbers), now, request)
        self._by_key[model.key] = wish
        return wish

    def raise_to(self, wish: Wish, trigger: Trigger, *, priority: int = 0, request: str = "") -> Trigger | None:
        """Take over a higher urgency; returns the old one if it was lower."""
        if priority and (not wish.priority or priority < wish.priority):
            wish.priority = priority
        if RANK[trigger] >= RANK[wish.trigger]:
            return None
        was, wish.trigger = wish.trigger, trigger
        wish.request = wish.request or request
        return was

    def join(self, wish: Wish, waiter: Waiter) -> None:
        """Queue a waiter."""
        wish.waiters[waiter.ticket] = waiter
        self._by_ticket[waiter.ticket] = wish
        end = waiter.due
        if end < math.inf:
            heapq.heappush(self._deadlines, (end, next(self._numbers), waiter.ticket))

    def leave(self, ticket: Ticket) -> tuple[Wish, Waiter] | None:
        """Take a waiter out; None if the ticket does not wait."""
        wish = self._by_ticket.pop(ticket, None)
        if wish is None:
            return None
        return wish, wish.waiters.pop(ticket)

    def begin(self, wish: Wish, row: Resident, job: Job, *, now: float, far: bool = False) -> None:
        """Its load starts; `far` says on which channel."""
        wish.far = far
        wish.row, wish.job, wish.started, wish.blocked = row, job, now, ""
        self._by_load[wish.load] = wish

    def requeue(self, wish: Wish, load: str) -> None:
        """Its load ended without success and may be tried once more, under another name."""
        self._by_load.pop(wish.load, None)
        wish.load = load
        wish.row = wish.job = None

    def give_up(self, wish: Wish) -> None:
        """Stop wanting it while its load is still being undone; a new wish may begin meanwhile."""
        wish.given_up = True
        if self._by_key.get(wish.key) is wish:
            del self._by_key[wish.key]

    def end(self, wish: Wish) -> None:
        """It is over, one way or the other. Waiters still in it leave the index."""
        self._by_load.pop(wish.load, None)
        if self._by_key.get(wish.key) is wish:
            del self._by_key[wish.key]
        for ticket in wish.waiters:
            self._by_ticket.pop(ticket, None)

    def overdue(self, now: float) -> Iterator[Waiter]:
        """Waiters whose deadline or patience has passed; each is told once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, ticket = heapq.heappop(self._deadlines)
            wish = self._by_ticket.get(ticket)
            # Its deadline of a former stay in the queue says nothing about a ticket that came back.
            if wish is not None and wish.waiters[ticket].due <= now:
                yield wish.waiters[ticket]

    @property
    def next_deadline(self) -> float:
        """Loop seconds of the earliest deadline; infinite if there is none."""
        while self._deadlines and self._deadlines[0][2] not in self._by_ticket:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def queued(self, now: float, tier_bytes: dict[ModelKey, int] | None = None) -> list[Wish]:
        """Wishes that wait for room, in the order in which they are served.

        Urgency first, then the caller's priority (1 before 2, none as the last of the named ones), then the shortest
        if this tier reads from a disk (unless the wish is old), then age.
        """
        sizes = tier_bytes if tier_bytes is not None and self._shortest_first else {}

        def place(wish: Wish) -> tuple[int, float, float, int]:
            size = 0 if now - wish.since > PATIENCE_OF_AGE else sizes.get(wish.key, 0)
            return RANK[wish.trigger], wish.priority or math.inf, size, wish.order

        return sorted((wish for wish in self._by_key.values() if not wish.loading), key=place)

    def all(self) -> list[Wish]:
        """Every live wish."""
        return list(self._by_key.values())

    def begun(self) -> list[Wish]:
        """Wishes whose loads are under way, given-up ones included."""
        return list(self._by_load.values())

    @property
    def open(self) -> int:
        """Live wishes."""
        return len(self._by_key)

    @property
    def queueing(self) -> bool:
        """Whether any wish waits for room."""
        return any(wish.row is None for wish in self._by_key.values())

    @property
    def loading(self) -> int:
        """Loads under way, given-up ones included: they still occupy their channel."""
        return len(self._by_load)

    def loading_from(self, *, far: bool) -> int:
        """The same, on one channel: from beyond this machine, or from its disk."""
        return sum(wish.far is far for wish in self._by_load.values())

    @property
    def waiting(self) -> int:
        """Tickets in all queues."""
        return len(self._by_ticket)

    def check(self) -> None:
        """Recompute the indices. Raises `AssertionError`."""
        tickets = {ticket: wish for wish in self._by_key.values() for ticket in wish.waiters}
        assert tickets == self._by_ticket, "a waiter is in no live wish"
        for load, wish in self._by_load.items():
            assert wish.load == load, f"{wish!r} under {load}"
            assert wish.given_up != (self._by_key.get(wish.key) is wish), repr(wish)

    def __repr__(self) -> str:
        return f"<Wishes {len(self._by_key)} models, {self.loading} loading, {self.waiting} waiting>"
