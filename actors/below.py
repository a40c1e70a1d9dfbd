"""How a tier gets bytes from the one below, and keeps the copy there as long as it needs it.

`Bottom` has nothing below. `OnHost` leases from the host cache; on devices that share the host's memory the lease
lasts as long as the model is resident, and its tickets outlive a crash of this tier's actor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from actors import messages as m
from actors.residency.model import Tier, Trigger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actors.actor import Ref
    from actors.clock import Clock
    from actors.ports import LoadReport, Residence
    from actors.residency.ledger import Resident
    from actors.residency.model import Model, ModelKey, Ticket
    from actors.residency.wishes import Wish
    from actors.spawning import Spawn

HOST_PATIENCE = 30.0
"""Seconds that a load waits for room in the host tier before it gives its device bytes back."""


class Below(Protocol):
    """The tier below, as a load and an eviction need it."""

    async def bring(self, wish: Wish, residence: Residence) -> tuple[LoadReport, Ticket | None]:
        """Load a model here; runs as a job. The ticket keeps the copy below, if it has to stay."""
        ...

    def hurry(self, wish: Wish) -> None:
        """A load under way became more urgent."""
        ...

    def keep(self, key: ModelKey, ticket: Ticket | None) -> None:
        """Remember what keeps the copy below of a resident."""
        ...

    def let_go(self, key: ModelKey) -> None:
        """The resident left: so may its copy below."""
        ...

    def drop(self, ticket: Ticket | None) -> None:
        """A ticket that no resident needs."""
        ...

    def adopted(self, row: Resident) -> None:
        """A resident was found after a crash."""
        ...

    def rehold(self, rows: Iterable[Resident]) -> None:
        """The tier below lost its books: lease again what is used."""
        ...

    def forget_others(self, keys: Iterable[ModelKey]) -> None:
        """Let go of what a former incarnation kept for models that are not here any more."""
        ...


class Bottom:
    """Nothing below."""

    async def bring(self, wish: Wish, residence: Residence) -> tuple[LoadReport, Ticket | None]:
        """Just load it."""
        return await residence.load(wish.model), None

    def hurry(self, wish: Wish) -> None:
        """Nobody to hurry."""

    def keep(self, key: ModelKey, ticket: Ticket | None) -> None:
        """Nothing to keep."""

    def let_go(self, key: ModelKey) -> None:
        """Nothing kept."""

    def drop(self, ticket: Ticket | None) -> None:
        """Nothing kept."""

    def adopted(self, row: Resident) -> None:
        """Nothing to lease."""

    def rehold(self, rows: Iterable[Resident]) -> None:
        """Nothing leased."""

    def forget_others(self, keys: Iterable[ModelKey]) -> None:
        """Nothing kept."""


class OnHost:
    """`stays` says that a resident goes on using the host copy. `tickets` is given by whoever builds incarnations."""

    def __init__(
        self,
        where: str,
        host: Ref[m.Command],
        *,
        stays: bool,
        tickets: dict[ModelKey, Ticket],
        clock: Clock,
        spawn: Spawn[m.Command],
    ) -> None:
        self._where = where
        self._host = host
        self._stays = stays
        self._tickets = tickets
        self._now = clock.now
        self._spawn = spawn

    async def bring(self, wish: Wish, residence: Residence) -> tuple[LoadReport, Ticket | None]:
        """Lease it on the host, then copy or bind it."""
        ticket = m.new_ticket()
        ask = m.Acquire(
            wish.model,
            ticket,
            wish.request or wish.load,
            patience=self._now() + HOST_PATIENCE,
            priority=wish.priority,
            trigger=wish.trigger,
        )
        try:
            grant = await self._host.ask(ask)
            report = told_whole(await residence.load(wish.model), grant)
        except BaseException:
            self.drop(ticket)
            raise
        if self._stays:
            return report, ticket
        self.drop(ticket)
        return report, None

    def hurry(self, wish: Wish) -> None:
        """Pass the urgency on."""
        self._host.tell(m.Upgrade(wish.key, wish.trigger, wish.request))

    def keep(self, key: ModelKey, ticket: Ticket | None) -> None:
        """Remember the ticket."""
        if ticket is not None:
            self._tickets[key] = ticket

    def let_go(self, key: ModelKey) -> None:
        """Release the ticket."""
        self.drop(self._tickets.pop(key, None))

    def drop(self, ticket: Ticket | None) -> None:
        """Release it: idempotent, and right even if the lease was never granted."""
        if ticket is not None:
            self._host.tell(m.Release(ticket))

    def adopted(self, row: Resident) -> None:
        """Lease its copy, unless a former incarnation's ticket still does."""
        if self._stays and row.key not in self._tickets:
            self._hold(row.model)

    def rehold(self, rows: Iterable[Resident]) -> None:
        """Lease every copy that is in use again."""
        for row in rows:
            if self._tickets.pop(row.key, None) is not None:
                self._hold(row.model)

    def forget_others(self, keys: Iterable[ModelKey]) -> None:
        """Release the tickets of models that are gone."""
        for key in self._tickets.keys() - set(keys):
            self.let_go(key)

    def _hold(self, model: Model) -> None:
        ticket = m.new_ticket()
        self._tickets[model.key] = ticket
        # For what is here already, nobody waits: it must not go before those who do.
        ask = m.Acquire(model, ticket, f"{self._where} holds {model.key}", trigger=Trigger.RECOVERY)

        async def hold() -> m.Command:
            await self._host.ask(ask)
            return m.Woke()

        self._spawn(hold, failed=lambda _: m.Woke())


def told_whole(report: LoadReport, grant: m.Grant) -> LoadReport:
    """The whole way: where the bytes were before the host tier had them, and how long that took."""
    steps = (("host", grant.waited), *report.steps) if grant.waited else report.steps
    return replace(report, source=Tier(grant.found), steps=steps)
