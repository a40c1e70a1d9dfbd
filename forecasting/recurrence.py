"""Rules that say when: times on days, cron, recurrence rules, one instant. From a rule and a zone to starts.

Everything recurs in *local wall time*; each wall time becomes an instant once, in `forecasting.calendar`. So a time
that occurs twice starts at its first occurrence, and one that does not exist at the first instant after the gap.
Nothing here knows models, durations or configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from typing import TYPE_CHECKING, Final, TypeAlias

from cronsim import CronSim, CronSimError
from dateutil.rrule import rrule, rrulestr

from forecasting.calendar import local_instant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import tzinfo

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EVERY_DAY: Final = frozenset(range(7))
MOST_COUNT: Final = 10_000
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  # a wall time, in no zone
_SAMPLE_FROM: Final = datetime(2024, 1, 1)  # noqa: DTZ001  # a wall time; its five years hold a 29 February
_SAMPLE: Final = 400
_FIVE_YEARS: Final = timedelta(days=5 * 366)
_MARGIN: Final = timedelta(hours=25)
"""No zone change of our time moved a wall clock by more than a day (Apia skipped one)."""
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class Daily:
    """Times of day on days of the week (Monday 0)."""

    times: tuple[time, ...]
    days: frozenset[int] = EVERY_DAY

    def walls(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Give wall times in [since, until), in order."""
        day, last = since.date(), until.date()
        while day <= last:
            if day.weekday() in self.days:
                yield from (w for at in sorted(self.times) if since <= (w := datetime.combine(day, at)) < until)
            day += timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Cron:
    """Five fields as in Debian's cron, with L, LW and # (cronsim); build it with `read_cron`."""

    expression: str

    def walls(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Give wall times in [since, until), in order.

        cronsim runs on naive times here: with a zone it fires in both passes of a repeated hour when the minute or
        hour is a wildcard.
        """
        yield from takewhile(lambda wall: wall < until, CronSim(self.expression, since - timedelta(seconds=1)))


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrence rule (RFC 5545) from a wall time on; build it with `read_rrule`. `last` is inclusive."""

    rule: str
    start: datetime
    last: datetime | None = None
    count: int | None = None

    def walls(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Give wall times in [since, until), in order."""
        end = min(until, self.last + timedelta(seconds=1)) if self.last else until
        begin = self.start if self.count else self._forward(since)
        # An end is always given: a rule that never fires would else be searched for until the year 9999.
        found = _built(self.rule, begin).replace(until=end)
        for wall in islice(found, self.count):
            if since <= wall < end:
                yield wall

    def _forward(self, since: datetime) -> datetime:
        """Move the start by whole intervals towards `since`, so that years gone by cost nothing."""
        fields = dict(part.split("=", 1) for part in self.rule.split(";"))
        unit = {"MINUTELY": 60, "HOURLY": 3600, "DAILY": 86_400, "WEEKLY": 7 * 86_400}.get(fields["FREQ"])
        if unit is None:
            return self.start
        step = unit * int(fields.get("INTERVAL", "1"))
        behind = int((since - self.start).total_seconds() // step) - 1
        return self.start + timedelta(seconds=max(behind, 0) * step)


@dataclass(frozen=True, slots=True)
class Once:
    """One time: a wall time if naive, else an instant."""

    at: datetime

    def walls(self, since: datetime, until: datetime) -> Iterator[datetime]:
        """Give the wall time if it is in [since, until); an instant is no wall time and gives nothing."""
        if self.at.tzinfo is None and since <= self.at < until:
            yield self.at


Rule: TypeAlias = Daily | Cron | Recurrence | Once


@dataclass(frozen=True, slots=True)
class Start:
    """One start: its instant (UTC epoch seconds), the local date the rule names, and whether a gap moved it."""

    at: float
    day: date
    moved: bool = False


def starts(rule: Rule, zone: tzinfo, since: float, until: float) -> Iterator[Start]:
    """Give the starts of a rule in [since, until), UTC epoch seconds, strictly increasing."""
    if isinstance(rule, Once) and rule.at.tzinfo is not None:
        at = rule.at.timestamp()
        if since <= at < until:
            yield Start(at, rule.at.astimezone(zone).date())
        return
    before = float("-inf")
    for wall in rule.walls(_wall(since, zone) - _MARGIN, _wall(until, zone) + _MARGIN):
        at = local_instant(wall, zone).timestamp()
        if at <= before:
            continue  # a second wall time in the same gap
        before = at
        if since <= at < until and not _skipped(wall.date(), at, zone):
            yield Start(at, wall.date(), _wall(at, zone) != wall)


def shortest_gap(rule: Rule) -> float | None:
    """Give the least time between two starts, in seconds of wall time; None for a rule with fewer than two.

    Looks at the first 400 starts within five years, which hold every pattern of hours, weekdays and months.
    Raises `ValueError` for a recurrence rule that contradicts itself.
    """
    gaps = [(b - a).total_seconds() for a, b in pairwise(_sample(rule))]
    return min(gaps, default=None)


def fires(rule: Rule) -> bool:
    """Tell whether a rule starts anything within five years of its own beginning. Raises as `shortest_gap`."""
    return isinstance(rule, Once) or bool(_sample(rule))


@lru_cache(maxsize=1024)
def _sample(rule: Rule) -> tuple[datetime, ...]:
    begin = rule.start if isinstance(rule, Recurrence) else _SAMPLE_FROM
    return tuple(islice(rule.walls(begin, begin + _FIVE_YEARS), _SAMPLE))


# -- reading -----------------------------------------------------------------------------------------


def read_cron(text: str) -> Cron:
    """Read five fields. Raises `ValueError` (what is wrong; hint)."""
    fields = text.split()
    if text.strip().startswith("@"):
        raise ValueError(f"{text.strip()[:20]!r} is not five fields; write minute hour day month weekday: 0 9 * * *")
    if len(text) > _LONGEST:
        raise ValueError(f"is longer than {_LONGEST} characters; write five fields: 0 9 * * MON-FRI")
    if len(fields) != 5:  # noqa: PLR2004  # cronsim would take six, the first as seconds
        hint = "there are no seconds and no year; write minute hour day month weekday: 0 9 * * MON-FRI"
        raise ValueError(f"has {len(fields)} fields, not five; {hint}")
    expression = " ".join(fields).upper()
    try:
        CronSim(expression, _SAMPLE_FROM)
    except CronSimError as error:
        raise ValueError(f"is not a cron expression: {str(error).lower()}; {_cron_hint(expression)}") from None
    return Cron(expression)


def _cron_hint(expression: str) -> str:
    if re.search(r"(SUN|MON|TUE|WED|THU|FRI|SAT|\d)-(SUN|MON|TUE|WED|THU|FRI|SAT|\d)", expression.split()[4]):
        return "a range of weekdays ends after it begins, Sunday is 0 or 7; write FRI,SAT,SUN for one that does not"
    return "minute 0-59, hour 0-23, day 1-31 and one that the month has, month 1-12, weekday 0-7"


_KEYS: Final = frozenset(
    {"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYSETPOS", "BYMONTH", "BYMONTHDAY", "BYYEARDAY"}
    | {"BYWEEKNO", "BYDAY", "BYHOUR", "BYMINUTE", "BYSECOND"}
)
_UNTIL: Final = re.compile(r"(\d{8})(?:T(\d{6})(Z?))?", re.ASCII)


def read_rrule(text: str, start: datetime | None, zone: tzinfo | None) -> Recurrence:
    """Read a recurrence rule whose first start is `start`, a wall time. Raises `ValueError` (what is wrong; hint).

    Without a start the rule is only checked by itself: the result is good for nothing else.
    A date as UNTIL includes that day; an UNTIL in UTC (Z) is taken to the wall clock of `zone` (None: UTC).
    """
    body = text.strip().upper().removeprefix("RRULE:").strip(";")
    hint = "write one rule such as FREQ=WEEKLY;INTERVAL=2;BYDAY=TH"
    if len(body) > _LONGEST or re.search(r"[\s:]", body):
        raise ValueError(f"is not one recurrence rule; {hint}")
    fields: dict[str, str] = {}
    for part in body.split(";"):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not equals or not value:
            raise ValueError(f"{part[:40]!r} is not a part of a recurrence rule; known are {', '.join(sorted(_KEYS))}")
        if key in fields:
            raise ValueError(f"{key} is here twice; {hint}")
        fields[key] = value
    if "FREQ" not in fields:
        raise ValueError(f"has no FREQ; {hint}")
    if fields["FREQ"] == "SECONDLY":
        raise ValueError("fires more than once a minute; use FREQ=MINUTELY or longer")
    count, until = fields.pop("COUNT", None), fields.pop("UNTIL", None)
    if count and until:
        raise ValueError("has both COUNT and UNTIL; keep one")
    _whole(fields.get("INTERVAL"), "INTERVAL")
    rule = ";".join(f"{key}={value}" for key, value in fields.items())
    _possible(fields, start)
    start = start or _SAMPLE_FROM
    try:
        _built(rule, start)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, IndexError):
        raise ValueError(f"is not a recurrence rule (RFC 5545); {hint}") from None
    return Recurrence(rule, start, _last(until, zone) if until else None, _whole(count, "COUNT"))


_DAYS_IN: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ONLY_WITH: Final = {
    "BYSETPOS": ("MONTHLY", "YEARLY"),
    "BYMONTHDAY": ("MONTHLY", "YEARLY"),
    "BYYEARDAY": ("YEARLY",),
    "BYWEEKNO": ("YEARLY",),
}


_RANGES: Final = {
    "BYMONTH": (1, 12),
    "BYMONTHDAY": (1, 31),
    "BYYEARDAY": (1, 366),
    "BYWEEKNO": (1, 53),
    "BYSETPOS": (1, 366),
    "BYHOUR": (0, 23),
    "BYMINUTE": (0, 59),
    "BYSECOND": (0, 59),
}
"""dateutil takes any number, and then looks for it; from 1 on, the negative ones count from the end."""


def _possible(fields: Mapping[str, str], start: datetime | None) -> None:
    """Refuse what can never fire: dateutil would search for it until the year 9999, for minutes."""
    frequency = fields["FREQ"]
    for key, with_ in _ONLY_WITH.items():
        if key in fields and frequency not in with_:
            raise ValueError(f"{key} belongs to FREQ={' or FREQ='.join(with_)}; change FREQ, or leave it out")
    for key, (low, high) in _RANGES.items():
        if any(not low <= (abs(each) if low else each) <= high for each in _numbers(fields.get(key))):
            raise ValueError(f"{key} goes from {low} to {high}; as in {key}={high}")
    months, days = _numbers(fields.get("BYMONTH")), _numbers(fields.get("BYMONTHDAY"))
    if months and days and all(abs(day) > _DAYS_IN[abs(month) - 1] for day in days for month in months):
        raise ValueError("never fires; does the date exist, as 31 February does not?")
    # Whole weeks of days, hours or minutes keep the weekday of the start.
    unit = {"DAILY": 1, "HOURLY": 24, "MINUTELY": 1440}.get(frequency)
    if start and unit and "BYDAY" in fields and int(fields.get("INTERVAL", "1")) % (7 * unit) == 0:
        weekday = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")[start.weekday()]
        if weekday not in fields["BYDAY"]:
            raise ValueError(f"never fires; its start is on {weekday}, and so is every interval after it")


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(each) for each in text.split(",")] if text else []
    except ValueError:
        return []  # refused by dateutil


def _whole(text: str | None, what: str) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= MOST_COUNT:
        raise ValueError(f"{what} must be a whole number from 1 to {MOST_COUNT}; as in {what}=2")
    return int(text)


def _last(text: str, zone: tzinfo | None) -> datetime:
    found = _UNTIL.fullmatch(text)
    try:
        last = datetime.strptime(found[1] + (found[2] or "235959") if found else "", "%Y%m%d%H%M%S")  # noqa: DTZ007  # a wall time
    except ValueError:
        raise ValueError(f"UNTIL={text[:20]} is not a time; write UNTIL=20271231 or UNTIL=20271231T180000") from None
    if found and found[3]:
        last = last.replace(tzinfo=UTC).astimezone(zone).replace(tzinfo=None)
    return last


def _built(rule: str, start: datetime) -> rrule:
    built = rrulestr(rule, dtstart=start)
    assert isinstance(built, rrule)  # a text of one line is no set of rules
    return built


# -- wall time ---------------------------------------------------------------------------------------


def _wall(at: float, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(at, zone).replace(tzinfo=None, fold=0)


def _skipped(day: date, at: float, zone: tzinfo) -> bool:
    """Tell whether a zone left out that whole day (Apia's 30 December 2011): then it has no start."""
    if _wall(at, zone).date() == day:
        return False
    midnight = datetime.combine(day, time())
    return local_instant(midnight, zone) == local_instant(midnight + timedelta(days=1), zone)
