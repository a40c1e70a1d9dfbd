"""The one frozen value that the rest of the system sees of any forecast.

Policies score residents with it; nothing here knows how a number was estimated, and nothing here needs numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SURE = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is expected of one model.

    Rates are in requests per second: `rate` on the whole, `evict_rate` what keeping it is worth (λ_E),
    `prefetch_rate` what bringing it is worth (λ_P); the last two follow `rate` unless given. `next_use` is in seconds
    from the outlook's origin (infinite: none expected), `confidence` between 0 (a guess) and 1. `chances` are pairs
    (within so many seconds, probability), both rising; `source` names the estimator.
    """

    rate: float = 0.0
    next_use: float = math.inf
    confidence: float = 0.0
    evict_rate: float = math.nan
    prefetch_rate: float = math.nan
    chances: tuple[tuple[float, float], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("rate", "evict_rate", "prefetch_rate"):
            value = getattr(self, name)
            if name != "rate" and math.isnan(value):
                object.__setattr__(self, name, self.rate)
            elif not (math.isfinite(value) and value >= 0):
                msg = f"{name} must be finite and not negative, not {value!r}"
                raise ValueError(msg)
        if math.isnan(self.next_use) or self.next_use < 0:
            msg = f"next_use must be a duration, not {self.next_use!r}"
            raise ValueError(msg)
        if not 0 <= self.confidence <= 1:
            msg = f"confidence must lie in 0..1, not {self.confidence!r}"
            raise ValueError(msg)
        at, reached = 0.0, 0.0
        for within, chance in self.chances:
            if not (within > at and reached <= chance <= 1):
                msg = f"chances must rise with their horizons and lie in 0..1, not {self.chances!r}"
                raise ValueError(msg)
            at, reached = within, chance

    def chance(self, within: float) -> float:
        """Probability of at least one request within so many seconds.

        Between known `chances` the hazard is even; beyond the last, or without any, requests are Poisson at `rate`.
        """
        at, hazard = 0.0, 0.0
        for until, chance in self.chances:
            reached = -math.log1p(-min(chance, SURE))
            if within <= until:
                share = max(within - at, 0.0) / (until - at)
                return -math.expm1(-(hazard + share * (reached - hazard)))
            at, hazard = until, reached
        return -math.expm1(-(hazard + self.rate * max(within - at, 0.0)))

    def raised(self, floor: Floor) -> Prospect:
        """The same with what is declared as a floor: the higher rate and probability, the earlier use."""
        near = max(floor.within, floor.next_use)
        rate, chances = floor.rate, self.chances
        if near > 0:
            rate = max(rate, -math.log1p(-min(floor.chance, SURE)) / near)
        if near > 0 and floor.chance > self.chance(near):
            times = sorted({near, *(within for within, _ in chances)})
            chances = tuple((t, max(self.chance(t), floor.chance if t >= near else 0.0)) for t in times)
        return replace(
            self,
            rate=max(self.rate, rate),
            evict_rate=max(self.evict_rate, rate),
            prefetch_rate=max(self.prefetch_rate, rate),
            next_use=min(self.next_use, floor.next_use),
            confidence=max(self.confidence, floor.chance),
            chances=chances,
            source=f"{self.source}+{floor.source}" if self.source else floor.source,
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """What is declared of one model: requests `next_use` seconds from now or before, with this `chance`, at `rate`.

    A floor without a rate stands for the one that makes its chance come true `within` seconds.
    """

    chance: float = 0.98
    rate: float = 0.0
    next_use: float = 0.0
    within: float = 600.0
    source: str = "scheduled"

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            msg = f"chance must lie in 0..1, not {self.chance!r}"
            raise ValueError(msg)
        for name in ("rate", "next_use", "within"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                msg = f"{name} must be finite and not negative, not {value!r}"
                raise ValueError(msg)


NO_PROSPECT = Prospect()


class _Raised(Mapping[str, Prospect]):
    """Prospects, some of them on a floor; the others are looked up beneath, so that nothing is copied."""

    __slots__ = ("_beneath", "_raised")

    def __init__(self, beneath: Mapping[str, Prospect], raised: Mapping[str, Prospect]) -> None:
        self._beneath = beneath
        self._raised = raised

    def __getitem__(self, key: str) -> Prospect:
        found = self._raised.get(key)
        return self._beneath[key] if found is None else found

    def __iter__(self) -> Iterator[str]:
        yield from self._beneath
        yield from (key for key in self._raised if key not in self._beneath)

    def __len__(self) -> int:
        return len(self._beneath) + sum(1 for key in self._raised if key not in self._beneath)

    def __contains__(self, key: object) -> bool:
        return key in self._raised or key in self._beneath


@dataclass(frozen=True, slots=True)
class Outlook:
    """Prospects per model key, as of `origin` (loop seconds), to be trusted for `valid` seconds."""

    origin: float = 0.0
    prospects: Mapping[str, Prospect] = field(default_factory=lambda: MappingProxyType({}))
    valid: float = math.inf

    def of(self, key: str) -> Prospect:
        """The prospect of one model; an unknown one expects nothing, with no confidence."""
        return self.prospects.get(key, NO_PROSPECT)

    def fresh(self, now: float) -> bool:
        """Is there anything in it, and is it young enough? If not, recency is the better guide."""
        return bool(self.prospects) and now - self.origin <= self.valid

    def raised(self, floors: Mapping[str, Floor]) -> Outlook:
        """The same with declared floors under some models."""
        if not floors:
            return self
        raised = {key: self.of(key).raised(floor) for key, floor in floors.items()}
        return replace(self, prospects=_Raised(self.prospects, raised))


UNKNOWN = Outlook()
"""The outlook of a server that has no forecaster: policies fall back to recency."""
