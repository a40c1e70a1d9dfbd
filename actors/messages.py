"""Commands: imperative, frozen. What a caller may tell or ask a tier's cache, and what its own jobs report back.

`Command` is closed: `TierCache.receive` ends in `assert_never`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from actors.actor import Request, Urgent
from actors.residency.model import Ticket, Trigger

if TYPE_CHECKING:
    from actors.ports import EvictReport, Held, LoadReport, MemorySample
    from actors.residency.model import Model, ModelKey, Tier
    from forecasting.outlook import Outlook

_tickets = itertools.count(1)


def new_ticket() -> Ticket:
    """A ticket nobody else in this process holds; its holder chooses it before asking, so release is idempotent."""
    return Ticket(next(_tickets))


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease was given. `found` is the tier the model was on when it was asked for, `waited` in seconds.

    `result` is hit, prefetch_hit, coalesced or miss; `load` names the load that was waited for.
    """

    result: str
    found: Tier
    waited: float = 0.0
    load: str = ""


# -- what callers send -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire(Request[Grant]):
    """Lease a model to `ticket`, loading it if need be.

    `deadline` (loop seconds) is the caller's own and ends in `DeadlineExceeded`; `patience` is the server's and ends in
    `StillLoading` while the load goes on. `priority` 0 is the default, 1 the highest of the others.
    """

    model: Model
    ticket: Ticket
    request: str = ""
    deadline: float | None = None
    patience: float | None = None
    priority: int = 0
    trigger: Trigger = Trigger.DEMAND


@dataclass(frozen=True, slots=True)
class Release(Urgent):
    """The ticket's holder is done, or has left the queue. Idempotent."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Ensure(Request[None]):
    """Make a model resident without leasing it: an explicit load, a warm-list entry, a prefetch.

    Answered when it is resident. `pin` keeps it. An `ADMIN` trigger lifts a quarantine. `expires` (loop seconds)
    drops a wish that could not be afforded by then. `hold_until` (loop seconds) keeps it for a declared window, against
    everything but pins and leases of others if `firm`. `victims` are the only residents that may leave for it.
    """

    model: Model
    trigger: Trigger
    pin: bool | None = None
    expires: float | None = None
    request: str = ""
    priority: int = 0
    hold_until: float | None = None
    firm: bool = False
    victims: frozenset[ModelKey] | None = None


@dataclass(frozen=True, slots=True)
class Outlooked(Urgent):
    """What is expected of the models from now on; policies score residents with it."""

    outlook: Outlook


@dataclass(frozen=True, slots=True)
class Upgrade(Urgent):
    """Someone who cannot wait joined: raise the urgency of a load that was asked for before."""

    key: ModelKey
    trigger: Trigger
    request: str = ""


@dataclass(frozen=True, slots=True)
class Unload(Request[None]):
    """Give residency back; in-flight leases finish first. Raises `Conflict` for a leased model if not `drain`."""

    key: ModelKey
    drain: bool = True
    reason: str = "unload"


@dataclass(frozen=True, slots=True)
class Pin(Request[None]):
    """Never evict it (`on`), or treat it like the others again. Raises `NotReady` if it is not resident."""

    key: ModelKey
    on: bool = True


@dataclass(frozen=True, slots=True)
class Sampled(Urgent):
    """A reading of the host's memory."""

    sample: MemorySample


@dataclass(frozen=True, slots=True)
class Lost(Urgent):
    """The place that held the models ended; everything in it is gone."""

    cause: str


@dataclass(frozen=True, slots=True)
class Restored(Urgent):
    """It is back, and empty."""


@dataclass(frozen=True, slots=True)
class Rehold(Urgent):
    """The tier below forgot its leases in a crash: lease again what residents here still use."""


@dataclass(frozen=True, slots=True)
class Drain(Request[int]):
    """Admit no more work; answered with zero when every lease is back. Loads that nobody waits for are given up."""


# -- what the cache's own jobs report ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inventoried:
    """What the tier really holds, after the start of an incarnation or while adopted residents settle."""

    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class InventoryFailed:
    """The tier could not tell."""

    cause: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load succeeded. `below` is the ticket that keeps the copy on the tier below, if it has to stay."""

    load: str
    report: LoadReport
    below: Ticket | None = None


@dataclass(frozen=True, slots=True)
class LoadBroke:
    """A load failed and was undone."""

    load: str
    error: Exception


@dataclass(frozen=True, slots=True)
class LoadStopped:
    """A load was cancelled and undone."""

    load: str


@dataclass(frozen=True, slots=True)
class Gone:
    """An eviction ended."""

    eviction: str
    report: EvictReport


@dataclass(frozen=True, slots=True)
class EvictBroke:
    """An eviction raised: whatever it held has to be taken for leaked."""

    eviction: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Woke:
    """Something may have become possible or overdue; `timer` names the timer that says so, 0 for none."""

    timer: int = 0


Command: TypeAlias = (
    Acquire
    | Release
    | Ensure
    | Upgrade
    | Outlooked
    | Unload
    | Pin
    | Sampled
    | Lost
    | Restored
    | Rehold
    | Drain
    | Inventoried
    | InventoryFailed
    | Loaded
    | LoadBroke
    | LoadStopped
    | Gone
    | EvictBroke
    | Woke
)
