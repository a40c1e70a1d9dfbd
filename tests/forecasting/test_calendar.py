"""Local weeks across daylight saving time, local times that do not exist, calendars of dates."""

# ruff: noqa: DTZ001, DTZ901 - naive local times are what is tested here
from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting import calendar

ZONES = sorted(available_timezones() - {"localtime"})
BEGIN = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
END = datetime(2041, 1, 1, tzinfo=UTC).timestamp()
NEW_YORK = ZoneInfo("America/New_York")


@given(st.sampled_from(ZONES), st.lists(st.floats(BEGIN, END - 1), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_slot_is_what_the_local_clock_on_the_wall_says(name: str, instants: list[float]):
    """Over all IANA zones 2020-2040, one by one and vectorised, the slot and day are those of `datetime`."""
    zone = calendar.zone_of(name)
    slots = calendar.slots_of(np.array(instants), zone)
    for instant, slot in zip(instants, slots.tolist(), strict=True):
        local = datetime.fromtimestamp(instant, UTC).astimezone(ZoneInfo(name))
        seconds = local.weekday() * 86_400 + local.hour * 3600 + local.minute * 60 + local.second
        assert calendar.slot_of(instant, zone) == slot == seconds // 900
        assert calendar.day_of(instant, zone) == local.date()


def test_every_change_of_offset_is_found_to_the_second():
    """The cached transitions of each zone agree with the zone itself right before and at each change."""
    for name in ZONES[::2]:
        zone = calendar.zone_of(name)
        starts, offsets = calendar._year(zone, 2020 + len(name) % 21)
        for start, offset, before in zip(starts[1:], offsets[1:], offsets, strict=False):
            assert calendar._offset_at(start, zone) == offset
            assert calendar._offset_at(start - 1, zone) == before


@given(st.sampled_from(ZONES), st.datetimes(datetime(2020, 1, 1), datetime(2040, 12, 31)))
@settings(max_examples=500, deadline=None)
def test_a_local_time_has_one_instant_that_is_never_imaginary_and_never_early(name: str, local: datetime):
    """Fault F68: the instant reads as the local time, or, in a gap, as the first valid time after it; first of two."""
    zone = ZoneInfo(name)
    instant = calendar.local_instant(local, zone)
    shown = instant.astimezone(zone).replace(tzinfo=None, fold=0)
    if shown == local:
        assert instant == min(local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    else:
        just_before = (instant - timedelta(seconds=1)).astimezone(zone).replace(tzinfo=None, fold=0)
        assert just_before < local < shown


def test_the_instants_of_one_zone_never_go_backwards():
    """Local times a quarter of an hour apart have instants in the same order, gap and overlap included."""
    locals_ = [datetime(2026, 3, 8) + timedelta(minutes=15 * step) for step in range(96)]
    locals_ += [datetime(2026, 11, 1) + timedelta(minutes=15 * step) for step in range(96)]
    instants = [calendar.local_instant(local, NEW_YORK) for local in locals_]
    assert instants == sorted(instants)


@pytest.mark.parametrize(
    ("name", "local", "expected"),
    [
        ("America/New_York", "2026-03-08T02:30", "2026-03-08T07:00+00:00"),  # gap: 03:00, not 03:30
        ("America/New_York", "2026-11-01T01:30", "2026-11-01T05:30+00:00"),  # overlap: the first
        ("Europe/Berlin", "2027-03-28T02:30", "2027-03-28T01:00+00:00"),
        ("Europe/Berlin", "2026-10-25T02:30", "2026-10-25T00:30+00:00"),
        ("Australia/Lord_Howe", "2026-10-04T02:15", "2026-10-03T15:30+00:00"),  # half an hour
        ("Pacific/Apia", "2011-12-30T12:00", "2011-12-30T10:00+00:00"),  # a whole day that never was
        ("Asia/Kolkata", "2026-11-11T00:00", "2026-11-10T18:30+00:00"),
    ],
)
def test_gaps_and_overlaps_known_from_the_field(name: str, local: str, expected: str):
    """Fault F68 as a table."""
    found = calendar.local_instant(datetime.fromisoformat(local), ZoneInfo(name))
    assert found == datetime.fromisoformat(expected)


def test_a_day_without_an_hour_has_92_slots_and_a_day_with_two_has_100():
    """Spring forward skips four slots, fall back visits four twice; nothing is lost (goal 7: DST 0 %)."""

    def visited(day: datetime) -> list[int]:
        begin = calendar.local_instant(day, NEW_YORK).timestamp()
        end = calendar.local_instant(day + timedelta(days=1), NEW_YORK).timestamp()
        return calendar.slots_of(np.arange(begin, end, 900.0), NEW_YORK).tolist()

    spring, autumn = visited(datetime(2026, 3, 8)), visited(datetime(2026, 11, 1))
    sunday = 6 * 96
    assert sorted(spring) == [slot for slot in range(sunday, sunday + 96) if slot not in range(sunday + 8, sunday + 12)]
    assert sorted(autumn) == sorted([*range(sunday, sunday + 96), *range(sunday + 4, sunday + 8)])


def test_unknown_names_get_a_hint():
    """Zones, countries, subdivisions, markets and kinds: each error names the nearest that exists."""
    for ask, hint in (
        (lambda: calendar.zone_of("Europe/Berln"), "Europe/Berlin"),
        (lambda: calendar.zone_of("shanghai"), "Asia/Shanghai"),
        (lambda: calendar.of_country("china"), "'CN'"),
        (lambda: calendar.of_country("USS"), "'US'"),
        (lambda: calendar.of_country("US", subdivision="Califorina"), "of US"),
        (lambda: calendar.of_market("NYSEE"), "'NYSE'"),
        (lambda: calendar.of_country("CN", kind="workingdays"), "working_days"),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            ValueError, match=r"unknown (time zone|country|subdivision|market|kind of calendar)"
        ) as said:
            ask()
        assert hint in str(said.value)


@pytest.mark.parametrize("name", ["", " ", "../../etc/passwd", "/etc/passwd", "Europe", "A\0B", "Ü" * 9, "x" * 99_999])
def test_hostile_zone_names_are_unknown_zones(name: str):
    """Paths, control characters and huge names end in one ValueError."""
    with pytest.raises(ValueError, match="unknown time zone"):
        calendar.zone_of(name)


def test_a_machine_without_a_time_zone_database_says_which_package_is_missing():
    """Fault F70, in a Python that has neither system zones nor the package; UTC still works."""
    code = (
        "import sys; sys.modules['tzdata'] = None\n"
        "import zoneinfo; zoneinfo.reset_tzpath(to=[])\n"
        "from forecasting.calendar import zone_of\n"
        "assert zone_of('UTC').utcoffset(None).total_seconds() == 0\n"
        "zone_of('Europe/Paris')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ValueError: no time-zone database for 'Europe/Paris': install the package `tzdata`" in ended.stderr


@pytest.mark.parametrize("instant", [float("nan"), float("inf"), -1.0, 1e12, -1e300])
def test_instants_outside_the_supported_years_are_refused(instant: float):
    """NaN, infinity and garbage clocks: a ValueError, one by one and vectorised."""
    with pytest.raises(ValueError, match="1970"):
        calendar.slot_of(instant, NEW_YORK)
    with pytest.raises(ValueError, match="1970"):
        calendar.slots_of(np.array([BEGIN, instant]), NEW_YORK)


def test_a_local_time_must_be_naive_and_representable():
    """An aware time is a mistake of the caller; year 1 and 9999 may have no instant."""
    with pytest.raises(ValueError, match="no zone of its own"):
        calendar.local_instant(datetime(2026, 1, 1, tzinfo=UTC), NEW_YORK)
    with pytest.raises(ValueError, match="no instant"):
        calendar.local_instant(datetime.max, NEW_YORK)


def test_working_days_honour_substitute_weekends_and_markets_close():
    """14 February 2026 is a working Saturday in China; the exchange rests on Good Friday, which is no US holiday."""
    china = calendar.of_country("CN", kind="working_days")
    assert date(2026, 2, 14) in china
    assert date(2026, 2, 17) not in china
    assert date(2026, 7, 14) in calendar.of_country("FR")
    assert date(2026, 4, 3) not in calendar.of_market("NYSE")
    assert date(2026, 4, 3) in calendar.of_country("US", kind="working_days")
    assert date(2026, 1, 6) in calendar.of_country("DE", subdivision="BY")
    assert date(2026, 1, 6) not in calendar.of_country("DE")
    assert date(2026, 1, 6) in calendar.of_country("DE", subdivision="Bayern")


def test_listed_dates_are_exactly_those():
    """A calendar of dates knows no weekends and takes a datetime for its date."""
    promos = calendar.of_dates([date(2026, 11, 11), datetime(2026, 12, 12, 9)])
    assert date(2026, 11, 11) in promos
    assert date(2026, 12, 12) in promos
    assert date(2026, 11, 12) not in promos
