"""How residents leave a tier: chosen or due, drained if leased, taken away by a job, and only then forgotten.

Decides nothing about who comes instead. Belongs to `TierCache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors import events as facts
from actors import messages as m
from actors.errors import WorkerDied
from actors.residency.model import Trigger
from actors.residency.policies import expires_at
from actors.residency.states import State

if TYPE_CHECKING:
    from actors.below import Below
    from actors.books import Books
    from actors.ports import Residence
    from actors.residency.ledger import Resident
    from actors.residency.model import ModelKey
    from actors.residency.wishes import Wish
    from actors.spawning import Spawn


@dataclass(slots=True, eq=False)
class Leaving:
    """An eviction: decided, draining or under way. `load` names the load that it makes room for."""

    id: str
    row: Resident
    reason: str
    since: float
    wish: Wish | None = None
    load: str = ""


class Departures:
    """Every eviction under way, by model."""

    def __init__(self, books: Books, residence: Residence, below: Below, spawn: Spawn[m.Command]) -> None:
        self._books = books
        self._residence = residence
        self._below = below
        self._spawn = spawn
        self._leaving: dict[ModelKey, Leaving] = {}

    # -- deciding ------------------------------------------------------------------------------------

    def retire(self, row: Resident, reason: str, now: float, wish: Wish | None = None) -> None:
        """Make a resident leave: at once if idle, after its leases otherwise."""
        if row.key in self._leaving:
            return
        leaving = Leaving(self._books.name("e"), row, reason, now, wish, wish.load if wish is not None else "")
        self._leaving[row.key] = leaving
        if row.idle:
            self._begin(leaving, now)
        else:
            self._books.ledger.drain(row.key, now=now)

    def resume(self, row: Resident, now: float) -> None:
        """Take a drain back."""
        del self._leaving[row.key]
        self._books.ledger.resume(row.key, now=now)

    def spare(self, wish: Wish, now: float) -> list[Resident]:
        """Residents that were only draining for this wish stay."""
        spared = [
            leaving.row
            for leaving in self._leaving.values()
            if leaving.wish is wish and leaving.row.state is State.DRAINING
        ]
        for row in spared:
            self.resume(row, now)
        return spared

    def shrink(self, wanted: int, reason: str, now: float) -> None:
        """Evict idle residents, the least valuable first, until so many bytes are on their way out."""
        wanted -= sum(each.row.size for each in self._leaving.values())
        for row in self._books.disposable(now):
            if wanted <= 0:
                return
            wanted -= row.size
            self.retire(row, reason, now)

    def expire(self, row: Resident, now: float) -> float | None:
        """Retire what is due; else say when to look again (loop seconds)."""
        end = expires_at(row) if row.state is State.RESIDENT else None
        if end is None:
            return None
        at, reason = end
        if at > now:
            return at
        if reason == "ttl_idle" and row.held(now):
            return row.held_until
        if reason == "ttl" or row.idle:
            self.retire(row, reason, now)
            return None
        # In use: the idle clock starts anew when it is given back.
        return now + (row.model.rules.ttl_idle or 1.0)

    def take_away(self, wish: Wish, now: float) -> None:
        """A given-up load finished all the same: its bytes are unloading already, and go."""
        assert wish.row is not None
        leaving = Leaving(self._books.name("e"), wish.row, "cancelled", now, load=wish.load)
        self._leaving[wish.key] = leaving
        self._send(leaving, now)

    # -- under way -----------------------------------------------------------------------------------

    def go_on(self, now: float) -> None:
        """Begin with what has drained meanwhile."""
        for leaving in tuple(self._leaving.values()):
            if leaving.row.state is State.DRAINING and leaving.row.idle:
                self._begin(leaving, now)

    def _begin(self, leaving: Leaving, now: float) -> None:
        row, books = leaving.row, self._books
        books.ledger.retire(row.key, now=now)
        if row.uses == 0 and row.trigger is Trigger.PREFETCH:
            books.emit(facts.PrefetchSettled(now, books.where, row.key, "wasted", now - row.loaded_at))
        for_model = leaving.wish.key if leaving.wish is not None else ""
        books.emit(
            facts.EvictionStarted(
                now, leaving.id, books.where, books.tier, row.key, leaving.reason, leaving.load, for_model
            )
        )
        self._send(leaving, now)

    def _send(self, leaving: Leaving, now: float) -> None:
        eviction, key = leaving.id, leaving.row.key
        leaving.since = now

        async def take_away() -> m.Command:
            return m.Gone(eviction, await self._residence.evict(key))

        self._spawn(take_away, failed=lambda exc: m.EvictBroke(eviction, exc))

    # -- over ----------------------------------------------------------------------------------------

    def gone(self, eviction: str, returned: int, leaked: int) -> None:
        """The bytes were observed free, but for those that leaked."""
        leaving = self._find(eviction)
        if leaving is None:
            return
        now = self._books.now()
        row = leaving.row
        del self._leaving[row.key]
        self._books.ledger.forget(row.key)
        self._books.leak(leaked)
        self._below.let_go(row.key)
        self._tell(leaving, returned, leaked, now)

    def broke(self, eviction: str, error: Exception) -> None:
        """Nobody knows what it still holds: count all of it as lost until the place itself is renewed."""
        leaving = self._find(eviction)
        if leaving is not None:
            self.gone(eviction, 0, 0 if isinstance(error, WorkerDied) else leaving.row.size)

    def lose(self, row: Resident, now: float) -> None:
        """The place ended, and this resident with it."""
        books = self._books
        leaving = self._leaving.pop(row.key, None)
        self._below.let_go(row.key)
        for ticket, since in row.leases.items():
            books.emit(facts.LeaseReleased(now, books.where, row.key, ticket, now - since))
        if leaving is None or row.state is State.DRAINING:
            leaving = Leaving(books.name("e"), row, "lost", now)
            books.emit(facts.EvictionStarted(now, leaving.id, books.where, books.tier, row.key, "lost"))
        self._tell(leaving, row.size, 0, now)

    def _find(self, eviction: str) -> Leaving | None:
        return next((each for each in self._leaving.values() if each.id == eviction), None)

    def _tell(self, leaving: Leaving, returned: int, leaked: int, now: float) -> None:
        row, books = leaving.row, self._books
        took = now - leaving.since
        if leaving.reason == "cancelled":
            # It became resident only because the cancellation came too late: for everybody else it never was.
            books.emit(facts.LoadCancelled(now, leaving.load, books.where, books.tier, row.key, row.trigger, took))
            return
        books.emit(
            facts.Evicted(
                now,
                leaving.id,
                books.where,
                books.tier,
                row.key,
                leaving.reason,
                returned,
                leaked,
                now - row.loaded_at,
                leaving.since - row.last_used,
                took,
                row.uses,
            )
        )

    def check(self) -> None:
        """Prove that draining and unloading rows are exactly those that leave. Raises `AssertionError`."""
        for key, leaving in self._leaving.items():
            assert leaving.row.key == key, leaving
            assert self._books.ledger.get(key) is leaving.row, leaving
            assert leaving.row.state in {State.DRAINING, State.UNLOADING}, leaving
        for row in self._books.ledger.rows():
            assert row.state is not State.DRAINING or row.key in self._leaving, row

    def __repr__(self) -> str:
        return f"<Departures {len(self._leaving)} under way>"
