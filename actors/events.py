"""The closed union of facts. Past tense, frozen, stated once by whoever made it so.

Spans, metrics, logs, the request log and the dashboard feed are derived from these and from nothing else.
Every event carries `at`, loop seconds. A new kind belongs in `Event` too: a `match` over it ends in
`assert_never`, so type checking fails wherever it is not handled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from actors.residency.model import ModelKey, Ticket, Tier, Trigger

# -- requests ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request named a model that exists."""

    at: float
    request: str
    model: ModelKey


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A ticket may use a resident. `found` is the tier the model was on when asked for, `waited` in seconds.

    `result` is hit, prefetch_hit (first use of a prefetched resident), coalesced (shared someone's load) or miss.
    `load` is the id of the load that was waited for.
    """

    at: float
    device: str
    model: ModelKey
    ticket: Ticket
    request: str
    result: str
    found: Tier
    waited: float
    load: str = ""


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """A ticket is done with its resident; `held` in seconds."""

    at: float
    device: str
    model: ModelKey
    ticket: Ticket
    held: float


@dataclass(frozen=True, slots=True)
class WaiterJoined:
    """A ticket waits for a resident: `depth` waiters for that model, itself included. `load` is the load it shares."""

    at: float
    device: str
    model: ModelKey
    ticket: Ticket
    request: str
    depth: int
    load: str = ""


@dataclass(frozen=True, slots=True)
class WaiterLeft:
    """A ticket stopped waiting without a lease: cancelled, deadline, refused or failed (`reason` is an error code)."""

    at: float
    device: str
    model: ModelKey
    ticket: Ticket
    request: str
    reason: str
    waited: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """An answer was given. `outcome` is ok or an error code; phases in seconds; `batch` requests shared the forward."""

    at: float
    request: str
    model: ModelKey
    outcome: str
    total: float
    load_wait: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    batch: int = 1


# -- residency ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadStarted:
    """Bytes are reserved on `tier` of `device` and a load is under way."""

    at: float
    load: str
    device: str
    tier: Tier
    model: ModelKey
    fingerprint: str
    reserved: int
    trigger: Trigger
    request: str = ""


@dataclass(frozen=True, slots=True)
class LoadUpgraded:
    """A demand joined a load or wish of lower urgency and raised it."""

    at: float
    device: str
    tier: Tier
    model: ModelKey
    was: Trigger
    request: str = ""


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """The model is resident: `resident` bytes measured, `steps` phases with seconds, `source` the tier it came from."""

    at: float
    load: str
    device: str
    tier: Tier
    model: ModelKey
    trigger: Trigger
    source: Tier
    seconds: float
    resident: int
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load was undone to the byte. `code` and `cause` say why; `retry_after` is the back-off in seconds."""

    at: float
    load: str
    device: str
    tier: Tier
    model: ModelKey
    trigger: Trigger
    code: str
    cause: str
    seconds: float
    retry_after: float


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    """Nobody wanted it any more; its bytes are back."""

    at: float
    load: str
    device: str
    tier: Tier
    model: ModelKey
    trigger: Trigger
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchStarted:
    """A file of `total` bytes is fetched over the network for a load of the model; `scheme` is that of its address."""

    at: float
    model: ModelKey
    scheme: str
    total: int


@dataclass(frozen=True, slots=True)
class FetchProgressed:
    """So many bytes of it are on disk; `rate` in bytes per second since it began, `left` the seconds that implies."""

    at: float
    model: ModelKey
    scheme: str
    done: int
    total: int
    rate: float
    left: float


@dataclass(frozen=True, slots=True)
class FetchFinished:
    """It ended: `outcome` is ok, cancelled or an error code; `fetched` bytes came over the network, in `seconds`."""

    at: float
    model: ModelKey
    scheme: str
    fetched: int
    seconds: float
    outcome: str


@dataclass(frozen=True, slots=True)
class EvictionStarted:
    """A victim leaves. `load` is the load that needs the room, if one does.

    `reason` is room, ttl_idle, ttl, pressure, unload, replaced, out_of_memory or lost (its place ended).
    """

    at: float
    eviction: str
    device: str
    tier: Tier
    model: ModelKey
    reason: str
    load: str = ""
    for_model: str = ""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The bytes were observed free. `age` since it was loaded, `idle` since its last use, in seconds."""

    at: float
    eviction: str
    device: str
    tier: Tier
    model: ModelKey
    reason: str
    returned: int
    leaked: int
    age: float
    idle: float
    seconds: float
    uses: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A new incarnation found the model on its tier; `in_flight` requests were still using it."""

    at: float
    device: str
    tier: Tier
    model: ModelKey
    resident: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class PrefetchSettled:
    """What a load made ahead of demand was worth: used, wasted, late or cancelled; `lead` seconds before first use."""

    at: float
    device: str
    model: ModelKey
    result: str
    lead: float = 0.0


@dataclass(frozen=True, slots=True)
class PressureChanged:
    """A tier crossed its high mark (`high` true) or fell below it again."""

    at: float
    device: str
    tier: Tier
    high: bool
    used_ratio: float


@dataclass(frozen=True, slots=True)
class WarmSettled:
    """A warm-list entry is resident, or is not and why. `model` is a plain name where no version of it is known."""

    at: float
    model: ModelKey
    required: bool
    ready: bool
    cause: str = ""


# -- foresight ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefetchWithheld:
    """A prefetch was due and not made: `reason` is observe, control (a window kept to measure by) or suppressed."""

    at: float
    device: str
    model: ModelKey
    reason: str


@dataclass(frozen=True, slots=True)
class PeakInfeasible:
    """A declared window will find its model cold. `starts_in` seconds; `reason` and `remedy` in words."""

    at: float
    device: str
    model: ModelKey
    cause: str
    starts_in: float
    required: bool
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ForecastFitted:
    """Rates and probabilities were learned anew, in `seconds` of CPU; `skilled` models may be loaded ahead.

    `source` is what serves from now on. Costs are those of deciding loads by either source on a held-out day, relative
    to the better of always and never holding; None where they were not judged.
    """

    at: float
    models: int
    skilled: int
    seconds: float
    brier: float
    ece: float
    source: str = ""
    cost_blend: float | None = None
    cost_occurrence: float | None = None


@dataclass(frozen=True, slots=True)
class ForecastDemoted:
    """The forecast of some models has stopped being right: they follow the last hour's rate (`demoted`), or no more.

    `models` are the first of their keys, `count` says how many there are; `total` are demoted now.
    """

    at: float
    demoted: bool
    models: tuple[str, ...]
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class ForecastJudged:
    """What was stated of the next ten minutes, against what came, over the last day: `forecasts` judged.

    `climatology` is the Brier score of always stating the observed frequency: a forecast above it is worth nothing.
    """

    at: float
    forecasts: int
    brier: float
    ece: float
    climatology: float


@dataclass(frozen=True, slots=True)
class ForecastFell:
    """Something of the forecast failed or is stale; schedules, recency and serving go on without it."""

    at: float
    part: str
    cause: str


@dataclass(frozen=True, slots=True)
class ForesightReported:
    """What loading ahead earned in a day that ended: counts of prefetches by what became of them.

    `host_` ones were meant for the host tier, as the best that could be had: used, when a load on a device read them.

    `cold_control` of `control` requests in windows without foresight found their model cold, `cold_treated` of
    `treated` in the others: their difference is what was saved, measured.
    """

    at: float
    used: int
    late: int
    wasted: int
    cancelled: int
    control: int
    cold_control: int
    treated: int
    cold_treated: int
    host_used: int = 0
    host_late: int = 0
    host_wasted: int = 0
    host_cancelled: int = 0


# -- processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A device worker answers; `pid` 0 for a thread."""

    at: float
    device: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A device worker ended on its own; `cause` is its exit in words."""

    at: float
    device: str
    pid: int
    cause: str


@dataclass(frozen=True, slots=True)
class CompileStarted:
    """A resident is being compiled in the background; it serves meanwhile."""

    at: float
    device: str
    model: ModelKey
    fingerprint: str


@dataclass(frozen=True, slots=True)
class CompileFinished:
    """The compiled twin of a resident took over, after `seconds`.

    `reused`: an artefact of an earlier compilation was there, which saved `saved` seconds of making it anew.
    """

    at: float
    device: str
    model: ModelKey
    fingerprint: str
    seconds: float
    reused: bool
    saved: float


@dataclass(frozen=True, slots=True)
class CompileFailed:
    """A resident stays as it was loaded: `cause` says why there is no compiled twin."""

    at: float
    device: str
    model: ModelKey
    fingerprint: str
    cause: str


@dataclass(frozen=True, slots=True)
class ActorRestarted:
    """An actor crashed and a new incarnation runs; `cause` is the exception in one line."""

    at: float
    actor: str
    incarnation: int
    cause: str


@dataclass(frozen=True, slots=True)
class SubscriberDropped:
    """A consumer of events raised and was switched off."""

    at: float
    subscriber: str
    cause: str


@dataclass(frozen=True, slots=True)
class CatalogChanged:
    """A model was admitted, changed, or set aside (`state` admitted, pending, rejected, removed) with its reason."""

    at: float
    model: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The server stops taking new work."""

    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class DrainFinished:
    """Every lease is back, or `abandoned` of them were given up."""

    at: float
    abandoned: int
    seconds: float


Event: TypeAlias = (
    RequestArrived
    | LeaseGranted
    | LeaseReleased
    | WaiterJoined
    | WaiterLeft
    | RequestFinished
    | LoadStarted
    | LoadUpgraded
    | LoadFinished
    | LoadFailed
    | LoadCancelled
    | FetchStarted
    | FetchProgressed
    | FetchFinished
    | EvictionStarted
    | Evicted
    | Adopted
    | PrefetchSettled
    | PressureChanged
    | WarmSettled
    | PrefetchWithheld
    | PeakInfeasible
    | ForecastFitted
    | ForecastDemoted
    | ForecastJudged
    | ForecastFell
    | ForesightReported
    | WorkerStarted
    | WorkerLost
    | CompileStarted
    | CompileFinished
    | CompileFailed
    | ActorRestarted
    | SubscriberDropped
    | CatalogChanged
    | DrainStarted
    | DrainFinished
)
