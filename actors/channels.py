"""When load channels are free again: the loads under way on a tier, and how long such loads take.

Advice for a plan, from snapshots; a load that takes longer than its 95 % quantile may end at any moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.residency.states import State

if TYPE_CHECKING:
    from actors.load_times import LoadTimes
    from actors.residency.wishes import Wish
    from actors.tier_cache import TierCache


def device_free(cache: TierCache, host: TierCache | None, times: LoadTimes, now: float) -> float:
    """Seconds from `now` (loop) until the device takes another load; 0 if it would at once."""
    ends = sorted(_end(wish, host, times) for wish in cache.wishes.begun())
    if len(ends) < cache.parallel:
        return 0.0
    return max(ends[len(ends) - cache.parallel] - now, 0.0)


def disk_free(host: TierCache | None, times: LoadTimes, now: float) -> float:
    """Seconds until the disk reads for another load."""
    if host is None or host.wishes.loading < host.parallel:
        return 0.0
    ends = sorted(wish.started + _reading(wish, times) for wish in host.wishes.begun())
    return max(ends[len(ends) - host.parallel] - now, 0.0)


def _reading(wish: Wish, times: LoadTimes) -> float:
    """Seconds of a load that go to the disk."""
    return max(times.high(wish.model, on_host=False) - times.high(wish.model, on_host=True), 0.0)


def _end(wish: Wish, host: TierCache | None, times: LoadTimes) -> float:
    """When a load on a device should be over; the bytes may have reached the host after it began."""
    row = host.ledger.get(wish.key) if host is not None else None
    if row is not None and row.state is State.RESIDENT:
        return max(wish.started, row.loaded_at) + times.high(wish.model, on_host=True)
    return wish.started + times.high(wish.model, on_host=False)
