"""Turns a calendar file (.ics, RFC 5545) into entries of `preload.peaks`. Needs the extra `ics`.

An event that recurs by one plain rule stays a rule; whatever has exceptions, extra dates or moved instances becomes
one entry per instance in the span asked for. What this cannot express is refused, never dropped silently.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from actors.errors import ConfigError
from runtime.config.document import Document
from runtime.config.preload import Preload
from runtime.config.units import print_seconds
from runtime.config.yaml import validate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_BYTES: Final = 4 << 20
_MOST_ENTRIES: Final = 1000
_NAME: Final = re.compile(r"[^A-Za-z0-9]+")
_EXCEPTIONS: Final = ("RDATE", "EXDATE", "EXRULE", "RECURRENCE-ID")


class IcsMissing(Exception):
    """The libraries that read calendars are not installed."""


def entries(
    raw: bytes, since: datetime, span: float, models: Sequence[str] = (), zone: str | None = None
) -> list[dict[str, Any]]:
    """Entries for every event of a calendar; single instances from `since` on, for `span` seconds.

    Categories of an event that look like models are its models, else `models`; `zone` is for times that have none.
    Raises `IcsMissing`, or `ConfigError` naming the event.
    """
    try:
        import icalendar
        import recurring_ical_events
    except ImportError:
        raise IcsMissing("reading a calendar needs more packages; install foreload[ics]") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"the calendar is over {MOST_BYTES} bytes")
    try:
        calendar = icalendar.Calendar.from_ical(raw)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"not a calendar (RFC 5545): {str(error)[:120] or type(error).__name__}") from None
    events = list(calendar.walk("VEVENT"))
    rules: list[dict[str, Any]] = []
    rest: list[Any] = []
    for event in events:
        row = _rule(event, events, models, zone)
        if row is None:
            rest.append(event)
        else:
            rules.append(row)
    calendar.subcomponents = [each for each in calendar.subcomponents if each.name != "VEVENT"] + rest
    try:
        found = recurring_ical_events.of(calendar).between(since, since + timedelta(seconds=span)) if rest else []
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(f"the calendar contradicts itself: {str(error)[:120]}") from None
    if len(found) + len(rules) > _MOST_ENTRIES:
        raise ConfigError(f"more than {_MOST_ENTRIES} entries (ask for a shorter span with --next)")
    single = [_single(each, models, zone) for each in sorted(found, key=lambda event: _utc(event.start))]
    rows = list(_named([*rules, *single]))
    _check(rows)
    return rows


def spell(rows: Sequence[dict[str, Any]]) -> str:
    """Write entries as YAML that a configuration can take in."""
    from ruamel.yaml import YAML

    writer, text = YAML(), StringIO()
    writer.width = 120
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump({"preload": {"peaks": list(rows)}}, text)
    return text.getvalue()


# -- events ------------------------------------------------------------------------------------------


def _rule(event: Any, events: Sequence[Any], models: Sequence[str], zone: str | None) -> dict[str, Any] | None:
    """The entry of an event that recurs by one plain rule; None if it must be written out."""
    rule = event.get("RRULE")
    if rule is None:
        return None
    title = _title(event)
    several = isinstance(rule, list)
    if any("MINUTELY" in text or "SECONDLY" in text for text in _texts(rule if several else [rule])):
        raise ConfigError(f"{title}: recurs more often than hourly (use cron in the configuration)")
    moved = sum(1 for other in events if other.get("UID") == event.get("UID")) > 1
    if moved or several or any(key in event for key in _EXCEPTIONS):
        return None
    start = _start(event)
    key: str | None = getattr(start.tzinfo, "key", None)
    if start.tzinfo is not None and key is None:
        return None
    when = {"rrule": _texts([rule])[0], "start": _written(start.replace(tzinfo=None))}
    if place := key or zone:
        when["timezone"] = place
    row = {"name": title, "models": _models(event, models), "when": when, "duration": _duration(event)}
    try:
        _check([{**row, "name": "event"}])
    except ConfigError:
        return None  # an instance at a time it may still be sound, as all-day events on every day are
    return row


def _single(event: Any, models: Sequence[str], zone: str | None) -> dict[str, Any]:
    start = _start(event)
    when = {"once": _written(start)}
    if start.tzinfo is None and zone:
        when["timezone"] = zone
    name = f"{_title(event)}-{start:%Y-%m-%d}"
    return {"name": name, "models": _models(event, models), "when": when, "duration": _duration(event)}


def _title(event: Any) -> str:
    return _NAME.sub("-", str(event.get("SUMMARY", ""))[:80]).strip("-").lower() or "event"


def _start(event: Any) -> datetime:
    """When it starts; a whole day at its midnight."""
    if "DTSTART" not in event:
        raise ConfigError(f"{_title(event)}: has no DTSTART")
    start = event.start
    return start if isinstance(start, datetime) else datetime.combine(start, time())


def _duration(event: Any) -> str:
    """Elapsed time: over a change of the clocks the wall's difference would be an hour off."""
    seconds = (_utc(event.end) - _utc(event.start)).total_seconds()
    if seconds <= 0:
        raise ConfigError(f"{_title(event)}: has no length (give it a DTEND or DURATION after its start)")
    return print_seconds(seconds)


def _utc(moment: date | datetime) -> datetime:
    moment = moment if isinstance(moment, datetime) else datetime.combine(moment, time())
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _written(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds" if moment.second else "minutes")


def _models(event: Any, models: Sequence[str]) -> list[str]:
    """Categories that can be models, else those given."""
    from runtime.config.preload_checks import pattern

    found = []
    for each in event.categories:
        try:
            found.append(pattern(str(each)))
        except ValueError:
            continue
    if not found and not models:
        raise ConfigError(f"{_title(event)}: names no models (give it categories, or say --model)")
    return found or list(models)


def _texts(rules: Sequence[Any]) -> list[str]:
    return [rule.to_ical().decode().upper() for rule in rules]


# -- entries -----------------------------------------------------------------------------------------


def _named(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give every entry a name of its own."""
    taken: set[str] = set()
    for row in rows:
        name, number = row["name"], 2
        while name in taken:
            name, number = f"{row['name']}-{number}", number + 1
        taken.add(name)
        yield {**row, "name": name}


def _check(rows: list[dict[str, Any]]) -> None:
    """What is printed must be accepted where it is put. Raises `ConfigError`."""
    validate(Preload, Document("calendar", {"peaks": rows}))
