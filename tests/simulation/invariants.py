"""The invariants of `faults.md` section 2, proved again from the event log alone."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from actors import events as f

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def prove(events: Iterable[f.Event], capacity: Mapping[str, int], *, finished: bool = True) -> None:  # noqa: C901, PLR0912
    """I1-I4 and I6 from the log. `capacity` bytes per place; `finished` also asks that nothing is left over."""
    leases: dict[tuple[str, int], str] = {}
    waiting: dict[tuple[str, int], str] = {}
    loading: dict[tuple[str, str], str] = {}
    used: dict[str, dict[str, int]] = defaultdict(dict)
    before = -1.0
    for event in events:
        assert event.at >= before, f"time runs backwards at {event}"
        before = event.at
        match event:
            case f.WaiterJoined():
                assert (event.device, event.ticket) not in waiting, event
                waiting[event.device, event.ticket] = event.model
            case f.WaiterLeft():
                waiting.pop((event.device, event.ticket))
            case f.LeaseGranted():
                waiting.pop((event.device, event.ticket), None)
                assert event.model in used[event.device], f"lease on what is not there: {event}"
                assert (event.device, event.model) not in loading, f"lease during a load: {event}"
                assert (event.device, event.ticket) not in leases, event
                leases[event.device, event.ticket] = event.model
            case f.LeaseReleased():
                assert leases.pop((event.device, event.ticket)) == event.model, event
            case f.LoadStarted():
                assert event.model not in used[event.device], f"second load: {event}"
                loading[event.device, event.model] = event.load
                used[event.device][event.model] = event.reserved
            case f.LoadFinished():
                assert loading.pop((event.device, event.model)) == event.load, event
                used[event.device][event.model] = event.resident
            case f.LoadFailed() | f.LoadCancelled():
                assert loading.pop((event.device, event.model)) == event.load, event
                del used[event.device][event.model]
            case f.EvictionStarted():
                held = [t for (where, t), key in leases.items() if where == event.device and key == event.model]
                assert not held, f"evicted under lease {held}: {event}"
            case f.Adopted():
                used[event.device][event.model] = event.resident
            case f.ActorRestarted():
                raise AssertionError(f"an actor crashed: {event.actor}: {event.cause}")
            case f.Evicted():
                loading.pop((event.device, event.model), None)  # a cancelled load that had finished
                del used[event.device][event.model]
            case _:
                pass
        for where, rows in used.items():
            assert sum(rows.values()) <= capacity[where], f"{where} holds {rows} of {capacity[where]} at {event}"
    if finished:
        assert not waiting, f"waiters left over: {waiting}"
        assert not loading, f"loads left over: {loading}"
        assert not [key for (where, _), key in leases.items() if where != "host"], f"leases left over: {leases}"
