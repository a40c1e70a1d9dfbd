"""One device's residency: loads go through the host tier, and end in the device's worker.

Where device memory is the host's own (`cpu:N`), the host copy stays leased as long as the model is resident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors import messages as m
from actors.lease import Lease
from actors.residency.model import Model, Ticket, Tier
from actors.tier_cache import Settings, TierCache

if TYPE_CHECKING:
    from actors.actor import Ref
    from actors.clock import Clock
    from actors.ports import Emit, LoadReport, Residence
    from actors.residency.ledger import Resident
    from actors.residency.model import ModelKey
    from actors.residency.policies import Score
    from actors.residency.wishes import Wish

HOST_PATIENCE = 30.0
"""Seconds that a load waits for room in the host tier before it gives its device bytes back."""


class DeviceCache(TierCache):
    """Owns one device's ledger.

    `keeps_host` says that a resident goes on using the host copy. `host_ceiling` (bytes) is the most that the host tier
    could hold of one model: what does not fit there can never come here. `host_tickets` is given by whoever builds the
    incarnations, because the leases it names live on in the host's books when this actor crashes.
    """

    def __init__(
        self,
        where: str,
        settings: Settings,
        *,
        residence: Residence,
        host: Ref[m.Command],
        keeps_host: bool,
        host_ceiling: int,
        host_tickets: dict[ModelKey, Ticket],
        clock: Clock,
        emit: Emit,
        score: Score | None = None,
    ) -> None:
        super().__init__(where, Tier.DEVICE, settings, residence=residence, clock=clock, emit=emit, score=score)
        self._host = host
        self._keeps_host = keeps_host
        self._host_ceiling = host_ceiling
        self._host_tickets = host_tickets

    def _admit(self, model: Model, now: float) -> None:
        if model.footprint.host > self._host_ceiling:
            raise self._never(model, model.footprint.host, "host", self._host_ceiling)
        super()._admit(model, now)

    async def _bring(self, wish: Wish, load: str) -> m.Command:
        ticket = m.new_ticket()
        ask = m.Acquire(
            wish.model,
            ticket,
            wish.request or load,
            patience=self._clock.now() + HOST_PATIENCE,
            priority=wish.priority,
            trigger=wish.trigger,
        )
        lease = Lease(self._host, ask)
        grant = await lease.__aenter__()
        try:
            report: LoadReport = await self._residence.load(wish.model)
        except BaseException:
            lease.release()
            raise
        report = report_from(report, grant)
        if self._keeps_host:
            return m.Loaded(load, report, ticket)
        lease.release()
        return m.Loaded(load, report)

    def _hurry(self, wish: Wish) -> None:
        self._host.tell(m.Upgrade(wish.key, wish.trigger, wish.request))

    def _adopted(self, row: Resident) -> None:
        if self._keeps_host and row.key not in self._host_tickets:
            self._hold(row)

    def _rehold(self) -> None:
        for row in self.ledger.rows():
            if self._host_tickets.pop(row.key, None) is not None:
                self._hold(row)

    def _hold(self, row: Resident) -> None:
        """Lease the host copy of a resident that is here already."""
        ticket = m.new_ticket()
        self._host_tickets[row.key] = ticket
        ask = m.Acquire(row.model, ticket, f"{self.where} holds {row.key}")

        async def hold() -> m.Command:
            await self._host.ask(ask)
            return m.Woke()

        self.spawn(hold, failed=lambda _: m.Woke())

    def _forgotten_below(self) -> None:
        for key in tuple(self._host_tickets):
            if self.ledger.get(key) is None:
                self._let_go_below(self._host_tickets.pop(key))

    def _keep_below(self, key: ModelKey, below: Ticket | None) -> None:
        if below is not None:
            self._host_tickets[key] = below

    def _below_of(self, key: ModelKey) -> Ticket | None:
        return self._host_tickets.pop(key, None)

    def _let_go_below(self, below: Ticket | None) -> None:
        if below is not None:
            self._host.tell(m.Release(below))


def report_from(report: LoadReport, grant: m.Grant) -> LoadReport:
    """Tell the whole way: where the bytes were before the host tier had them, and how long that took."""
    steps = (("host", grant.waited), *report.steps) if grant.waited else report.steps
    return type(report)(report.resident, Tier.HOST if grant.found is Tier.HOST else grant.found, steps)
