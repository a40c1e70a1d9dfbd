"""OpenTelemetry spans from events: the requests and the drain here, loads and evictions in `loadspans.py`.

No metric, no log line, no decision. Where spans go is `export.py`; without an exporter only trace ids are made.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Status, StatusCode

from actors import events as e
from runtime.telemetry.loadspans import LoadSpans
from runtime.telemetry.places import BELOW
from runtime.telemetry.traces import Acquire, Trace, name_model, parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Span

    from runtime.telemetry.epoch import Epoch
    from runtime.telemetry.export import Export
    from runtime.telemetry.fanout import Wants

_OPEN_LIMIT: Final = 65_536
_NOWHERE: Final = Context()


class Spans:
    """Turns events into spans. `begin` is called by whoever takes a request in, before it states `RequestArrived`.

    `export` None means that nothing is sent: `begin` still gives a trace id. All maps are bounded.
    """

    IGNORED: ClassVar[Mapping[type, str]] = {
        e.PrefetchWithheld: "nothing was done",
        e.FetchStarted: "a step of a load, which has a span",
        e.FetchProgressed: "feed and logs",
        e.FetchFinished: "a step of a load, which tells its seconds; counted in metrics",
        e.PeakInfeasible: "nothing was done: logs and metrics",
        e.ForecastFitted: "another process' work, told in logs",
        e.ForecastDemoted: "metrics and logs",
        e.ForecastJudged: "a score: metrics",
        e.ForecastFell: "logs and metrics",
        e.ForesightReported: "a sum over a day: logs",
        e.Adopted: "found, not moved: logs and feed",
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
        self._open: dict[str, Acquire | str] = {}
        self._loads = LoadSpans(self._tracer, epoch, self._recording) if self._tracer is not None else None
        self._drain: Span | None = None

    def wants(self) -> Wants:
        """Subscribe with this. Without a tracer only the end of a request matters."""
        if self._loads is None:
            return {e.RequestFinished: self._finished}
        return {
            **self._loads.wants(),
            e.RequestArrived: self._arrived,
            e.LeaseGranted: self._granted,
            e.WaiterJoined: self._joined,
            e.WaiterLeft: self._left,
            e.RequestFinished: self._finished,
            e.DrainStarted: self._drain_started,
            e.DrainFinished: self._drain_finished,
        }

    # -- requests ------------------------------------------------------------------------------------

    def begin(
        self, request: str, traceparent: str = "", tracestate: str = "", model: str = "", trace_id: str = ""
    ) -> str:
        """Open the acquire span of a request and give its trace id, 32 hex digits: `trace_id`, if one is chosen.

        `request` must be unique in this process: a second `begin` under a name still open ends the first.
        """
        parent = parse(traceparent, tracestate) if traceparent else None
        if self._tracer is None or (parent is not None and self._follows_unsampled and not parent.trace_flags):
            # Measured: making the id ourselves takes 0.3 us, a span nobody sees 2.9 us.
            if parent:
                trace_id = f"{parent.trace_id:032x}"
            trace_id = trace_id or f"{random.getrandbits(128) or 1:032x}"
            self._keep(request, trace_id)
            return trace_id
        where = trace.set_span_in_context(NonRecordingSpan(parent), _NOWHERE) if parent else _NOWHERE
        if trace_id and parent is None and self._export is not None:
            self._export.ids.coming = int(trace_id, 16)
        span = self._tracer.start_span("foreload.acquire", where, start_time=self._ns(self._now()))
        trace_id = f"{span.get_span_context().trace_id:032x}"
        if not span.is_recording():
            self._keep(request, trace_id)
            return trace_id
        acquire = Acquire(span, trace_id)
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
        return self._loads.trace(load) if self._loads is not None else Trace()

    def _recording(self, request: str) -> Acquire | None:
        acquire = self._open.get(request, "")
        return None if isinstance(acquire, str) else acquire

    def _keep(self, request: str, acquire: Acquire | str) -> None:
        kept = self._open
        former = kept.pop(request, "") if request in kept else ""
        if not isinstance(former, str):
            self._abandon(former, "superseded")
        kept[request] = acquire
        if len(kept) > _OPEN_LIMIT:
            oldest = kept.pop(next(iter(kept)))
            if not isinstance(oldest, str):
                self._abandon(oldest, "unfinished")

    def _arrived(self, event: e.RequestArrived) -> None:
        if event.request not in self._open:
            self.begin(event.request)

    def _granted(self, event: e.LeaseGranted) -> None:
        acquire = self._open.get(event.request, "")
        if isinstance(acquire, str):
            return
        if event.device in BELOW:
            self._link(acquire, event.load)
            return
        noted = acquire.noted
        noted["foreload.device"] = event.device
        noted["foreload.cache.result"] = event.result
        if event.result == "hit":  # says where it was found, and each attribute costs 0.7 us
            return
        noted["foreload.tier.from"] = event.found.value
        noted["foreload.cold_start"] = event.result in {"miss", "coalesced"}
        self._link(acquire, event.load)

    def _joined(self, event: e.WaiterJoined) -> None:
        acquire = self._recording(event.request)
        if acquire is not None:
            self._link(acquire, event.load)

    def _link(self, acquire: Acquire, load: str) -> None:
        if load and self._loads is not None:
            self._loads.link(acquire, load)

    def _left(self, event: e.WaiterLeft) -> None:
        acquire = self._recording(event.request)
        if acquire is not None:
            acquire.span.add_event("foreload.waiter_left", {"error.type": event.reason}, self._ns(event.at))

    def _finished(self, event: e.RequestFinished) -> None:
        acquire = self._open.pop(event.request, "")
        if isinstance(acquire, str):
            return
        name_model(acquire.noted, event.model)
        if event.outcome != "ok":
            acquire.noted["error.type"] = event.outcome
            acquire.span.set_status(Status(StatusCode.ERROR))
        acquire.span.set_attributes(acquire.noted)
        acquire.span.end(self._ns(event.at))

    # -- drain and stop ------------------------------------------------------------------------------

    def _drain_started(self, event: e.DrainStarted) -> None:
        if self._drain is None:
            assert self._tracer is not None, "only subscribed to with a tracer"
            noted = {"foreload.drain.reason": event.reason}
            self._drain = self._tracer.start_span(
                "foreload.drain", _NOWHERE, attributes=noted, start_time=self._ns(event.at)
            )

    def _drain_finished(self, event: e.DrainFinished) -> None:
        if self._drain is None:
            return
        self._drain.set_attribute("foreload.lease.count", event.abandoned)
        self._drain.end(self._ns(event.at))
        self._drain = None

    def _abandon(self, acquire: Acquire, why: str) -> None:
        acquire.span.set_attributes(acquire.noted)
        self._give_up(acquire.span, why)

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
        for acquire in self._open.values():
            if not isinstance(acquire, str):
                self._abandon(acquire, "unfinished")
        self._open.clear()
        if self._loads is not None:
            self._loads.close()
        if self._drain is not None:
            self._give_up(self._drain, "unfinished")
            self._drain = None
        return self._export is None or self._export.close()

    def __repr__(self) -> str:
        return f"<Spans open={len(self._open)} {self._loads!r}>"
