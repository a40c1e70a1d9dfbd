"""Where time comes from: durations from the running loop, calendar time from the system.

Nobody else reads a clock. A virtual loop makes `now()` virtual without any change here.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

SAME_CLOCK = 0.1
"""Seconds by which a loop on real time may differ from the system's monotonic clock."""


class Clock(Protocol):
    """Monotonic seconds for durations and a UTC instant for people."""

    def now(self) -> float:
        """Seconds of the running loop; only differences mean anything."""
        ...

    def wall(self) -> datetime:
        """The calendar instant, in UTC."""
        ...


class LoopClock:
    """The running event loop's clock; binds the loop at construction, so build it inside the loop."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        # Bound once: looking the loop up costs more than the whole hit path.
        self.now: Callable[[], float] = asyncio.get_running_loop().time
        if abs(self.now() - time.monotonic()) < SAME_CLOCK:
            # A loop on real time counts the same seconds, but some (uvloop) only in milliseconds, once per turn.
            self.now = time.monotonic

    def wall(self) -> datetime:
        """The system's calendar time."""
        return datetime.now(UTC)

    def __repr__(self) -> str:
        return f"<LoopClock {self.now():.3f}s>"
