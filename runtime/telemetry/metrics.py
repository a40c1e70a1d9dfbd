"""Prometheus metrics from events: one registry, children resolved once per model, no unbounded label.

No span, no log line of an event, no decision. What is read instead of counted comes through `readings.py`.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, ClassVar, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from actors import events as e
from actors.errors import ForeloadError
from actors.residency.model import Tier
from runtime.telemetry.buckets import Buckets
from runtime.telemetry.families import AGES, PHASES, Families
from runtime.telemetry.places import BELOW
from runtime.telemetry.readings import Reading, Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Histogram

    from actors.ports import Offload
    from actors.residency.model import ModelKey, Trigger
    from runtime.telemetry.fanout import Wants

OTHER: Final = "(other)"
"""Label of everything that may not have a label of its own; no model or error code can be called so."""

_NAMES: Final = 256  # devices and actors: bounded by the configuration, and by this should that ever be wrong

_EVICTIONS: Final = frozenset(
    {"room", "ttl_idle", "ttl", "pressure", "unload", "stop", "replaced", "out_of_memory", "cancelled"}
)
_PREFETCHES: Final = frozenset({"used", "wasted", "late", "cancelled"})


def _codes(kind: type[ForeloadError]) -> set[str]:
    return {kind.code}.union(*(_codes(child) for child in kind.__subclasses__()))


class _Series:
    """One model's children, resolved once: a cached child costs half of a look-up by labels."""

    __slots__ = ("coalesced", "hits", "infer", "last_use", "load_wait", "loads", "ok", "queue")

    def __init__(self, table: Families, model: str) -> None:
        self.ok = table.requests.labels(model, "ok")
        self.queue = Buckets(PHASES)
        self.load_wait = Buckets(PHASES)
        self.infer = Buckets(PHASES)
        self.hits = {tier: table.hits.labels(model, tier.value) for tier in Tier}
        self.coalesced = table.coalesced.labels(model)
        self.last_use = -1.0
        self.loads: dict[tuple[Tier, Tier, Trigger], Histogram] = {}


def _nothing(_request: str) -> str:
    return ""


def _nowhere(_load: str) -> tuple[str, str]:
    return "", ""


class Metrics:
    """Counts facts. Subscribe it before the spans: an exemplar needs the request's trace while it is open.

    `reading` is called at scrape time; `sampled` gives the trace id of a recorded request,
    `load_trace` trace and span id of a recorded load.
    A model gets a label when the catalog admits it (or `admit`), at most `limit` of them; all else is `(other)`.
    """

    IGNORED: ClassVar[Mapping[type, str]] = {
        e.ForesightReported: "sums of what is counted anyway",
        e.FetchStarted: "counted when it ends; what it lacks is shown from its first progress on",
        e.Adopted: "residents are read at scrape time",
        e.RequestArrived: "counted when it is finished; arrivals per model are the forecaster's",
        e.LeaseReleased: "leases are read at scrape time",
        e.WaiterJoined: "counted by how its wait ends",
        e.LoadUpgraded: "its load is counted when it ends",
        e.EvictionStarted: "counted when the bytes are free",
        e.PressureChanged: "device bytes are read at scrape time",
        e.WarmSettled: "its load is counted",
        e.CompileStarted: "counted when it is over",
        e.WorkerStarted: "process facts go to logs and feed",
        e.DrainStarted: "the process ends; logs and spans tell",
        e.DrainFinished: "the process ends; logs and spans tell",
    }

    def __init__(
        self,
        *,
        version: str,
        reading: Callable[[], Reading] = Reading,
        sampled: Callable[[str], str] = _nothing,
        load_trace: Callable[[str], tuple[str, str]] = _nowhere,
        limit: int = 1_000,
    ) -> None:
        self.registry = CollectorRegistry()
        self._sampled = sampled
        self._load_trace = load_trace
        self._limit = limit
        self._admitted: set[str] = set()
        self._series: dict[str, _Series] = {}
        self._words = frozenset(_codes(ForeloadError))
        self._names: set[str] = set()
        self._loading: set[tuple[str, Tier, ModelKey]] = set()
        self._reuse = Buckets(AGES)
        self._table = Families(self.registry)
        self._other = self._series[OTHER] = _Series(self._table, OTHER)
        self._table.build.labels(version, platform.python_version()).set(1)
        self._readings = Readings(reading, self)
        self.registry.register(self._readings)

    # -- labels --------------------------------------------------------------------------------------

    def admit(self, model: str) -> None:
        """Let a model, by name or by key, have series of its own."""
        if len(self._admitted) < self._limit:
            self._admitted.add(model)

    def forget(self, model: str) -> None:
        """Drop the series of a model that left the catalog, and its right to any; `model` is a name or a key."""
        self._admitted.discard(model)
        for key in [key for key in self._series if model in {key, key.rpartition("@")[0]} and key != OTHER]:
            del self._series[key]
            for metric in self._table.per_model:
                metric.remove_by_labels({"model": key})

    def _of(self, model: ModelKey) -> _Series:
        return self._series.get(model) or self._resolve(model)

    def _resolve(self, model: ModelKey) -> _Series:
        label = self.label(model)
        if label == OTHER:
            return self._other
        series = self._series[label] = _Series(self._table, label)
        return series

    def label(self, model: ModelKey) -> str:
        """The model's label: its key, or `(other)`."""
        if model in self._series:
            return model
        admitted = model in self._admitted or model.rpartition("@")[0] in self._admitted
        return model if admitted and len(self._series) <= self._limit else OTHER

    def _name(self, name: str) -> str:
        if name in self._names or len(self._names) < _NAMES:
            self._names.add(name)
            return name
        return OTHER

    def _word(self, code: str) -> str:
        return code if code in self._words else OTHER

    # -- events --------------------------------------------------------------------------------------

    def wants(self) -> Wants:
        """Subscribe with this."""
        return {
            e.LeaseGranted: self._granted,
            e.WaiterLeft: self._left,
            e.RequestFinished: self._finished,
            e.LoadStarted: self._load_started,
            e.LoadFinished: self._load_finished,
            e.LoadFailed: self._load_failed,
            e.LoadCancelled: self._load_ended,
            e.FetchProgressed: self._fetch_progressed,
            e.FetchFinished: self._fetch_finished,
            e.Evicted: self._evicted,
            e.PrefetchSettled: self._prefetched,
            e.PrefetchWithheld: self._withheld,
            e.PeakInfeasible: self._infeasible,
            e.ForecastFitted: self._fitted,
            e.ForecastDemoted: self._demoted,
            e.ForecastJudged: self._judged,
            e.ForecastFell: self._fell,
            e.WorkerLost: self._worker_lost,
            e.CompileFinished: self._compiled,
            e.CompileFailed: self._compile_failed,
            e.ActorRestarted: self._restarted,
            e.SubscriberDropped: self._subscriber_dropped,
            e.CatalogChanged: self._catalog,
        }

    def observe_lag(self, seconds: float) -> None:
        """One tick of the loop came this late."""
        self._table.lag.observe(max(0.0, seconds))

    def _granted(self, event: e.LeaseGranted) -> None:
        if event.device in BELOW:
            return
        series = self._series.get(event.model) or self._resolve(event.model)
        hits = series.hits.get(event.found)
        if hits is not None:
            hits.inc()
        if event.found is Tier.DEVICE and series is not self._other:
            if series.last_use >= 0:
                self._reuse.observe(event.at - series.last_use)
            series.last_use = event.at
        if event.result == "miss":
            self._table.misses.labels(self.label(event.model), "not_resident").inc()
        elif event.result == "coalesced":
            series.coalesced.inc()
            self._table.misses.labels(self.label(event.model), "loading").inc()

    def _left(self, event: e.WaiterLeft) -> None:
        if event.device in BELOW:
            return
        self._table.misses.labels(self.label(event.model), self._word(event.reason)).inc()

    def _finished(self, event: e.RequestFinished) -> None:
        series = self._series.get(event.model) or self._resolve(event.model)
        if event.outcome != "ok":
            self._table.requests.labels(self.label(event.model), self._word(event.outcome)).inc()
            return
        series.ok.inc()
        series.queue.observe(event.queue)
        series.infer.observe(event.infer)
        if event.load_wait > 0:
            series.load_wait.observe_traced(event.load_wait, self._sampled(event.request))

    def _load_started(self, event: e.LoadStarted) -> None:
        self._loading.add((event.device, event.tier, event.model))

    def _load_ended(self, event: e.LoadFinished | e.LoadFailed | e.LoadCancelled | e.Evicted) -> None:
        self._loading.discard((event.device, event.tier, event.model))

    def _load_finished(self, event: e.LoadFinished) -> None:
        self._load_ended(event)
        series = self._of(event.model)
        if event.tier is Tier.DEVICE:
            series.last_use = -1.0  # a gap ends where the resident did
        which = (event.source, event.tier, event.trigger)
        child = series.loads.get(which)
        if child is None:
            words = (each.value for each in which)
            child = series.loads[which] = self._table.load_duration.labels(self.label(event.model), *words)
        child.observe(event.seconds, _exemplar(self._load_trace(event.load)[0]))

    def _load_failed(self, event: e.LoadFailed) -> None:
        self._load_ended(event)
        self._of(event.model)
        self._table.load_failures.labels(self.label(event.model), self._word(event.code)).inc()

    def _fetch_progressed(self, event: e.FetchProgressed) -> None:
        self._of(event.model)
        self._table.fetching.labels(self.label(event.model)).set(event.total - event.done)

    def _fetch_finished(self, event: e.FetchFinished) -> None:
        self._of(event.model)
        scheme = self._name(event.scheme)
        outcome = event.outcome if event.outcome in {"ok", "cancelled"} else self._word(event.outcome)
        self._table.fetching.labels(self.label(event.model)).set(0)
        self._table.fetched.labels(scheme).inc(event.fetched)
        self._table.fetches.labels(scheme, outcome).inc()
        if event.outcome == "ok":
            self._table.fetch_duration.labels(scheme).observe(event.seconds)

    def _evicted(self, event: e.Evicted) -> None:
        self._load_ended(event)  # one that ended after everybody had given it up is taken away at once
        self._of(event.model)
        reason = event.reason if event.reason in _EVICTIONS else OTHER
        device = self._name(event.device)
        self._table.evictions.labels(self.label(event.model), device, reason).inc()
        if event.leaked > 0:
            self._table.leaked.labels(device).inc(event.leaked)
        if event.tier is Tier.DEVICE:
            self._table.residency.observe(event.age)
            self._table.age.observe(event.idle)

    def _prefetched(self, event: e.PrefetchSettled) -> None:
        below = event.device in BELOW
        self._of(event.model)
        result = event.result if event.result in _PREFETCHES else OTHER
        self._table.prefetches.labels(self.label(event.model), event.device if below else Tier.DEVICE, result).inc()
        if result == "used" and not below:
            self._table.lead.observe(event.lead)

    def _withheld(self, event: e.PrefetchWithheld) -> None:
        self._table.withheld.labels(event.reason).inc()

    def _infeasible(self, event: e.PeakInfeasible) -> None:
        self._table.infeasible.labels("yes" if event.required else "no").inc()

    def _fitted(self, event: e.ForecastFitted) -> None:
        self._table.brier.set(event.brier)
        self._table.ece.set(event.ece)
        for source, cost in (("blend", event.cost_blend), ("occurrence", event.cost_occurrence)):
            if cost is not None:
                self._table.cost.labels(source).set(cost)

    def _demoted(self, event: e.ForecastDemoted) -> None:
        self._table.demoted.set(event.total)

    def _judged(self, event: e.ForecastJudged) -> None:
        for kind, value in (("brier", event.brier), ("error", event.ece), ("climatology", event.climatology)):
            self._table.judged.labels(kind).set(value)

    def _fell(self, event: e.ForecastFell) -> None:
        self._table.fallbacks.labels(self._name(event.part)).inc()

    def _worker_lost(self, event: e.WorkerLost) -> None:
        self._table.workers_lost.labels(self._name(event.device)).inc()
        self._loading = {place for place in self._loading if place[0] != event.device or place[1] is not Tier.DEVICE}

    def _compiled(self, event: e.CompileFinished) -> None:
        self._table.compiles.labels("reused" if event.reused else "made").inc()
        if event.reused:
            self._table.compile_saved.inc(event.saved)
        else:
            self._table.compile_seconds.inc(event.seconds)

    def _compile_failed(self, _event: e.CompileFailed) -> None:
        self._table.compiles.labels("failed").inc()

    def _restarted(self, event: e.ActorRestarted) -> None:
        self._table.restarts.labels(self._name(event.actor)).inc()

    def _subscriber_dropped(self, _event: e.SubscriberDropped) -> None:
        self._table.dropped.inc()

    def _catalog(self, event: e.CatalogChanged) -> None:
        if event.state == "admitted":
            self.admit(event.model)

    # -- read at scrape time -------------------------------------------------------------------------

    def loads_in_progress(self) -> dict[str, int]:
        """Loads under way, by device."""
        found: dict[str, int] = {}
        for device, _, _ in list(self._loading):
            found[device] = found.get(device, 0) + 1
        return found

    def phases(self) -> Iterator[tuple[str, str, Buckets]]:
        """Model, phase and its buckets, where there is anything in them."""
        for model, series in list(self._series.items()):
            for phase, buckets in (("queue", series.queue), ("load_wait", series.load_wait), ("infer", series.infer)):
                if buckets.count:
                    yield model, phase, buckets

    @property
    def reuse_gaps(self) -> Buckets:
        """Seconds between two uses of a device resident."""
        return self._reuse

    # -- exposition ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the reading that the next page shows, on the loop's thread."""
        self._readings.look()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics page and its content type: OpenMetrics with exemplars if `accept` asks, else Prometheus text.

        Spelling it takes about a millisecond per busy model; `page` does that away from the loop.
        """
        self.look()
        return self._spell(accept)

    async def page(self, accept: str, offload: Offload) -> tuple[bytes, str]:
        """The same; the reading is taken here and now, the spelling is done elsewhere."""
        self.look()
        return await offload(self._spell, accept)

    def _spell(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def __repr__(self) -> str:
        return f"<Metrics models={len(self._series) - 1}/{self._limit}>"


def _exemplar(trace_id: str) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None
