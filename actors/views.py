"""Frozen, advisory views of a tier, for tests, the state endpoint and the gauges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.residency.policies import expires_at
from actors.residency.states import State

if TYPE_CHECKING:
    from actors.books import Books
    from actors.residency.ledger import Resident
    from actors.residency.model import Tier, Trigger


@dataclass(frozen=True, slots=True)
class ResidentView:
    """One row; `age`, `idle` and `expires_in` in seconds."""

    model: str
    fingerprint: str
    state: State
    bytes: int
    leases: int
    pinned: bool
    adopted: bool
    age: float
    idle: float
    uses: int
    expires_in: float | None


@dataclass(frozen=True, slots=True)
class WishView:
    """One wish; `load` is empty while it waits for room, `age` in seconds."""

    model: str
    trigger: Trigger
    waiters: int
    load: str
    blocked: str
    age: float


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier; sizes in bytes."""

    where: str
    tier: Tier
    up: bool
    draining: bool
    capacity: int
    headroom: int
    foreign: int
    leaked: int
    loading: int
    resident: int
    unloading: int
    free: int
    leases: int
    waiting: int
    under_pressure: bool
    residents: tuple[ResidentView, ...]
    wishes: tuple[WishView, ...]


def view_of(books: Books, *, up: bool, draining: bool, under_pressure: bool) -> TierSnapshot:
    """Look at the books as they are now."""
    now = books.now()
    ledger = books.ledger
    return TierSnapshot(
        books.where,
        books.tier,
        up,
        draining,
        ledger.capacity,
        ledger.headroom,
        ledger.foreign,
        books.leaked,
        ledger.bytes_in(State.LOADING),
        ledger.bytes_in(State.RESIDENT),
        ledger.bytes_in(State.UNLOADING),
        ledger.free,
        ledger.leases,
        books.wishes.waiting,
        under_pressure,
        tuple(_resident(row, now) for row in ledger.rows()),
        tuple(
            WishView(w.key, w.trigger, len(w.waiters), w.load if w.loading else "", w.blocked, now - w.since)
            for w in books.wishes.all()
        ),
    )


def _resident(row: Resident, now: float) -> ResidentView:
    end = expires_at(row) if row.state is State.RESIDENT else None
    return ResidentView(
        row.key,
        row.model.fingerprint,
        row.state,
        row.size,
        len(row.leases),
        row.pinned,
        row.adopted,
        now - row.loaded_at if row.loaded_at else 0.0,
        now - row.last_used if row.last_used else 0.0,
        row.uses,
        None if end is None else max(end[0] - now, 0.0),
    )
