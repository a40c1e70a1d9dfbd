"""One timer per actor: the earliest of all the times at which it wants to be woken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from actors import messages as m

if TYPE_CHECKING:
    from actors.actor import Job
    from actors.clock import Clock
    from actors.spawning import Spawn

SLACK = 1e-5
"""Seconds by which a wake-up comes after what it is for: loops fire timers up to their resolution early."""


class Alarm:
    """Sends `Woke(number)`; whoever gets it tells `rang` the number."""

    def __init__(self, clock: Clock, spawn: Spawn[m.Command]) -> None:
        self._now = clock.now
        self._spawn = spawn
        self._at = math.inf
        self._number = 0
        self._job: Job | None = None

    def at(self, when: float | None) -> None:
        """Be woken at this time (loop seconds), if nothing wakes us before."""
        if when is None or when >= self._at:
            return
        if self._job is not None:
            self._job.cancel()
        self._at = when
        self._number += 1
        number = self._number
        self._job = self._spawn(lambda: self._sleep(when, number), failed=lambda _: m.Woke(number))

    def rang(self, number: int) -> None:
        """A wake-up came; an older timer's, or nobody's (0), changes nothing."""
        if number == self._number:
            self._at = math.inf
            self._job = None

    async def _sleep(self, when: float, number: int) -> m.Command:
        await anyio.sleep(max(when - self._now(), 0.0) + SLACK)
        return m.Woke(number)

    def __repr__(self) -> str:
        return f"<Alarm {self._at:.3f}>"
