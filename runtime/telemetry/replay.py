"""Rebuilds who is resident from events alone (I10): the log is complete only if this equals the actors' own books.

Pure. It reports what does not add up instead of repairing it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from actors import events as e
from actors.residency.model import ModelKey, Tier
from runtime.telemetry.places import BELOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from actors.events import Event

Place: TypeAlias = tuple[str, Tier]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the log says: bytes by place and model, loads and evictions under way, leases, and contradictions."""

    resident: Mapping[Place, Mapping[ModelKey, int]]
    loading: Mapping[str, tuple[str, Tier, ModelKey]]
    evicting: Mapping[str, tuple[str, Tier, ModelKey]]
    leases: Mapping[ModelKey, int]
    faults: tuple[str, ...]


@dataclass(slots=True)
class _Books:
    whole: bool
    resident: dict[Place, dict[ModelKey, int]] = field(default_factory=dict)
    loading: dict[str, tuple[str, Tier, ModelKey]] = field(default_factory=dict)
    evicting: dict[str, tuple[str, Tier, ModelKey]] = field(default_factory=dict)
    tickets: dict[tuple[str, int], ModelKey] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    at: float = float("-inf")

    def apply(self, event: Event) -> None:
        """Book one event."""
        if event.at < self.at:
            self.fault(event, "is earlier than the event before it")
        self.at = max(self.at, event.at)
        match event:
            case e.LoadStarted() | e.LoadFinished() | e.LoadFailed() | e.LoadCancelled():
                self._load(event)
            case e.EvictionStarted():
                self._eviction_started(event)
            case e.Evicted():
                self._evicted(event)
            case e.LeaseGranted() | e.LeaseReleased():
                self._lease(event)
            case e.WorkerLost():
                self._worker_lost(event)
            case e.Adopted():
                self.resident.setdefault((event.device, event.tier), {})[event.model] = event.resident
            case (
                e.RequestArrived()
                | e.WaiterJoined()
                | e.WaiterLeft()
                | e.RequestFinished()
                | e.LoadUpgraded()
                | e.FetchStarted()
                | e.FetchProgressed()
                | e.FetchFinished()
                | e.PrefetchSettled()
                | e.PressureChanged()
                | e.WarmSettled()
                | e.PrefetchWithheld()
                | e.PeakInfeasible()
                | e.ForecastFitted()
                | e.ForecastDemoted()
                | e.ForecastJudged()
                | e.ForecastFell()
                | e.ForesightReported()
                | e.WorkerStarted()
                | e.CompileStarted()
                | e.CompileFinished()
                | e.CompileFailed()
                | e.ActorRestarted()
                | e.SubscriberDropped()
                | e.CatalogChanged()
                | e.DrainStarted()
                | e.DrainFinished()
            ):
                pass  # nobody moves
            case _ as unhandled:
                assert_never(unhandled)

    def fault(self, event: Any, what: str) -> None:
        """Note a contradiction."""
        self.faults.append(f"{type(event).__name__} at {event.at:.6f} {what}")

    def _load(self, event: e.LoadStarted | e.LoadFinished | e.LoadFailed | e.LoadCancelled) -> None:
        where = (event.device, event.tier, event.model)
        if isinstance(event, e.LoadStarted):
            known = self.loading.get(event.load)
            if known not in {None, where}:  # the same again is a second try after running out of memory
                self.fault(event, f"uses load id {event.load} twice")
            if known is None and where in self.loading.values():
                self.fault(event, f"loads {event.model} a second time at once")
            self.loading[event.load] = where
            return
        if event.load in self.orphans:
            self.orphans.discard(event.load)
        elif self.loading.pop(event.load, None) != where:
            self.fault(event, f"ends load {event.load} of {event.model}, which was not under way")
        if isinstance(event, e.LoadFinished):
            self.resident.setdefault((event.device, event.tier), {})[event.model] = event.resident

    def _eviction_started(self, event: e.EvictionStarted) -> None:
        if event.model not in self.resident.get((event.device, event.tier), {}):
            self.fault(event, f"evicts {event.model}, which is not resident")
        if any(device == event.device and model == event.model for (device, _), model in self.tickets.items()):
            self.fault(event, f"evicts {event.model}, which is leased")
        self.evicting[event.eviction] = (event.device, event.tier, event.model)

    def _evicted(self, event: e.Evicted) -> None:
        where = (event.device, event.tier, event.model)
        if self.evicting.pop(event.eviction, None) == where:
            self.resident.get((event.device, event.tier), {}).pop(event.model, None)
            return
        # A load that ended after everybody had given it up is taken away without ever having been resident.
        given_up = next((load for load, place in self.loading.items() if place == where), None)
        if given_up is None:
            self.fault(event, f"ends eviction {event.eviction} of {event.model}, which was not under way")
        else:
            del self.loading[given_up]

    def _lease(self, event: e.LeaseGranted | e.LeaseReleased) -> None:
        if not self.whole:
            return
        ticket = (event.device, event.ticket)
        if isinstance(event, e.LeaseReleased):
            if self.tickets.pop(ticket, None) != event.model:
                self.fault(event, f"gives back ticket {event.ticket}, which is not out")
            return
        tier = Tier(event.device) if event.device in BELOW else Tier.DEVICE
        if event.model not in self.resident.get((event.device, tier), {}):
            self.fault(event, f"leases {event.model}, which is not resident")
        if ticket in self.tickets:
            self.fault(event, f"grants ticket {event.ticket} twice")
        self.tickets[ticket] = event.model

    def _worker_lost(self, event: e.WorkerLost) -> None:
        """A process took its memory along, and with it every lease, eviction and load there."""
        there = (event.device, Tier.DEVICE)
        self.resident.pop(there, None)
        self.orphans |= {load for load, place in self.loading.items() if place[:2] == there}
        self.loading = {load: place for load, place in self.loading.items() if place[:2] != there}
        self.evicting = {eviction: place for eviction, place in self.evicting.items() if place[:2] != there}
        self.tickets = {ticket: model for ticket, model in self.tickets.items() if ticket[0] != event.device}


def replay(events: Iterable[Event], *, whole: bool = True) -> Replayed:
    """Read a log, oldest first. `whole` False says that plain hits are left out, as in the feed: then no leases."""
    books = _Books(whole)
    for event in events:
        books.apply(event)
    leases: dict[ModelKey, int] = {}
    for (device, _), model in books.tickets.items():
        if device not in BELOW:
            leases[model] = leases.get(model, 0) + 1
    resident = {place: dict(models) for place, models in books.resident.items() if models}
    return Replayed(resident, books.loading, books.evicting, leases, tuple(books.faults))
