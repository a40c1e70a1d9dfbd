"""From validated entries to the values that `forecasting` computes with. Checks nothing: that is done before."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING

from forecasting.calendar import Calendar, local_instant, of_country, of_dates, of_market, zone_of
from forecasting.peaks import Peak
from forecasting.recurrence import DAYS, EVERY_DAY, Daily, Once, Rule, read_cron, read_rrule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from runtime.config.preload import Days, DaySet, PeakEntry, Preload, When


def peaks_of(preload: Preload) -> tuple[Peak, ...]:
    """Every entry, in the order of the file, the disabled ones included."""
    return tuple(_peak(entry, preload) for entry in preload.peaks)


def _peak(entry: PeakEntry, preload: Preload) -> Peak:
    defaults = preload.defaults
    zone = _zone(entry.when, defaults.timezone)
    return Peak(
        name=entry.name,
        rule=_rule(entry.when, zone),
        zone=zone,
        duration=entry.duration,
        models=entry.models,
        labels=tuple(sorted(entry.selector.labels.items())) if entry.selector else (),
        lead=defaults.lead if entry.lead is None else entry.lead,
        ramp=entry.ramp,
        rps=entry.expected_rps or 0.0,
        priority=entry.priority,
        confidence=defaults.confidence if entry.confidence is None else entry.confidence,
        require=entry.require,
        adds=entry.combine == "sum",
        suppress=entry.action == "suppress",
        only_on=_calendars(entry.only_on, preload.calendars),
        except_on=_calendars(entry.except_on, preload.calendars),
        valid_from=-math.inf if entry.valid_from is None else _instant(entry.valid_from, zone),
        valid_until=math.inf if entry.valid_until is None else _instant(entry.valid_until, zone, after=1),
        enabled=entry.enabled,
    )


def _zone(when: When, default: str | None) -> tzinfo:
    name = when.timezone or default
    if name is not None:
        return zone_of(name)
    # Only an instant may do without a zone; its own offset then tells its date.
    assert when.once is not None
    assert when.once.tzinfo is not None
    return when.once.tzinfo


def _rule(when: When, zone: tzinfo) -> Rule:
    if when.at is not None:
        return Daily(when.at, frozenset(map(DAYS.index, when.days)) if when.days else EVERY_DAY)
    if when.cron is not None:
        return read_cron(when.cron)
    if when.once is not None:
        return Once(when.once)
    assert when.rrule is not None
    assert when.start is not None
    start = when.start if when.start.tzinfo is None else when.start.astimezone(zone).replace(tzinfo=None)
    return read_rrule(when.rrule, start, zone)


def _calendars(days: Days | None, named: Mapping[str, DaySet]) -> tuple[Calendar, ...]:
    if days is None:
        return ()
    others = _calendars_of(named[days.calendar]) if days.calendar is not None else ()
    return (*_calendars_of(days), *others)


def _calendars_of(days: DaySet) -> tuple[Calendar, ...]:
    found: list[Calendar] = []
    if days.country is not None:
        found.append(of_country(days.country, kind=days.kind, subdivision=days.subdivision or ""))
    if days.market is not None:
        found.append(of_market(days.market, kind=days.kind))
    if days.dates:
        found.append(of_dates(days.dates))
    return tuple(found)


def _instant(bound: date | datetime, zone: tzinfo, after: int = 0) -> float:
    """A bound as UTC epoch seconds; a date begins at its midnight, or so many days `after`."""
    if not isinstance(bound, datetime):
        bound = datetime(bound.year, bound.month, bound.day) + timedelta(days=after)  # noqa: DTZ001  # a wall time
    return (bound if bound.tzinfo is not None else local_instant(bound, zone)).timestamp()
