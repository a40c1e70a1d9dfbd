"""The limits of one tier, as values. Where they come from is the configuration's business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of one tier. Bytes and seconds.

    `parallel` loads at once, and apart from them `pulls` of models whose bytes are beyond this machine; `victims` per
    load; after `fairness` seconds a waiting demand may drain leased residents; `finish_orphans` lets a load go on that
    nobody waits for; `waiters` in all and per model; `high` and `low` are the watermarks of the host's memory.
    """

    capacity: int
    headroom: int = 0
    count: int | None = None
    parallel: int = 4
    pulls: int = 2
    victims: int = 16
    fairness: float = 1.0
    finish_orphans: bool = False
    backoff_first: float = 1.0
    backoff_limit: float = 300.0
    waiters: int = 10_000
    waiters_per_model: int = 2_000
    shortest_first: bool = False
    policy: str = "lru"
    high: float = 0.85
    low: float = 0.80
