"""The one frozen value that the rest of the system sees of any forecast.

Policies score residents with it; nothing here knows how a number was estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is expected of one model.

    `rate` is in requests per second, `next_use` in seconds from the outlook's origin (infinite: none expected),
    `confidence` between 0 (a guess) and 1.
    """

    rate: float = 0.0
    next_use: float = math.inf
    confidence: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate >= 0):
            msg = f"rate must be finite and not negative, not {self.rate!r}"
            raise ValueError(msg)
        if math.isnan(self.next_use) or self.next_use < 0:
            msg = f"next_use must be a duration, not {self.next_use!r}"
            raise ValueError(msg)
        if not 0 <= self.confidence <= 1:
            msg = f"confidence must lie in 0..1, not {self.confidence!r}"
            raise ValueError(msg)

    def chance(self, within: float) -> float:
        """Probability of at least one request within so many seconds, for Poisson arrivals at `rate`."""
        return -math.expm1(-self.rate * max(within, 0.0))


NO_PROSPECT = Prospect()


@dataclass(frozen=True, slots=True)
class Outlook:
    """Prospects per model key, as of `origin` (loop seconds)."""

    origin: float = 0.0
    prospects: Mapping[str, Prospect] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, key: str) -> Prospect:
        """The prospect of one model; an unknown one expects nothing, with no confidence."""
        return self.prospects.get(key, NO_PROSPECT)


UNKNOWN = Outlook()
"""The outlook of a server that has no forecaster: policies fall back to recency."""
