"""The views together, as the server builds them."""

from __future__ import annotations

import io
import json

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from actors import events as e
from actors.residency.model import Tier
from runtime.telemetry.logs import configure
from runtime.telemetry.wiring import Views
from tests.runtime.telemetry.samples import KEY, Ticks, finished, granted, joined, load_finished, load_started
from tests.runtime.telemetry.test_export import Receiver

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(autouse=True)
def _no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the machine's own settings nothing is sent anywhere."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_one_failed_cold_request_is_the_same_trace_in_every_view():
    """I11: span, log line and exemplar carry one trace id, so that an operator can go from any to any."""
    stream = io.StringIO()
    with Receiver() as receiver, configure("debug", "json", stream) as logs:
        views = Views(now=Ticks(), version="1", otlp=receiver.url, logs=logs)
        views.metrics.admit("resnet")
        trace_id = views.spans.begin("r1", CALLER)
        views.spans.begin("r2", CALLER.replace("4bf9", "aaaa"))
        for event in (
            joined("r1", load="L1"),
            load_started("L1", request="r1"),
            load_finished("L1"),
            granted("r1", 101.0, result="miss", found=Tier.DISK, waited=1.0, load="L1"),
            finished("r1", 101.1, load_wait=1.0),
            finished("r2", 101.2, outcome="inference_failed"),
        ):
            views.emit(event)
        page = views.metrics.exposition(OPENMETRICS)[0].decode()
        assert views.close()
        sent = {span.name: span for span in receiver.spans() if span.trace_id.hex() == trace_id}
    assert set(sent) == {"foreload.acquire"}
    exemplars = [
        sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.exemplar and "duration" in sample.name
    ]
    assert trace_id in exemplars
    lines = {line["event"]: line for line in map(json.loads, stream.getvalue().splitlines())}
    assert lines["load started"]["trace_id"] == trace_id
    assert lines["request failed"]["trace_id"].startswith("aaaa")
    assert lines["loaded"]["trace_id"] in exemplars
    assert views.emit.subscribers == ("feed", "tally", "metrics", "log", "spans")


def test_losses_of_telemetry_are_on_the_metrics_page():
    """F78, F79: dropped spans and log lines are numbers an operator can alert on."""
    with configure("info", "json", io.StringIO()) as logs:
        views = Views(now=Ticks(), version="1", logs=logs)
        views.emit(e.LoadStarted(100.0, "L1", "cpu:0", Tier.DEVICE, KEY, "f", 1, "demand"))
        page = views.metrics.exposition("")[0].decode()
        assert 'foreload_telemetry_lost_total{channel="spans"} 0.0' in page
        assert 'foreload_telemetry_lost_total{channel="logs"} 0.0' in page
        assert views.close()
