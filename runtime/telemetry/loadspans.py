"""Spans of shared loads and of evictions, tied to the requests that waited and to each other.

Requests are `spans.py`. A load is a trace of its own, since it serves many requests: links, not parents.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Link, Status, StatusCode

from actors import events as e
from actors.residency.model import ModelKey, Tier, Trigger
from runtime.telemetry import redact
from runtime.telemetry.traces import Noted, Trace, name_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.trace import Span, SpanContext, Tracer

    from runtime.telemetry.epoch import Epoch
    from runtime.telemetry.fanout import Wants
    from runtime.telemetry.traces import Acquire

_LIMIT: Final = 2_048
_HOLD: Final = 60.0  # seconds that an ended eviction waits for the load it made room for
_NOWHERE: Final = Context()

K = TypeVar("K")
V = TypeVar("V")


class _Load:
    """One shared load's span, kept for a while after its end so that late leases can link to it."""

    __slots__ = ("evictions", "pending", "span", "waiters")

    def __init__(self) -> None:
        self.span: Span | None = None  # until LoadStarted names it
        self.waiters = 0
        self.pending: list[Acquire] = []
        self.evictions: list[_Eviction] = []


class _Eviction:
    """One eviction's span. Room is made before the load can start, so its end is held back until it has its link."""

    __slots__ = ("at", "ended", "span", "waits")

    def __init__(self, span: Span, *, waits: bool) -> None:
        self.span = span
        self.waits = waits
        self.at = 0.0
        self.ended: int | None = None

    def settle(self) -> None:
        """Nothing more to link: end the span when the eviction ended."""
        self.waits = False
        if self.ended is not None and self.span.is_recording():
            self.span.end(self.ended)


class LoadSpans:
    """Turns events of residency into spans. `recording` finds the open span of a request, if it records."""

    def __init__(self, tracer: Tracer, epoch: Epoch, recording: Callable[[str], Acquire | None]) -> None:
        self._tracer = tracer
        self._ns = epoch.ns
        self._now = epoch.now
        self._recording = recording
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._places: dict[tuple[str, Tier, ModelKey], str] = {}
        self._evictions: OrderedDict[str, _Eviction] = OrderedDict()
        self._held: deque[_Eviction] = deque()
        self._compiles: OrderedDict[tuple[str, ModelKey], Span] = OrderedDict()
        self._attempts: OrderedDict[tuple[str, Tier, ModelKey], int] = OrderedDict()

    def wants(self) -> Wants:
        """Subscribe with this."""
        return {
            e.LoadStarted: self._load_started,
            e.LoadUpgraded: self._load_upgraded,
            e.LoadFinished: self._load_finished,
            e.LoadFailed: self._load_failed,
            e.LoadCancelled: self._load_cancelled,
            e.EvictionStarted: self._eviction_started,
            e.Evicted: self._evicted,
            e.CompileStarted: self._compile_started,
            e.CompileFinished: self._compile_finished,
            e.CompileFailed: self._compile_failed,
            e.WorkerLost: self._worker_lost,
        }

    def trace(self, load: str) -> Trace:
        """The ids of a load if it is recorded, else empty."""
        known = self._loads.get(load)
        context = known.span.get_span_context() if known is not None and known.span is not None else None
        if context is None or not context.trace_flags.sampled:
            return Trace()
        return Trace(f"{context.trace_id:032x}", f"{context.span_id:016x}")

    def link(self, acquire: Acquire, load: str) -> None:
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
            if len(self._loads) > _LIMIT:
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
            self.link(asker, event.load)
        self._let_go(event.at)
        waiting, known.pending = [acquire.span for acquire in known.pending], []
        name = "foreload.prefetch" if event.trigger is Trigger.PREFETCH else "foreload.load"
        noted: Noted = {}
        name_model(noted, event.model)
        noted |= {
            "foreload.model.fingerprint": event.fingerprint,
            "foreload.device": event.device,
            "foreload.tier.to": event.tier.value,
            "foreload.bytes": event.reserved,
            "foreload.trigger": event.trigger.value,
            "foreload.attempt": self._attempts.get(place, 0) + 1,
        }
        causes = [span.get_span_context() for span in (*waiting, *(each.span for each in known.evictions))]
        known.span = self._start(name, event.at, noted, causes)
        self._places[place] = event.load
        for span in (*waiting, *(each.span for each in known.evictions)):
            if span.is_recording():
                span.add_link(known.span.get_span_context())
        for eviction in known.evictions:
            eviction.settle()
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
        _bounded(self._attempts, place, self._attempts.pop(place, 0) + 1, _LIMIT)
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

    # -- evictions -----------------------------------------------------------------------------------

    def _eviction_started(self, event: e.EvictionStarted) -> None:
        noted: Noted = {}
        name_model(noted, event.model)
        noted |= {
            "foreload.device": event.device,
            "foreload.tier.from": event.tier.value,
            "foreload.evict.reason": event.reason,
            "foreload.evict.victim": event.model,
        }
        causes: list[SpanContext] = []
        known = self._load(event.load) if event.load else None
        if known is not None:  # the load, or before it has started, whoever waits for it
            sources = [acquire.span for acquire in known.pending] if known.span is None else [known.span]
            causes = [span.get_span_context() for span in sources]
        waits = known is not None and known.span is None
        eviction = _Eviction(self._start("foreload.evict", event.at, noted, causes), waits=waits)
        if known is not None and waits:
            known.evictions.append(eviction)
        pushed = _bounded(self._evictions, event.eviction, eviction, _LIMIT)
        if pushed is not None:
            self._give_up(pushed.span, "unfinished")

    def _evicted(self, event: e.Evicted) -> None:
        self._let_go(event.at)
        eviction = self._evictions.pop(event.eviction, None)
        if eviction is None:
            self._taken_away(event)
            return
        if eviction.span.is_recording():
            eviction.span.set_attributes({"foreload.bytes": event.returned, "foreload.bytes.leaked": event.leaked})
        eviction.at, eviction.ended = event.at, self._ns(event.at)
        if eviction.waits:
            self._held.append(eviction)
        else:
            eviction.settle()

    def _let_go(self, at: float) -> None:
        """End the evictions whose load did not start in time: perhaps nobody wanted it any more."""
        while self._held and (self._held[0].at < at - _HOLD or not self._held[0].waits):
            self._held.popleft().settle()

    def _taken_away(self, event: e.Evicted) -> None:
        """A load that ended after everybody had given it up: what it brought leaves without having been resident."""
        load = self._places.pop((event.device, event.tier, event.model), "")
        known = self._loads.get(load)
        if known is not None and known.span is not None and known.span.is_recording():
            known.span.set_attribute("error.type", "cancelled")
            known.span.end(self._ns(event.at))

    # -- compilations --------------------------------------------------------------------------------

    def _compile_started(self, event: e.CompileStarted) -> None:
        span = self._compile(event, event.at)
        pushed = _bounded(self._compiles, (event.device, event.model), span, _LIMIT)
        if pushed is not None:
            self._give_up(pushed, "unfinished")

    def _compile_finished(self, event: e.CompileFinished) -> None:
        span = self._compiles.pop((event.device, event.model), None) or self._compile(event, event.at - event.seconds)
        span.set_attributes({"foreload.compile.reused": event.reused, "foreload.compile.saved": event.saved})
        span.end(self._ns(event.at))

    def _compile_failed(self, event: e.CompileFailed) -> None:
        span = self._compiles.pop((event.device, event.model), None) or self._compile(event, event.at)
        span.set_attribute("error.type", "compile_failed")
        span.set_status(Status(StatusCode.ERROR, redact.text(event.cause)))
        span.end(self._ns(event.at))

    def _compile(self, event: e.CompileStarted | e.CompileFinished | e.CompileFailed, at: float) -> Span:
        noted: Noted = {}
        name_model(noted, event.model)
        noted |= {"foreload.model.fingerprint": event.fingerprint, "foreload.device": event.device}
        return self._start("foreload.compile", at, noted, ())

    # -- workers -------------------------------------------------------------------------------------

    def _worker_lost(self, event: e.WorkerLost) -> None:
        """What was under way there may get no end of its own."""
        for compiling in [each for each in self._compiles if each[0] == event.device]:
            self._give_up(self._compiles.pop(compiling), "worker_died")
        for place, load in list(self._places.items()):
            if place[:2] == (event.device, Tier.DEVICE):
                known = self._loads.get(load)
                if known is not None and known.span is not None and known.span.is_recording():
                    known.span.add_event("foreload.worker_lost", timestamp=self._ns(event.at))
        for name, eviction in list(self._evictions.items()):
            if name.startswith(f"{event.device}/"):
                del self._evictions[name]
                self._give_up(eviction.span, "worker_died")

    # -- common --------------------------------------------------------------------------------------

    def _start(self, name: str, at: float, noted: Noted, causes: Iterable[SpanContext]) -> Span:
        links = [Link(cause) for cause in causes]
        return self._tracer.start_span(name, _NOWHERE, attributes=noted, links=links, start_time=self._ns(at))

    def _give_up(self, span: Span, why: str) -> None:
        if span.is_recording():
            span.set_attribute("error.type", why)
            span.end(self._ns(self._now()))

    def close(self) -> None:
        """End what is still open."""
        for held in self._held:
            held.settle()
        for load in self._loads.values():
            if load.span is not None:
                self._give_up(load.span, "unfinished")
        for eviction in self._evictions.values():
            self._give_up(eviction.span, "unfinished")
        self._held.clear()
        self._loads.clear()
        self._places.clear()
        self._evictions.clear()

    def __repr__(self) -> str:
        return f"<LoadSpans loads={len(self._loads)} evictions={len(self._evictions)} held={len(self._held)}>"


def _bounded(kept: OrderedDict[K, V], key: K, value: V, limit: int) -> V | None:
    """Keep a value; give back the oldest one if it had to make room."""
    kept[key] = value
    return kept.popitem(last=False)[1] if len(kept) > limit else None
