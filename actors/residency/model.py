"""Who may be resident: identity, size and the rules that travel with a model.

Pure values. Nothing here knows where weights lie or how they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

ModelKey = NewType("ModelKey", str)
"""`name@version`; a str, because its hash is cached and the hit path looks it up on each request."""

Ticket = NewType("Ticket", int)
"""A lease's name, chosen by its holder before asking."""


def key_of(name: str, version: str) -> ModelKey:
    """Spell the key of one version of a model."""
    return ModelKey(f"{name}@{version}")


class Tier(StrEnum):
    """Where weights can be, ordered by cost."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class Trigger(StrEnum):
    """Why a load was started."""

    DEMAND = "demand"
    PREFETCH = "prefetch"
    WARM = "warm"
    ADMIN = "admin"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model needs on each tier, workspace and margin included."""

    device: int
    host: int

    def __post_init__(self) -> None:
        if self.device < 0 or self.host < 0:
            msg = f"a footprint is not negative: {self!r}"
            raise ValueError(msg)

    def on(self, tier: Tier) -> int:
        """Bytes on one tier; the disk and remote tiers hold what the host does."""
        return self.device if tier is Tier.DEVICE else self.host


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a resident stays. Durations in seconds; `None` means no such limit.

    `ttl_idle` counts from the last use, `ttl` from the load (revalidation), `min_residency` protects a newcomer.
    """

    ttl_idle: float | None = None
    ttl: float | None = None
    min_residency: float = 0.0
    pinned: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """One servable version: identity is name, version and the hash of what it is made of.

    `load_seconds` is what bringing it to the device is expected to cost; policies use it to break ties.
    """

    name: str
    version: str
    fingerprint: str
    footprint: Footprint
    rules: Rules = Rules()
    load_seconds: float = 0.0
    key: ModelKey = field(init=False, compare=False)
    """`name@version`; spelled once, because the hit path asks for it several times per request."""

    artefact: str = field(init=False, compare=False, repr=False)
    """Key and fingerprint: what a failure is remembered by, so that no honest twin suffers for a spoiled copy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.name, self.version))
        object.__setattr__(self, "artefact", f"{self.key} {self.fingerprint}")

    def __repr__(self) -> str:
        return f"<Model {self.key} {self.fingerprint[:8]} {self.footprint.device} B>"
