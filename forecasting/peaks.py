"""Scheduled peaks: what somebody declares will be wanted, and the windows that follow from it.

`agenda` is the one function that turns peaks into windows; preview and planner both call it, so what is shown is what
is done. Pure: no clock is read, no configuration known. Times are UTC epoch seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from forecasting.merge import REACH, Cut, Part, Quiet, Window, quiets_of, windows_of, without
from forecasting.recurrence import Once, Rule, starts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import date, tzinfo

    from forecasting.calendar import Calendar

Labels: TypeAlias = "Mapping[str, Mapping[str, str]]"
"""Labels of each model key."""

Bridge: TypeAlias = "Mapping[str, float] | Callable[[str], float] | float"
"""Seconds of each model key, or of all."""

_Places: TypeAlias = "tuple[Mapping[str, int], Mapping[str, str]]"

NO_LABELS: Final[Labels] = MappingProxyType({})
_WILD: Final = frozenset("*?[")
_DAY: Final = 86_400.0
_FURTHEST: Final = 2 * REACH + 32 * _DAY
"""How far a look must go beyond its span: to the next turn of the month that cuts, and what decides about it."""
_FIVE_YEARS: Final = 5 * 366 * _DAY


@dataclass(frozen=True, slots=True)
class Peak:
    """One entry: who, when and how much. Durations in seconds, `rps` in requests per second (0: not declared).

    `models` are names, `name@version` or patterns with `*`; a name without a version means the last version among
    the keys it is matched against. `labels` select further models: all of them must fit. `duration` is elapsed time.
    A start counts if it lies in [valid_from, valid_until), its local date is in one of `only_on` (if there are any)
    and in none of `except_on`. `suppress` turns the entry around: nothing is loaded ahead meanwhile.
    """

    name: str
    rule: Rule
    zone: tzinfo
    duration: float
    models: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    lead: float = 120.0
    ramp: float = 0.0
    rps: float = 0.0
    priority: int = 0
    confidence: float = 0.98
    require: bool = False
    adds: bool = False
    suppress: bool = False
    only_on: tuple[Calendar, ...] = ()
    except_on: tuple[Calendar, ...] = ()
    valid_from: float = -math.inf
    valid_until: float = math.inf
    enabled: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.duration) and self.duration > 0):
            msg = f"duration must be positive and finite, not {self.duration!r}"
            raise ValueError(msg)
        for name in ("lead", "ramp", "rps"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                msg = f"{name} must be finite and not negative, not {value!r}"
                raise ValueError(msg)
        if not 0 <= self.confidence <= 1:
            msg = f"confidence must lie in 0..1, not {self.confidence!r}"
            raise ValueError(msg)

    def selects(self, models: Sequence[str], labels: Labels = NO_LABELS) -> tuple[str, ...]:
        """Keys (`name@version`) that the entry is about, in the order given (of a name, the lowest version first)."""
        return self.among(_places(tuple(models)), labels)

    def among(self, places: _Places, labels: Labels) -> tuple[str, ...]:
        """`selects` of many entries: hashing ten thousand keys for each of them costs more than all else."""
        place, last = places
        found = {key for pattern in self.models for key in _matching(pattern, place, last)}
        if self.labels:
            found |= {k for k in place if all(labels.get(k, {}).get(name) == value for name, value in self.labels)}
        return tuple(sorted(found, key=place.__getitem__))

    def applies_on(self, day: date) -> bool:
        """Whether calendars let a start on this local date count."""
        wanted = not self.only_on or any(day in calendar for calendar in self.only_on)
        return wanted and not any(day in calendar for calendar in self.except_on)


@lru_cache(maxsize=8)
def _places(models: tuple[str, ...]) -> _Places:
    """Where each key stands, and the last key of each name. Every entry asks for the same ones."""
    return {key: at for at, key in enumerate(models)}, {key.partition("@")[0]: key for key in models}


def _matching(pattern: str, keys: Mapping[str, int], last: Mapping[str, str]) -> Iterable[str]:
    """Keys for one name, key or pattern; of a name without a version, only its last one."""
    versioned = "@" in pattern
    if not set(pattern) & _WILD:
        key = pattern if versioned else last.get(pattern, "")
        return (key,) if key in keys else ()
    if versioned:
        return (key for key in keys if fnmatchcase(key, pattern))
    return (key for name, key in last.items() if fnmatchcase(name, pattern))


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that an entry's window opens: [start, end), its local date, and whether a clock change moved it."""

    peak: Peak
    start: float
    end: float
    day: date
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Agenda:
    """Everything declared that touches a span of time.

    `windows` when models should be resident, `quiet` when nothing is to be loaded ahead, `cuts` the pieces of
    entries that quiet took away.
    """

    windows: tuple[Window, ...] = ()
    quiet: tuple[Quiet, ...] = ()
    cuts: tuple[Cut, ...] = ()


def occurrences(peak: Peak, start: float, end: float) -> Iterator[Occurrence]:
    """Give the occurrences of an entry that touch [start, end), in order. A disabled entry has none."""
    if not peak.enabled:
        return
    since = max(start - peak.duration, peak.valid_from)
    until = min(end, peak.valid_until)
    if since >= until:
        return
    for found in starts(peak.rule, peak.zone, since, until):
        if found.at + peak.duration > start and peak.applies_on(found.day):
            yield Occurrence(peak, found.at, found.at + peak.duration, found.day, found.moved)


def agenda(
    peaks: Sequence[Peak],
    start: float,
    end: float,
    models: Sequence[str],
    labels: Labels = NO_LABELS,
    *,
    bridge: Bridge = 0.0,
) -> Agenda:
    """Merge all entries that touch [start, end) into windows per model, whole ones, not clipped to the span.

    `bridge`: seconds, per model or for all, below which a gap between windows is bridged (load_p95 + cool-down).
    Independent of the span asked for: a window is the same in every agenda that shows it. A chain of
    windows without end is cut at turns of the month (`merge.cuts_of`). Raises `ValueError` for a span that is none.
    """
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        msg = f"a span must be finite and not empty, not {start!r} to {end!r}"
        raise ValueError(msg)
    places = _places(tuple(models))
    who = {index: peak.among(places, labels) for index, peak in enumerate(peaks) if peak.enabled}
    gaps = {
        key: bridge if isinstance(bridge, float | int) else bridge(key) if callable(bridge) else bridge.get(key, 0.0)
        for key in dict.fromkeys(chain.from_iterable(who.values()))
    }
    # A second more than the rules reach, so that windows which only touch are seen together.
    margin = 1.0 + max([0.0, *gaps.values()]) + max([0.0, *(peak.lead for peak in peaks)])
    floor, ceiling = start - _FURTHEST, end + _FURTHEST
    low, high = start - margin, end + margin
    while True:
        whole = _build(peaks, who, gaps, low, high)
        spans = [(w.start, w.end) for w in whole.windows] + [(q.start, q.end) for q in whole.quiet]
        near = [span for span in spans if span[1] > start and span[0] < end]
        first = min([start, *(span[0] for span in near)]) - margin
        last = max([end, *(span[1] for span in near)]) + margin
        if (first >= low or low <= floor) and (last <= high or high >= ceiling):
            return _touching(whole, start, end)
        width = high - low  # at least doubled, so that a long chain takes few rounds
        low = max(min(first, low - width), floor) if first < low else low
        high = min(max(last, high + width), ceiling) if last > high else high


def windows(
    peaks: Sequence[Peak],
    start: float,
    end: float,
    models: Sequence[str],
    labels: Labels = NO_LABELS,
    *,
    bridge: Bridge = 0.0,
) -> list[Window]:
    """Give the windows of `agenda` that touch [start, end), by start and model."""
    return list(agenda(peaks, start, end, models, labels, bridge=bridge).windows)


def next_start(peak: Peak, now: float) -> float | None:
    """Find the next start of one entry after `now`, within five years; None if it will not fire."""
    low, reach = now, 8 * _DAY
    while low < now + _FIVE_YEARS:
        high = min(low + reach, now + _FIVE_YEARS)
        found = next((o.start for o in occurrences(peak, low, high) if o.start > now), None)
        if found is not None:
            return found
        low, reach = high, reach * 4
    return None


def masks(
    peaks: Iterable[Peak], start: float, end: float, models: Sequence[str], labels: Labels = NO_LABELS
) -> dict[str, list[tuple[float, float]]]:
    """Give, per model, the spans of one-off windows: a promotion is no weekly pattern and must not be learned."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    places = _places(tuple(models))
    for peak in peaks:
        if isinstance(peak.rule, Once) and not peak.suppress:
            for each in occurrences(peak, start, end):
                for key in peak.among(places, labels):
                    found[key].append((each.start, each.end))
    return {key: sorted(spans) for key, spans in sorted(found.items())}


def _build(
    peaks: Sequence[Peak],
    who: Mapping[int, Sequence[str]],
    gaps: Mapping[str, float],
    low: float,
    high: float,
) -> Agenda:
    """Everything whose occurrences touch [low, high); complete for what lies well inside."""
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    spans: defaultdict[str, list[tuple[tuple[float, float], str]]] = defaultdict(list)
    for index, keys in who.items():
        peak = peaks[index]
        for each in occurrences(peak, low, high) if keys else ():
            for key in keys:
                if peak.suppress:
                    spans[key].append(((each.start, each.end), peak.name))
                else:
                    parts[key].append(_part(each))
    windows_found: list[Window] = []
    quiet_found: list[Quiet] = []
    cuts_found: list[Cut] = []
    for key in sorted({*parts, *spans}):
        quiet = quiets_of(key, spans[key])
        kept, cuts = without(key, parts[key], quiet)
        windows_found += windows_of(key, kept, quiet, gaps.get(key, 0.0))
        quiet_found += quiet
        cuts_found += cuts
    return Agenda(tuple(windows_found), tuple(quiet_found), tuple(cuts_found))


def _part(each: Occurrence) -> Part:
    peak = each.peak
    return Part(
        start=each.start,
        end=each.end,
        cause=peak.name,
        lead=peak.lead,
        rps=peak.rps,
        ramp=peak.ramp,
        priority=peak.priority,
        confidence=peak.confidence,
        require=peak.require,
        adds=peak.adds,
        began=each.start,
        moved=each.moved,
    )


def _touching(whole: Agenda, start: float, end: float) -> Agenda:
    return Agenda(
        tuple(sorted((w for w in whole.windows if w.end > start and w.start < end), key=lambda w: (w.start, w.model))),
        tuple(sorted((q for q in whole.quiet if q.end > start and q.start < end), key=lambda q: (q.start, q.model))),
        tuple(
            sorted(
                (c for c in whole.cuts if c.end > start and c.start < end), key=lambda c: (c.start, c.model, c.cause)
            )
        ),
    )
