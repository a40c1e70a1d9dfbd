"""Scheduled peaks: from what people write to instants that exist, once each, the same in preview and plan."""

import math
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forecasting.calendar import of_country, of_dates
from forecasting.merge import cuts_of
from forecasting.peaks import Peak, agenda, masks, next_start, occurrences, windows
from forecasting.recurrence import Daily, Once, Rule, fires, read_cron, read_rrule, shortest_gap, starts

BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = ZoneInfo("America/New_York")
SHANGHAI = ZoneInfo("Asia/Shanghai")
ZONES = sorted(available_timezones() - {"Factory", "localtime"})
HOUR = 3600.0
DAY = 86_400.0
MODELS = ("a@1", "a@2", "b@1", "c@1")


def utc(text: str) -> float:
    """Epoch seconds of a UTC time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def wall(text: str) -> datetime:
    """A time on some wall."""
    return datetime.fromisoformat(text)


def local(at: float, zone: ZoneInfo) -> str:
    """How a clock on the wall shows an instant, with its offset."""
    return datetime.fromtimestamp(at, zone).isoformat(timespec="minutes")


def daily(clock: str, zone: ZoneInfo = BERLIN, duration: float = HOUR, **more: Any) -> Peak:
    """An entry at a time of day for model a."""
    return replace(Peak("p", Daily((time.fromisoformat(clock),)), zone, duration, ("a",), lead=0.0), **more)


def shown(peak: Peak, begin: str, end: str) -> list[str]:
    """Starts of an entry on its own clock."""
    return [local(each.start, peak.zone) for each in occurrences(peak, utc(begin), utc(end))]  # type: ignore[arg-type]


# -- gaps and overlaps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "clock", "day", "start"),
    [
        ("Europe/Berlin", "02:30", "2027-03-28", "2027-03-28T03:00+02:00"),
        ("Europe/Berlin", "02:00", "2027-03-28", "2027-03-28T03:00+02:00"),
        ("Europe/Berlin", "03:00", "2027-03-28", "2027-03-28T03:00+02:00"),
        ("Europe/Berlin", "01:59", "2027-03-28", "2027-03-28T01:59+01:00"),
        ("Europe/Berlin", "02:30", "2026-10-25", "2026-10-25T02:30+02:00"),
        ("Europe/Berlin", "03:00", "2026-10-25", "2026-10-25T03:00+01:00"),
        ("America/New_York", "02:30", "2026-03-08", "2026-03-08T03:00-04:00"),
        ("America/New_York", "01:30", "2026-11-01", "2026-11-01T01:30-04:00"),
        ("Australia/Lord_Howe", "02:15", "2026-10-04", "2026-10-04T02:30+11:00"),
        ("Australia/Lord_Howe", "01:45", "2027-04-04", "2027-04-04T01:45+11:00"),
        ("Antarctica/Troll", "02:30", "2027-03-28", "2027-03-28T03:00+02:00"),
        ("Antarctica/Troll", "01:30", "2027-03-28", "2027-03-28T03:00+02:00"),
        ("Antarctica/Troll", "01:30", "2026-10-25", "2026-10-25T01:30+02:00"),
        ("America/Nuuk", "23:30", "2025-03-29", "2025-03-30T00:00-01:00"),
        ("Africa/Cairo", "00:30", "2026-04-24", "2026-04-24T01:00+03:00"),
    ],
)
@pytest.mark.parametrize("kind", ["at", "cron", "rrule", "once"])
def test_a_clock_change_moves_a_start_to_the_first_valid_instant_or_takes_the_first(
    zone: str, clock: str, day: str, start: str, kind: str
) -> None:
    """F68: every way to write a time gives the same instant, once; not 03:30 for 02:30 in a gap of an hour."""
    place = ZoneInfo(zone)
    named = wall(f"{day}T{clock}")
    rules: dict[str, Rule] = {
        "at": Daily((named.time(),)),
        "cron": read_cron(f"{named.minute} {named.hour} * * *"),
        "rrule": read_rrule("FREQ=DAILY", named - timedelta(days=40), place),
        "once": Once(named),
    }
    middle = datetime.fromisoformat(start).timestamp()
    found = [
        each for each in starts(rules[kind], place, middle - 2 * DAY, middle + 2 * DAY) if each.day == named.date()
    ]
    assert [local(each.at, place) for each in found] == [start]
    assert found[0].moved is (datetime.fromisoformat(start).replace(tzinfo=None) != named)


def test_a_day_that_a_zone_left_out_has_no_window() -> None:
    """Apia had no 30 December 2011; its ten o'clock is nobody's, and the days around it have one each."""
    apia = ZoneInfo("Pacific/Apia")
    assert shown(daily("10:00", apia), "2011-12-29T00:00", "2012-01-01T12:00") == [
        "2011-12-29T10:00-10:00",
        "2011-12-31T10:00+14:00",
        "2012-01-01T10:00+14:00",
    ]


def test_wildcards_fire_once_in_a_repeated_hour_and_not_in_a_missing_one() -> None:
    """The library fires in both passes of a repeated hour when minute or hour is a wildcard; a gap's hits are one."""
    quarter = Peak("p", read_cron("*/30 1-3 * * *"), BERLIN, 600, ("a",))
    assert [row[11:16] for row in shown(quarter, "2026-10-24T22:00", "2026-10-25T12:00")] == [
        "01:00", "01:30", "02:00", "02:30", "03:00", "03:30",
    ]  # fmt: skip
    assert [row[11:16] for row in shown(quarter, "2027-03-27T23:00", "2027-03-28T12:00")] == [
        "01:00", "01:30", "03:00", "03:30",
    ]  # fmt: skip


def test_a_duration_is_elapsed_time() -> None:
    """A window of 26 h over a change of the clocks ends 26 h later, whatever the wall says."""
    (spring,) = windows([daily("00:00", duration=26 * HOUR)], utc("2027-03-27T23:30"), utc("2027-03-28T00:00"), ["a@1"])
    assert spring.end - spring.start > 26 * HOUR  # three days overlap: a union
    (once,) = windows(
        [replace(daily("00:00", duration=26 * HOUR), rule=Once(wall("2027-03-28T00:00")))],
        utc("2027-03-27T22:00"),
        utc("2027-03-29T22:00"),
        ["a@1"],
    )
    assert (local(once.start, BERLIN), local(once.end, BERLIN)) == ("2027-03-28T00:00+01:00", "2027-03-29T03:00+02:00")
    assert once.end - once.start == 26 * HOUR


@settings(max_examples=150, deadline=None)
@given(
    zone=st.sampled_from(ZONES), year=st.integers(2020, 2040), clock=st.times(), kind=st.sampled_from(["at", "cron"])
)
@example(zone="Africa/Casablanca", year=2030, clock=time(2, 30), kind="cron")
@example(zone="America/Nuuk", year=2024, clock=time(23, 30), kind="at")
@example(zone="Antarctica/Troll", year=2025, clock=time(1, 30), kind="cron")
@example(zone="Asia/Beirut", year=2023, clock=time(0, 30), kind="at")
@example(zone="Australia/Lord_Howe", year=2026, clock=time(2, 15), kind="cron")
def test_in_every_zone_a_daily_start_exists_once_per_local_day(zone: str, year: int, clock: time, kind: str) -> None:
    """Goal 9: once per local day, increasing, never an imaginary time, the first of two, the end of a gap."""
    place, clock = ZoneInfo(zone), time(clock.hour, clock.minute)
    rule = read_cron(f"{clock.minute} {clock.hour} * * *") if kind == "cron" else Daily((clock,))
    begin, end = (datetime(y, 1, 3, tzinfo=UTC).timestamp() for y in (year, year + 1))
    found = list(starts(rule, place, begin, end))
    assert all(a.at < b.at for a, b in pairwise(found))
    days = [each.day for each in found]
    assert days == [days[0] + timedelta(days=number) for number in range(len(days))]
    assert len(days) in {(date(year + 1, 1, 3) - date(year, 1, 3)).days + more for more in (-1, 0, 1)}
    for each in found:
        named = datetime.combine(each.day, clock)
        seen = datetime.fromtimestamp(each.at, place)
        if each.moved:
            before = datetime.fromtimestamp(each.at - 1, place)
            assert before.replace(tzinfo=None) < named < seen.replace(tzinfo=None, fold=0)
            assert seen.utcoffset() != before.utcoffset()
        else:
            assert (seen.replace(tzinfo=None, fold=0), seen.fold) == (named, 0)


@settings(max_examples=60, deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    at=st.integers(int(utc("2020-01-05T00:00")), int(utc("2040-12-01T00:00"))),
    rule=st.sampled_from(
        [
            read_cron("*/20 * * * *"),
            read_cron("0 0,12 * * MON-FRI"),
            Daily((time(2, 30), time(23, 45)), frozenset({0, 5, 6})),
            read_rrule("FREQ=HOURLY;INTERVAL=5", wall("2019-05-05T01:30"), None),
            read_rrule("FREQ=MONTHLY;BYDAY=-1SU", wall("2019-05-05T01:30"), None),
        ]
    ),
)
def test_a_span_in_two_pieces_has_the_same_starts(zone: str, at: int, rule: Rule) -> None:
    """Nothing is lost, doubled or reordered where one look ends and the next begins, also inside a repeated hour."""
    place, begin, end = ZoneInfo(zone), at - 3 * DAY, at + 3 * DAY
    whole = list(starts(rule, place, begin, end))
    assert [*starts(rule, place, begin, at), *starts(rule, place, at, end)] == whole
    assert all(a.at < b.at for a, b in pairwise(whole))


# -- rules -------------------------------------------------------------------------------------------


def test_weekdays_mean_weekdays() -> None:
    """Others run `30 6 * * 1-5` to `10 22 * * *` from Friday to Sunday: an end by duration cannot be missed."""
    peak = Peak("p", read_cron("30 6 * * 1-5"), BERLIN, 15 * HOUR + 40 * 60, ("a",))
    found = windows([peak], utc("2026-12-04T00:00"), utc("2026-12-08T00:00"), ["a@1"])
    assert [(local(w.start, BERLIN), local(w.end, BERLIN)) for w in found] == [
        ("2026-12-04T06:30+01:00", "2026-12-04T22:10+01:00"),
        ("2026-12-07T06:30+01:00", "2026-12-07T22:10+01:00"),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("* * * * * *", "has 6 fields, not five"),
        ("0 0 9 * * * 2027", "has 7 fields"),
        ("0 9 * *", "has 4 fields"),
        ("", "has 0 fields"),
        ("@daily", "is not five fields"),
        ("0 0 31 2 *", "bad day-of-month"),
        ("60 9 * * *", "bad minute"),
        ("0 9 * * FRI-MON", "write FRI,SAT,SUN"),
        ("0 9 * * *; rm", "has 6 fields"),
        ("1," * 300 + "1 * * * *", "longer than 256"),
        ("٣ 9 * * *", "bad minute"),
    ],
)
def test_what_is_no_cron_expression_is_refused_with_its_reason(text: str, what: str) -> None:
    """Six fields would be seconds to the library; weekdays do not wrap; 31 February is nobody's."""
    with pytest.raises(ValueError, match=what.replace("(", r"\(")):
        read_cron(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("FREQ=SECONDLY", "more than once a minute"),
        ("BYDAY=TH", "no FREQ"),
        ("FREQ=WEEKLY;FREQ=DAILY", "twice"),
        ("FREQ=WEEKLY;BYDAY=XX", "is not a recurrence rule"),
        ("FREQ=MONTHLY;BYMONTH=x;BYMONTHDAY=1", "is not a recurrence rule"),
        ("FREQ=MONTHLY;BYMONTHDAY=99", "BYMONTHDAY goes from 1 to 31"),
        ("FREQ=DAILY;BYHOUR=24", "BYHOUR goes from 0 to 23"),
        ("FREQ=YEARLY;BYMONTH=0", "BYMONTH goes from 1 to 12"),
        ("FREQ=OFTEN", "is not a recurrence rule"),
        ("FREQ=WEEKLY;INTERVAL=0", "INTERVAL must be"),
        ("FREQ=WEEKLY;COUNT=99999999", "COUNT must be"),
        ("FREQ=WEEKLY;COUNT=3;UNTIL=20270101", "both COUNT and UNTIL"),
        ("FREQ=WEEKLY;UNTIL=20270231", "is not a time"),
        ("FREQ=WEEKLY;DTSTART=20270101", "is not a part"),
        ("FREQ=WEEKLY\nEXDATE:20270101", "is not one recurrence rule"),
        ("FREQ=WEEKLY;BYMONTH", "is not a part"),
    ],
)
def test_what_is_no_recurrence_rule_is_refused_with_its_reason(text: str, what: str) -> None:
    """An INTERVAL of 0 would never end; a second rule or an EXDATE in the text is not silently dropped."""
    with pytest.raises(ValueError, match=what):
        read_rrule(text, wall("2026-01-01T00:00"), BERLIN)


def test_every_other_thursday_keeps_its_week_for_years() -> None:
    """The phase of an interval counts from the first start, however far away the look begins."""
    rule = read_rrule("RRULE:FREQ=WEEKLY;INTERVAL=2;BYDAY=TH", wall("2020-01-02T15:00"), BERLIN)
    days = [each.day for each in starts(rule, BERLIN, utc("2039-12-01T00:00"), utc("2040-01-15T00:00"))]
    assert days
    assert all((day - date(2020, 1, 2)).days % 14 == 0 for day in days)


@pytest.mark.parametrize(
    ("limit", "last"),
    [
        ("COUNT=3", date(2026, 3, 30)),
        ("UNTIL=20260330", date(2026, 3, 30)),
        ("UNTIL=20260330T150000", date(2026, 3, 30)),
        ("UNTIL=20260330T145959", date(2026, 3, 29)),
        ("UNTIL=20260330T130000Z", date(2026, 3, 30)),
        ("UNTIL=20260330T125959Z", date(2026, 3, 29)),
    ],
)
def test_count_and_until_end_a_recurrence_where_they_say(limit: str, last: date) -> None:
    """A date as UNTIL includes its day, one in UTC is taken to the zone's clock (summer time here)."""
    rule = read_rrule(f"FREQ=DAILY;{limit}", wall("2026-03-28T15:00"), BERLIN)
    days = [each.day for each in starts(rule, BERLIN, utc("2026-01-01T00:00"), utc("2027-01-01T00:00"))]
    assert (days[0], days[-1]) == (date(2026, 3, 28), last)
    assert list(starts(rule, BERLIN, utc("2026-06-01T00:00"), utc("2027-01-01T00:00"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=31",
        "FREQ=MONTHLY;BYMONTH=4,6;BYMONTHDAY=31",
        "FREQ=MINUTELY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=DAILY;BYSETPOS=5",
        "FREQ=WEEKLY;BYYEARDAY=366",
        "FREQ=MONTHLY;BYWEEKNO=20",
        "FREQ=DAILY;INTERVAL=14;BYDAY=MO",
        "FREQ=HOURLY;INTERVAL=168;BYDAY=MO",
    ],
)
def test_rules_that_never_fire_are_refused_at_once(text: str) -> None:
    """The library would look for 31 February until the year 9999; here it takes no time. 1 January is a Thursday."""
    with pytest.raises(ValueError, match=r"never|belongs to"):
        read_rrule(text, wall("2026-01-01T00:00"), None)


def test_rules_that_seldom_fire_are_found() -> None:
    """A leap day is within five years, the fifth Monday of February is not."""
    assert fires(read_cron("0 0 29 2 *"))
    assert fires(read_rrule("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29", wall("2025-01-01T00:00"), None))
    assert not fires(read_rrule("FREQ=YEARLY;BYMONTH=2;BYDAY=5MO", wall("2026-01-01T00:00"), None))


def test_the_least_time_between_starts_is_found() -> None:
    """It decides whether windows of one entry would overlap."""
    assert shortest_gap(read_cron("0 9 L * *")) == 28 * DAY
    assert shortest_gap(read_cron("*/7 * * * *")) == 240
    assert shortest_gap(Daily((time(8), time(20)))) == 12 * HOUR
    assert shortest_gap(Once(wall("2026-01-01T00:00"))) is None


# -- which models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "labels", "keys"),
    [
        (("a",), (), ("a@2",)),
        (("a@1",), (), ("a@1",)),
        (("*",), (), ("a@2", "b@1", "c@1")),
        (("a@*",), (), ("a@1", "a@2")),
        (("z",), (), ()),
        ((), (("tier", "gold"),), ("a@1", "c@1")),
        ((), (("tier", "gold"), ("team", "ads")), ("c@1",)),
        (("b",), (("team", "ads"),), ("b@1", "c@1")),
    ],
)
def test_models_are_chosen_by_name_pattern_and_label(
    patterns: tuple[str, ...], labels: tuple[tuple[str, str], ...], keys: tuple[str, ...]
) -> None:
    """A bare name means the version that a request without one gets: the last."""
    peak = replace(daily("10:00"), models=patterns, labels=labels)
    have = {"a@1": {"tier": "gold"}, "b@1": {"tier": "tin"}, "c@1": {"tier": "gold", "team": "ads"}}
    assert peak.selects(MODELS, have) == keys


# -- calendars, validity -----------------------------------------------------------------------------


def test_calendars_test_the_local_date_of_the_start() -> None:
    """In the entry's own zone, not the machine's: at 07:00 in Shanghai it is still yesterday in UTC."""
    peak = daily("07:00", SHANGHAI, only_on=(of_dates([date(2026, 12, 12)]),))
    assert shown(peak, "2026-12-01T00:00", "2026-12-31T00:00") == ["2026-12-12T07:00+08:00"]
    night = daily("23:00", SHANGHAI, duration=4 * HOUR, except_on=(of_dates([date(2026, 12, 13)]),))
    assert [row[:10] for row in shown(night, "2026-12-12T00:00", "2026-12-15T00:00")] == ["2026-12-12", "2026-12-14"]


def test_make_up_working_weekends_count() -> None:
    """China's Saturday of 14 February 2026 is a working day, the holiday it makes up for is not."""
    peak = daily("10:00", SHANGHAI, only_on=(of_country("CN", kind="working_days"),))
    days = [row[:10] for row in shown(peak, "2026-02-12T00:00", "2026-02-25T00:00")]
    assert "2026-02-14" in days
    assert "2026-02-17" not in days


def test_a_start_moved_out_of_a_gap_keeps_the_date_it_names() -> None:
    """Nuuk's Saturday 23:30 of the change starts on Sunday 00:00 and is still Saturday's."""
    nuuk = ZoneInfo("America/Nuuk")
    saturday = daily("23:30", nuuk, only_on=(of_dates([date(2025, 3, 29)]),))
    assert shown(saturday, "2025-03-28T00:00", "2025-04-01T00:00") == ["2025-03-30T00:00-01:00"]


def test_outside_its_validity_and_disabled_an_entry_has_no_effect() -> None:
    """No effect at all, not a default of one: neither a window nor a suppression."""
    span = (utc("2026-12-01T00:00"), utc("2026-12-11T00:00"))
    bounded = daily("10:00", valid_from=utc("2026-12-03T00:00"), valid_until=utc("2026-12-05T00:00"))
    assert [local(w.start, BERLIN)[:10] for w in windows([bounded], *span, MODELS)] == ["2026-12-03", "2026-12-04"]
    assert list(occurrences(daily("10:00", enabled=False), *span)) == []
    for off in (daily("10:00", enabled=False), daily("10:00", enabled=False, suppress=True)):
        assert agenda([off], *span, MODELS).windows == ()
        assert agenda([off], *span, MODELS).quiet == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("duration", 0.0), ("duration", math.inf), ("lead", -1.0), ("rps", math.nan), ("ramp", -1.0), ("confidence", 1.1)],
)
def test_impossible_entries_are_refused(field: str, value: float) -> None:
    """The value itself checks what no configuration may let through."""
    with pytest.raises(ValueError, match=field):
        Peak(**{"name": "p", "rule": Daily((time(10),)), "zone": BERLIN, "duration": HOUR, field: value})  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(("start", "end"), [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_a_span_that_is_none_is_refused(start: float, end: float) -> None:
    """An endless look would never come back."""
    with pytest.raises(ValueError, match="span"):
        windows([daily("10:00")], start, end, MODELS)


# -- preview equals action ---------------------------------------------------------------------------

_entries = st.lists(
    st.builds(
        Peak,
        name=st.sampled_from("pqrst"),
        rule=st.sampled_from(
            [
                Daily((time(8),)),
                Daily((time(20), time(2, 30)), frozenset({5, 6})),
                read_cron("*/30 1-3 * * *"),
                read_cron("0 0 * * MON"),
                Once(wall("2027-03-28T02:15")),
                read_rrule("FREQ=HOURLY;INTERVAL=7", wall("2027-01-01T00:00"), None),
            ]
        ),
        zone=st.sampled_from([BERLIN, NEW_YORK, ZoneInfo("Australia/Lord_Howe")]),
        duration=st.sampled_from([600.0, HOUR, 5 * HOUR, 12 * HOUR]),
        models=st.sampled_from([("a",), ("b",), ("*",), ("a@1", "b")]),
        lead=st.sampled_from([0.0, 120.0, 3 * HOUR]),
        rps=st.sampled_from([0.0, 5.0, 50.0]),
        ramp=st.sampled_from([0.0, 900.0]),
        priority=st.integers(-2, 2),
        require=st.booleans(),
        suppress=st.booleans(),
        adds=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(
    peaks=_entries,
    offset=st.integers(0, 8 * 24),
    width=st.sampled_from([600.0, HOUR, DAY]),
    bridge=st.sampled_from([0.0, 900.0]),
)
def test_what_is_shown_is_what_is_done(peaks: list[Peak], offset: int, width: float, bridge: float) -> None:
    """Goal 9: a look at 14 days (the preview) and a look at the next hour (the planner) see the same windows whole."""
    begin = utc("2027-03-22T00:00")
    preview = agenda(peaks, begin, begin + 14 * DAY, MODELS, bridge=bridge)
    now = begin + offset * HOUR
    action = agenda(peaks, now, now + width, MODELS, bridge=bridge)
    assert list(action.windows) == [w for w in preview.windows if w.end > now and w.start < now + width]
    assert list(action.quiet) == [q for q in preview.quiet if q.end > now and q.start < now + width]
    assert action == agenda(peaks, now, now + width, MODELS, bridge=bridge)


@settings(max_examples=40, deadline=None)
@given(peaks=_entries)
def test_windows_of_a_model_are_apart_and_cover_exactly_what_is_declared(peaks: list[Peak]) -> None:
    """Per model: in order, disjoint; covered is every declared instant that is required or not suppressed."""
    begin = utc("2027-03-22T00:00")
    found = agenda(peaks, begin, begin + 7 * DAY, MODELS)
    for model in MODELS:
        own = [w for w in found.windows if w.model == model]
        assert all(
            a.end < b.start or b.start in cuts_of(a.start - 99 * DAY, b.end + 99 * DAY) for a, b in pairwise(own)
        )
        assert all(w.ready_by <= w.start < w.end for w in own)
        mine = [o for p in peaks if model in p.selects(MODELS) for o in occurrences(p, begin, begin + 7 * DAY)]
        for step in range(0, int(7 * DAY), 1790):
            at = begin + step
            here = [o.peak for o in mine if o.start <= at < o.end]
            quiet = any(peak.suppress for peak in here)
            wanted = any(not peak.suppress and (peak.require or not quiet) for peak in here)
            assert any(w.start <= at < w.end for w in own) is wanted


def test_a_chain_without_end_is_cut_at_turns_of_the_month_and_costs_little() -> None:
    """Two entries that cover day and night are one window, the same from everywhere; a look reads months, not years."""
    zone = ZoneInfo("UTC")
    chain = [daily("08:00", zone, 12 * HOUR), replace(daily("20:00", zone, 12 * HOUR), name="q")]
    for now in (utc("2027-05-01T00:00"), utc("2027-05-15T12:00"), utc("2027-05-31T23:59")):
        (window,) = windows(chain, now, now + 60, ["a@1"])
        assert (window.start, window.end) == (utc("2027-05-01T00:00"), utc("2027-06-01T00:00"))
    year = windows(chain, utc("2027-01-01T00:00"), utc("2028-01-01T00:00"), ["a@1"])
    assert window in year
    assert len(year) == 12
    assert all(a.end == b.start for a, b in pairwise(year))


# -- looking ahead -----------------------------------------------------------------------------------


def test_the_next_start_is_found_years_ahead_or_not_at_all() -> None:
    """What has begun is not next; a one-off is next until it starts."""
    peak = daily("10:00", rule=Once(wall("2029-02-01T10:00")))
    found = next_start(peak, utc("2026-12-01T00:00"))
    assert found is not None
    assert local(found, BERLIN) == "2029-02-01T10:00+01:00"
    assert next_start(peak, found) is None


def test_one_off_windows_are_kept_out_of_what_is_learned() -> None:
    """A promotion is no weekly pattern: its spans are masked, those of recurring entries are not."""
    once = daily("10:00", rule=Once(datetime(2026, 12, 12, tzinfo=UTC)), duration=26 * HOUR)
    start = utc("2026-12-12T00:00")
    found = masks([once, daily("09:00")], start - DAY, start + DAY, MODELS)
    assert found == {"a@2": [(start, start + 26 * HOUR)]}
