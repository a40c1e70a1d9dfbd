"""OpenTelemetry spans from events: acquire, load, prefetch, evict, drain, linked to each other by cause.

No metric, no log line, no decision. Where spans go is `export.py`; without an exporter only trace ids are made.
"""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from actors import events as e
from actors.residency.model import ModelKey, Tier, Trigger
from runtime.telemetry import redact
from runtime.telemetry.places import BELOW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Span
    from opentelemetry.util.types import Attributes

    from runtime.telemetry.epoch import Epoch
    from runtime.telemetry.export import Export
    from runtime.telemetry.fanout import Wants

_OPEN_LIMIT: Final = 65_536
_LOAD_LIMIT: Final = 2_048
_NOWHERE: Final = Context()
# https://www.w3.org/TR/trace-context/#traceparent-header; a later version may carry more after the flags.
_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_LIMIT: Final = 512

K = TypeVar("K")
V = TypeVar("V")


class Trace(NamedTuple):
    """Where something belongs: hex ids as log lines and error bodies carry them; empty strings for nowhere."""

    trace_id: str = ""
    span_id: str = ""


class _Acquire:
    """One recording request's open span. A request that does not record is only its trace id."""

    __slots__ = ("loads", "noted", "span", "trace_id")

    def __init__(self, span: Span, trace_id: str) -> None:
        self.span = span
        self.trace_id = trace_id
        self.noted: dict[str, str | bool | float] = {}
        self.loads: tuple[str, ...] = ()


class _Load:
    """One shared load's span, kept for a while after its end so that late leases can link to it."""

    __slots__ = ("evictions", "pending", "span", "waiters")

    def __init__(self) -> None:
        self.span: Span | None = None  # until LoadStarted names it
        self.waiters = 0
        self.pending: list[_Acquire] = []
        self.evictions: list[Span] = []


def parse(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Read a W3C trace context; None for an absent or malformed one, as the standard asks (start a new trace)."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if more is not None and version == "00":
        return None
    state = TraceState.from_header([tracestate]) if 0 < len(tracestate) <= _STATE_LIMIT else None
    # By position: keywords cost on the hit path. The True says that the parent is another process' span.
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16) & 1), state)
    return context if context.is_valid else None


class Spans:
    """Turns events into spans. `begin` is called by whoever takes a request in, before it states `RequestArrived`.

    `export` None means that nothing is sent: `begin` still gives a trace id. All maps are bounded.
    """

    IGNORED: ClassVar[Mapping[type, str]] = {
        e.LeaseReleased: "the acquire span ends with RequestFinished, a moment later",
        e.PrefetchSettled: "known long after the prefetch span ended; counted in metrics",
        e.PressureChanged: "a state, not an operation: metrics and logs",
        e.WarmSettled: "its load has a span",
        e.WorkerStarted: "logs and feed",
        e.ActorRestarted: "logs and metrics",
        e.SubscriberDropped: "logs and metrics",
        e.CatalogChanged: "logs and feed",
    }

    def __init__(self, export: Export | None, epoch: Epoch) -> None:
        self._export = export
        self._tracer = export.tracer if export is not None else None
        self._follows_unsampled = export is not None and export.follows_unsampled
        self._ns = epoch.ns
        self._now = epoch.now
        self._open: dict[str, _Acquire | str] = {}
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._places: dict[tuple[str, Tier, ModelKey], str] = {}
        self._evictions: OrderedDict[str, Span] = OrderedDict()
        self._attempts: OrderedDict[tuple[str, Tier, ModelKey], int] = OrderedDict()
        self._drain: Span | None = None

    def wants(self) -> Wants:
        """Subscribe with this. Without a tracer only the end of a request matters."""
        if self._tracer is None:
            return {e.RequestFinished: self._finished}
        return {
            e.RequestArrived: self._arrived,
            e.LeaseGranted: self._granted,
            e.WaiterJoined: self._joined,
            e.WaiterLeft: self._left,
            e.RequestFinished: self._finished,
            e.LoadStarted: self._load_started,
            e.LoadUpgraded: self._load_upgraded,
            e.LoadFinished: self._load_finished,
            e.LoadFailed: self._load_failed,
            e.LoadCancelled: self._load_cancelled,
            e.EvictionStarted: self._eviction_started,
            e.Evicted: self._evicted,
            e.WorkerLost: self._worker_lost,
            e.DrainStarted: self._drain_started,
            e.DrainFinished: self._drain_finished,
        }

    # -- requests ------------------------------------------------------------------------------------

    def begin(self, request: str, traceparent: str = "", tracestate: str = "", model: str = "") -> str:
        """Open the acquire span of a request and give its trace id, 32 hex digits.

        `request` must be unique in this process: a second `begin` under a name still open ends the first.
        """
        parent = parse(traceparent, tracestate) if traceparent else None
        if self._tracer is None or (parent is not None and self._follows_unsampled and not parent.trace_flags):
            # Measured: making the id ourselves takes 0.3 us, a span nobody sees 2.9 us.
            trace_id = f"{parent.trace_id if parent else random.getrandbits(128) or 1:032x}"
            self._keep(request, trace_id)
            return trace_id
        where = trace.set_span_in_context(NonRecordingSpan(parent), _NOWHERE) if parent else _NOWHERE
        span = self._tracer.start_span("foreload.acquire", where, start_time=self._ns(self._now()))
        trace_id = f"{span.get_span_context().trace_id:032x}"
        if not span.is_recording():
            self._keep(request, trace_id)
            return trace_id
        acquire = _Acquire(span, trace_id)
        if model:
            acquire.noted["foreload.model.name"] = model
        self._keep(request, acquire)
        return trace_id

    def trace_of(self, request: str) -> Trace:
        """The ids of an open request, for log lines; empty once it is finished."""
        acquire = self._open.get(request, "")
        if isinstance(acquire, str):
            return Trace(acquire)
        return Trace(acquire.trace_id, f"{acquire.span.get_span_context().span_id:016x}")

    def sampled(self, request: str) -> str:
        """The trace id of an open request if its trace is recorded, else empty: what an exemplar may point at."""
        acquire = self._open.get(request, "")
        return "" if isinstance(acquire, str) else acquire.trace_id

    def load_trace(self, load: str) -> Trace:
        """The ids of a load if it is recorded, else empty."""
        known = self._loads.get(load)
        context = known.span.get_span_context() if known is not None and known.span is not None else None
        if context is None or not context.trace_flags.sampled:
            return Trace()
        return Trace(f"{context.trace_id:032x}", f"{context.span_id:016x}")

    def _recording(self, request: str) -> _Acquire | None:
        acquire = self._open.get(request, "")
        return None if isinstance(acquire, str) else acquire

    def _keep(self, request: str, acquire: _Acquire | str) -> None:
        kept = self._open
        former = kept.pop(request, "") if request in kept else ""
        if not isinstance(former, str):
            self._give_up(former.span, "superseded")
        kept[request] = acquire
        if len(kept) > _OPEN_LIMIT:
            oldest = kept.pop(next(iter(kept)))
            if not isinstance(oldest, str):
                self._give_up(oldest.span, "unfinished")

    def _arrived(self, event: e.RequestArrived) -> None:
        if event.request not in self._open:
            self.begin(event.request)

    def _granted(self, event: e.LeaseGranted) -> None:
        acquire = self._open.get(event.request, "")
        if isinstance(acquire, str):
            return
        if event.device in BELOW:
            if event.load:
                self._link(acquire, event.load)
            return
        noted = acquire.noted
        noted["foreload.device"] = event.device
        noted["foreload.cache.result"] = event.result
        if event.result == "hit":  # says where it was found, and each attribute costs 0.7 us
            return
        noted["foreload.tier.from"] = event.found.value
        noted["foreload.cold_start"] = event.result in {"miss", "coalesced"}
        if event.load:
            self._link(acquire, event.load)

    def _joined(self, event: e.WaiterJoined) -> None:
        acquire = self._recording(event.request)
        if acquire is not None and event.load:
            self._link(acquire, event.load)

    def _left(self, event: e.WaiterLeft) -> None:
        acquire = self._recording(event.request)
        if acquire is not None:
            acquire.span.add_event("foreload.waiter_left", {"error.type": event.reason}, self._ns(event.at))

    def _finished(self, event: e.RequestFinished) -> None:
        acquire = self._open.pop(event.request, "")
        if isinstance(acquire, str):
            return
        _name_model(acquire.noted, event.model)
        if event.outcome != "ok":
            acquire.noted["error.type"] = event.outcome
            acquire.span.set_status(Status(StatusCode.ERROR))
        acquire.span.set_attributes(acquire.noted)
        acquire.span.end(self._ns(event.at))

    def _link(self, acquire: _Acquire, load: str) -> None:
        """Tie request and load to each other, once, whichever of the two is known first."""
        if load in acquire.loads:
            return
        acquire.loads += (load,)
        known = self._load(load)
        known.waiters += 1
        if known.span is None:
            known.pending.append(acquire)
            return
        acquire.span.add_link(known.span.get_span_context())
        if known.span.is_recording():
            known.span.add_link(acquire.span.get_span_context())

    # -- loads ---------------------------------------------------------------------------------------

    def _load(self, load: str) -> _Load:
        known = self._loads.get(load)
        if known is None:
            known = self._loads[load] = _Load()
            if len(self._loads) > _LOAD_LIMIT:
                _, oldest = self._loads.popitem(last=False)
                if oldest.span is not None:
                    self._give_up(oldest.span, "unfinished")
        return known

    def _load_started(self, event: e.LoadStarted) -> None:
        known = self._load(event.load)
        if known.span is not None:
            if known.span.is_recording():
                known.span.add_event("foreload.retried", timestamp=self._ns(event.at))
            return
        place = (event.device, event.tier, event.model)
        asker = self._recording(event.request)
        if asker is not None:
            self._link(asker, event.load)
        waiting, known.pending = [acquire.span for acquire in known.pending], []
        name = "foreload.prefetch" if event.trigger is Trigger.PREFETCH else "foreload.load"
        noted: dict[str, str | bool | float] = {}
        _name_model(noted, event.model)
        noted |= {
            "foreload.model.fingerprint": event.fingerprint,
            "foreload.device": event.device,
            "foreload.tier.to": event.tier.value,
            "foreload.bytes": event.reserved,
            "foreload.trigger": event.trigger.value,
            "foreload.attempt": self._attempts.get(place, 0) + 1,
        }
        known.span = self._start(name, event.at, noted, [span.get_span_context() for span in waiting])
        self._places[place] = event.load
        for span in (*waiting, *known.evictions):
            if span.is_recording():
                span.add_link(known.span.get_span_context())
        known.evictions = []

    def _load_upgraded(self, event: e.LoadUpgraded) -> None:
        known = self._loads.get(self._places.get((event.device, event.tier, event.model), ""))
        if known is None or known.span is None or not known.span.is_recording():
            return
        known.span.set_attribute("foreload.trigger", Trigger.DEMAND.value)
        known.span.add_event("foreload.upgraded", {"foreload.trigger.was": event.was.value}, self._ns(event.at))

    def _load_finished(self, event: e.LoadFinished) -> None:
        self._attempts.pop((event.device, event.tier, event.model), None)
        span = self._load_ended(event)
        if span is None:
            return
        span.set_attributes({"foreload.tier.from": event.source.value, "foreload.bytes": event.resident})
        instant = event.at - event.seconds
        for step, seconds in event.steps:
            span.add_event(step, {"foreload.seconds": seconds}, self._ns(instant))
            instant += seconds
        span.end(self._ns(event.at))

    def _load_failed(self, event: e.LoadFailed) -> None:
        place = (event.device, event.tier, event.model)
        _bounded(self._attempts, place, self._attempts.pop(place, 0) + 1, _LOAD_LIMIT)
        span = self._load_ended(event)
        if span is not None:
            span.set_attribute("error.type", event.code)
            span.set_status(Status(StatusCode.ERROR, redact.text(event.cause)))
            span.end(self._ns(event.at))

    def _load_cancelled(self, event: e.LoadCancelled) -> None:
        span = self._load_ended(event)
        if span is not None:
            span.set_attribute("error.type", "cancelled")
            span.end(self._ns(event.at))

    def _load_ended(self, event: e.LoadFinished | e.LoadFailed | e.LoadCancelled) -> Span | None:
        """Its span if it records, with the number of requests that waited for it."""
        self._places.pop((event.device, event.tier, event.model), None)
        known = self._loads.get(event.load)
        if known is None or known.span is None or not known.span.is_recording():
            return None
        known.span.set_attribute("foreload.lease.count", known.waiters)
        return known.span

    # -- evictions and drain -------------------------------------------------------------------------

    def _eviction_started(self, event: e.EvictionStarted) -> None:
        noted: dict[str, str | bool | float] = {}
        _name_model(noted, event.model)
        noted |= {
            "foreload.device": event.device,
            "foreload.tier.from": event.tier.value,
            "foreload.evict.reason": event.reason,
            "foreload.evict.victim": event.model,
        }
        known = self._load(event.load) if event.load else None
        cause = known.span.get_span_context() if known is not None and known.span is not None else None
        span = self._start("foreload.evict", event.at, noted, [cause] if cause else [])
        if known is not None and cause is None:
            known.evictions.append(span)  # room is made first, the load starts after it: linked then
        pushed = _bounded(self._evictions, event.eviction, span, _LOAD_LIMIT)
        if pushed is not None:
            self._give_up(pushed, "unfinished")

    def _evicted(self, event: e.Evicted) -> None:
        span = self._evictions.pop(event.eviction, None)
        if span is None:
            self._taken_away(event)
            return
        if span.is_recording():
            span.set_attributes({"foreload.bytes": event.returned, "foreload.bytes.leaked": event.leaked})
        span.end(self._ns(event.at))

    def _taken_away(self, event: e.Evicted) -> None:
        """A load that ended after everybody had given it up: what it brought leaves without having been resident."""
        load = self._places.pop((event.device, event.tier, event.model), "")
        known = self._loads.get(load)
        if known is not None and known.span is not None and known.span.is_recording():
            known.span.set_attribute("error.type", "cancelled")
            known.span.end(self._ns(event.at))

    def _worker_lost(self, event: e.WorkerLost) -> None:
        """What was under way there may get no end of its own."""
        for place, load in list(self._places.items()):
            if place[:2] == (event.device, Tier.DEVICE):
                known = self._loads.get(load)
                if known is not None and known.span is not None and known.span.is_recording():
                    known.span.add_event("foreload.worker_lost", timestamp=self._ns(event.at))
        for eviction, span in list(self._evictions.items()):
            if eviction.startswith(f"{event.device}/"):
                del self._evictions[eviction]
                self._give_up(span, "worker_died")

    def _drain_started(self, event: e.DrainStarted) -> None:
        if self._drain is None:
            self._drain = self._start("foreload.drain", event.at, {"foreload.drain.reason": event.reason}, [])

    def _drain_finished(self, event: e.DrainFinished) -> None:
        if self._drain is None:
            return
        self._drain.set_attribute("foreload.lease.count", event.abandoned)
        self._drain.end(self._ns(event.at))
        self._drain = None

    # -- common --------------------------------------------------------------------------------------

    def _start(self, name: str, at: float, attributes: Attributes, causes: list[SpanContext]) -> Span:
        assert self._tracer is not None, "only subscribed to with a tracer"
        links = [Link(cause) for cause in causes]
        return self._tracer.start_span(name, _NOWHERE, attributes=attributes, links=links, start_time=self._ns(at))

    def _give_up(self, span: Span, why: str) -> None:
        if span.is_recording():
            span.set_attribute("error.type", why)
            span.end(self._ns(self._now()))

    @property
    def lost(self) -> int:
        """Recorded spans that will never reach the collector."""
        return self._export.losses.lost if self._export is not None else 0

    def close(self) -> bool:
        """End what is still open, flush and stop, within 3 s; False if spans had to be given up.

        Blocks its thread, so call it away from the loop, after the last event.
        """
        open_spans = [acquire.span for acquire in self._open.values() if not isinstance(acquire, str)]
        open_spans += [load.span for load in self._loads.values() if load.span is not None]
        open_spans += self._evictions.values()
        for span in open_spans if self._drain is None else [*open_spans, self._drain]:
            self._give_up(span, "unfinished")
        self._open.clear()
        self._loads.clear()
        self._places.clear()
        self._evictions.clear()
        self._drain = None
        return self._export is None or self._export.close()

    def __repr__(self) -> str:
        return f"<Spans open={len(self._open)} loads={len(self._loads)} evictions={len(self._evictions)}>"


def _name_model(noted: dict[str, str | bool | float], key: str) -> None:
    name, _, version = key.rpartition("@")
    noted["foreload.model.name"] = name or key
    if name:
        noted["foreload.model.version"] = version


def _bounded(kept: OrderedDict[K, V], key: K, value: V, limit: int) -> V | None:
    """Keep a value; give back the oldest one if it had to make room."""
    kept[key] = value
    return kept.popitem(last=False)[1] if len(kept) > limit else None
