"""What the parts of one tier's cache share: its ledger, its wishes, its memory of sizes and failures, its voice.

Values and questions only; whoever acts on them is `arrivals.py`, `departures.py` or the cache itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.errors import NeverFits, NoEvictableSpace
from actors.residency.ledger import Ledger
from actors.residency.plan import ceiling
from actors.residency.policies import POLICIES, order
from actors.residency.quarantine import Quarantine
from actors.residency.states import State
from actors.residency.wishes import Wishes
from forecasting.outlook import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.clock import Clock
    from actors.ports import Emit
    from actors.residency.ledger import Resident
    from actors.residency.model import Model, Tier
    from actors.residency.policies import Score
    from actors.residency.wishes import Wish
    from actors.settings import Settings
    from forecasting.outlook import Outlook


class Books:
    """`where` names the place in events, `name` makes ids that no other incarnation has made.

    `far` advises whether a model's bytes are beyond this machine: such loads have a channel of their own, because
    minutes of network must not stand before milliseconds of disk.
    """

    def __init__(
        self,
        where: str,
        tier: Tier,
        settings: Settings,
        *,
        clock: Clock,
        emit: Emit,
        score: Score | None,
        name: Callable[[str], str],
        far: Callable[[Model], bool] = lambda _: False,
    ) -> None:
        self.where = where
        self.tier = tier
        self.settings = settings
        self.now = clock.now
        self.emit = emit
        self.name = name
        self.far = far
        self.ledger = Ledger(settings.capacity, headroom=settings.headroom, count=settings.count)
        self.wishes = Wishes(shortest_first=settings.shortest_first)
        self.quarantine = Quarantine(first=settings.backoff_first, limit=settings.backoff_limit)
        self.measured: dict[str, int] = {}
        self.leaked = 0
        self.outlook: Outlook = UNKNOWN
        self.score = score or POLICIES[settings.policy]

    def need(self, model: Model) -> int:
        """Bytes to reserve: measured once it was here, declared before."""
        return self.measured.get(model.fingerprint, model.footprint.on(self.tier))

    def fits(self, model: Model) -> bool:
        """Could it ever be here?"""
        return self.need(model) <= ceiling(self.ledger) and self.ledger.count != 0

    def occupied(self, *, far: bool) -> bool:
        """Does one of the two channels carry all the loads that it may?"""
        limit = self.settings.pulls if far else self.settings.parallel
        return self.wishes.loading_from(far=far) >= limit

    def affords(self, need: int) -> bool:
        """Could so many bytes be reserved now?"""
        places = self.ledger.places
        return need <= self.ledger.free and (places is None or places > 0)

    def leak(self, size: int) -> None:
        """So many bytes did not come back: the budget is smaller until the place is renewed."""
        self.leaked += size
        self.ledger.foreign += size

    def renew(self) -> None:
        """The place starts afresh: nothing is leaked any more."""
        self.ledger.foreign -= self.leaked
        self.leaked = 0

    def disposable(self, now: float) -> list[Resident]:
        """Residents that may be evicted without draining, the least valuable first."""
        idle = [
            row
            for row in self.ledger.rows()
            if row.state is State.RESIDENT
            and row.idle
            and not row.pinned
            and not row.held(now)
            and now - row.loaded_at >= row.model.rules.min_residency
        ]
        return sorted(idle, key=lambda row: order(row, self.score, now, self.outlook))

    def never(self, model: Model) -> NeverFits:
        """Why it can't ever be here, with the numbers."""
        return never_fits(model, self.need(model), self.where, ceiling(self.ledger))

    def no_room(self, wish: Wish, retry_after: float) -> NoEvictableSpace:
        """Why it can't be here now, with the numbers."""
        obstacle = wish.blocked or "busy"
        return NoEvictableSpace(
            f"no room for {wish.key} on {self.where}: what is there is {obstacle}",
            model=wish.model.name,
            detail={"bytes_needed": self.need(wish.model), "bytes_free": max(self.ledger.free, 0)},
            retry_after=retry_after,
        )

    def __repr__(self) -> str:
        return f"{self.where} {self.ledger!r} {self.wishes!r}"


def never_fits(model: Model, needed: int, where: str, most: int) -> NeverFits:
    """A refusal that nothing but another set-up can change."""
    return NeverFits(
        f"{model.key} needs {needed} bytes on {where}, which can hold {most}",
        model=model.name,
        detail={"bytes_needed": needed, "bytes_available": most},
    )
