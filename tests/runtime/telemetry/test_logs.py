"""Log lines are one JSON object each, carry no secret, and never block who writes them (F79, S10, I11)."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import structlog
from pydantic import SecretStr

from actors import events as e
from actors.residency.model import Tier
from runtime.telemetry import eventlog, redact
from runtime.telemetry.eventlog import EventLog
from runtime.telemetry.feed import as_fields
from runtime.telemetry.logs import Logs, configure
from runtime.telemetry.sink import LineSink
from tests.runtime.telemetry.samples import (
    DEVICE,
    KEY,
    arrived,
    deliver,
    evicted,
    finished,
    granted,
    load_failed,
    load_finished,
    one_of_each,
    released,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "hunter2-MARKER"


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """A stream under a running set-up, which is undone afterwards."""
    stream = io.StringIO()
    with configure("info", "json", stream):
        yield stream


def lines(stream: io.StringIO, logs: Logs | None = None) -> list[dict[str, object]]:
    """What was written, after everything waiting is."""
    if logs is not None:
        logs.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def logged(*calls: str, level: str = "info", **fields: object) -> list[dict[str, object]]:
    """Lines of one run, by structlog."""
    stream = io.StringIO()
    logs = configure("info", "json", stream)
    for call in calls:
        getattr(structlog.get_logger(), level)(call, **fields)
    return lines(stream, logs)


class Unprintable:
    """An object with a broken text."""

    def __str__(self) -> str:
        return str(1 / 0)


class Recorder:
    """A logger that keeps its calls."""

    def __init__(self, level: int = logging.DEBUG) -> None:
        self.calls: list[tuple[str, str, dict[str, object]]] = []
        self._level = level

    def is_enabled_for(self, level: int) -> bool:
        return level >= self._level

    def debug(self, event: str, /, **fields: object) -> None:
        self.calls.append(("debug", event, fields))

    def info(self, event: str, /, **fields: object) -> None:
        self.calls.append(("info", event, fields))

    def warning(self, event: str, /, **fields: object) -> None:
        self.calls.append(("warning", event, fields))

    def error(self, event: str, /, **fields: object) -> None:
        self.calls.append(("error", event, fields))


def test_a_line_that_is_not_written_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is some lines below the default level, and its fields cost more than the line's level."""
    made: list[str] = []

    def counted(event: object) -> dict[str, object]:
        made.append(type(event).__name__)
        return as_fields(event)  # type: ignore[arg-type]

    monkeypatch.setattr(eventlog, "as_fields", counted)
    recorder = Recorder(logging.WARNING)
    deliver(EventLog(recorder).wants(), *one_of_each(), evicted("E9", leaked=7))
    assert recorder.calls
    assert {level for level, _, _ in recorder.calls} <= {"warning", "error"}
    assert len(made) == len(recorder.calls)


def test_a_line_is_one_json_object_with_utc_time_level_and_event():
    """Newlines inside stay inside; the order of the first fields is the same on each line."""
    (line,) = logged("two\nlines", trace_id="ab", span_id="cd", answer=42)
    assert list(line)[:3] == ["time", "level", "event"]
    assert str(line["time"]).endswith("Z")
    assert (line["level"], line["event"], line["trace_id"], line["answer"]) == ("info", "two\nlines", "ab", 42)


def test_the_standard_library_is_routed_in():
    """Uvicorn and every other library write the same lines, with their logger's name and tracebacks."""
    stream = io.StringIO()
    logs = configure("info", "json", stream)
    logging.getLogger("uvicorn.error").info("started on %s", "port 1")
    try:
        {}["x"]
    except KeyError:
        logging.getLogger("somewhere").exception("went wrong")
    logging.getLogger("uvicorn.access").info("GET /v2?key=1")
    first, second = lines(stream, logs)
    assert (first["event"], first["logger"], first["level"]) == ("started on port 1", "uvicorn.error", "info")
    assert "KeyError: 'x'" in str(second["exception"])


def test_lines_below_the_level_are_not_written():
    """The level holds for structlog and for the standard library."""
    stream = io.StringIO()
    logs = configure("warning", "json", stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(stream, logs)] == ["loud"]


def test_pretty_only_on_a_terminal_or_when_asked():
    """`auto` on a file or pipe is JSON; `pretty` is for people."""
    for choice, is_json in (("auto", True), ("json", True), ("pretty", False)):
        stream = io.StringIO()
        logs = configure("info", choice, stream)
        structlog.get_logger().info("hello", a=1)
        logs.close()
        assert stream.getvalue().startswith("{") is is_json
        assert "hello" in stream.getvalue()


def test_what_cannot_be_spelled_as_json_is_spelled_as_text():
    """Objects, bytes, lone surrogates, NaN, deep nests and huge values still give one valid line."""
    deep: dict[str, object] = {}
    for _ in range(50):
        deep = {"in": deep}
    (line,) = logged("x", thing=object(), blob=b"\x00" * 10, odd="\ud800", nan=float("nan"), deep=deep, n=1 << 80)
    assert (line["blob"], line["n"]) == ("<10 bytes>", str(1 << 80))
    (line,) = logged("w", what=Unprintable(), nan=float("nan"))
    assert (line["what"], line["nan"]) == ("<Unprintable that raises ZeroDivisionError>", None)
    (line,) = logged("y", big=["z" * 5_000] * 100)
    assert int(str(line["cut"])) > 32_768


def test_bad_calls_to_the_standard_library_lose_their_line_only():
    """A format string without its arguments raises nowhere, and says that a line was lost."""
    stream = io.StringIO()
    logs = configure("info", "json", stream)
    logging.getLogger("x").info("%d and %d", *["one"])
    (line,) = lines(stream, logs)
    assert line["event"] == "log line lost"


def test_closing_puts_the_former_set_up_back():
    """Embedding foreload in another program leaves its logging as it was."""
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    with configure("debug", "json", io.StringIO()):
        assert root.handlers != before[1]
    assert (root.level, root.handlers) == before


# -- never blocking ----------------------------------------------------------------------------------


def test_a_full_pipe_blocks_nobody_and_the_loss_is_told():
    """F79: while nobody reads, logging goes on at full speed; lines beyond the queue are counted and told."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        logs = configure("info", "json", stream, room=500)
        log = structlog.get_logger()
        began = monotonic()
        for index in range(3_000):
            log.info("filling", index=index, padding="p" * 200)
        assert monotonic() - began < 3
        assert logs.dropped > 1_000
        dropped = logs.dropped
        drained: list[bytes] = []
        drain = threading.Thread(target=lambda: drained.extend(iter(lambda: os.read(reader, 65_536), b"")))
        drain.start()
        assert logs.close()
    drain.join(5)
    os.close(reader)
    rows = [json.loads(line) for line in b"".join(drained).splitlines()]
    assert sum(row["event"] == "filling" for row in rows) == 3_000 - dropped
    assert sum(row.get("dropped", 0) for row in rows if row["event"] == "log lines dropped") == dropped


def test_a_closed_stdout_is_survived():
    """F79: the reader went away (`| head -1`): lines are lost and counted, nothing raises."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        sink = LineSink(stream, str)
        for index in range(10):
            sink.put(f"line {index}")
        assert sink.close() is False
        assert sink.dropped == 10
        sink.put("after the end")
        assert sink.dropped == 11


def test_a_stream_without_descriptor_that_is_closed_is_survived():
    """A replaced stdout may be any object."""
    stream = io.StringIO()
    sink = LineSink(stream, str)
    stream.close()
    sink.put("gone")
    assert sink.close() is False
    assert sink.dropped == 1


def test_a_process_with_a_stuck_stdout_still_exits():
    """F79: nobody reads, the pipe is full, and the interpreter ends in good order within its second."""
    code = (
        "import structlog, sys\n"
        "from runtime.telemetry.logs import configure\n"
        "logs = configure('info', 'json', room=200)\n"
        "for i in range(2000): structlog.get_logger().info('filling', padding='p' * 500)\n"
        "logs.close()\n"
        "sys.stderr.write('done')\n"
    )
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, timeout=20, check=False
        )
    finally:
        os.close(writer)
        os.close(reader)
    assert (done.returncode, done.stderr) == (0, b"done")


# -- secrets -----------------------------------------------------------------------------------------


def test_no_line_carries_a_planted_secret():
    """I11, S10: by field name, in URLs, in auth headers, in pairs, nested, in tracebacks, by either logger."""
    stream = io.StringIO()
    logs = configure("info", "json", stream)
    log = structlog.get_logger()
    log.info(
        "fields",
        authorization=MARK,
        api_key=MARK,
        keys=[MARK],
        headers={"Authorization": MARK, "x-api-key": MARK, "Cookie": MARK},
        awsSecretAccessKey=MARK,
        config=[{"password": MARK}],
        secret=SecretStr(MARK),
        other=SecretStr(MARK),
    )
    what = f"fetching s3://user:{MARK}@bucket/key and https://host/path?X-Amz-Signature={MARK}&x=1"
    log.info(what)
    log.info("headers", seen=[f"Authorization: Bearer {MARK}", f'{{"token": "{MARK}"}}', f"password='{MARK} {MARK}'"])
    logging.getLogger("urllib3").warning("retry https://a:%s@b/", MARK, extra={"token": MARK})
    try:
        int(f"https://u:p@{MARK}@host/x?sig={MARK}")
    except ValueError:
        log.exception("failed")
        logging.getLogger("x").exception("failed")
    assert len(lines(stream, logs)) == 6
    assert MARK not in stream.getvalue()
    assert "host" in stream.getvalue()


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("authorization", True),
        ("X-Api-Key", True),
        ("apiKey", True),
        ("DB_PASSWORD", True),
        ("refresh_token", True),
        ("x-amz-signature", True),
        ("tokenizer", False),
        ("monkey", False),
        ("model", False),
        ("assignment", False),
    ],
)
def test_fields_are_secret_by_whole_words(name: str, secret: bool):  # noqa: FBT001  a parameter of the test
    """No more is hidden than must be."""
    assert redact.is_secret_field(name) is secret


def test_numbers_and_plain_text_are_left_alone():
    """`max_tokens=5` is no secret, and a sentence stays a sentence."""
    assert redact.fields({"max_tokens": 5, "note": "the model resnet@1 on cpu:0 is fine"}) == {
        "max_tokens": 5,
        "note": "the model resnet@1 on cpu:0 is fine",
    }


@pytest.mark.parametrize("text", ["a://" * 9_000, "a-" * 9_000, "token=" * 9_000, "bearer " * 9_000, "a_b-" * 9_000])
def test_hostile_text_costs_bounded_time(text: str):
    """Redaction is linear: 36 kB of the worst kind take milliseconds, on the loop."""
    began = monotonic()
    assert len(redact.text(text)) < 20_000
    assert monotonic() - began < 0.5


def test_a_secret_across_the_cut_of_a_long_text_is_masked():
    """Cutting happens after masking."""
    text = "x" * 8_180 + f" https://user:{MARK}@host/"
    assert "hunter2" not in redact.text(text)


# -- events ------------------------------------------------------------------------------------------


def test_hits_are_not_logged():
    """The hit path writes no line."""
    recorder = Recorder()
    deliver(EventLog(recorder).wants(), arrived("r1"), granted("r1"), released(), finished("r1"))
    assert recorder.calls == []


def test_events_are_logged_at_the_level_of_what_to_do_about_them():
    """Debug: step by step. Info: what went on. Warning: look. Error: look now."""
    recorder = Recorder()
    deliver(EventLog(recorder).wants(), *one_of_each(), evicted("E9", leaked=7))
    levels = {(level, what) for level, what, _ in recorder.calls}
    assert levels == {
        ("info", "worker started"),
        ("info", "catalogue changed"),
        ("warning", "warm model not ready"),
        ("debug", "load started"),
        ("debug", "load upgraded"),
        ("info", "fetching"),
        ("debug", "fetch under way"),
        ("info", "fetch ended"),
        ("info", "loaded"),
        ("debug", "prefetch settled"),
        ("debug", "waiter left"),
        ("warning", "load failed"),
        ("info", "load cancelled"),
        ("warning", "memory pressure"),
        ("debug", "evicting"),
        ("info", "evicted"),
        ("warning", "evicted"),
        ("debug", "compiling"),
        ("info", "compiled"),
        ("warning", "compilation failed"),
        ("debug", "prefetch withheld"),
        ("error", "peak will be cold"),
        ("info", "forecast fitted"),
        ("info", "forecast demoted"),
        ("debug", "forecast judged"),
        ("warning", "forecast fell back"),
        ("info", "foresight report"),
        ("warning", "adopted"),
        ("error", "actor restarted"),
        ("error", "worker lost"),
        ("info", "drain started"),
        ("warning", "drain finished"),
    }


def test_only_failures_of_ours_are_logged_per_request():
    """A caller's bad tensor is no line of ours; a model that raised is, with the trace to look at."""
    recorder = Recorder()
    log = EventLog(recorder, trace_of=lambda request: (f"trace-{request}", "span"))
    deliver(log.wants(), finished("r1", outcome="bad_tensor"), finished("r2", outcome="inference_failed"))
    ((level, what, fields),) = recorder.calls
    assert (level, what, fields["trace_id"], fields["span_id"]) == ("warning", "request failed", "trace-r2", "span")


def test_load_lines_carry_the_loads_trace_and_good_news_comes_at_info():
    """From a line to its span; the other side of each two-sided event."""
    recorder = Recorder()
    log = EventLog(recorder, load_trace=lambda load: (f"trace-{load}", ""))
    deliver(
        log.wants(),
        load_finished("L1"),
        e.PressureChanged(100.0, "host", Tier.HOST, high=False, used_ratio=0.5),
        e.WarmSettled(100.0, KEY, required=True, ready=True),
        e.CatalogChanged(100.0, "resnet", "rejected", "no manifest"),
        e.DrainFinished(101.0, 0, 1.0),
        e.WaiterLeft(101.0, "host", KEY, 3, "r3", "cancelled", 0.0),
    )
    assert [(level, what) for level, what, _ in recorder.calls] == [
        ("info", "loaded"),
        ("info", "memory pressure over"),
        ("info", "warm model ready"),
        ("warning", "catalogue changed"),
        ("info", "drain finished"),
    ]
    fields = recorder.calls[0][2]
    assert (fields["trace_id"], fields["model"], fields["device"], "at" in fields) == ("trace-L1", KEY, DEVICE, False)


def test_an_events_cause_is_redacted_before_it_reaches_any_logger():
    """Also a logger that does not redact by itself."""
    recorder = Recorder()
    deliver(EventLog(recorder).wants(), load_failed("L1", cause=f"GET https://u:{MARK}@h/x?sig={MARK}"))
    assert MARK not in repr(recorder.calls)


def test_the_fixture_writes_where_it_says(out: io.StringIO):
    """Fields bound to the context, such as a request's trace id, are on every line."""
    with structlog.contextvars.bound_contextvars(trace_id="abc"):
        structlog.get_logger().info("inside")
    for _ in range(200):
        if out.getvalue():
            break
        threading.Event().wait(0.01)
    assert json.loads(out.getvalue())["trace_id"] == "abc"
