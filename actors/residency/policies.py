"""Eviction policies as score functions over one resident and the outlook. The smallest score leaves first.

Protection (leases, pins, minimum residency) is not a policy's business: `plan.py` only shows it what may leave.
"""

from __future__ import annotations

import zlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.residency.ledger import Resident
    from forecasting.outlook import Outlook


class Score(Protocol):
    """Judges one resident; pure, cheap, and total (never NaN)."""

    def __call__(self, row: Resident, now: float, outlook: Outlook, /) -> float:
        """How much it is worth keeping."""
        ...


def lru(row: Resident, _now: float, _outlook: Outlook) -> float:
    """Least recently used leaves first."""
    return row.last_used


TRACE = 1e-9
"""Of a rate: enough to order by recency what nothing at all is expected of."""
PATIENCE = 600.0
"""Seconds of idleness after which a model without a forecast is expected as often as one with a request in so many."""
ENOUGH = 0.7
"""Expected requests that count as the next use."""
SOONEST = 75.0
"""Seconds: a use that is due may not weigh without limit."""


def rate(row: Resident, now: float, outlook: Outlook) -> float:
    """Expected request rate times reload cost per byte leaves first when small (λ_E·c/s, `policy.md` section 6.4).

    Least recently used, for all alike, when the outlook is empty or stale.
    """
    if not outlook.fresh(now):
        return row.last_used
    known = row.key in outlook.prospects
    return _value(row, now, outlook.of(row.key).evict_rate if known else _recency(row, now))


def ttn(row: Resident, now: float, outlook: Outlook) -> float:
    """The same with the rate that the time to the next use implies; for traffic that follows a schedule."""
    if not outlook.fresh(now):
        return row.last_used
    if row.key not in outlook.prospects:
        return _value(row, now, _recency(row, now))
    left = outlook.of(row.key).next_use - max(now - outlook.origin, 0.0)
    return _value(row, now, ENOUGH / max(left, SOONEST))


def _recency(row: Resident, now: float) -> float:
    """The rate of a model that no forecast knows: the longer idle, the lower."""
    return 1.0 / (max(now - row.last_used, 0.0) + PATIENCE)


def _value(row: Resident, now: float, expected: float) -> float:
    """Seconds of reloading that a byte saves per second; a model that costs nothing to load still counts a little."""
    cost = max(row.model.load_seconds, 1e-3)
    return (expected + TRACE * _recency(row, now)) * cost / max(row.size, 1)


POLICIES: Mapping[str, Score] = MappingProxyType(
    {
        "lru": lru,
        "rate": rate,
        "ttn": ttn,
        # The same order; what differs is that its residents also leave by themselves when idle for `ttl_idle`.
        "lru_ttl": lru,
    }
)


def order(row: Resident, score: Score, now: float, outlook: Outlook) -> tuple[int, float, float, int, str]:
    """Sort key of a victim: low priority first, then the policy, then cheap to reload and small, then by name."""
    return (row.model.rules.priority, score(row, now, outlook), row.model.load_seconds, row.size, row.key)


def jitter(row: Resident, share: float = 0.05) -> float:
    """A factor in 1±`share`, fixed for one residency, so that models loaded together do not expire together."""
    spread = (zlib.crc32(row.key.encode()) % 2001) / 1000 - 1
    return 1 + share * spread


def expires_at(row: Resident) -> tuple[float, str] | None:
    """When a resident leaves by itself, in loop seconds, and why (`ttl` or `ttl_idle`); None if never.

    A pin overrides the idle limit but not the absolute one, which exists for revalidation.
    """
    rules = row.model.rules
    limits: list[tuple[float, str]] = []
    if rules.ttl is not None:
        limits.append((row.loaded_at + rules.ttl * jitter(row), "ttl"))
    if rules.ttl_idle is not None and not row.pinned:
        limits.append((row.last_used + rules.ttl_idle * jitter(row), "ttl_idle"))
    return min(limits, default=None)
