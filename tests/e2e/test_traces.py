"""Spans of a real server as a real collector receives them: acquire, load and evict, linked by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import shelf
from tests.e2e.live import rows, serving
from tests.runtime.telemetry.test_export import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
FAILING = "11111111111111111111111111111111"


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes, texts and numbers alike."""
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found


def about(spans: list[Any], name: str, model: str) -> list[Any]:
    """Spans of one name about one model, oldest first."""
    found = [span for span in spans if span.name == name and attributes(span)["foreload.model.name"] == model]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run: A cold under a caller's trace, B in A's place, A again, and a failure; then a stop, which sends all."""
    folder = tmp_path_factory.mktemp("traces")
    for at, name in enumerate(("a", "b")):
        shelf.put(folder / "models", name, seed=at)
    shelf.put(folder / "models", "broken", factory="absent")
    with Receiver() as receiver:
        with serving(folder, telemetry__otlp=receiver.url, devices__count=1) as live:
            body = rows(1, 1, 1)
            said = {
                "a": live.infer("a", body, HEADERS),
                "hit": live.infer("a", body),
                "b": live.infer("b", body, {"x-request-id": "call-7"}),
                "broken": live.infer("broken", body, {"traceparent": f"00-{FAILING}-{PARENT}-01"}),
                "unknown": live.infer("nobody", body, HEADERS),
            }
            lines = live.lines()
        yield {"spans": receiver.spans(), "said": said, "lines": lines}


def test_a_cold_request_and_its_load_are_linked_under_the_callers_trace(told: dict[str, Any]) -> None:
    """W3C in: the acquire span is a child of the caller's; its load links to it and it to the load."""
    acquire = about(told["spans"], "foreload.acquire", "a")[0]
    assert acquire.trace_id.hex() == TRACE
    assert acquire.parent_span_id.hex() == PARENT
    assert "vendor=1" in acquire.trace_state
    loads = about(told["spans"], "foreload.load", "a")
    assert len(loads) == 2, "one into the host's memory, one onto the device"
    linked = {link.span_id for link in acquire.links}
    device = next(span for span in loads if span.span_id in linked)
    assert acquire.span_id in {link.span_id for link in device.links}
    assert device.start_time_unix_nano <= device.end_time_unix_nano <= acquire.end_time_unix_nano


def test_w3c_out_the_answer_names_the_trace(told: dict[str, Any]) -> None:
    """W3C out: the caller's trace id comes back on a 200, and a fresh one where none was given."""
    said = told["said"]
    assert said["a"].headers["foreload-trace-id"] == TRACE
    assert said["hit"].headers["foreload-trace-id"] not in {TRACE, "0" * 32}
    assert len(said["hit"].headers["foreload-trace-id"]) == 32
    assert said["b"].headers["x-request-id"] == "call-7"


def test_an_eviction_is_linked_to_the_load_that_needed_the_place(told: dict[str, Any]) -> None:
    """B takes A's place: its evict span names A, and is linked with B's load and B's request."""
    evict = about(told["spans"], "foreload.evict", "a")[0]
    acquire = about(told["spans"], "foreload.acquire", "b")[0]
    load = next(
        span
        for span in about(told["spans"], "foreload.load", "b")
        if span.span_id in {link.span_id for link in acquire.links}
    )
    assert evict.span_id in {link.span_id for link in load.links}
    causes = {link.span_id for link in evict.links}
    assert load.span_id in causes
    assert acquire.span_id in causes
    assert "room" in attributes(evict).values()
    assert acquire.trace_id.hex() == told["said"]["b"].headers["foreload-trace-id"]


def test_a_hit_has_a_span_without_links(told: dict[str, Any]) -> None:
    """A hit is one acquire span: nothing was loaded for it, so it is linked to nothing."""
    trace = told["said"]["hit"].headers["foreload-trace-id"]
    spans = [span for span in told["spans"] if span.trace_id.hex() == trace]
    assert [span.name for span in spans] == ["foreload.acquire"]
    assert not spans[0].links
    assert not spans[0].parent_span_id


def test_an_error_body_and_its_span_share_the_trace_id(told: dict[str, Any]) -> None:
    """I11: the id that a user quotes finds the failed request, its span is an error, its load too."""
    body = told["said"]["broken"].json
    assert body["trace_id"] == FAILING
    acquire = next(
        span for span in about(told["spans"], "foreload.acquire", "broken") if span.trace_id.hex() == FAILING
    )
    assert acquire.status.code == 2
    assert body["code"] in str(attributes(acquire).values()) + acquire.status.message
    failed = [span for span in about(told["spans"], "foreload.load", "broken") if span.status.code == 2]
    assert failed
    assert told["said"]["unknown"].json["trace_id"] == TRACE


def test_log_lines_carry_the_same_trace(told: dict[str, Any]) -> None:
    """I11: the failure's log line has the trace id of the answer."""
    lines = [line for line in told["lines"] if isinstance(line, dict) and line.get("model") == "broken@1"]
    assert any(line.get("trace_id") == FAILING for line in lines if line["event"] == "request failed")


def test_a_silent_collector_delays_neither_requests_nor_the_stop(tmp_path: Path) -> None:
    """F78: nobody listens at the collector's address: requests are served, the stop adds at most 3 s."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, telemetry__otlp="http://127.0.0.1:9") as live:
        for _ in range(20):
            said = live.infer("a")
            assert said.status == 200
        live.process.terminate()
        assert live.wait(10) == 0
