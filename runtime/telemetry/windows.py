"""Counting how models were found, over the last minutes, the last hour and all time, in bounded memory.

Arithmetic only: no event, no clock, no JSON. `tally.py` feeds it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

FIELDS: Final = (
    "device",
    "host",
    "disk",
    "remote",
    "device_seconds",
    "host_seconds",
    "disk_seconds",
    "remote_seconds",
    "coalesced",
    "misses",
    "prefetch_hits",
    "joined",
    "left",
)
AT: Final = {name: index for index, name in enumerate(FIELDS)}
_WIDTH: Final = len(FIELDS)
_SLOT: Final = 60.0  # seconds
_SLOTS: Final = 60
_FIVE: Final = 5


@dataclass(frozen=True, slots=True)
class Accesses:
    """How leases were got in one span of time. Times in seconds; None where nothing was seen.

    `device`, `host`, `disk`, `remote`: leases by the tier the model was on when asked for. h1 is the share found on
    the device, h2 the share found on the host of those not on the device; t1, t2, t3 the mean wait for a lease of
    what was found on device, host, and below. `mean` is `h1*t1 + (1-h1)*(h2*t2 + (1-h2)*t3)`.
    """

    leases: int
    device: int
    host: int
    disk: int
    remote: int
    prefetch_hits: int
    coalesced: int
    misses: int
    joined: int
    left: int
    h1: float | None
    h2: float | None
    t1: float | None
    t2: float | None
    t3: float | None
    mean: float | None


@dataclass(frozen=True, slots=True)
class Windows:
    """The same three spans for everything: the last 5 to 6 minutes, the last 60 to 61, and since the start."""

    five_minutes: Accesses
    hour: Accesses
    lifetime: Accesses


class Ring:
    """A ring of one-minute slots plus a lifetime slot. An idle minute costs nothing, a busy one 104 bytes."""

    __slots__ = ("_last", "_life", "_open", "_slots")

    def __init__(self) -> None:
        self._life = array("d", bytes(8 * _WIDTH))
        self._slots: dict[int, array[float]] = {}
        self._last = -1
        self._open = self._life  # replaced by the first `slot`

    def slot(self, at: float) -> array[float]:
        """The open minute's counts; also drops the minutes that left the hour."""
        minute = int(at // _SLOT)
        if minute != self._last:
            self._last = minute
            self._open = self._slots.setdefault(minute, array("d", bytes(8 * _WIDTH)))
            for old in [old for old in self._slots if old < minute - _SLOTS]:
                del self._slots[old]
        return self._open

    def add(self, at: float, field: int, amount: float = 1.0) -> None:
        """Add to one field, `AT[name]`, now and for ever."""
        self.slot(at)[field] += amount
        self._life[field] += amount

    def found(self, at: float, tier: int, seconds: float) -> None:
        """Count a lease and its wait under the tier's field."""
        slot, life = self.slot(at), self._life
        slot[tier] += 1.0
        slot[tier + 4] += seconds
        life[tier] += 1.0
        life[tier + 4] += seconds

    def snapshot(self, at: float) -> Windows:
        """The three spans, frozen."""
        minute = int(at // _SLOT)
        return Windows(
            five_minutes=_accesses(self._sum(minute, _FIVE)),
            hour=_accesses(self._sum(minute, _SLOTS)),
            lifetime=_accesses(self._life),
        )

    def _sum(self, minute: int, back: int) -> array[float]:
        total = array("d", bytes(8 * _WIDTH))
        for when, slot in self._slots.items():
            if minute - back <= when <= minute:
                for index, value in enumerate(slot):
                    total[index] += value
        return total

    def __repr__(self) -> str:
        return f"<Ring minutes={len(self._slots)}>"


def _accesses(counts: array[float]) -> Accesses:
    device, host, disk, remote = (int(counts[index]) for index in range(4))
    leases = device + host + disk + remote
    absent, below = leases - device, disk + remote
    h1 = device / leases if leases else None
    h2 = host / absent if absent else None
    t1 = counts[AT["device_seconds"]] / device if device else None
    t2 = counts[AT["host_seconds"]] / host if host else None
    t3 = (counts[AT["disk_seconds"]] + counts[AT["remote_seconds"]]) / below if below else None
    return Accesses(
        leases=leases,
        device=device,
        host=host,
        disk=disk,
        remote=remote,
        prefetch_hits=int(counts[AT["prefetch_hits"]]),
        coalesced=int(counts[AT["coalesced"]]),
        misses=int(counts[AT["misses"]]),
        joined=int(counts[AT["joined"]]),
        left=int(counts[AT["left"]]),
        h1=h1,
        h2=h2,
        t1=t1,
        t2=t2,
        t3=t3,
        mean=_mean(h1, h2, (t1 or 0.0, t2 or 0.0, t3 or 0.0)),
    )


def _mean(h1: float | None, h2: float | None, times: tuple[float, float, float]) -> float | None:
    """Mean access time; a share of zero lets its unseen time count for nothing."""
    if h1 is None:
        return None
    near = h2 if h2 is not None else 0.0
    return h1 * times[0] + (1 - h1) * (near * times[1] + (1 - near) * times[2])
