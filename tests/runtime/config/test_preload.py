"""The preload section: what is written, every fault at once with its place, and what it means."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.errors import ConfigError
from forecasting.peaks import occurrences, windows
from forecasting.recurrence import Once
from runtime.config.document import read
from runtime.config.load import load
from runtime.config.preload_lint import Known, inspect
from runtime.config.preload_peaks import peaks_of
from runtime.config.schema import Config
from runtime.config.yaml import validate

ZONE = "preload:\n  defaults: {timezone: Europe/Berlin}\n  peaks:\n"
REPOSITORY = "repository: [models]\n"
CONFIGS = Path(__file__).parents[3] / "configs"


def config(text: str) -> Config:
    """A configuration, or every fault of it."""
    return validate(Config, read(text, "f"))


def faults(text: str) -> list[str]:
    """What is wrong, a line each, without the file's name."""
    with pytest.raises(ConfigError) as refused:
        config(text)
    return [row.removeprefix("f:") for row in refused.value.message.splitlines()]


def entry(rest: str, head: str = REPOSITORY + ZONE) -> str:
    """A configuration with one entry on line 5."""
    return f"{head}    - {{name: p, models: [m], {rest}}}\n"


def utc(text: str) -> float:
    """Epoch seconds of a UTC time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


# -- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("when: {at: '10:00'}, duration: 1h, dration: 1h", "dration: unknown key (did you mean duration?)"),
        ("when: {at: '10:00', zone: X}, duration: 1h", "when.zone: unknown key (did you mean once?)"),
        ("when: {at: '10:00', timezone: Europe/Berln}, duration: 1h", "did you mean 'Europe/Berlin'?"),
        ("when: {at: '10:00', timezone: Local}, duration: 1h", "differs between machines (write Europe/Berlin)"),
        ("when: {}, duration: 1h", "when: says no time (give exactly one of at, cron, rrule or once"),
        ("when: {days: weekdays}, duration: 1h", "when: says no time"),
        ("when: {at: '10:00', cron: 0 9 * * *}, duration: 1h", "when.cron: contradicts at"),
        ("when: {at: '10:00', once: 2027-01-01T10:00}, duration: 1h", "when.once: contradicts at"),
        ("when: {days: mon, cron: 0 9 * * *}, duration: 1h", "when.days: goes with at, not with cron"),
        ("when: {at: '10:00', start: 2027-01-01T10:00}, duration: 1h", "when.start: goes with rrule, not with at"),
        ("when: {at: '10:00'}, duration: 0", "duration: must be greater than 0"),
        ("when: {at: '10:00'}", "duration: is missing"),
        ("when: {at: '10:00'}, duration: 24h", "duration: is not shorter than the time between two starts (1d)"),
        ("when: {at: ['10:00', '11:00']}, duration: 61m", "time between two starts (1h)"),
        ("when: {cron: 0 * * * *}, duration: 2h", "duration: is not shorter than the time between two starts (1h)"),
        ("when: {at: '10:00'}, duration: 1h, lead: 25h", "lead: is longer than the time between two starts (1d)"),
        ("when: {rrule: FREQ=WEEKLY}, duration: 1h", "when.rrule: needs start"),
        ("when: {rrule: FREQ=SECONDLY, start: 2027-01-01T10:00}, duration: 1s", "fires more than once a minute"),
        (
            "when: {rrule: 'FREQ=DAILY;BYSECOND=0,30', start: 2027-01-01T10:00}, duration: 1s, lead: 0",
            "when.rrule: fires more than once a minute",
        ),
        (
            "when: {rrule: FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=31, start: 2027-01-01T10:00}, duration: 1h",
            "when.rrule: never fires (does the date exist, as 31 February does not?)",
        ),
        (
            "when: {rrule: FREQ=YEARLY;BYMONTH=2;BYDAY=5TU, start: 2021-01-01T10:00}, duration: 1h",
            "when.rrule: never fires in five years",
        ),
        (
            "when: {rrule: FREQ=DAILY;INTERVAL=14;BYDAY=TH, start: 2027-01-01T10:00}, duration: 1h",
            "when.rrule: never fires (its start is on FR, and so is every interval after it)",
        ),
        (
            "when: {rrule: FREQ=DAILY;INTERVAL=14;BYDAY=TH, start: 2026-12-31T23:30Z}, duration: 1h",
            "when.rrule: never fires (its start is on FR",
        ),
        (
            "when: {rrule: 'FREQ=HOURLY;INTERVAL=2;BYHOUR=1', start: 2027-01-01T10:00}, duration: 1h",
            "when.rrule: is not a recurrence rule",
        ),
        ("when: {cron: 0 0 31 2 *}, duration: 1h", "when.cron: is not a cron expression: bad day-of-month"),
        ("when: {cron: 0 0 9 * * *}, duration: 1h", "when.cron: has 6 fields, not five (there are no seconds"),
        ("when: {cron: 0 0 9 * * * *}, duration: 1h", "when.cron: has 7 fields"),
        ("when: {at: 10:60}, duration: 1h", "when.at: '10:60' is not a time of day"),
        ("when: {at: 24:00}, duration: 1h", "when.at: 24:00 is 00:00 of the next day"),
        ("when: {at: 600}, duration: 1h", "when.at: 600 is not a time of day"),
        ("when: {at: []}, duration: 1h", "when.at: [] is not a time of day"),
        ("when: {days: [], at: '1:00'}, duration: 1h", "when.days: [] is not a choice of days"),
        ("when: {days: munday, at: '1:00'}, duration: 1h", "when.days: 'munday' is not a day"),
        ("when: {once: 2027-02-30T10:00}, duration: 1h", "when.once: 2027-02-30T10:00 does not exist"),
        ("when: {once: 2027-02-03}, duration: 1h", "when.once: '2027-02-03' is not a date with a time"),
        ("when: {once: 0001-01-01T00:00}, duration: 1h", "the year must be from 1971 to 2150"),
        ("when: {at: '10:00'}, duration: 1h, ramp: 2h", "ramp: is longer than the window (1h)"),
        ("when: {at: '10:00'}, duration: 1h, expected_rps: -1", "expected_rps: must be greater than or equal to 0"),
        ("when: {at: '10:00'}, duration: 1h, expected_rps: .nan", "expected_rps: "),
        ("when: {at: '10:00'}, duration: 1h, only_on: x", "only_on: no calendar x is defined (preload.calendars is"),
        ("when: {at: '10:00'}, duration: 1h, only_on: {calendar: x}", "only_on.calendar: no calendar x is defined"),
        ("when: {at: '10:00'}, duration: 1h, except_on: {country: Germny}", "except_on.country: unknown country"),
        ("when: {at: '10:00'}, duration: 1h, except_on: {country: DE, subdivision: XX}", "except_on.subdivision: "),
        ("when: {at: '10:00'}, duration: 1h, except_on: {subdivision: BY}", "except_on.subdivision: needs country"),
        ("when: {at: '10:00'}, duration: 1h, except_on: {market: NISE}", "except_on.market: unknown market"),
        ("when: {at: '10:00'}, duration: 1h, except_on: {}", "except_on: names no dates"),
        ("when: {at: '10:00'}, duration: 1h, require: true, action: suppress", "require: contradicts action: suppress"),
        ("when: {at: '10:00'}, duration: 1h, action: supress", "action: is not one of the choices (did you mean supp"),
        (
            "when: {at: '10:00'}, duration: 1h, valid_from: 2027-02-01, valid_until: 2027-01-01",
            "valid_until: is before valid_from",
        ),
    ],
)
def test_a_faulty_entry_is_refused_with_line_key_and_hint(rest: str, said: str) -> None:
    """Each sentence names the file's line, the key, and what would have been right."""
    (row,) = faults(entry(rest))
    assert row.startswith("5: preload.peaks.0")
    assert said in row


def test_every_fault_of_every_entry_is_told_at_once() -> None:
    """An unknown key does not hide a wrong duration, a wrong calendar not a missing zone, one entry not another."""
    rows = faults(
        """\
preload:
  defaults: {lead: 5x}
  calendars:
    c: {country: CNN, colour: red}
  peaks:
    - {name: p, models: [m], when: {cron: "0 * * * *"}, duration: 2h, typo: 1, only_on: d}
    - {name: p, models: [m], when: {at: "25:00", once: 2026-01-01T10:00, tz: X}, duration: 0}
    - nonsense
    - {name: q, when: {cron: "* * * * * *"}, duration: 1h}
"""
    )
    assert sorted(row.split(" (")[0] for row in rows) == [
        "2: preload.defaults.lead: unknown unit 'x'",
        "4: preload.calendars.c.colour: unknown key",
        "4: preload.calendars.c.country: unknown country 'CNN'",
        "6: preload.peaks.0.duration: is not shorter than the time between two starts",
        "6: preload.peaks.0.models.0: no model m is listed",
        "6: preload.peaks.0.only_on: no calendar d is defined",
        "6: preload.peaks.0.typo: unknown key",
        "6: preload.peaks.0.when.cron: has no time zone",
        "7: preload.peaks.1.duration: must be greater than 0",
        "7: preload.peaks.1.models.0: no model m is listed",
        "7: preload.peaks.1.name: p is listed twice",
        "7: preload.peaks.1.when.at: '25:00' is not a time of day",
        "7: preload.peaks.1.when.at: has no time zone",
        "7: preload.peaks.1.when.once: contradicts at",
        "7: preload.peaks.1.when.once: has no time zone",
        "7: preload.peaks.1.when.tz: unknown key",
        "8: preload.peaks.2: must be a mapping",
        "9: preload.peaks.3.when.cron: has 6 fields, not five",
        "9: preload.peaks.3.when.cron: has no time zone",
        "9: preload.peaks.3: names no models",
    ]


@pytest.mark.parametrize("key", ["timezone: Europe/Berlin", "lead: 2m", "mode: observe"])
def test_a_default_in_the_wrong_place_is_pointed_to_its_own(key: str) -> None:
    """There is one spelling: `preload.defaults.timezone`. Nothing is said of zones that this one would have given."""
    (row,) = faults(f"preload:\n  {key}\n  peaks: []\n")
    assert row == f"2: preload.{key.partition(':')[0]}: unknown key (did you mean defaults.{key.partition(':')[0]}?)"


@pytest.mark.parametrize("when", ["at: '10:00'", "cron: 0 9 * * *", "once: 2027-01-01T10:00"])
def test_a_time_without_any_zone_is_refused(when: str) -> None:
    """The machine's zone is nobody's choice; an entry's own zone or the default is enough, an instant needs neither."""
    text = f"{REPOSITORY}preload:\n  peaks:\n    - {{name: p, models: [m], duration: 1h, when: {{%s}}}}\n"
    (row,) = faults(text % when)
    assert "has no time zone (set preload.defaults.timezone or when.timezone" in row
    config(text % f"{when}, timezone: Asia/Tokyo")
    config(text % "once: 2027-01-01T10:00+09:00")
    config(entry(f"duration: 1h, when: {{{when}}}"))


def test_a_default_lead_longer_than_a_period_is_refused_once() -> None:
    """The entry is named, as another entry may well bear that default; its own lead settles it."""
    head = f"{REPOSITORY}preload:\n  defaults: {{timezone: UTC, lead: 2h}}\n  peaks:\n"
    (row,) = faults(entry("when: {cron: 0 * * * *}, duration: 1m", head))
    assert row.startswith("5: preload.peaks.0.lead: the default, 2h, is longer than")
    config(entry("when: {cron: 0 * * * *}, duration: 1m, lead: 1m", head))


@pytest.mark.parametrize(
    ("models", "hint"),
    [
        ("[recomender]", "did you mean recommender?"),
        ("[recommender@2]", "did you mean recommender@1?"),
        ("['x-*']", "known are recommender"),
    ],
)
def test_models_that_are_not_listed_are_refused_unless_allowed(models: str, hint: str) -> None:
    """Only where everything is listed; with a repository to search, `peaks lint` tells."""
    listed = f"models: [{{name: recommender, source: x}}]\n{ZONE}"
    text = f"{listed}    - {{name: p, models: {models}, when: {{at: '10:00'}}, duration: 1h%s}}\n"
    (row,) = faults(text % "")
    assert "preload.peaks.0.models.0: no model" in row
    assert hint in row
    config(text % ", allow_missing: true")
    config(REPOSITORY + text % "")
    config(listed + "    - {name: p, models: ['rec*', 'recommender@*', '*'], when: {at: '10:00'}, duration: 1h}\n")


def test_junk_in_every_place_is_refused_and_crashes_nothing() -> None:
    """Our own checks look at what was written before its types are known."""
    junk = ["7", "null", "[]", "{}", "x", "true", "[[[]]]", "{a: {b: c}}", "-1", "'*'", ".inf", "1e400"]
    places = [
        "preload: %s",
        "preload: {peaks: %s}",
        "preload: {defaults: %s}",
        "preload: {calendars: %s}",
        "preload: {calendars: {c: %s}}",
        "preload: {peaks: [%s]}",
    ]
    keys = ("name", "models", "selector", "when", "duration", "lead", "ramp", "only_on", "valid_from", "require")
    places += [f"preload: {{peaks: [{{name: p, models: [m], {key}: %s}}]}}" for key in keys]
    inner = ("days", "at", "cron", "rrule", "start", "once", "timezone")
    places += [f"preload: {{peaks: [{{name: p, models: [m], duration: 1h, when: {{{key}: %s}}}}]}}" for key in inner]
    for place in places:
        for each in junk:
            try:
                config(place % each)
            except ConfigError as refused:
                assert refused.message.startswith("f:1: ")  # noqa: PT017  # both outcomes are right, a crash is not


# -- meaning -----------------------------------------------------------------------------------------


def test_yaml_leaves_times_and_dates_as_they_are_written() -> None:
    """F69: `12:30` is no number of minutes, `NO` no refusal, and a date no object of the parser's."""
    (peak,) = peaks_of(
        config(entry("when: {days: [mon, Tuesday], at: 12:30}, duration: 1h, except_on: {country: NO}")).preload
    )
    found = list(occurrences(peak, utc("2027-05-16T00:00"), utc("2027-05-20T00:00")))
    assert [datetime.fromtimestamp(o.start, UTC).isoformat() for o in found] == ["2027-05-18T10:30:00+00:00"]


def test_entries_take_what_they_do_not_say_from_the_defaults() -> None:
    """And their own word where they have one."""
    text = """\
repository: [m]
preload:
  defaults: {timezone: Asia/Shanghai, lead: 5m, confidence: 50%}
  peaks:
    - {name: a, models: [m], when: {at: "10:00"}, duration: 2h}
    - {name: b, models: [m], when: {cron: "0 9 L * *", timezone: UTC}, duration: 2h, lead: 0, confidence: 90%}
"""
    a, b = peaks_of(config(text).preload)
    assert (str(a.zone), a.lead, a.confidence) == ("Asia/Shanghai", 300, 0.5)
    assert (str(b.zone), b.lead, b.confidence) == ("UTC", 0, 0.9)


def test_validity_is_in_local_dates_both_included() -> None:
    """`valid_until` names the last day, or the instant before which a start must lie."""
    when = "when: {at: '23:30'}, duration: 5h, valid_from: 2027-03-27, valid_until: %s"
    (peak,) = peaks_of(config(entry(when % "2027-03-28")).preload)
    assert len(list(occurrences(peak, utc("2027-01-01T00:00"), utc("2028-01-01T00:00")))) == 2
    (peak,) = peaks_of(config(entry(when % "2027-03-28T23:30")).preload)
    assert len(list(occurrences(peak, utc("2027-01-01T00:00"), utc("2028-01-01T00:00")))) == 1
    (peak,) = peaks_of(config(entry("when: {at: '23:30'}, duration: 5h")).preload)
    assert (peak.valid_from, peak.valid_until) == (-math.inf, math.inf)


def test_an_instant_without_a_zone_has_its_date_by_its_own_offset() -> None:
    """Midnight in Shanghai is the 12th there, although it is the 11th in UTC."""
    head = "repository: [m]\npreload:\n  peaks:\n\n"
    once = "when: {once: 2026-12-12T00:00+08:00}, duration: 26h, only_on: {dates: [2026-12-12]}"
    (peak,) = peaks_of(config(entry(once, head)).preload)
    (found,) = occurrences(peak, utc("2026-12-01T00:00"), utc("2027-01-01T00:00"))
    assert found.start == utc("2026-12-11T16:00")


def test_an_interval_of_whole_weeks_keeps_the_weekday_of_its_start() -> None:
    """It fires where the start is on one of the days named, and is not refused for any other day's sake."""
    (peak,) = peaks_of(
        config(entry("when: {rrule: FREQ=DAILY;INTERVAL=14;BYDAY=TH, start: 2026-12-31T10:00}, duration: 1h")).preload
    )
    found = [o.day.isoformat() for o in occurrences(peak, utc("2026-12-01T00:00"), utc("2027-02-01T00:00"))]
    assert found == ["2026-12-31", "2027-01-14", "2027-01-28"]


def test_a_recurrence_may_start_at_an_instant() -> None:
    """Its wall time is then that of the entry's zone."""
    rest = "when: {rrule: FREQ=DAILY, start: '2027-01-01T09:00Z'}, duration: 1h"
    (peak,) = peaks_of(config(entry(rest)).preload)
    found = [o.start for o in occurrences(peak, utc("2027-07-01T00:00"), utc("2027-07-02T00:00"))]
    assert found == [utc("2027-07-01T08:00")]  # 10:00 in Berlin, also in summer


def test_calendars_may_be_named_written_out_or_both() -> None:
    """All their dates count."""
    text = """\
repository: [m]
preload:
  defaults: {timezone: Europe/Paris}
  calendars: {promos: {dates: [2026-11-11, 2026-12-12]}}
  peaks:
    - name: p
      models: [m]
      when: {at: "10:00"}
      duration: 1h
      only_on: {calendar: promos, country: FR, dates: [2026-12-13]}
"""
    (peak,) = peaks_of(config(text).preload)
    days = [o.day.isoformat() for o in occurrences(peak, utc("2026-11-01T00:00"), utc("2026-12-31T00:00"))]
    assert days == ["2026-11-01", "2026-11-11", "2026-12-12", "2026-12-13", "2026-12-25"]
    (named,) = peaks_of(config(text.replace("{calendar: promos, country: FR, dates: [2026-12-13]}", "promos")).preload)
    assert len(list(occurrences(named, utc("2026-11-01T00:00"), utc("2026-12-31T00:00")))) == 2


def test_the_example_means_what_it_says() -> None:
    """The recommender rests on Chinese holidays, the campaign is required and the freeze does not touch it."""
    preload = load(CONFIGS / "peaks.yaml", {}).preload
    peaks = peaks_of(preload)
    models = ("recommender@1", "ads-ranker@1", "llm-report@3", "summariser@1")
    found = windows(peaks, utc("2026-12-31T00:00"), utc("2027-01-05T00:00"), models)
    assert [(w.model, datetime.fromtimestamp(w.start, UTC).isoformat()[5:16]) for w in found] == [
        ("recommender@1", "12-31T02:00"),
        ("summariser@1", "12-31T07:00"),
        ("llm-report@3", "12-31T08:00"),
        ("recommender@1", "01-04T02:00"),
    ]
    (campaign,) = (p for p in peaks if p.name == "double-12")
    assert campaign.require
    assert isinstance(campaign.rule, Once)


# -- advice ------------------------------------------------------------------------------------------


def remarks(text: str, now: str, known: tuple[Known, ...] = (), room: int | None = None) -> list[str]:
    """Advice as of a day, a line each."""
    found = inspect(config(text).preload, now=utc(now), known=known, room=room)
    return [f"{each.level}: {'.'.join(map(str, each.fault.path))}: {each.fault}" for each in found]


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("when: {once: 2026-01-01T10:00}", "when.once: is in the past"),
        ("when: {rrule: FREQ=DAILY;COUNT=3, start: 2026-01-01T10:00}", "when.rrule: does not fire again; its COUNT or"),
        ("when: {rrule: FREQ=DAILY;UNTIL=20260601, start: 2026-01-01T10:00}", "when.rrule: does not fire again"),
        ("when: {at: '10:00'}, valid_until: 2026-06-01", "valid_until: has passed"),
        ("when: {at: '10:00'}, only_on: {dates: [2026-06-01]}", "only_on: leaves no date in the next five years"),
    ],
)
def test_what_will_not_fire_again_is_an_error_of_the_day(rest: str, said: str) -> None:
    """The server still starts with it: a date that has passed is no reason to be down."""
    text = entry(f"{rest}, duration: 1h")
    (row,) = remarks(text, "2026-11-29T00:00", (Known("m@1"),))
    assert row.startswith("error: preload.peaks.0.")
    assert said in row
    assert remarks(text, "2025-12-29T00:00", (Known("m@1"),)) == []


def test_an_entry_that_is_running_for_the_last_time_is_not_over() -> None:
    """Its end counts, not its start."""
    text = entry("when: {once: 2026-11-29T10:00}, duration: 2h")
    assert remarks(text, "2026-11-29T10:30", (Known("m@1"),)) == []
    assert len(remarks(text, "2026-11-29T11:30", (Known("m@1"),))) == 1


def test_models_and_labels_that_nobody_has_are_told() -> None:
    """As an error, or as a warning where it is allowed; what is switched off is noted."""
    known = (Known("mm@1", labels=(("tier", "gold"),)),)
    rest = "when: {at: '10:00'}, duration: 1h"
    assert remarks(entry(rest), "2026-11-29T00:00", known) == [
        "error: preload.peaks.0.models.0: no model m is served (did you mean mm?)"
    ]
    missing = entry(f"{rest}, allow_missing: true").replace("models: [m]", "models: [z, m, 'y*', mm]")
    assert remarks(missing, "2026-11-29T00:00", known) == [
        "warning: preload.peaks.0.models.0: not served, which allow_missing accepts: m, y*, z"
    ]
    labelled = entry(rest).replace("models: [m]", "selector: {labels: {tier: tin}}")
    assert "selects no model (labels there are: tier: gold)" in remarks(labelled, "2026-11-29T00:00", known)[0]
    assert remarks(labelled.replace("tin", "gold"), "2026-11-29T00:00", known) == []
    off = remarks(entry(f"{rest}, enabled: false"), "2026-11-29T00:00", known)
    assert [row.partition(":")[0] for row in off] == ["warning", "note"]


def test_peaks_that_do_not_fit_together_are_named_with_their_sizes() -> None:
    """Infeasible if more than there is, a warning if more than loading ahead may take; leads count as residency."""
    text = f"""\
{REPOSITORY}preload:
  defaults: {{timezone: UTC, lead: 10m, max_gpu_fraction: 80%}}
  peaks:
    - {{name: a, models: [x], when: {{at: "10:00"}}, duration: 1h}}
    - {{name: b, models: [y], when: {{at: "11:05"}}, duration: 1h}}
"""
    known = (Known("x@1", 600), Known("y@1", 500))
    (row,) = remarks(text, "2026-11-29T00:00", known, 1000)
    assert row.startswith("error: preload.peaks.1: infeasible at 2026-11-29T10:55+00:00: x@1 (600 B), y@1 (500 B) need")
    (row,) = remarks(text, "2026-11-29T00:00", known, 1200)
    assert row.startswith("warning: preload.peaks.1: at 2026-11-29T10:55+00:00")
    assert "over max_gpu_fraction (80% of 1.2 KiB)" in row
    assert remarks(text, "2026-11-29T00:00", known, 1400) == []
    assert remarks(text.replace("11:05", "11:15"), "2026-11-29T00:00", known, 1000) == []


def test_a_collision_years_ahead_is_found() -> None:
    """The look goes to the next start of every entry, however far."""
    text = f"""\
{REPOSITORY}preload:
  defaults: {{timezone: UTC}}
  peaks:
    - {{name: a, models: [x], when: {{at: "10:00"}}, duration: 1h}}
    - {{name: b, models: [y], when: {{once: 2028-01-01T10:30}}, duration: 1h}}
"""
    (row,) = remarks(text, "2026-11-29T00:00", (Known("x@1", 600), Known("y@1", 500)), 1000)
    assert "infeasible at 2028-01-01T10:28+00:00" in row


def test_observing_is_pointed_out() -> None:
    """So that nobody waits for loads that will not come."""
    text = entry("when: {at: '10:00'}, duration: 1h").replace("Berlin}", "Berlin, mode: observe}")
    assert [row[:4] for row in remarks(text, "2026-11-29T00:00", (Known("m@1"),))] == ["note"]
