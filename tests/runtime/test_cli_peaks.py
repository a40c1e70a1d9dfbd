"""`foreload peaks`: lint with exit codes, previews that are the plan, charts that are images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from forecasting.peaks import windows
from runtime.cli import OK, SETUP, main
from runtime.commands.peaks import known_models, room_of
from runtime.config.load import load
from runtime.config.preload_peaks import peaks_of

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """\
models:
  - {name: recommender, source: ./x, footprint: {device: 600MiB, host: 600MiB}}
  - {name: ads, source: ./y, footprint: {device: 300MiB, host: 300MiB}}
devices: [{id: cpu:0, memory: 1GiB}]
host: {memory: 1GiB}
warm: []
preload:
  defaults: {timezone: Europe/Berlin, max_gpu_fraction: 100%}
  peaks:
    - {name: night, models: [recommender], when: {at: "02:30"}, duration: 1h, expected_rps: 12.5}
    - {name: sale, models: [ads], when: {once: 2027-03-28T02:45}, duration: 26h, require: true}
    - {name: freeze, models: ["*"], when: {once: 2027-03-28T03:30}, duration: 1h, action: suppress}
"""
AT = ["--at", "2027-03-27T12:00Z"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sound configuration over a change of the clocks."""
    path = tmp_path / "c.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed, as JSON."""
    return json.loads(capsys.readouterr().out)


# -- lint --------------------------------------------------------------------------------------------


def test_check_tells_of_peaks_as_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the lint calls an error is a warning of `foreload check`: the server would start with it."""
    past = "{name: past, models: [gone], when: {once: 2020-01-01T00:00Z}, duration: 1h}"
    path = tmp_path / "c.yaml"
    path.write_text(f"repository: [.]\nwarm: []\npreload: {{peaks: [{past}]}}\n", encoding="utf-8")
    assert main(["check", str(path)]) == OK
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "warning: preload.peaks.0.models.0: no model gone is served",
        "warning: preload.peaks.0.when.once: is in the past",
        f"{path}: ok",
    ]
    assert main(["check", str(path), "--json"]) == OK
    assert {row["level"] for row in answer(capsys)["findings"]} == {"warning"}


def test_lint_passes_a_sound_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0 and one line; JSON says the same."""
    assert main(["peaks", "lint", str(file), *AT]) == OK
    assert capsys.readouterr().out == f"{file}: ok\n"
    assert main(["peaks", "lint", str(file), *AT, "--json"]) == OK
    assert answer(capsys) == {"ok": True, "errors": [], "findings": []}


def test_lint_tells_what_has_passed_with_file_and_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, on standard error, as an editor jumps to it."""
    assert main(["peaks", "lint", str(file), "--at", "2028-01-01T00:00"]) == SETUP
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"{file}:11: error: preload.peaks.1.when.once: is in the past (remove the entry, or give it a later time)",
        f"{file}:12: error: preload.peaks.2.when.once: is in the past (remove the entry, or give it a later time)",
    ]


def test_lint_names_models_that_do_not_fit(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the sizes that are declared, in the memory of the devices together."""
    file.write_text(TEXT.replace("memory: 1GiB}]", "memory: 700MiB}]"), encoding="utf-8")
    assert main(["peaks", "lint", str(file), *AT, "--json"]) == SETUP
    (row,) = answer(capsys)["findings"]
    assert (row["level"], row["place"]) == ("error", f"{file}:10")
    assert "ads@1 (300.0 MiB), recommender@1 (600.0 MiB) need 900.0 MiB, the devices have 700.0 MiB" in row["text"]


def test_lint_lists_every_fault_of_a_file_that_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong on every day comes first, all of it."""
    file.write_text(TEXT.replace("02:30", "2:3O").replace("26h", "26"), encoding="utf-8")
    file.write_text(file.read_text().replace("action: suppress", "action: stop"), encoding="utf-8")
    assert main(["peaks", "lint", str(file)]) == SETUP
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert main(["peaks", "lint", str(file), "--json"]) == SETUP
    assert [len(answer(capsys)["errors"])] == [2]


def test_models_of_a_repository_count_with_size_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Selectors look at manifests; a name is searched for where models are, not only where they are listed."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 17)
    (folder / "foreload.yaml").write_text(
        "name: tiny\nversion: '1'\nbuilder: {kind: python, target: 'pkg.models:tiny'}\nlabels: {tier: gold}\n"
        "inputs: [{name: x, datatype: FP32, shape: [-1, 2]}]\noutputs: [{name: y, datatype: FP32, shape: [-1, 2]}]\n",
        encoding="utf-8",
    )
    assert main(["describe", str(folder)]) == OK
    path = tmp_path / "c.yaml"
    path.write_text(
        "repository: [models]\nwarm: []\npreload:\n  defaults: {timezone: UTC}\n  peaks:\n"
        "    - {name: a, selector: {labels: {tier: gold}}, when: {at: '10:00'}, duration: 1h}\n"
        "    - {name: b, models: [tinny], when: {at: '10:00'}, duration: 1h}\n",
        encoding="utf-8",
    )
    (known,) = known_models(load(path, {}))
    assert (known.key, known.size, known.labels) == ("tiny@1", 17, (("tier", "gold"),))
    capsys.readouterr()
    assert main(["peaks", "lint", str(path)]) == SETUP
    assert "preload.peaks.1.models.0: no model tinny is served (did you mean tiny?)" in capsys.readouterr().err


def test_the_room_of_a_device_elsewhere_is_not_guessed(file: Path) -> None:
    """Half of a GPU that this machine may not have is no number."""
    file.write_text(TEXT.replace("{id: cpu:0, memory: 1GiB}", "{id: cpu:0, memory: 1GiB}, {id: cuda:0}"))
    assert room_of(load(file, {}), 1 << 34) is None


# -- preview -----------------------------------------------------------------------------------------


def test_a_preview_is_the_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal 9: window for window what the planner gets from the same entries."""
    assert main(["peaks", "preview", str(file), "--next", "3d", *AT, "--json"]) == OK
    rows = [row for row in answer(capsys)["rows"] if row["what"] == "preload"]
    now = datetime(2027, 3, 27, 12, tzinfo=UTC).timestamp()
    planned = windows(peaks_of(load(file, {}).preload), now, now + 3 * 86_400, ["recommender@1", "ads@1"])
    assert [(row["models"], stamp(row["start"]), stamp(row["end"]), stamp(row["ready_by"])) for row in rows] == [
        ([w.model], w.start, w.end, w.ready_by) for w in planned
    ]


def stamp(text: str) -> float:
    """Epoch seconds of an instant as it was printed."""
    return datetime.fromisoformat(text).timestamp()


def test_a_preview_shows_both_clocks_gaps_and_suppression(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F68: 02:30 of 28 March 2027 is shown at 03:00, and why; what is suppressed is marked, what is required stays."""
    assert main(["peaks", "preview", str(file), "--next", "36h", *AT, "--json"]) == OK
    rows = answer(capsys)["rows"]
    assert [(row["what"], row["start"], row["start_utc"], row["models"]) for row in rows] == [
        ("preload", "2027-03-28T03:00:00+02:00", "2027-03-28T01:00:00Z", ["ads@1"]),
        ("preload", "2027-03-28T03:00:00+02:00", "2027-03-28T01:00:00Z", ["recommender@1"]),
        ("suppress", "2027-03-28T03:30:00+02:00", "2027-03-28T01:30:00Z", ["ads@1", "recommender@1"]),
        ("suppressed", "2027-03-28T03:30:00+02:00", "2027-03-28T01:30:00Z", ["recommender@1"]),
    ]
    assert rows[1]["end"] == "2027-03-28T03:30:00+02:00"
    assert any("does not exist" in remark for remark in rows[1]["remarks"])
    assert "required" in rows[0]["remarks"]
    assert rows[3]["remarks"] == ["by freeze"]
    assert main(["peaks", "preview", str(file), "--next", "36h", *AT]) == OK
    table = capsys.readouterr().out
    assert "Sun 2027-03-28 03:00 - 03:30 +0200" in table
    assert "Sun 2027-03-28 01:00 - 01:30" in table


def test_a_preview_in_another_zone_shows_the_same_instants(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tz` changes clocks, not windows; UTC is the same in both."""
    found = []
    for zone in ("Asia/Kolkata", "America/Nuuk"):
        assert main(["peaks", "preview", str(file), "--tz", zone, "--next", "9d", *AT, "--json"]) == OK
        rows = answer(capsys)["rows"]
        found.append([(row["start_utc"], row["end_utc"], row["models"]) for row in rows])
        assert all(stamp(row["start"]) == stamp(row["start_utc"]) for row in rows)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tz", "Europe/Berln"], "--tz: unknown time zone 'Europe/Berln'; did you mean 'Europe/Berlin'?"),
        (["--next", "soon"], "--next: 'soon' is not a duration"),
        (["--next", "0"], "--next: must be longer than nothing"),
        (["--next", "99y"], "--next: unknown unit 'y'"),
        (["--at", "tomorrow"], "--at: 'tomorrow' is not a date with a time"),
        (["--plot", "nowhere/out.png"], "--plot: No such file"),
        (["--plot", "out.doc"], "--plot: "),
    ],
)
def test_wrong_options_exit_2_with_what_would_be_right(
    file: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence that names the option; never a traceback."""
    assert main(["peaks", "preview", str(file), *more]) == SETUP
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("span", ["2h", "3d", "30d"])
def test_a_plot_is_an_image(file: Path, span: str, tmp_path: Path) -> None:
    """From an empty span to a year, with required and suppressed windows in it."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert main(["peaks", "preview", str(file), "--next", span, *AT, "--plot", str(path)]) == OK
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("package", "code"), [("present", OK), ("absent", SETUP)])
def test_without_a_system_database_the_package_serves_and_is_named_if_it_is_missing(
    file: Path, package: str, code: int
) -> None:
    """F70: a slim image has no time zones; `tzdata` is a dependency, and without it the fault says what to install."""
    hide = "sys.modules['tzdata'] = None; " if package == "absent" else ""
    program = f"import sys; {hide}from runtime.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "peaks", "preview", str(file), "--next", "36h", *AT, "--json"],
        env={**os.environ, "PYTHONTZPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    if code == OK:
        assert len(json.loads(done.stdout)["rows"]) == 4
    else:
        assert "c.yaml:8: preload.defaults.timezone: no time-zone database for 'Europe/Berlin'" in done.stderr
        assert "install the package `tzdata`" in done.stderr


# -- import ------------------------------------------------------------------------------------------

CALENDAR = """\
BEGIN:VCALENDAR
VERSION:2.0
PRODID:-//test//EN
BEGIN:VEVENT
UID:1
SUMMARY:Morning: rush!
CATEGORIES:recommender,two words
DTSTART;TZID=Europe/Berlin:20270104T090000
DTEND;TZID=Europe/Berlin:20270104T110000
RRULE:FREQ=WEEKLY;BYDAY=MO,TH
END:VEVENT
BEGIN:VEVENT
UID:2
SUMMARY:Report
DTSTART;TZID=Europe/Berlin:20270326T180000
DTEND;TZID=Europe/Berlin:20270327T180000
RRULE:FREQ=DAILY;INTERVAL=2;COUNT=3
EXDATE;TZID=Europe/Berlin:20270328T180000
END:VEVENT
BEGIN:VEVENT
UID:3
SUMMARY:Report
DTSTART;VALUE=DATE:20270401
END:VEVENT
END:VCALENDAR
"""


def imported(text: str, tmp_path: Path, *more: str) -> int:
    """Exit code of an import of this text."""
    pytest.importorskip("recurring_ical_events")
    path = tmp_path / "c.ics"
    path.write_text(text.replace("\n", "\r\n"), encoding="utf-8")
    return main(["peaks", "import-ics", str(path), "--at", "2027-01-01T00:00", "--next", "120d", *more])


def test_a_calendar_becomes_entries_that_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plain rule stays one; exceptions are written out; a whole day is a day of the zone given."""
    assert imported(CALENDAR, tmp_path, "--model", "llm", "--tz", "Asia/Tokyo") == OK
    text = capsys.readouterr().out
    path = tmp_path / "c.yaml"
    path.write_text(f"repository: [models]\n{text}", encoding="utf-8")
    found = load(path, {}).preload.peaks
    assert [(each.name, each.models, each.duration / 3600) for each in found] == [
        ("morning-rush", ("recommender",), 2),
        ("report-2027-03-26", ("llm",), 24),
        ("report-2027-03-30", ("llm",), 24),
        ("report-2027-04-01", ("llm",), 24),
    ]
    now = datetime(2027, 3, 25, tzinfo=UTC).timestamp()
    planned = windows(peaks_of(load(path, {}).preload), now, now + 7 * 86_400, ["llm@1", "recommender@1"])
    assert [datetime.fromtimestamp(each.start, UTC).isoformat()[5:16] for each in planned] == [
        "03-25T08:00",
        "03-26T17:00",
        "03-29T07:00",
        "03-30T16:00",  # runs into the whole day in Tokyo: one window
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("BEGIN:VCALENDAR\n", "", "not a calendar"),
        ("CATEGORIES:recommender,two words\n", "", "morning-rush: names no models"),
        ("FREQ=WEEKLY;BYDAY=MO,TH", "FREQ=SECONDLY", "morning-rush: recurs more often than hourly"),
        ("DTSTART;TZID=Europe/Berlin:20270104T090000\n", "", "morning-rush: has no DTSTART"),
        ("DTEND;TZID=Europe/Berlin:20270104T110000", "DTEND;TZID=Europe/Berlin:20270104T090000", "has no length"),
    ],
)
def test_a_calendar_that_cannot_be_taken_is_refused_with_its_event(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is dropped silently."""
    only = CALENDAR[: CALENDAR.index("BEGIN:VEVENT\nUID:2")] + "END:VCALENDAR\n"
    assert imported(only.replace(old, new), tmp_path) == SETUP
    assert said in capsys.readouterr().err


def test_a_calendars_time_without_a_zone_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A floating time is nobody's until somebody says whose."""
    floating = CALENDAR.replace(";TZID=Europe/Berlin", "")
    assert imported(floating, tmp_path, "--model", "llm") == SETUP
    assert "has no time zone" in capsys.readouterr().err
    assert imported(floating, tmp_path, "--model", "llm", "--tz", "UTC") == OK
