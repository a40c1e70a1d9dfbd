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


POLICIES: Mapping[str, Score] = MappingProxyType(
    {
        "lru": lru,
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
