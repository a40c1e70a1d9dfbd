"""Models and ledgers for the tests of pure decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.residency.ledger import Ledger
from actors.residency.model import Footprint, Model, ModelKey, Rules, Ticket, Trigger
from actors.residency.states import State

if TYPE_CHECKING:
    from actors.residency.ledger import Resident

KEY = ModelKey("m@1")


def model(
    name: str = "m",
    size: int = 10,
    *,
    fingerprint: str = "",
    load_seconds: float = 0.0,
    rules: Rules | None = None,
) -> Model:
    """A model of so many bytes on both tiers."""
    return Model(name, "1", fingerprint or f"fp-{name}", Footprint(size, size), rules or Rules(), load_seconds)


def bring(ledger: Ledger, what: Model, *, now: float = 0.0, leases: tuple[int, ...] = (), size: int = 0) -> Resident:
    """Make a model resident, and lease it to these tickets."""
    ledger.reserve(what, what.footprint.device, now=now, trigger=Trigger.DEMAND)
    row = ledger.commit(what.key, size or what.footprint.device, now=now)
    for ticket in leases:
        ledger.lease(row, Ticket(ticket), now=now)
    return row


def ledger_in(state: State) -> Ledger:
    """A ledger whose model `m@1` is in this state."""
    ledger = Ledger(100)
    if state is State.ABSENT:
        return ledger
    ledger.reserve(model(), 10, now=0.0, trigger=Trigger.DEMAND)
    if state is State.LOADING:
        return ledger
    ledger.commit(KEY, 10, now=0.0)
    if state is State.DRAINING:
        ledger.drain(KEY, now=0.0)
    if state is State.UNLOADING:
        ledger.retire(KEY, now=0.0)
    return ledger
