"""Loop seconds as calendar time: one offset, taken once, so that durations never jump with the wall clock.

Nothing else here. Events carry loop seconds; spans, feed and logs need an instant for people.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NS = 1_000_000_000


class Epoch:
    """Turns loop seconds into wall time. A later step of the system's clock is not followed, on purpose."""

    __slots__ = ("_offset", "now")

    def __init__(self, now: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.now = now
        self._offset = wall_ns() - int(now() * _NS)

    def ns(self, at: float) -> int:
        """Nanoseconds since 1970 of loop second `at`."""
        return int(at * _NS) + self._offset

    def text(self, at: float) -> str:
        """RFC 3339 in UTC with microseconds, `2026-11-29T21:30:00.000000Z`."""
        instant = datetime.fromtimestamp(self.ns(at) / _NS, UTC)
        return instant.isoformat(timespec="microseconds").replace("+00:00", "Z")

    def __repr__(self) -> str:
        return f"<Epoch offset={self._offset} ns>"
