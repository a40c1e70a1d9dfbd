"""Calendar time that passes with virtual seconds."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta


class SimulatedClock:
    """Starts at an instant; `jump` moves the wall without moving the loop, as an operator or NTP might."""

    def __init__(self, start: datetime) -> None:
        self._start = start.astimezone(UTC)
        self._jumped = 0.0
        self._time = asyncio.get_running_loop().time

    def now(self) -> float:
        """See `Clock.now`."""
        return self._time()

    def wall(self) -> datetime:
        """See `Clock.wall`."""
        return self._start + timedelta(seconds=self._time() + self._jumped)

    def jump(self, seconds: float) -> None:
        """Move the wall clock."""
        self._jumped += seconds

    def __repr__(self) -> str:
        return f"<SimulatedClock {self.wall():%Y-%m-%d %H:%M:%S}>"
