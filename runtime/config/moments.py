"""Dates and times as people write them: `2026-12-31`, `2026-12-31T22:00`, `10:00`, `weekdays`.

Typed values of the calendar live here; what a setting means lives in `preload.py`. Every refusal says what would
have been right. A time without an offset is a wall time: it gets its zone where it is used.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

from runtime.config.yaml import closest

WEEK: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WORDS: Final = {"daily": WEEK, "weekdays": WEEK[:5], "weekends": WEEK[5:]}
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_MOMENT: Final = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(Z|[+-]\d\d:\d\d)?", re.ASCII)
_TIME: Final = re.compile(r"\d\d?:\d\d", re.ASCII)
_FIRST, _LAST = 1971, 2150
_DATE_HINT: Final = "write 2026-12-31"
_MOMENT_HINT: Final = "write 2026-12-31T22:00, or 2026-12-31T22:00+01:00 for an instant"
_TIME_HINT: Final = 'write "10:00", from "00:00" to "23:59"'
_LONGEST: Final = 40

D = TypeVar("D", date, datetime)


def parse_date(value: object) -> date:
    """Read `2026-12-31`. Raises `ValueError`."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    if not (isinstance(value, str) and _DATE.fullmatch(value)):
        raise _wrong(value, "date", _DATE_HINT)
    try:
        return _bounded(date.fromisoformat(value))
    except ValueError as error:
        raise _no_such(value, error, _DATE_HINT) from None


def parse_moment(value: object) -> datetime:
    """Read a date with a time, with an offset or without. Raises `ValueError`."""
    if isinstance(value, datetime):
        return value
    if not (isinstance(value, str) and _MOMENT.fullmatch(value.strip())):
        raise _wrong(value, "date with a time", _MOMENT_HINT)
    try:
        return _bounded(datetime.fromisoformat(value.strip()))
    except ValueError as error:
        raise _no_such(value, error, _MOMENT_HINT) from None


def parse_bound(value: object) -> date | datetime:
    """Read a date, or a date with a time. Raises `ValueError`."""
    return parse_date(value) if isinstance(value, str) and _DATE.fullmatch(value) else parse_moment(value)


def parse_time(value: object) -> time:
    """Read a time of day, to the minute. Raises `ValueError`."""
    if isinstance(value, time):
        return value
    if isinstance(value, str) and value.strip() == "24:00":
        raise ValueError('24:00 is 00:00 of the next day; write "00:00" and the next day')
    if not (isinstance(value, str) and _TIME.fullmatch(value.strip())):
        raise _wrong(value, "time of day", _TIME_HINT)
    hour, _, minute = value.strip().partition(":")
    try:
        return time(int(hour), int(minute))
    except ValueError:
        raise _wrong(value, "time of day", _TIME_HINT) from None


def parse_days(value: object) -> tuple[str, ...]:
    """Read `daily`, `weekdays`, `weekends`, one day or a list of days; in the order of the week. `ValueError` else."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words:
        raise _wrong(value, "choice of days", "write weekdays, weekends, daily or [mon, thu]")
    found: set[str] = set()
    for word in words:
        folded = word.strip().casefold() if isinstance(word, str) else ""
        folded = folded[:3] if any(folded == f"{name}day" for name in _LONG) else folded
        if folded not in WEEK and folded not in _WORDS:
            raise ValueError(f"{str(word)[:_LONGEST]!r} is not a day; {closest(str(word), [*WEEK, *_WORDS])}")
        found |= set(_WORDS.get(folded, (folded,)))
    return tuple(day for day in WEEK if day in found)


_LONG: Final = ("mon", "tues", "wednes", "thurs", "fri", "satur", "sun")


def parse_times(value: object) -> tuple[time, ...]:
    """Read one time of day or a list, each once; sorted. Raises `ValueError`."""
    words = value if isinstance(value, list | tuple) else [value]
    if not words:
        raise _wrong(value, "time of day", _TIME_HINT)
    return tuple(sorted({parse_time(word) for word in words}))


def zone(value: str) -> str:
    """Check an IANA time zone. Raises `ValueError`, naming the nearest one, or the package that has them."""
    from forecasting.calendar import zone_of

    if value.casefold() in {"local", "system", "localtime"}:
        raise ValueError(f"{value!r} would be the machine's zone, which differs between machines; write Europe/Berlin")
    zone_of(value)
    return value


def _spell(value: Any) -> Any:
    if isinstance(value, time):
        return value.strftime("%H:%M")
    if isinstance(value, tuple):
        return [_spell(each) for each in value]
    return value.isoformat() if isinstance(value, date) else value


def _bounded(value: D) -> D:
    if not _FIRST <= value.year <= _LAST:
        raise ValueError(f"the year must be from {_FIRST} to {_LAST}")
    return value


def _wrong(value: object, what: str, hint: str) -> ValueError:
    shown = repr(value)
    return ValueError(f"{shown[:_LONGEST]}{'…' if len(shown) > _LONGEST else ''} is not a {what}; {hint}")


def _no_such(value: str, error: ValueError, hint: str) -> ValueError:
    return ValueError(f"{value.strip()} does not exist ({error}); {hint}")


def _text(*examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": list(examples)})


def _texts(*examples: str) -> WithJsonSchema:
    listed = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    return WithJsonSchema({"anyOf": [{"type": "string"}, listed], "examples": list(examples)})


_spelled = PlainSerializer(_spell, when_used="json")

Date: TypeAlias = Annotated[date, BeforeValidator(parse_date), _spelled, _text("2026-12-31")]
"""A date."""

Moment: TypeAlias = Annotated[datetime, BeforeValidator(parse_moment), _spelled, _text("2026-12-31T22:00")]
"""A date with a time; with an offset it is an instant, else a wall time."""

Bound: TypeAlias = Annotated[date | datetime, BeforeValidator(parse_bound), _spelled, _text("2026-12-31")]
"""A date, or a date with a time."""

Times: TypeAlias = Annotated[tuple[time, ...], BeforeValidator(parse_times), _spelled, _texts("10:00")]
"""Times of day."""

DayNames: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(parse_days), _spelled, _texts("weekdays", "mon")]
"""Days of the week."""

Zone: TypeAlias = Annotated[str, AfterValidator(zone)]
"""An IANA time zone."""
