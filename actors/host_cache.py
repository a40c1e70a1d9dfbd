"""The host tier: weights in the host's memory, read from the disk tier.

Its loads are disk reads, so as many run at once as the disk has channels, the shortest demand first. Loads whose bytes
have to come over the network first (`far`) are counted apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.residency.model import Tier
from actors.tier_cache import TierCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.clock import Clock
    from actors.ports import Emit, Residence
    from actors.residency.model import Model
    from actors.residency.policies import Score
    from actors.settings import Settings


class HostCache(TierCache):
    """Owns the host tier's ledger. Device caches lease from it while they copy, or as long as they map."""

    def __init__(
        self,
        settings: Settings,
        *,
        residence: Residence,
        clock: Clock,
        emit: Emit,
        score: Score | None = None,
        far: Callable[[Model], bool] = lambda _: False,
    ) -> None:
        # A host copy is leased by device residents for as long as they live: draining it would wait for ever.
        settings = replace(settings, fairness=math.inf)
        super().__init__("host", Tier.HOST, settings, residence=residence, clock=clock, emit=emit, score=score, far=far)
