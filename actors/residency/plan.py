"""What it would take to make a model resident. Pure: may be asked a thousand times per load, and leaves no trace.

Answers are values; only the actor that owns the ledger acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from actors.residency.policies import order
from actors.residency.states import State
from forecasting.outlook import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.residency.ledger import Ledger, Resident
    from actors.residency.model import ModelKey
    from actors.residency.policies import Score
    from forecasting.outlook import Outlook


@dataclass(frozen=True, slots=True)
class Ready:
    """It is resident and may be leased."""


@dataclass(frozen=True, slots=True)
class Join:
    """Its load is under way."""


@dataclass(frozen=True, slots=True)
class Load:
    """It may be loaded once these have left (in order; empty: once what is already leaving has left)."""

    evict: tuple[ModelKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. `reason` is leased, young, held, pinned, unloading, victims or busy; `until`: when to ask again."""

    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Never:
    """Larger than this tier can ever hold, in bytes."""

    needed: int
    budget: int


Plan: TypeAlias = Ready | Join | Load | Wait | Never


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked for: `need` bytes for `key`, of which `claimed` bytes and places are promised to others.

    `may_evict` is false for loads that only take free room; `only` names the sole possible victims, if given. Demand is
    `urgent`: it may take the place of what a declared window holds, after all else. `impatient` may also choose leased
    residents, which are then drained first. `victims` caps how many may leave for one load.
    """

    key: ModelKey
    need: int
    claimed: int = 0
    claimed_places: int = 0
    may_evict: bool = True
    only: frozenset[ModelKey] | None = None
    urgent: bool = True
    impatient: bool = False
    victims: int = 16


def ceiling(ledger: Ledger) -> int:
    """The most that a single model could ever get: the budget without today's foreign bytes."""
    return ledger.capacity - ledger.headroom


def plan(ledger: Ledger, asking: Asking, *, score: Score, now: float, outlook: Outlook = UNKNOWN) -> Plan:
    """Decide what making `asking.key` resident takes. See the module's types for the answers."""
    if asking.need > ceiling(ledger) or ledger.count == 0:
        return Never(asking.need, ceiling(ledger))
    row = ledger.get(asking.key)
    if row is not None:
        if row.state is State.RESIDENT:
            return Ready()
        return Join() if row.state is State.LOADING else Wait("unloading")
    short, places = _shortage(ledger, asking)
    if short <= 0 and places <= 0:
        return Load()
    return _make_room(ledger, asking, short, places, score=score, now=now, outlook=outlook)


def _make_room(
    ledger: Ledger, asking: Asking, short: int, places: int, *, score: Score, now: float, outlook: Outlook
) -> Load | Wait:
    """Name the residents that have to leave for so many bytes and places, or what is in the way."""
    if not asking.may_evict:
        return Wait("full")
    candidates = sorted(
        (row for row in ledger.rows() if _may_leave(row, asking, now)),
        # An idle victim is always better than one that has to be drained.
        key=lambda row: (bool(row.leases), row.held(now), order(row, score, now, outlook)),
    )
    chosen = _choose(candidates, short, places)
    if chosen is not None and len(chosen) > asking.victims:
        # Few large victims instead of many small ones, before giving up.
        large_first = sorted(candidates, key=lambda row: (bool(row.leases), row.held(now), -row.size))
        chosen = _choose(large_first, short, places)
        if chosen is not None and len(chosen) > asking.victims:
            return Wait("victims")
    if chosen is None:
        return _obstacle(ledger, asking, now)
    return Load(tuple(row.key for row in chosen))


def _shortage(ledger: Ledger, asking: Asking) -> tuple[int, int]:
    """Bytes and places missing once everything that is already leaving has left."""
    leaving = [row for row in ledger.rows() if row.state in {State.UNLOADING, State.DRAINING}]
    short = asking.need + asking.claimed - ledger.free - sum(row.size for row in leaving)
    places = 0
    if ledger.places is not None:
        places = 1 + asking.claimed_places - ledger.places - len(leaving)
    return short, places


def _may_leave(row: Resident, asking: Asking, now: float) -> bool:
    if row.state is not State.RESIDENT or row.pinned or row.adopted:
        return False
    if row.leases and not asking.impatient:
        return False
    if asking.only is not None and row.key not in asking.only:
        return False
    if row.held(now) and (row.firm or not asking.urgent):
        return False
    return now - row.loaded_at >= row.model.rules.min_residency


def _choose(candidates: Sequence[Resident], short: int, places: int) -> list[Resident] | None:
    """The first that suffice, without those that turn out not to be needed; None if all together do not suffice."""
    chosen: list[Resident] = []
    gained = 0
    for row in candidates:
        if gained >= short and len(chosen) >= places:
            break
        chosen.append(row)
        gained += row.size
    if gained < short or len(chosen) < places:
        return None
    for row in tuple(reversed(chosen)):
        if gained - row.size >= short and len(chosen) - 1 >= places:
            chosen.remove(row)
            gained -= row.size
    return chosen


def _obstacle(ledger: Ledger, asking: Asking, now: float) -> Wait:
    """Name what is in the way, the most transient first, and when it may end."""
    rows = [row for row in ledger.rows() if row.state is State.RESIDENT]
    if asking.need > ledger.budget - sum(row.size for row in rows if row.pinned):
        return Wait("pinned")  # whatever else ends: only an unpin helps
    young = [end for row in rows if not row.pinned and (end := row.loaded_at + row.model.rules.min_residency) > now]
    if any((row.leases or row.adopted) and not row.pinned for row in rows):
        return Wait("leased", min(young, default=None))
    if young:
        return Wait("young", min(young))
    held = [row.held_until for row in rows if row.held(now) and (row.firm or not asking.urgent)]
    if held:
        return Wait("held", min(held))
    if any(row.state in {State.LOADING, State.UNLOADING, State.DRAINING} for row in ledger.rows()) or asking.claimed:
        return Wait("busy")
    return Wait("pinned")
