"""Rebuilds who is resident from events alone (I10): the log is complete only if this equals the actors' own books.

Pure. It reports what does not add up instead of repairing it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from actors import events as e
from actors.residency.model import ModelKey, Tier

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
    resident: dict[Place, dict[ModelKey, int]] = field(default_factory=dict)
    loading: dict[str, tuple[str, Tier, ModelKey]] = field(default_factory=dict)
    evicting: dict[str, tuple[str, Tier, ModelKey]] = field(default_factory=dict)
    tickets: dict[tuple[str, int], ModelKey] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    at: float = float("-inf")

    def apply(self, event: Event) -> None:
        """Book one event."""
        if event.at < self.at:
            self.fault(event, "is earlier than the event before it")
        self.at = max(self.at, event.at)
        match event:
            case e.LoadStarted():
                self._load_started(event)
            case e.LoadFinished():
                self._load_ended(event)
                self.resident.setdefault((event.device, event.tier), {})[event.model] = event.resident
            case e.LoadFailed() | e.LoadCancelled():
                self._load_ended(event)
            case e.EvictionStarted():
                self._eviction_started(event)
            case e.Evicted():
                self._evicted(event)
            case e.LeaseGranted():
                self._granted(event)
            case e.LeaseReleased():
                if self.tickets.pop((event.device, event.ticket), None) is None:
                    self.fault(event, f"gives back ticket {event.ticket}, which is not out")
            case e.WorkerLost():
                self._worker_lost(event)
            case (
                e.RequestArrived()
                | e.WaiterJoined()
                | e.WaiterLeft()
                | e.RequestFinished()
                | e.LoadUpgraded()
                | e.PrefetchSettled()
                | e.PressureChanged()
                | e.WarmSettled()
                | e.WorkerStarted()
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

    def _load_started(self, event: e.LoadStarted) -> None:
        where = (event.device, event.tier, event.model)
        if event.load in self.loading:
            self.fault(event, f"uses the load id {event.load} twice")
        if where in self.loading.values():
            self.fault(event, f"loads {event.model} a second time at once")
        self.loading[event.load] = where

    def _load_ended(self, event: e.LoadFinished | e.LoadFailed | e.LoadCancelled) -> None:
        if self.loading.pop(event.load, None) != (event.device, event.tier, event.model):
            self.fault(event, f"ends load {event.load} of {event.model}, which was not under way")

    def _eviction_started(self, event: e.EvictionStarted) -> None:
        if event.model not in self.resident.get((event.device, event.tier), {}):
            self.fault(event, f"evicts {event.model}, which is not resident")
        if event.tier is Tier.DEVICE and any(
            device == event.device and model == event.model for (device, _), model in self.tickets.items()
        ):
            self.fault(event, f"evicts {event.model}, which is leased")
        self.evicting[event.eviction] = (event.device, event.tier, event.model)

    def _evicted(self, event: e.Evicted) -> None:
        if self.evicting.pop(event.eviction, None) is None:
            self.fault(event, f"ends eviction {event.eviction}, which was not under way")
        if self.resident.get((event.device, event.tier), {}).pop(event.model, None) is None:
            self.fault(event, f"evicted {event.model}, which was not resident")

    def _granted(self, event: e.LeaseGranted) -> None:
        if event.model not in self.resident.get((event.device, Tier.DEVICE), {}):
            self.fault(event, f"leases {event.model}, which is not resident")
        if (event.device, event.ticket) in self.tickets:
            self.fault(event, f"grants ticket {event.ticket} twice")
        self.tickets[event.device, event.ticket] = event.model

    def _worker_lost(self, event: e.WorkerLost) -> None:
        """A process took its memory along; its loads end with an event of their own, and so do its leases."""
        self.resident.pop((event.device, Tier.DEVICE), None)
        self.evicting = {
            eviction: where
            for eviction, where in self.evicting.items()
            if (where[0], where[1]) != (event.device, Tier.DEVICE)
        }


def replay(events: Iterable[Event]) -> Replayed:
    """Read a whole log, oldest first. A log without requests (the feed's ring) gives residency but no leases."""
    books = _Books()
    for event in events:
        books.apply(event)
    leases: dict[ModelKey, int] = {}
    for model in books.tickets.values():
        leases[model] = leases.get(model, 0) + 1
    resident = {place: dict(models) for place, models in books.resident.items() if models}
    return Replayed(resident, books.loading, books.evicting, leases, tuple(books.faults))
