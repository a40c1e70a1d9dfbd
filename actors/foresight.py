"""What loading ahead earned: prefetches by what became of them, and a control group to measure savings by.

Pure counting of facts; the forecaster asks it who is withheld, and the daily report is made from it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors import events as e
from actors.residency.model import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from actors.residency.model import ModelKey

HOUR = 3_600.0
RESULTS = ("used", "late", "wasted", "cancelled")


@dataclass(frozen=True, slots=True)
class Earned:
    """Counts since a report; see `ForesightReported`."""

    used: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0
    control: int = 0
    cold_control: int = 0
    treated: int = 0
    cold_treated: int = 0
    host_used: int = 0
    host_late: int = 0
    host_wasted: int = 0
    host_cancelled: int = 0

    @property
    def saved(self) -> float | None:
        """Share of requests that foresight spared a cold start; None until both groups have been seen."""
        if not self.control or not self.treated:
            return None
        return self.cold_control / self.control - self.cold_treated / self.treated


def _resumed(begun: NDArray[np.uint32], rest: bytes) -> NDArray[np.uint32]:
    """`zlib.crc32(rest, value)` for each of these values (RFC 1952, section 8)."""
    state = ~begun
    for byte in rest:
        state = _CRC[(state ^ np.uint32(byte)) & np.uint32(0xFF)] ^ (state >> np.uint32(8))
    return ~state


def _remainders() -> NDArray[np.uint32]:
    found = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        found = np.where(found & 1, (found >> 1) ^ np.uint32(0xEDB88320), found >> 1).astype(np.uint32)
    return found


_CRC = _remainders()
"""The remainder of each byte."""


class Foresight:
    """`share` of all (model, hour) pairs get no learned prefetch: the same ones everywhere, and new ones each hour."""

    def __init__(self, *, share: float, wall: Callable[[], float]) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"the control group is a share of all, not {share}")
        self._share = share
        self._wall = wall
        self._counts = dict.fromkeys(Earned.__dataclass_fields__, 0)
        self._keys: tuple[ModelKey, ...] = ()
        self._begun = np.zeros(0, np.uint32)
        self._hour = -1
        self._drawn = np.zeros(0, np.bool_)

    def control(self, key: ModelKey, at: float) -> bool:
        """Is this model in the control group in the hour of `at` (epoch seconds)?"""
        if self._share == 0:
            return False
        drawn = zlib.crc32(f"{key}|{int(at // HOUR)}".encode()) / 2**32
        return drawn < self._share

    def controls(self, keys: tuple[ModelKey, ...], at: float) -> NDArray[np.bool_]:
        """`control` of many models; drawn once an hour for the same tuple of keys."""
        if self._keys is not keys:
            self._keys, self._hour = keys, -1
            self._begun = np.array([zlib.crc32(f"{key}|".encode()) for key in keys], np.uint32)
        hour = int(at // HOUR)
        if self._hour != hour:
            self._hour = hour
            self._drawn = _resumed(self._begun, str(hour).encode()) / 2**32 < self._share
        return self._drawn

    def wants(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """Subscribe with this."""
        return {e.PrefetchSettled: self._settled, e.LeaseGranted: self._granted}

    def _settled(self, event: e.PrefetchSettled) -> None:
        # On the host only what was asked for there is settled; copies that a device's load passes through are not.
        if event.result in RESULTS:
            self._counts[f"host_{event.result}" if event.device == Tier.HOST else event.result] += 1

    def _granted(self, event: e.LeaseGranted) -> None:
        if event.device == Tier.HOST:
            return
        group = "control" if self.control(event.model, self._wall()) else "treated"
        self._counts[group] += 1
        if event.result in {"miss", "coalesced"}:
            self._counts[f"cold_{group}"] += 1

    def earned(self) -> Earned:
        """Counts so far."""
        return Earned(**self._counts)

    def report(self, at: float) -> e.ForesightReported:
        """Close the day: the counts as a fact, and from zero again."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return e.ForesightReported(at, **counts)

    def __repr__(self) -> str:
        return f"<Foresight {self.earned()!r}>"
