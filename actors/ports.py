"""What actors need of the world: tiny protocols, each with a simulated twin in `runtime/simulation`.

No implementation here, and no import that a simulator would have to pay for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.events import Event
    from actors.residency.model import Model, ModelKey, Tier
    from forecasting.fitted import Fitted
    from forecasting.snapshot import Snapshot
    from forecasting.tiers import Minute

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a load went.

    `resident` is the measured footprint in bytes on the tier, `source` the tier the bytes came from, and
    `steps` the phases in order with their seconds.
    """

    resident: int
    source: Tier
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EvictReport:
    """How an eviction went: bytes measured as returned; `leaked` if fewer than expected stay away for good."""

    returned: int
    leaked: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """One model that a tier really holds, for rebuilding a ledger after a crash."""

    model: Model
    resident: int
    in_flight: int = 0


class Residence(Protocol):
    """A place that can hold models: a device worker, or the host's memory.

    Contract (`tests/contracts`): `load` either returns with the model held, or raises with nothing held and every
    byte given back; cancelling it undoes it *before* the cancellation is let through. `evict` of a model that is
    not held returns zero bytes. Both are called at most once at a time per model, by one actor.
    """

    async def load(self, model: Model) -> LoadReport:
        """Bring the model here from the tier below. Raises `Broken`, `NeverFits` or `NotReady`."""
        ...

    async def evict(self, key: ModelKey) -> EvictReport:
        """Let go of it and measure what came back."""
        ...

    async def inventory(self) -> tuple[Held, ...]:
        """What is really held now."""
        ...


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Host memory as a budget: `limit` and `available` bytes (MemAvailable or the cgroup's limit, never MemFree)."""

    limit: int
    available: int

    @property
    def used_ratio(self) -> float:
        """Share of the limit in use, 0..1."""
        return 1 - self.available / self.limit if self.limit else 0.0


class Memory(Protocol):
    """Reads the machine's memory."""

    def sample(self) -> MemorySample:
        """One reading."""
        ...


class Offload(Protocol):
    """Runs blocking work away from the loop; a direct call in simulation."""

    async def __call__(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` and return its result."""
        ...


class Catalog(Protocol):
    """Where models are described; may block on a disk, so it is only asked from a job."""

    async def refresh(self) -> Mapping[str, tuple[Model, ...]]:
        """Look again, and return every model that is served now: by name, the lowest version first."""
        ...


class Journal(Protocol):
    """Keeps what was counted over a crash of the process; may block on a disk, so it is only asked from jobs."""

    async def append(self, snapshot: Snapshot, minutes: tuple[tuple[int, Minute], ...]) -> None:
        """Add closed minutes. Raises `OSError`; what was written before stays."""
        ...

    async def checkpoint(self, snapshot: Snapshot) -> None:
        """Write everything. Raises `OSError`."""
        ...


class Fitting(Protocol):
    """Fits what was counted, away from the loop; a direct call in simulation."""

    async def fit(self, snapshot: Snapshot) -> Fitted:
        """One round, one at a time. Raises `Broken` when it died, took too long or said something absurd."""
        ...


class Emit(Protocol):
    """The one way out for facts. Never raises, never blocks."""

    def __call__(self, event: Event, /) -> None:
        """State a fact."""
        ...
