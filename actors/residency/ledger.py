"""The books of one tier: who holds which bytes, who leases whom. Moves only; no decision, no clock, no I/O.

`loading + resident + unloading + foreign <= capacity - headroom`, and `check()` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.residency.model import Trigger
from actors.residency.states import Move, State, after

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actors.residency.model import Model, ModelKey, Ticket


class LedgerBroken(AssertionError):
    """The books do not add up: a bug of ours."""


@dataclass(slots=True, eq=False)
class Resident:
    """One row. `size` is reserved bytes while loading and measured bytes afterwards; times are loop seconds."""

    model: Model
    state: State
    size: int
    since: float
    loaded_at: float = 0.0
    last_used: float = 0.0
    uses: int = 0
    trigger: Trigger = Trigger.DEMAND
    pinned: bool = False
    adopted: bool = False
    """Found after a crash and not yet known to be idle: never a victim."""
    held_until: float = 0.0
    """Wanted for a declared window until then (loop seconds): it leaves after all others, and only for demand."""
    firm: bool = False
    """That window is required: it does not leave for anything before its end."""
    leases: dict[Ticket, float] = field(default_factory=dict["Ticket", float])

    @property
    def key(self) -> ModelKey:
        """The model's key."""
        return self.model.key

    @property
    def idle(self) -> bool:
        """Nobody leases it, and that is known."""
        return not self.leases and not self.adopted

    def held(self, now: float) -> bool:
        """A declared window still wants it."""
        return now < self.held_until

    def movable(self, now: float) -> bool:
        """Nobody needs it, and it has been there long enough: a guess may take its place."""
        return (
            self.state is State.RESIDENT
            and not self.leases
            and not self.adopted
            and not self.pinned
            and now >= self.held_until
            and now - self.loaded_at >= self.model.rules.min_residency
        )

    def hold(self, until: float, *, firm: bool, now: float) -> None:
        """Want it until then; the later of two windows counts, and the firmer while both last."""
        self.firm = firm or (self.firm and self.held(now))
        self.held_until = max(self.held_until, until)

    def __repr__(self) -> str:
        marks = (
            f" leases={len(self.leases)}" + (" pinned" if self.pinned else "") + (" adopted" if self.adopted else "")
        )
        return f"<{self.key} {self.state} {self.size} B{marks}>"


class Ledger:
    """Residents of one tier. `capacity` and `headroom` in bytes; `count` limits how many, if given."""

    def __init__(self, capacity: int, *, headroom: int = 0, count: int | None = None) -> None:
        if capacity < 0 or headroom < 0 or headroom > capacity:
            raise ValueError(f"impossible budget: capacity={capacity} headroom={headroom}")
        self.capacity = capacity
        self.headroom = headroom
        self.count = count
        self.foreign = 0
        self.overrun = 0
        """Bytes that residents turned out to need beyond what was reserved for them."""
        self.moves = 0
        """So many: who has seen them all knows who is where."""
        self._rows: dict[ModelKey, Resident] = {}
        self._tickets: dict[Ticket, Resident] = {}
        self._bytes: dict[State, int] = dict.fromkeys((State.LOADING, State.RESIDENT, State.UNLOADING), 0)

    # -- questions -----------------------------------------------------------------------------------

    def get(self, key: ModelKey) -> Resident | None:
        """The row of a model, if it has one."""
        return self._rows.get(key)

    def rows(self) -> Iterable[Resident]:
        """Every row."""
        return self._rows.values()

    def holder(self, ticket: Ticket) -> Resident | None:
        """What a ticket leases."""
        return self._tickets.get(ticket)

    def bytes_in(self, state: State) -> int:
        """Bytes loading, resident (draining included) or unloading."""
        return self._bytes[state]

    @property
    def budget(self) -> int:
        """Bytes that models may hold."""
        return max(self.capacity - self.headroom - self.foreign, 0)

    @property
    def used(self) -> int:
        """Loading + resident + unloading."""
        return sum(self._bytes.values())

    @property
    def free(self) -> int:
        """Bytes that may be reserved now; negative when reality outran the budget."""
        return self.budget - self.used

    @property
    def places(self) -> int | None:
        """How many more models may be here; None without a limit."""
        return None if self.count is None else self.count - len(self._rows)

    @property
    def leases(self) -> int:
        """Leases held."""
        return len(self._tickets)

    # -- the moves of residency ----------------------------------------------------------------------

    def reserve(self, model: Model, size: int, *, now: float, trigger: Trigger) -> Resident:
        """Set bytes aside before a load starts. The caller has made sure that they are free."""
        self._require(model.key, Move.RESERVE)
        if size > self.free or (self.places is not None and self.places < 1):
            raise LedgerBroken(f"reserving {size} B for {model.key} with {self.free} B and {self.places} places free")
        row = Resident(model, State.LOADING, size, now, trigger=trigger, pinned=model.rules.pinned)
        self._rows[model.key] = row
        self.moves += 1
        self._bytes[State.LOADING] += size
        return row

    def commit(self, key: ModelKey, size: int, *, now: float) -> Resident:
        """The load succeeded and holds `size` measured bytes, which may differ from what was reserved."""
        row = self._move(key, Move.COMMIT, now)
        self._bytes[State.LOADING] -= row.size
        self._bytes[State.RESIDENT] += size
        self.overrun += max(size - row.size, 0)
        row.size = size
        row.loaded_at = row.last_used = now
        self._settle()
        return row

    def adopt(self, model: Model, size: int, *, now: float, idle: bool) -> Resident:
        """Enter what a tier was found to hold after a crash."""
        self._require(model.key, Move.ADOPT)
        row = Resident(model, State.RESIDENT, size, now, now, now, pinned=model.rules.pinned, adopted=not idle)
        self._rows[model.key] = row
        self.moves += 1
        self._bytes[State.RESIDENT] += size
        self.overrun = max(-self.free, 0)
        return row

    def abort(self, key: ModelKey, *, now: float) -> Resident:
        """The load is given up; its bytes stay counted until `forget`."""
        row = self._move(key, Move.ABORT, now)
        self._bytes[State.LOADING] -= row.size
        self._bytes[State.UNLOADING] += row.size
        return row

    def drain(self, key: ModelKey, *, now: float) -> Resident:
        """Grant no more leases on it."""
        return self._move(key, Move.DRAIN, now)

    def resume(self, key: ModelKey, *, now: float) -> Resident:
        """Take a drain back."""
        return self._move(key, Move.RESUME, now)

    def retire(self, key: ModelKey, *, now: float) -> Resident:
        """Start to unload it; refused while it is leased."""
        row = self._rows.get(key)
        if row is not None and row.leases:
            raise LedgerBroken(f"retiring {row!r}")
        row = self._move(key, Move.RETIRE, now)
        self._bytes[State.RESIDENT] -= row.size
        self._bytes[State.UNLOADING] += row.size
        return row

    def forget(self, key: ModelKey) -> Resident:
        """Its bytes were observed free."""
        row = self._require(key, Move.FORGET)
        assert row is not None
        self._bytes[State.UNLOADING] -= row.size
        del self._rows[key]
        self.moves += 1
        self._settle()
        return row

    def clear(self) -> list[Resident]:
        """The whole tier is gone (its process ended): every row and lease with it."""
        rows = list(self._rows.values())
        self._rows.clear()
        self.moves += 1
        self._tickets.clear()
        self._bytes = dict.fromkeys(self._bytes, 0)
        self.overrun = 0
        return rows

    # -- leases --------------------------------------------------------------------------------------

    def lease(self, row: Resident, ticket: Ticket, *, now: float) -> None:
        """Enter a ticket. Only a resident that is not draining can be leased; a ticket holds one thing once."""
        if row.state is not State.RESIDENT or ticket in self._tickets:
            raise LedgerBroken(f"leasing {row!r} to ticket {ticket}")
        row.leases[ticket] = now
        row.last_used = now
        row.uses += 1
        self._tickets[ticket] = row

    def release(self, ticket: Ticket, *, now: float) -> tuple[Resident, float] | None:
        """Take a ticket out and tell what it held and for how long; None if it holds nothing (any more)."""
        row = self._tickets.pop(ticket, None)
        if row is None:
            return None
        row.last_used = now
        return row, now - row.leases.pop(ticket)

    # -- proof ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recompute everything from the rows. Raises `LedgerBroken`."""
        sums = dict.fromkeys(self._bytes, 0)
        for key, row in self._rows.items():
            if key != row.key or row.size < 0 or row.state is State.ABSENT:
                raise LedgerBroken(f"odd row {row!r} under {key}")
            sums[State.RESIDENT if row.state is State.DRAINING else row.state] += row.size
            if row.leases and row.state not in {State.RESIDENT, State.DRAINING}:
                raise LedgerBroken(f"leased while {row.state}: {row!r}")
            for ticket in row.leases:
                if self._tickets.get(ticket) is not row:
                    raise LedgerBroken(f"ticket {ticket} of {row!r} is not in the index")
        if sums != self._bytes:
            raise LedgerBroken(f"sums {self._bytes} but rows say {sums}")
        if len(self._tickets) != sum(len(row.leases) for row in self._rows.values()):
            raise LedgerBroken("a ticket leases nothing")
        if self.count is not None and len(self._rows) > self.count:
            raise LedgerBroken(f"{len(self._rows)} models, {self.count} allowed")
        if self.foreign == 0 and self.used > self.budget + self.overrun:
            raise LedgerBroken(f"{self.used} B used of {self.budget} B (+{self.overrun} B overrun)")

    # -- inside --------------------------------------------------------------------------------------

    def _require(self, key: ModelKey, move: Move) -> Resident | None:
        row = self._rows.get(key)
        after(row.state if row is not None else State.ABSENT, move)
        return row

    def _move(self, key: ModelKey, move: Move, now: float) -> Resident:
        row = self._require(key, move)
        assert row is not None  # no move of this kind starts at ABSENT
        row.state = after(row.state, move)
        row.since = now
        self.moves += 1
        return row

    def _settle(self) -> None:
        self.overrun = min(self.overrun, max(-self.free, 0))

    def __repr__(self) -> str:
        return (
            f"<Ledger {self.used}/{self.budget} B: {self._bytes[State.LOADING]} loading, "
            f"{self._bytes[State.RESIDENT]} resident, {self._bytes[State.UNLOADING]} unloading; "
            f"{len(self._rows)} models, {self.leases} leases>"
        )
