"""One device's residency: loads go through the host tier, and end in the device's worker.

Where device memory is the host's own (`cpu:N`), the host copy stays leased as long as the model is resident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.below import OnHost
from actors.books import never_fits
from actors.residency.model import Tier
from actors.tier_cache import TierCache

if TYPE_CHECKING:
    from actors import messages as m
    from actors.actor import Ref
    from actors.clock import Clock
    from actors.ports import Emit, Residence
    from actors.residency.model import Model, ModelKey, Ticket
    from actors.residency.policies import Score
    from actors.settings import Settings


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
        below = OnHost(where, host, stays=keeps_host, tickets=host_tickets, clock=clock, spawn=self.spawn)
        super().__init__(
            where, Tier.DEVICE, settings, residence=residence, clock=clock, emit=emit, score=score, below=below
        )
        self._host_ceiling = host_ceiling

    def _admit(self, model: Model, now: float) -> None:
        if model.footprint.host > self._host_ceiling:
            raise never_fits(model, model.footprint.host, "host", self._host_ceiling)
        super()._admit(model, now)
