"""Direct regression: how far the next day will be off the usual week, from how far the past days were.

Belongs here: the usual week, its deviations, one ridge regression for each bucket ahead. numpy alone, serving and
fitting alike. Never: choosing models, admission, clocks. Source: direct multi-step forecasts (Chevillon 2007,
section 3) by least absolute deviations, iteratively reweighted (Huber & Ronchetti 2009, section 7.8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from forecasting.profile import Bools, Floats, Ints

DAYS = 7
WEEKS = 8
"""Weeks that make up the usual one, and weeks of past questions that are fitted."""
HALF_LIFE = 4.0
"""Weeks after which a week weighs half in the usual one."""
TOLERANCE = 4.0
"""Median deviations beyond which a week loses weight in the usual one: a holiday is not what usually happens."""
LEAST = 21
"""Days of history: one week before the first deviation, ten days of those before the first question, four of these."""
CEILING = 4.0
"""A forecast is cut at so many times the largest count it was fitted on: an exponential has no bound of its own."""
_BACK = DAYS + 3
_ROWS = 2688
"""Past questions that are fitted at most, evenly spread: eight weeks of half hours."""
_PSEUDO = 5.0
_ROUNDS = 3
_HOURS = (1, 3, 6, 24, 24 * DAYS)


@dataclass(frozen=True, slots=True)
class Direct:
    """Coefficients by bucket ahead and column `[day, p]`, median deviation from the usual week, largest count."""

    weights: Floats
    spread: float
    most: float

    def forecast(self, counts: Floats, known: Bools, position: Ints, origin: int, horizon: int) -> Floats:
        """`[horizon]` requests per bucket from `origin`, given the history `[T]` up to there.

        `position` is the bucket of the local week, also of those to come. Raises `ValueError` beyond a day ahead.
        """
        day = len(self.weights)
        if horizon > day:
            msg = f"a direct regression looks a day ahead ({day} buckets), not {horizon}"
            raise ValueError(msg)
        first = max(0, origin - (WEEKS + 2) * DAYS * day)
        past = _Past.of(counts[first:origin], known[first:origin], position[first : origin + horizon], day, self.spread)
        now = np.array([origin - first], np.int64)
        common = past.common(now)
        off = [(past.columns(common, now, lead) @ self.weights[lead])[0] for lead in range(horizon)]
        return bounded(past.usual[origin - first :] + np.array(off), self.most)


def bounded(logarithms: Floats, most: float) -> Floats:
    """Counts from log1p counts, not negative and cut at `CEILING` times the largest one that was fitted on."""
    return np.clip(np.expm1(np.minimum(logarithms, 50.0)), 0.0, CEILING * most)


def fitted(counts: Floats, known: Bools, position: Ints, day: int, check: Callable[[], None]) -> Direct:
    """Fit on a history `[T]`, the newest bucket last; `check` is called between regressions and may raise.

    Raises `ValueError` with less than `LEAST` days.
    """
    length = len(counts)
    if length < LEAST * day:
        msg = f"a direct regression needs {LEAST} days of history, not {length / day:.1f}"
        raise ValueError(msg)
    ahead = position[:length]
    spread = _Past.of(counts, known, ahead, day, None).spread
    past = _Past.of(counts, known, ahead, day, spread)
    first = max(length - WEEKS * DAYS * day, (DAYS + _BACK) * day)
    asked = np.arange(first, length, max(1, (length - first) // _ROWS), dtype=np.int64)
    common = past.common(asked)
    weights: list[Floats] = []
    for lead in range(day):
        check()
        there = asked < length - lead
        there[there] = past.there[asked[there] + lead]
        now = asked[there]
        columns = past.columns(common[there], now, lead)
        weights.append(_least_absolute(columns, past.off[now + lead]))
    return Direct(np.stack(weights), spread, float(np.where(known, counts, 0.0).max()))


@dataclass(frozen=True, slots=True)
class _Past:
    """Log counts, the usual week and what they were off it; unknown ones are as usual. All `[T + horizon]`."""

    day: int
    usual: Floats
    off: Floats
    there: Bools
    calm: Floats
    total: Floats
    calmed: Floats
    a_day: tuple[Ints, ...]
    a_week: Ints
    spread: float

    @classmethod
    def of(cls, counts: Floats, known: Bools, position: Ints, day: int, spread: float | None) -> _Past:
        """`position` may be longer than the counts; without a `spread` all weeks weigh alike."""
        length = len(position)
        there = np.zeros(length, np.bool_)
        there[: len(counts)] = known
        logs = np.zeros(length)
        logs[: len(counts)] = np.log1p(np.where(known, counts, 0.0))
        usual, met, spread = _usual(logs, there, position, day, spread)
        there = there & met
        off = np.where(there, logs - usual, 0.0)
        calm = np.clip(off, -TOLERANCE * spread, TOLERANCE * spread)
        total, calmed = (np.concatenate(([0.0], np.cumsum(each))) for each in (off, calm))
        days = tuple(_back(position, k * day, day) for k in (1, 2, 3))
        return cls(day, usual, off, there, calm, total, calmed, days, _back(position, DAYS * day, day), spread)

    def common(self, now: Ints) -> Floats:
        """Columns that are the same for all leads: the newest deviation, and its means over past hours."""
        spans = (1, *(max(1, hours * self.day // 24) for hours in _HOURS))
        # What was wild days ago says little, and more of it than the fit has ever seen would say too much.
        sums = (self.total,) * (len(spans) - 1) + (self.calmed,)
        means = [(each[now] - each[np.maximum(now - span, 0)]) / span for each, span in zip(sums, spans, strict=True)]
        return np.stack([np.ones(len(now)), *means], axis=1)

    def columns(self, common: Floats, now: Ints, lead: int) -> Floats:
        """All columns of questions asked before bucket `now` about `now + lead`, `[len(now), p]`."""
        target, hour = now + lead, max(1, self.day // 24)
        one, two, three = (np.maximum(days[target], 0) for days in self.a_day)
        week = np.maximum(self.a_week[target], 0)
        last = np.minimum(one + hour + 1, now)
        first = np.clip(one - hour, 0, last - 1)
        around = (self.total[last] - self.total[first]) / (last - first)
        # A deviation carries over less, or more, where the week itself is about to rise or fall.
        climb = (self.usual[target] - self.usual[now - 1]) * common[:, 2]
        own = np.where(self.there[week], self.usual[week] + self.calm[week] - self.usual[target], 0.0)
        days = (np.where(at < now, self.off[at], 0.0) for at in (one, two, three))
        return np.column_stack([common, *days, around, own, climb])


def _usual(logs: Floats, there: Bools, position: Ints, day: int, spread: float | None) -> tuple[Floats, Bools, float]:
    """Mean of past weeks at the same local time, whether there was any, and the median deviation of a week.

    Weeks that are further from their median than `TOLERANCE` spreads lose weight in proportion.
    """
    weeks = min(WEEKS, max(1, len(position) // (DAYS * day)))
    past = np.full((weeks, len(position)), np.nan)
    for row in range(weeks):
        source = _back(position, (row + 1) * DAYS * day, day)
        met = source >= 0
        met[met] = there[source[met]]
        past[row, met] = logs[source[met]]
    found = ~np.isnan(past)
    count = found.sum(axis=0)
    kept = np.sort(past, axis=0)  # NaN last
    pair = [np.take_along_axis(kept, np.maximum(at, 0)[None], axis=0)[0] for at in ((count - 1) // 2, count // 2)]
    centre = np.nan_to_num((pair[0] + pair[1]) / 2)
    far = np.abs(np.where(found, past, centre) - centre)
    if spread is None:
        several = far[found & (count > 1)]
        spread = float(np.median(several)) if several.size else 0.0
    limit = TOLERANCE * spread + 1e-9
    weight = np.where(
        found, np.exp2(-np.arange(weeks) / HALF_LIFE)[:, None] * np.minimum(1, limit / np.maximum(far, limit)), 0.0
    )
    usual = (weight * np.where(found, past, 0.0)).sum(axis=0) / np.maximum(weight.sum(axis=0), 1e-12)
    return usual, count > 0, spread


def _back(position: Ints, lag: int, day: int) -> Ints:
    """Where the same local time was `lag` buckets ago, also over a change of the clock; below 0 where nowhere."""
    at = np.arange(len(position), dtype=np.int64)
    source = at - lag
    week = DAYS * day
    drift = (position - position[np.maximum(source, 0)] - lag) % week
    drift = np.where(drift > week // 2, drift - week, drift)
    # More than two hours is no change of the clock.
    source = source + np.where((np.abs(drift) <= day // 12) & (source >= 0), drift, 0)
    return np.minimum(source, at - 1)


def _least_absolute(columns: Floats, off: Floats) -> Floats:
    """Ridge coefficients of nearly least absolute error: a holiday among the answers must not set them."""
    weight: Floats = np.ones(len(off))
    found = _least_squares(columns, off, weight)
    for _ in range(_ROUNDS - 1):
        error = np.abs(off - columns @ found)
        limit = float(np.median(error)) + 1e-9
        weight = np.asarray(limit / np.maximum(error, limit), np.float64)
        found = _least_squares(columns, off, weight)
    return found


def _least_squares(columns: Floats, off: Floats, weight: Floats) -> Floats:
    penalty = np.diag(_PSEUDO * np.concatenate(([1e-6], columns[:, 1:].var(axis=0) + 1e-9)))
    weighted: Floats = columns * weight[:, None]
    solved: Any = np.linalg.solve(weighted.T @ columns + penalty, weighted.T @ off)
    return np.asarray(solved, np.float64)
