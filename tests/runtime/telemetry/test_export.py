"""Spans leave the process by real OTLP over HTTP, and a broken collector costs neither serving nor stopping (F78)."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import TYPE_CHECKING, Self

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from runtime.telemetry.export import STOP_CAP, Export, otlp, wanted
from runtime.telemetry.spans import Spans
from tests.runtime.telemetry.samples import (
    deliver,
    epoch,
    evicted,
    eviction_started,
    finished,
    granted,
    joined,
    load_finished,
    load_started,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from opentelemetry.proto.trace.v1.trace_pb2 import Span
    from opentelemetry.sdk.trace import ReadableSpan

REMOTE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(autouse=True)
def _no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own OTEL_* settings stay out of these tests."""
    import os

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class Receiver:
    """A small OTLP/HTTP collector: keeps what it is sent, answers with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                kept.paths.append(self.path)
                kept.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {pair.key: pair.value.string_value for pair in attributes}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def story(spans: Spans) -> None:
    """One cold request that needs a victim, from a caller with a trace."""
    spans.begin("r1", f"00-{REMOTE}-00f067aa0ba902b7-01")
    deliver(
        spans.wants(),
        joined("r1", load="L1"),
        eviction_started("E1", 100.0, load="L1"),
        evicted("E1", 100.2),
        load_started("L1", 100.2, request="r1"),
        load_finished("L1", 101.0),
        granted("r1", 101.0, result="miss", waited=1.0, load="L1"),
        finished("r1", 101.1, load_wait=1.0),
    )


def test_a_collector_receives_names_parents_and_links():
    """What arrives over HTTP is what happened: request under its caller, load and eviction linked by cause."""
    with Receiver() as receiver:
        spans = Spans(otlp(receiver.url), epoch())
        story(spans)
        assert spans.close()
        by_name = {span.name: span for span in receiver.spans()}
        assert set(by_name) == {"foreload.acquire", "foreload.load", "foreload.evict"}
        acquire, load, evict = (by_name[f"foreload.{name}"] for name in ("acquire", "load", "evict"))
        assert acquire.trace_id.hex() == REMOTE
        assert acquire.parent_span_id.hex() == "00f067aa0ba902b7"
        assert load.parent_span_id == b""
        assert [link.span_id for link in load.links] == [acquire.span_id, evict.span_id]
        assert [link.span_id for link in acquire.links] == [load.span_id]
        assert [link.span_id for link in evict.links] == [acquire.span_id, load.span_id]
        assert receiver.paths == ["/v1/traces"]
        assert receiver.resource()["service.name"] == "foreload"
        assert spans.lost == 0


def test_the_environment_alone_is_enough_and_names_the_process(monkeypatch: pytest.MonkeyPatch):
    """OTEL_* is read by the SDK: endpoint, service name and resource attributes, with no option of ours."""
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=vision")
        assert wanted(None)
        spans = Spans(otlp(None), epoch())
        story(spans)
        assert spans.close()
        assert receiver.resource()["service.name"] == "mine"
        assert receiver.resource()["team"] == "vision"


def test_export_is_off_until_somebody_names_a_collector(monkeypatch: pytest.MonkeyPatch):
    """No endpoint, no exporter, no 30 s stop; the SDK's own off switches win over an endpoint."""
    assert not wanted(None)
    assert not wanted("")
    assert wanted("http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/v1/traces")
    assert wanted(None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not wanted("http://collector:4318")
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not wanted("http://collector:4318")


def test_an_endpoint_with_the_full_path_is_taken_as_it_is():
    """Both spellings that operators use arrive at the same place."""
    with Receiver() as receiver:
        spans = Spans(otlp(f"{receiver.url}/v1/traces"), epoch())
        story(spans)
        assert spans.close()
        assert receiver.paths == ["/v1/traces"]


@contextmanager
def refusing() -> Iterator[str]:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def black_hole() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@contextmanager
def failing() -> Iterator[str]:
    """A collector that answers 503, which the exporter tries again and again."""
    with Receiver(503) as receiver:
        yield receiver.url


@pytest.mark.parametrize("collector", [refusing, black_hole, failing])
def test_a_broken_collector_adds_a_bounded_time_to_the_stop(collector: Callable[[], AbstractContextManager[str]]):
    """F78: refused, silent or failing, closing returns within its cap and says that spans were given up."""
    assert STOP_CAP == 3.0
    with collector() as url:
        export = otlp(url)
        spans = Spans(export, epoch())
        story(spans)
        began = monotonic()
        assert export.close(0.4) is False
        assert monotonic() - began < 1.5
        assert export.losses.unsent == 3


class Stuck(SpanExporter):
    """An exporter that holds on to its first batch until let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.let_go.wait(5)
        return SpanExportResult.FAILURE


def test_a_stuck_collector_costs_bounded_memory_and_the_loss_is_counted(monkeypatch: pytest.MonkeyPatch):
    """F78: the queue is bounded, spans beyond it are dropped and counted, and no request waits."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    stuck = Stuck()
    export = Export(stuck)
    spans = Spans(export, epoch())
    for index in range(16):
        spans.begin(f"r{index}")
        deliver(spans.wants(), finished(f"r{index}"))
    assert stuck.entered.wait(5)
    began = monotonic()
    for index in range(1_000):
        spans.begin(f"r{index}")
        deliver(spans.wants(), finished(f"r{index}"))
    assert (monotonic() - began) / 1_000 < 1e-3
    assert export.losses.overflowed == 1_000 - 64
    stuck.let_go.set()
    assert spans.close() is False
    assert spans.lost == 1_016
