"""The way of spans out of the process: OTLP over HTTP, a sampler that honours callers, counted losses, a capped stop.

Nothing here knows an event. Every `OTEL_*` variable is the SDK's business; there are no options of our own.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanKind, Tracer, TraceState
    from opentelemetry.util.types import Attributes

STOP_CAP = 3.0
"""Seconds that stopping may add; with a collector down the SDK alone takes 30 (F78)."""

_DEFAULT_QUEUE = 2_048


class Honouring(Sampler):
    """Samples whatever a sampled caller or a sampled linked span asks for; else what the configured sampler says.

    A load is a root span with links, so without this a sampled request would point at a load nobody recorded.
    """

    def __init__(self, otherwise: Sampler) -> None:
        self._otherwise = otherwise

    def should_sample(  # noqa: PLR0917  the SDK's signature
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See `Sampler.should_sample`."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.trace_flags.sampled or (links and any(link.context.trace_flags.sampled for link in links)):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._otherwise.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """See `Sampler.get_description`."""
        return f"Honouring{{{self._otherwise.get_description()}}}"


class ChosenIds(RandomIdGenerator):
    """Takes the next root's trace id from whoever opens it: an error body may name it before the span exists."""

    def __init__(self) -> None:
        super().__init__()
        self.coming = 0

    def generate_trace_id(self) -> int:
        """See `IdGenerator.generate_trace_id`."""
        chosen, self.coming = self.coming, 0
        return chosen or super().generate_trace_id()


class Losses:
    """How many sampled spans were ended, taken by the exporter, delivered, failed and pushed out of the full queue.

    Each number has one writing thread: `ended` and `overflowed` the loop's, the rest the exporter's.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self.ended = 0
        self.taken = 0
        self.delivered = 0
        self.failed = 0
        self.overflowed = 0

    def note_end(self) -> None:
        """A sampled span joins the queue; one too many pushes another out."""
        if self.ended - self.taken - self.overflowed >= self._room:
            self.overflowed += 1
        self.ended += 1

    @property
    def lost(self) -> int:
        """Spans that will never reach the collector."""
        return self.failed + self.overflowed

    @property
    def unsent(self) -> int:
        """Spans that did not reach the collector, yet or at all."""
        return self.ended - self.delivered


class _CountingExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, losses: Losses) -> None:
        self._inner = inner
        self._losses = losses

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._losses.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._losses.delivered += len(spans)
            else:
                self._losses.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _CountingProcessor(BatchSpanProcessor):
    def __init__(self, exporter: SpanExporter, losses: Losses) -> None:
        super().__init__(_CountingExporter(exporter, losses))
        self._losses = losses

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._losses.note_end()
        super().on_end(span)


class Export:
    """A tracer whose spans are sent. Build it only where `wanted` says so."""

    def __init__(self, exporter: SpanExporter, *, sampler: Sampler | None = None) -> None:
        resource = Resource.create()  # with OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "foreload"}))
        self.ids = ChosenIds()
        self._provider = TracerProvider(
            sampler=sampler, resource=resource, shutdown_on_exit=False, id_generator=self.ids
        )
        # Every sampler the environment can name says so unless it ignores parents; then nothing has to be asked.
        self.follows_unsampled = "remoteParentNotSampled:AlwaysOff" in self._provider.sampler.get_description()
        self._provider.sampler = Honouring(self._provider.sampler)
        self._exporter = exporter
        self.losses = Losses(_queue_room())
        self._provider.add_span_processor(_CountingProcessor(exporter, self.losses))

    @property
    def tracer(self) -> Tracer:
        """Makes the spans."""
        return self._provider.get_tracer("foreload")

    def close(self, cap: float = STOP_CAP) -> bool:
        """Flush and stop within `cap` seconds; False if the collector took longer and spans were given up.

        Blocks its thread, so call it away from the loop.
        """
        stop = threading.Thread(target=self._provider.shutdown, name="foreload-spans-stop", daemon=True)
        stop.start()
        stop.join(cap * 0.9)
        if stop.is_alive():
            self._exporter.shutdown()  # ends the exporter's retries, so that its thread does not outlive us by much
            stop.join(cap * 0.1)
        return not stop.is_alive() and self.losses.unsent == 0

    def __repr__(self) -> str:
        return f"<Export sent={self.losses.delivered} lost={self.losses.lost}>"


def wanted(endpoint: str | None) -> bool:
    """Is there somewhere to send spans: the configured endpoint, or one in the environment?"""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    variables = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return bool(endpoint) or any(os.environ.get(name, "").strip() for name in variables)


def otlp(endpoint: str | None) -> Export:
    """Export to an OTLP/HTTP base address, `http://collector:4318`; None leaves the address to the environment."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if not endpoint:
        return Export(OTLPSpanExporter())
    path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    return Export(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path))


def _queue_room() -> int:
    """The SDK's own bound, read as the SDK reads it."""
    try:
        return max(1, int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _DEFAULT_QUEUE)))
    except ValueError:
        return _DEFAULT_QUEUE
