"""How declared windows meet: with each other, with what suppresses them, and with the forecast.

Intervals and numbers only; where windows come from is `peaks.py`'s to know. Times are UTC epoch seconds, rates are
requests per second. All functions are pure and their results sorted, so that equal input gives equal output.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forecasting.outlook import Prospect

Interval: TypeAlias = tuple[float, float]
"""[start, end)."""

REACH: Final = 31 * 86_400.0
"""Seconds on both sides of a turn of the month over which a window must go on to be cut there."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one entry says of one model: [start, end), its rate (reached linearly within `ramp` s), and its weight.

    `began` is where the entry's own window starts: a part that was cut keeps the ramp of the whole. `adds` says that
    the rate comes on top of others (`combine: sum`), `moved` that a change of the clocks moved the start.
    """

    start: float
    end: float
    cause: str
    lead: float = 0.0
    rps: float = 0.0
    ramp: float = 0.0
    priority: int = 0
    confidence: float = 1.0
    require: bool = False
    adds: bool = False
    began: float | None = None
    moved: bool = False

    def rate(self, at: float) -> float:
        """Requests per second at an instant; 0 outside."""
        if not self.start <= at < self.end:
            return 0.0
        into = at - (self.start if self.began is None else self.began)
        return self.rps * min(1.0, into / self.ramp) if self.ramp > 0 else self.rps


@dataclass(frozen=True, slots=True)
class Window:
    """From when until when one model should be resident, merged from every entry that says so.

    Ready by `ready_by` (start - lead); `rps` is the highest declared rate (0: none was declared), `cause` the names
    of the entries, `parts` what each of them said.
    """

    model: str
    start: float
    end: float
    ready_by: float
    rps: float
    ramp: float
    priority: int
    confidence: float
    require: bool
    cause: tuple[str, ...]
    parts: tuple[Part, ...] = ()

    def rate(self, at: float) -> float:
        """Declared requests per second at an instant: the highest of the parts, and on top those that add."""
        return _rate(self.parts, at)


@dataclass(frozen=True, slots=True)
class Quiet:
    """From when until when nothing is loaded ahead for a model, except what is required. Demand still loads."""

    model: str
    start: float
    end: float
    cause: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of an entry's window that a suppression took away; `by` names who did."""

    model: str
    start: float
    end: float
    cause: str
    by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Declared:
    """What is declared of one model for the time ahead: chance of a request, rate, and seconds to the next start."""

    chance: float
    rate: float
    next_use: float


# -- windows of one model ----------------------------------------------------------------------------


def windows_of(model: str, parts: Iterable[Part], quiet: Sequence[Quiet] = (), bridge: float = 0.0) -> list[Window]:
    """Merge parts that overlap, touch or lie less than `bridge` seconds apart into windows.

    Lead, confidence and priority are the highest; a window is required if a part is. Nothing that is not required is
    made ready while it is quiet: `ready_by` then waits for the end of the quiet. A window without end is cut, see
    `cuts_of`.
    """
    groups: list[list[Part]] = []
    end = -math.inf
    for part in sorted(parts, key=lambda p: (p.start, p.end, p.cause)):
        if groups and (part.start <= end or part.start - end < bridge):
            groups[-1].append(part)
        else:
            groups.append([part])
        end = max(end, part.end) if len(groups[-1]) > 1 else part.end
    return [_window(model, tuple(piece), quiet) for group in groups for piece in _pieces(group)]


def cuts_of(start: float, end: float) -> list[float]:
    """Turns of the month (UTC) at which a window or quiet [start, end) is cut: all that lie `REACH` inside it.

    Whether a turn cuts is known from what is declared within `REACH` of it. So a window that goes on for ever, or
    for longer than anybody looks, is the same window however far one looks.
    """
    first, found = start + REACH, list[float]()
    if first > end - REACH:
        return []
    when = datetime.fromtimestamp(first, UTC)
    month = when.year * 12 + when.month - 1
    while (at := datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()) <= end - REACH:
        if at >= first:
            found.append(at)
        month += 1
    return found


def _pieces(group: Sequence[Part]) -> Iterator[list[Part]]:
    edges = [-math.inf, *cuts_of(group[0].start, max(part.end for part in group)), math.inf]
    for low, high in pairwise(edges):
        inside = [part for part in group if part.end > low and part.start < high]
        yield [replace(part, start=max(part.start, low), end=min(part.end, high)) for part in inside]


def _window(model: str, parts: tuple[Part, ...], quiet: Sequence[Quiet]) -> Window:
    start = parts[0].start
    required = any(part.require for part in parts)
    ready_by = start - max(part.lead for part in parts)
    if not required:
        over = [each.end for each in quiet if each.start < start and ready_by < each.end <= start]
        ready_by = max([ready_by, *over])
    return Window(
        model=model,
        start=start,
        end=max(part.end for part in parts),
        ready_by=ready_by,
        rps=_highest(parts, start, math.inf),
        ramp=min(part.ramp for part in parts if part.start == start),
        priority=max(part.priority for part in parts),
        confidence=max(part.confidence for part in parts),
        require=required,
        cause=tuple(sorted({part.cause for part in parts})),
        parts=parts,
    )


def _rate(parts: Iterable[Part], at: float) -> float:
    found = [(part.adds, part.rate(at)) for part in parts]
    return max((rate for adds, rate in found if not adds), default=0.0) + sum(rate for adds, rate in found if adds)


def _highest(parts: Sequence[Part], low: float, high: float) -> float:
    """Highest rate in [low, high): rates only fall where a part ends, so looking just before each end is enough."""
    waiting = deque(sorted(parts, key=lambda part: part.start))
    active: list[Part] = []
    best = 0.0
    for end in sorted({end for part in parts if (end := min(part.end, high)) > low}):
        at = math.nextafter(end, low)
        while waiting and waiting[0].start <= at:
            active.append(waiting.popleft())
        active = [part for part in active if part.end > at]
        best = max(best, _rate(active, at))
    return best


# -- suppression -------------------------------------------------------------------------------------


def quiets_of(model: str, spans: Iterable[tuple[Interval, str]]) -> list[Quiet]:
    """Merge the suppressions of one model that overlap or touch; one without end is cut, see `cuts_of`."""
    found: list[Quiet] = []
    for (start, end), cause in sorted(spans):
        if found and start <= found[-1].end:
            last = found[-1]
            causes = tuple(sorted({*last.cause, cause}))
            found[-1] = Quiet(model, last.start, max(last.end, end), causes)
        else:
            found.append(Quiet(model, start, end, (cause,)))
    return [
        replace(each, start=max(each.start, low), end=min(each.end, high))
        for each in found
        for low, high in pairwise([-math.inf, *cuts_of(each.start, each.end), math.inf])
    ]


def without(model: str, parts: Iterable[Part], quiet: Sequence[Quiet]) -> tuple[list[Part], list[Cut]]:
    """Take the quiet out of every part that is not required: what is left, and what was cut."""
    kept: list[Part] = []
    cuts: list[Cut] = []
    for part in parts:
        if part.require:
            kept.append(part)
            continue
        at = part.start
        for each in quiet:
            low, high = max(at, each.start), min(part.end, each.end)
            if low >= high:
                continue
            cuts.append(Cut(model, low, high, part.cause, each.cause))
            if at < low:
                kept.append(replace(part, start=at, end=low))
            at = high
        if at < part.end:
            kept.append(replace(part, start=at))
    return kept, cuts


# -- with the forecast -------------------------------------------------------------------------------


def declared(windows: Iterable[Window], at: float, within: float) -> dict[str, Declared]:
    """What windows say of the next `within` seconds, per model; models with no window left are absent.

    A window that declares no rate stands for the one whose chance of a request within `within` is its confidence.
    """
    found: dict[str, Declared] = {}
    for window in windows:
        if window.end <= at:
            continue
        near = window.start < at + within
        chance = window.confidence if near else 0.0
        rate = _declared_rate(window, at, within) if near else 0.0
        now = Declared(chance, rate, max(window.start - at, 0.0))
        old = found.get(window.model, now)
        found[window.model] = Declared(
            max(old.chance, now.chance), max(old.rate, now.rate), min(old.next_use, now.next_use)
        )
    return found


def _declared_rate(window: Window, at: float, within: float) -> float:
    low, high = max(window.start, at), min(window.end, at + within)
    floor = -math.log1p(-min(window.confidence, 1 - 1e-6)) / within
    edges = {
        low,
        math.nextafter(high, low),
        *(p.start + p.ramp for p in window.parts),
        *(p.start for p in window.parts),
    }
    return max([floor, *(window.rate(edge) for edge in edges if low <= edge < high)])


def merged(forecast: Prospect, declaration: Declared | None) -> Prospect:
    """Merge a forecast with what is declared: the higher rate, the higher chance (as confidence), the earlier use."""
    if declaration is None:
        return forecast
    return replace(
        forecast,
        rate=max(forecast.rate, declaration.rate),
        next_use=min(forecast.next_use, declaration.next_use),
        confidence=max(forecast.confidence, declaration.chance),
    )
