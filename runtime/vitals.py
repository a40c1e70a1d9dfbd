"""Signs of life: the loop's lag, actors whose queues do not move, loads that take too long, workers that do not answer.

Observes only; what follows from it is said by the health endpoints.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import anyio

from actors.errors import ForeloadError
from actors.tier_cache import TierCache

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from actors.actor import Ref
    from actors.clock import Clock
    from actors.messages import Command
    from actors.residency.model import ModelKey

TICK: Final = 0.25
"""Seconds between two looks."""

STUCK: Final = 30.0
"""Seconds without progress after which the server is not live (`protocol.md` section 6)."""

PROBE: Final = 2.0
"""Seconds between two questions to a worker, and how long it may take to answer one."""


class Vitals:
    """`observe` takes the loop's lag in seconds. `stuck_load` seconds is the longest that a load may take.

    `moved` says when the network last brought bytes for one, which takes as long as it takes.
    """

    def __init__(
        self,
        refs: tuple[Ref[Command], ...],
        probes: Mapping[str, Callable[[], Awaitable[None]]],
        *,
        clock: Clock,
        observe: Callable[[float], None],
        stuck_load: float,
        moved: Callable[[ModelKey], float | None] = lambda _: None,
    ) -> None:
        self._refs = refs
        self._probes = probes
        self._clock = clock
        self._observe = observe
        self._stuck_load = stuck_load
        self._progress = moved
        self._moved: dict[str, tuple[int, float]] = {}
        self._silent: set[str] = set()

    async def watch(self) -> None:
        """Look, for ever."""
        while True:
            due = self._clock.now() + TICK
            await anyio.sleep(TICK)
            now = self._clock.now()
            self._observe(max(now - due, 0.0))
            for ref in self._refs:
                taken = ref.mailbox.taken
                if ref.mailbox.depth == 0 or self._moved.get(ref.name, (-1, 0.0))[0] != taken:
                    self._moved[ref.name] = (taken, now)

    async def probe(self, device: str) -> None:
        """Ask one worker, for ever, whether it answers."""
        ask = self._probes[device]
        while True:
            await anyio.sleep(PROBE)
            with anyio.move_on_after(PROBE) as patience, contextlib.suppress(ForeloadError):
                await ask()
            # Silence alone counts. One that is down or starting is known to its cache, which also knows at once
            # when it is up again; noted here, it would count as silent until the next probe.
            (self._silent.add if patience.cancelled_caught else self._silent.discard)(device)

    def answers(self, device: str) -> bool:
        """Did the worker answer when it was last asked?"""
        return device not in self._silent

    def trouble(self) -> str:
        """Why the cold path does not move; empty while it does."""
        now = self._clock.now()
        for ref in self._refs:
            since = self._moved.get(ref.name, (0, now))[1]
            if ref.mailbox.depth and now - since > STUCK:
                return f"the actor {ref.name} has not taken a message for {now - since:.0f} s"
            owner = ref.owner
            if not isinstance(owner, TierCache):
                continue
            for wish in owner.wishes.begun():
                since = max(wish.started, self._progress(wish.key) or 0.0)
                if now - since > self._stuck_load:
                    return f"a load of {wish.key} on {ref.name} has made no progress for {now - since:.0f} s"
        return ""

    def __repr__(self) -> str:
        return f"<Vitals {self.trouble() or 'well'}>"
