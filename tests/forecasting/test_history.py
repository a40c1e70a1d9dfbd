"""Logs of the past: every format, every kind of dirt, and what counting learns from them."""

from __future__ import annotations

import gzip
import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forecasting.counts import Counts
from forecasting.history import MAX_LINE, Imported, read_logs

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 3, 30, 12, tzinfo=UTC).timestamp()
NOON = int(NOW // 60) - 1440  # yesterday at noon


def read(tmp_path: Path, text: str | bytes, **options: object) -> Imported:
    """One log read back."""
    path = tmp_path / "request.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_logs([path], now=NOW, **options)  # type: ignore[arg-type]


def cells(imported: Imported) -> dict[str, dict[int, int]]:
    """Requests by model and minute."""
    return {
        key: dict(zip((minutes - NOON).tolist(), counts.tolist(), strict=True))
        for key, (minutes, counts) in imported.cells.items()
    }


# -- formats -----------------------------------------------------------------------------------------


def test_access_logs_are_read_in_common_and_combined_form(tmp_path: Path):
    """Inference paths of v1 and v2, versions, escapes, offsets; other paths and 404s are no requests for a model."""
    text = (
        '10.0.0.1 - - [29/Mar/2026:12:00:59 +0000] "POST /v2/models/bert/infer HTTP/1.1" 200 17\n'
        '10.0.0.1 - bob [29/Mar/2026:14:00:01 +0200] "POST /v2/models/bert/versions/3/infer HTTP/1.1" 500 1 "-" "c/1"\n'
        '::1 - - [29/Mar/2026:07:31:00 -0430] "POST /v2/models/a%20b/generate_stream?x=1 HTTP/2" 200 -\n'
        '::1 - - [29/Mar/2026:12:01:00 +0000] "POST /v1/models/old:predict HTTP/1.1" 200 -\n'
        '::1 - - [29/Mar/2026:12:01:00 +0000] "POST /v2/models/none/infer HTTP/1.1" 404 -\n'
        '::1 - - [29/Mar/2026:12:01:00 +0000] "GET /v2/models/bert/ready HTTP/1.1" 200 -\n'
        '::1 - - [29/Mar/2026:12:01:00 +0000] "POST /v2/models/bert/inference HTTP/1.1" 200 -\n'
    )
    found = read(tmp_path, text)
    assert cells(found) == {"bert": {0: 1}, "bert@3": {0: 1}, "a b": {1: 1}, "old": {1: 1}}
    assert (found.report.counted, found.report.other, found.report.bad) == (4, 3, 0)


def test_json_lines_are_read_with_any_usual_name_of_time_and_model(tmp_path: Path):
    """Our own access log and generic keys; seconds, milli- and nanoseconds, ISO 8601 with and without zone."""
    base = NOON * 60
    rows: list[dict[str, object]] = [
        {"time": "2026-03-29T12:00:30.123456Z", "model": "bert@3", "outcome": "ok"},
        {"ts": base + 61.5, "model": "bert", "version": 3},
        {"timestamp": (base + 61) * 1000, "model_name": "bert", "model_version": "3"},
        {"@timestamp": (base + 61) * 10**9, "path": "/v2/models/bert/versions/3/infer"},
        {"time": "2026-03-29 14:02:00", "model": "bert", "version": "-1"},
        {"time": "2026-03-29T12:00:30Z", "event": "started"},
    ]
    found = read(tmp_path, "\n".join(map(json.dumps, rows)), zone=ZoneInfo("Europe/Berlin"))
    assert cells(found) == {"bert@3": {0: 1, 1: 3}, "bert": {2: 1}}
    assert found.report.other == 1


def test_csv_is_read_with_and_without_a_header(tmp_path: Path):
    """`ts,model`, or the columns wherever the header says; quotes as CSV has them."""
    base = NOON * 60
    assert cells(read(tmp_path, f"ts,model\n{base},a\n{base + 60},a\n")) == {"a": {0: 1, 1: 1}}
    assert cells(read(tmp_path, f'{base},"a,b"\n')) == {"a,b": {0: 1}}
    assert cells(read(tmp_path, "user,model_name,time\nx,a,2026-03-29T12:00:00Z\n")) == {"a": {0: 1}}


def test_tritons_verbose_log_is_read_and_its_missing_year_guessed(tmp_path: Path):
    """The year is the last in which the line is not in the future."""
    text = (
        'I0329 12:00:05.123456 7 http_server.cc:3570] "HTTP request: 2 /v2/models/bert/versions/1/infer"\n'
        "I0329 12:01:05.123456 7 http_server.cc:3570] HTTP request: 2 /v2/models/bert/infer\n"
        "I0329 12:01:06.000001 7 infer_request.cc:751] [request id: <id_unknown>] prepared\n"
        "I1231 23:59:00.000000 7 http_server.cc:3570] HTTP request: 2 /v2/models/bert/infer\n"
    )
    found = read(tmp_path, text, days=100)
    december = int(datetime(2025, 12, 31, 23, 59, tzinfo=UTC).timestamp() // 60) - NOON
    assert cells(found) == {"bert@1": {0: 1}, "bert": {december: 1, 1: 1}}


def test_compressed_logs_are_known_by_their_content(tmp_path: Path):
    """It is gzip whatever the name says; several files add up."""
    row = json.dumps({"ts": NOON * 60, "model": "a"}).encode() + b"\n"
    (tmp_path / "one").write_bytes(gzip.compress(row * 3))
    (tmp_path / "two.gz").write_bytes(row)
    found = read_logs([tmp_path / "one", tmp_path / "two.gz"], now=NOW)
    assert cells(found) == {"a": {0: 4}}


def test_a_pattern_of_ones_own_names_the_model(tmp_path: Path):
    """Any path with a group `model`; a pattern without one, and other options without sense, are refused by name."""
    line = '- - - [29/Mar/2026:12:00:59 +0000] "POST /serve/bert HTTP/1.1" 200 17\n'
    found = read(tmp_path, line, pattern=re.compile(r"/serve/(?P<model>\w+)"))
    assert cells(found) == {"bert": {0: 1}}
    for options, name in (
        ({"pattern": re.compile("x")}, "pattern"),
        ({"form": "xml"}, "form"),
        ({"days": 0}, "days"),
        ({"limit": 0}, "limit"),
        ({"silence": float("nan")}, "silence"),
    ):
        with pytest.raises(ValueError, match=name):
            read(tmp_path, line, **options)


def test_keys_can_be_mapped_to_versions_and_unknown_models_dropped(tmp_path: Path):
    """`renamed` adds up what becomes one model."""
    base = NOON * 60
    found = read(tmp_path, f"{base},a\n{base},a@2\n{base + 60},a\n{base},gone\n")
    mapped = found.renamed({"a": "a@2", "a@2": "a@2"}.get)
    assert cells(mapped) == {"a@2": {0: 2, 1: 1}}


# -- dirt --------------------------------------------------------------------------------------------


def test_bad_lines_are_counted_skipped_and_the_first_few_shown(tmp_path: Path):
    """With file, line, reason and the escaped beginning; what follows a bad line is read."""
    good = json.dumps({"ts": NOON * 60, "model": "a"})
    bad = ["{", "[1]", '{"ts": "yesterday", "model": "a"}', '{"model": "a"}', '{"ts": true, "model": "a"}', "\x1b[2J"]
    found = read(tmp_path, "\n".join([good, *bad, "", good]))
    assert cells(found) == {"a": {0: 2}}
    report = found.report
    assert (report.lines, report.counted, report.bad, len(report.shown)) == (8, 2, 6, 5)
    assert report.shown[0] == "request.log:2: not JSON: '{'"
    assert "no usable time" in report.shown[2]
    assert not any("\x1b" in line for line in report.shown)


@pytest.mark.parametrize(
    "line",
    [
        "x" * 300_000,
        "\0" * 1000,
        bytes(range(256)).decode("latin-1"),
        "[" * 60_000,
        '{"ts": NaN, "model": "a"}',
        '{"ts": Infinity, "model": "a"}',
        '{"ts": 1e400, "model": "a"}',
        '{"ts": -5, "model": "a"}',
        '{"ts": ' + "9" * 5000 + ', "model": "a"}',
        '{"ts": 1774785600, "model": ""}',
        '{"ts": 1774785600, "model": 7}',
        '{"ts": 1774785600, "model": "' + "n" * 300 + '"}',
        '{"ts": 1774785600, "model": "a\\u0000b"}',
        '{"ts": 1774785600, "model": "a", "version": [1]}',
        '{"ts": "9999-12-31T23:59:59-23:59", "model": "a"}',
        '{"ts": "0001-01-01T00:00:00+23:59", "model": "a"}',
        '{"ts": 1774999999, "model": "future"}',
        '- - - [31/Feb/2026:12:00:59 +0000] "POST /v2/models/a/infer HTTP/1.1" 200 17',
        '- - - [29/Mrz/2026:12:00:59 +0000] "POST /v2/models/a/infer HTTP/1.1" 200 17',
        '- - - [29/Mar/2026:12:00:59 +0000] "POST /v2/models/%00/infer HTTP/1.1" 200 17',
        "I0230 12:00:05.123456 7 http_server.cc:3570] HTTP request: 2 /v2/models/bert/infer",
        "1774785600",
        '1774785600,"a',
        "abc,def",
    ],
)
@pytest.mark.parametrize("form", ["auto", "access", "json", "csv", "triton"])
def test_hostile_lines_cost_one_line_each(tmp_path: Path, line: str, form: str):
    """Huge, binary, nested, out of range: never an exception, never a model, in whatever format they are read."""
    found = read(tmp_path, line.replace("\n", "") + "\n", form=form)
    assert found.cells == {}
    assert found.report.counted == 0
    assert found.report.bad + found.report.old == 1


def test_a_line_too_long_is_read_past_and_the_next_one_counts(tmp_path: Path):
    """Exactly at the limit, far beyond it, and without an end."""
    good = json.dumps({"ts": NOON * 60, "model": "a"})
    padded = json.dumps({"ts": NOON * 60, "model": "a", "x": ""})
    padded = padded[:-2] + "x" * (MAX_LINE - len(padded) - 1) + '"}'
    text = "\n".join([good, padded, "y" * (3 * MAX_LINE), good, "z" * (2 * MAX_LINE)])
    found = read(tmp_path, text)
    assert cells(found) == {"a": {0: 3}}
    assert found.report.bad == 2


def test_a_damaged_archive_is_read_up_to_the_damage(tmp_path: Path):
    """Cut or flipped: a problem in the report, what was read before stays."""
    rows = b"".join(json.dumps({"ts": NOON * 60, "model": f"m{n % 7}", "x": n}).encode() + b"\n" for n in range(20_000))
    packed = gzip.compress(rows)
    cut = read(tmp_path, packed[: len(packed) // 2])
    assert 0 < cut.report.counted < 20_000
    assert "damaged" in cut.report.problems[0]
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    assert read(tmp_path, bytes(flipped)).report.problems
    assert read(tmp_path, b"\x1f\x8b").report.problems


def test_what_is_read_is_bounded(tmp_path: Path):
    """Bytes after decompression, models, and pairs of model and minute: it stops, keeps what it has, and says so."""
    bomb = gzip.compress(b"\0" * 5_000_000)
    assert "5000000" not in str(read(tmp_path, bomb).cells)
    assert "more than 100000 bytes" in read(tmp_path, bomb, max_bytes=100_000).report.problems[0]
    base = NOON * 60
    many = "".join(f"{base},m{number}\n" for number in range(10))
    found = read(tmp_path, many, limit=3)
    assert len(found.cells) == 3
    assert found.report.bad == 7
    assert "more than 3 models" in found.report.shown[0]
    assert "more than 2 pairs" in read(tmp_path, many, max_cells=2).report.problems[0]


def test_a_file_of_no_known_format_is_given_up_and_a_missing_one_refused(tmp_path: Path):
    """After 50 lines without sense; the error names the file and not its folder."""
    found = read(tmp_path, "lorem ipsum\n" * 100_000)
    assert found.report.lines == 50
    assert "none of the first 50 lines" in found.report.problems[0]
    with pytest.raises(ValueError, match=r"cannot read the log 'missing.log'") as said:
        read_logs([tmp_path / "missing.log"], now=NOW)
    assert str(tmp_path) not in str(said.value)
    with pytest.raises(ValueError, match="cannot read the log"):
        read_logs([tmp_path], now=NOW)


def test_an_empty_log_teaches_nothing(tmp_path: Path):
    """No lines, no models, no minutes."""
    found = read(tmp_path, "")
    assert (found.start, found.end, found.cells) == (0, 0, {})
    counts = Counts(NOW, 0.0)
    assert counts.load_history(found) == ()
    assert counts.keys == ()


def test_order_does_not_matter_and_old_requests_are_left_out(tmp_path: Path):
    """Lines in any order; what is older than `days` is counted as old."""
    base = NOON * 60
    found = read(tmp_path, f"{base + 300},a\n{base},a\n{base + 120},b\n{base - 86_400 * 5},a\n{base},a\n", days=3)
    assert cells(found) == {"a": {0: 2, 5: 1}, "b": {2: 1}}
    assert found.report.old == 1
    assert (found.start, found.end) == (NOON, NOON + 6)


def test_a_long_silence_of_the_whole_log_is_unknown(tmp_path: Path):
    """A log that was not written for ten hours says nothing about them; two hours at night are zeros."""
    base = NOON * 60
    found = read(tmp_path, "".join(f"{base + 3600 * hour},a\n" for hour in (0, 2, 12, 13)))
    assert found.known[:121].all()
    assert not found.known[121:720].any()
    assert found.known[720:].all()


@given(st.binary(max_size=2000), st.sampled_from(["auto", "access", "json", "csv", "triton"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
def test_any_bytes_at_all_end_in_a_report(tmp_path: Path, content: bytes, form: str):
    """Random bytes, read as anything: a report whose numbers add up, no exception."""
    report = read(tmp_path, content, form=form).report
    assert report.lines == report.counted + report.other + report.bad + report.old


# -- learning ----------------------------------------------------------------------------------------


def _daily(days: int, *, zone: ZoneInfo, end: float = NOW) -> str:
    """A model asked every ten minutes from 9 to 10 local time, and another one every hour of the day."""
    rows: list[str] = []
    midnight = datetime.fromtimestamp(end, zone).replace(hour=0, minute=0, second=0, microsecond=0)
    for day in range(days):
        start = midnight - timedelta(days=day)
        rows += [f"{(start + timedelta(hours=9, minutes=10 * step)).timestamp()},nine@1" for step in range(6)]
        rows += [f"{(start + timedelta(hours=hour, minutes=1)).timestamp()},hourly@1" for hour in range(24)]
    return "\n".join(row for row in rows if float(row.split(",")[0]) < end)


def test_a_new_installation_starts_with_knowledge(tmp_path: Path):
    """Four weeks of log over a DST change, loaded before counting: the profile is right in *local* time at once."""
    berlin = ZoneInfo("Europe/Berlin")  # clocks went forward on 29 March 2026
    counts = Counts(NOW, 0.0, zone=berlin)
    assert counts.load_history(read(tmp_path, _daily(28, zone=berlin), zone=berlin)) == ()
    snapshot = counts.snapshot()
    sums, exposure = snapshot.sums()
    rate = sums / np.maximum(exposure, 1e-6)
    nine = rate[snapshot.keys.index("nine@1")]
    assert nine.reshape(7, 96)[:, 36:40] == pytest.approx(np.array([[2, 1, 2, 1]] * 7), rel=0.01)
    assert nine.sum() == pytest.approx(42, rel=0.01)
    assert rate[snapshot.keys.index("hourly@1")].sum() == pytest.approx(168, abs=2)
    assert (exposure > 1).mean() > 0.98


def test_imported_rows_are_the_raw_past(tmp_path: Path):
    """The last day in minutes, 8 days in fives, 28 days in quarters, all with the right totals; counters are warm."""
    text = _daily(27, zone=ZoneInfo("UTC"))
    counts = Counts(NOW, 0.0)
    found = read(tmp_path, text)
    counts.load_history(found)
    snapshot = counts.snapshot()
    hourly = snapshot.keys.index("hourly@1")
    assert snapshot.recent(1440).counts[hourly].sum() == 24
    assert snapshot.history(300).counts[hourly].sum() == 8 * 24 - 1  # the log ends within five minutes
    assert snapshot.history(900).counts[hourly].sum() == found.cells["hourly@1"][1].sum() - 2  # and begins so
    assert snapshot.rates()[hourly, 4] == pytest.approx(1 / 3600, rel=0.05)
    assert snapshot.seen[snapshot.rows[hourly]] == 60 * (NOW // 60 - 59)


def test_a_log_loaded_twice_or_overlapping_counts_once(tmp_path: Path):
    """What was learned or counted already is not learned again."""
    text = _daily(10, zone=ZoneInfo("UTC"))
    counts = Counts(NOW, 0.0)
    found = read(tmp_path, text)
    counts.load_history(found)
    before = counts.snapshot().sums()
    counts.load_history(found)
    for one, other in zip(before, counts.snapshot().sums(), strict=True):
        assert np.array_equal(one, other)
    counts.load_history(read(tmp_path, _daily(20, zone=ZoneInfo("UTC"))))
    fresh = Counts(NOW, 0.0)
    fresh.load_history(read(tmp_path, _daily(20, zone=ZoneInfo("UTC"))))
    rows = [fresh.keys.index(key) for key in counts.keys]
    assert counts.snapshot().sums()[0] == pytest.approx(fresh.snapshot().sums()[0][rows], rel=0.1, abs=0.1)


def test_importing_teaches_what_counting_would_have_taught(tmp_path: Path):
    """The same three weeks, live and from a log, a burst included: the same sums and exposure."""
    start = NOON * 60.0 - 86_400 * 20
    live = Counts(start, 0.0)
    live._partial = False
    live.index("a@1")
    random = np.random.default_rng(3)
    rows: list[str] = []
    for minute in range(21 * 1440):
        hits = (
            int(random.poisson(0.2)) + (40 if minute in range(29_000, 29_015) else 0) + (minute in {0, 21 * 1440 - 1})
        )
        rows += [f"{start + 60 * minute + 1},a@1"] * hits
        live._minute[0] = hits
        live._write(known=True, counts=None, facts=[])
    now = start + 60 * 21 * 1440
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows))
    loaded = Counts(now, 0.0)
    loaded.load_history(read_logs([path], now=now))
    for one, other in zip(live.snapshot().sums(), loaded.snapshot().sums(), strict=True):
        assert other == pytest.approx(one, rel=0.01, abs=0.01)
    for bucket in (300, 900):
        one, other = live.snapshot().history(bucket), loaded.snapshot().history(bucket)
        length = min(one.counts.shape[1], other.counts.shape[1]) - 1  # the first, when the model was new, differs
        assert length >= (8 * 288 - 1 if bucket == 300 else 20 * 96)
        assert one.start + bucket * one.counts.shape[1] == other.start + bucket * other.counts.shape[1] == now
        assert other.counts[:, -length:] == pytest.approx(one.counts[:, -length:], rel=0.05)


def test_of_too_many_models_the_busiest_are_kept(tmp_path: Path):
    """The limit of models holds for imports; the rest is named."""
    base = NOON * 60
    text = "".join(f"{base},m{number}\n" * (number + 1) for number in range(4))
    counts = Counts(NOW, 0.0, limit=2)
    assert counts.load_history(read(tmp_path, text)) == ("m1", "m0")
    assert set(counts.keys) == {"m3", "m2"}
