"""What types cannot say of the preload section: entries that contradict themselves, each other, or the calendar.

Works on the tree as written, part by part, so that one fault never hides another. Trouble that depends on the day
it is read (an UNTIL in the past) is advice and belongs in `preload_lint.py`.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from runtime.config.moments import parse_bound, parse_days, parse_moment, parse_times
from runtime.config.units import parse_seconds, print_seconds
from runtime.config.yaml import Fault, closest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from forecasting.recurrence import Rule
    from runtime.config import schema

V = TypeVar("V")
T = TypeVar("T")

_PATTERN: Final = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,127}(?:@[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,63})?")
_TIMES: Final = ("at", "cron", "rrule", "once")
_ONE: Final = "give exactly one of at, cron, rrule or once"


def all_at_once(value: Any, handler: Callable[[Any], V], faults_of: Callable[[Any], Iterable[Fault]]) -> V:
    """Validate a value and look for faults of our own in what was written; raise all of them as one error."""
    own = tuple(faults_of(value))
    lines: list[InitErrorDetails] = []
    if own:
        lines.append(InitErrorDetails(type=_custom(own), input=None))
    try:
        result = handler(value)
    except ValidationError as error:
        lines += [_again(each) for each in error.errors(include_url=False)]
    else:
        if not lines:
            return result
    raise ValidationError.from_exception_data("preload", lines)


def _custom(faults: tuple[Fault, ...]) -> PydanticCustomError:
    return PydanticCustomError("faults", "{text}", {"text": "; ".join(map(str, faults)), "faults": faults})


def _again(error: Any) -> InitErrorDetails:
    context = error.get("ctx", {})
    kind = _custom(context["faults"]) if error["type"] == "faults" else error["type"]
    return InitErrorDetails(type=kind, loc=error["loc"], input=error.get("input"), ctx=context)


# -- forms -------------------------------------------------------------------------------------------


def pattern(value: str) -> str:
    """Check a model's name, `name@version` or a pattern of one."""
    if not _PATTERN.fullmatch(value):
        raise ValueError(f"{value[:60]!r} names no model; write recommender, recommender@2 or llm-*")
    return value


def cron(value: str) -> str:
    """Check a cron expression of five fields."""
    from forecasting.recurrence import read_cron

    read_cron(value)
    return value


def rrule(value: str) -> str:
    """Check a recurrence rule by itself."""
    from forecasting.recurrence import read_rrule

    read_rrule(value, None, None)
    return value


def days_item(value: object) -> object:
    """Let the name of a calendar stand for its mapping."""
    return {"calendar": value} if isinstance(value, str) else value


# -- contradictions ----------------------------------------------------------------------------------


def day_set(raw: Any) -> Iterator[Fault]:
    """Some date must be meant, and countries and markets exist."""
    if not isinstance(raw, dict):
        return
    if not any(raw.get(key) for key in ("country", "subdivision", "market", "dates", "calendar")):
        yield Fault((), "names no dates", "give country, market or dates, as in {country: CN, kind: working_days}")
    country, part, market = raw.get("country"), raw.get("subdivision"), raw.get("market")
    if part is not None and country is None:
        yield Fault(("subdivision",), "needs country", "as in {country: DE, subdivision: BY}")
    from forecasting.calendar import of_country, of_market

    if isinstance(country, str):
        yield from _said(("country",), lambda: of_country(country))
        if isinstance(part, str) and not list(_said((), lambda: of_country(country))):
            yield from _said(("subdivision",), lambda: of_country(country, subdivision=part))
    if isinstance(market, str):
        yield from _said(("market",), lambda: of_market(market))


def when(raw: Any) -> Iterator[Fault]:
    """Exactly one way to say when, with what belongs to it."""
    if not isinstance(raw, dict):
        return
    given = [key for key in _TIMES if raw.get(key) is not None]
    if not given:
        yield Fault((), "says no time", f"{_ONE}, as in {{days: weekdays, at: '10:00'}}")
    for key in given[1:]:
        yield Fault((key,), f"contradicts {given[0]}", _ONE)
    if raw.get("days") is not None and given and "at" not in given:
        yield Fault(("days",), f"goes with at, not with {given[0]}", "leave it out")
    if "rrule" in given and raw.get("start") is None:
        yield Fault(("rrule",), "needs start, its first date and time", "as in start: 2026-12-03T15:00")
    if raw.get("start") is not None and given and "rrule" not in given:
        yield Fault(("start",), f"goes with rrule, not with {given[0]}", "leave it out, or use valid_from")


def entry(raw: Any) -> Iterator[Fault]:
    """A window has models, ends before it starts again, and can happen."""
    if not isinstance(raw, dict):
        return
    if not raw.get("models") and raw.get("selector") is None:
        yield Fault((), "names no models", "give models, or selector: {labels: …}")
    if raw.get("require") is True and raw.get("action") == "suppress":
        yield Fault(("require",), "contradicts action: suppress", "leave one out")
    duration, ramp = _tried(parse_seconds, raw.get("duration")), _tried(parse_seconds, raw.get("ramp"))
    if duration and ramp and ramp > duration:
        yield Fault(("ramp",), f"is longer than the window ({print_seconds(duration)})", "shorten it")
    low, high = _tried(parse_bound, raw.get("valid_from")), _tried(parse_bound, raw.get("valid_until"))
    if low and high and _day(low) > _day(high):
        yield Fault(("valid_until",), "is before valid_from", "exchange them")
    yield from _rhythm(raw, duration)


def _rhythm(raw: Mapping[str, Any], duration: float | None) -> Iterator[Fault]:
    from forecasting.recurrence import fires, shortest_gap

    key, rule = _rule(raw.get("when"))
    if rule is None:
        return
    try:
        gap = shortest_gap(rule)
        if not fires(rule):
            yield Fault(("when", key), "never fires in five years", "does the date exist, as 31 February does not?")
    except ValueError as error:
        yield Fault(("when", key), f"contradicts itself ({error})")
        return
    if gap is None:
        return
    between = f"the time between two starts ({print_seconds(gap)})"
    if gap < 60:  # noqa: PLR2004  # seconds of a minute
        yield Fault(("when", key), "fires more than once a minute", "use one longer window")
    if duration and duration >= gap:
        yield Fault(("duration",), f"is not shorter than {between}", "its windows would overlap; shorten it")
    lead = _tried(parse_seconds, raw.get("lead"))
    if lead is not None and lead > gap:
        yield Fault(("lead",), f"is longer than {between}", "shorten it")


def section(raw: Any) -> Iterator[Fault]:
    """Names are used once, calendars exist, and every wall time has a zone."""
    if not isinstance(raw, dict) or not _listed(raw.get("peaks")):
        return
    defaults, calendars = raw.get("defaults"), raw.get("calendars")
    given = defaults if isinstance(defaults, dict) else {}
    known = calendars if isinstance(calendars, dict) else {}
    first: dict[str, int] = {}
    for index, row in enumerate(raw["peaks"]):
        if not isinstance(row, dict):
            continue
        name = row.get("name")
        if isinstance(name, str) and name in first:
            yield Fault(("peaks", index, "name"), f"{name} is listed twice", f"first as item {first[name]}")
        elif isinstance(name, str):
            first[name] = index
        for fault in (*_zone(row, given), *_anchored(row, given), *_default_lead(row, given), *_calendar(row, known)):
            yield Fault(("peaks", index, *fault.path), fault.what, fault.hint)


def _calendar(row: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Fault]:
    for key in ("only_on", "except_on"):
        wanted = row.get(key)
        named = wanted.get("calendar") if isinstance(wanted, dict) else wanted
        if isinstance(named, str) and named not in known:
            path = (key, "calendar") if isinstance(wanted, dict) else (key,)
            yield Fault(
                path, f"no calendar {named[:60]} is defined", closest(named, known) or "preload.calendars is empty"
            )


def _default_lead(row: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Fault]:
    """A lead of the entry's own is checked with the entry."""
    _, rule = _rule(row.get("when"))
    gap = _tried(_gap, rule)
    lead = _tried(parse_seconds, given.get("lead", 120))
    if row.get("lead") is None and gap is not None and lead is not None and lead > gap:
        text = f"the default, {print_seconds(lead)}, is longer than the time between two starts ({print_seconds(gap)})"
        yield Fault(("lead",), text, "give a shorter one")


def _anchored(row: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Fault]:
    """A rule that is sound by itself may still never meet its start, on the clock of its zone."""
    from forecasting.calendar import zone_of
    from forecasting.recurrence import read_rrule

    timing = row.get("when")
    text, start = (timing.get(key) for key in ("rrule", "start")) if isinstance(timing, dict) else (None, None)
    moment = _tried(parse_moment, start)
    if not isinstance(timing, dict) or moment is None or _tried(rrule, text) is None:
        return
    name = timing.get("timezone") or given.get("timezone")
    zone = _tried(zone_of, name) if isinstance(name, str) else None
    wall = moment.replace(tzinfo=None) if moment.tzinfo is None or zone is None else moment.astimezone(zone)
    yield from _said(("when", "rrule"), lambda: read_rrule(str(text), wall.replace(tzinfo=None), zone))


def _zone(row: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Fault]:
    timing = row.get("when")
    if not isinstance(timing, dict) or given.get("timezone") is not None or timing.get("timezone") is not None:
        return
    for key in _TIMES:
        if timing.get(key) is None:
            continue
        moment = _tried(parse_moment, timing[key]) if key == "once" else None
        if moment is not None and moment.tzinfo is not None:
            continue
        offset = ", or write an offset as in 2026-12-12T00:00+08:00" if key == "once" else ""
        hint = f"set preload.defaults.timezone or when.timezone, as in timezone: Europe/Berlin{offset}"
        yield Fault(("when", key), "has no time zone", hint)


def models(
    raw: Any, listed: tuple[schema.ModelEntry, ...] | None, repository: tuple[Any, ...] | None
) -> Iterator[Fault]:
    """Entries name models that exist; with a repository to search, only `peaks lint` can tell."""
    peaks = raw.get("peaks") if isinstance(raw, dict) else None
    if listed is None or repository is None or repository or not _listed(peaks):
        return
    names = {each.name for each in listed}
    keys = {f"{each.name}@{each.version}" for each in listed}
    for index, row in enumerate(peaks):
        wanted = row.get("models") if isinstance(row, dict) and row.get("allow_missing") is not True else None
        for place, each in enumerate(wanted if _listed(wanted) else ()):
            if not (isinstance(each, str) and _PATTERN.fullmatch(each) and each != "*"):
                continue
            known = keys if "@" in each else names
            if not any(fnmatchcase(one, each) for one in known):
                hint = closest(each, known) or "models is empty, and so is repository"
                path = ("peaks", index, "models", place)
                yield Fault(path, f"no model {each[:60]} is listed", f"{hint}; or say allow_missing: true")


def preload(value: Any, handler: Callable[[Any], V], keys: tuple[str, ...]) -> V:
    """Check the section as a whole; a default written directly under it is pointed to its place."""
    moved = [key for key in keys if isinstance(value, dict) and key in value]
    rest = {key: each for key, each in value.items() if key not in moved} if moved else value
    found = [Fault((key,), "unknown key", f"did you mean defaults.{key}?") for key in moved]
    # Whoever wrote a zone in the wrong place needs no advice to write one.
    lent = {**rest, "defaults": {key: value[key] for key in moved}} if moved and "defaults" not in rest else rest
    return all_at_once(rest, handler, lambda _: [*found, *section(lent)])


# -- parts -------------------------------------------------------------------------------------------


def _rule(raw: Any) -> tuple[str, Rule | None]:
    """The rule that was written and its key; None where it cannot be read, which is somebody else's to report."""
    from forecasting.recurrence import DAYS, EVERY_DAY, Daily, read_cron, read_rrule

    given = [key for key in _TIMES if raw.get(key) is not None] if isinstance(raw, dict) else []
    if len(given) != 1 or given == ["once"]:
        return "", None
    key, value = given[0], raw[given[0]]
    if key == "at":
        times = _tried(parse_times, value)
        days = _tried(parse_days, raw["days"]) if raw.get("days") is not None else None
        chosen = frozenset(map(DAYS.index, days)) if days else EVERY_DAY
        return key, Daily(times, chosen) if times else None
    if not isinstance(value, str):
        return key, None
    if key == "cron":
        return key, _tried(read_cron, value)
    start = _tried(parse_moment, raw.get("start"))
    return key, _tried(lambda text: read_rrule(text, start.replace(tzinfo=None), None), value) if start else None


def _gap(rule: Any) -> float | None:
    from forecasting.recurrence import shortest_gap

    return shortest_gap(rule)


def _tried(parse: Callable[[Any], T], value: Any) -> T | None:
    try:
        return None if value is None else parse(value)
    except (ValueError, TypeError, AttributeError):  # also where a list stands for a text
        return None


def _said(path: tuple[str, ...], ask: Callable[[], object]) -> Iterator[Fault]:
    """What a look-up that fails says, as a fault."""
    try:
        ask()
    except ValueError as error:
        what, _, hint = str(error).partition("; ")
        yield Fault(path, what, hint)


def _day(bound: date | datetime) -> date:
    return bound.date() if isinstance(bound, datetime) else bound


def _listed(raw: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(raw, list | tuple)
