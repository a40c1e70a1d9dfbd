"""Public series and traces as panels: read, put on a grid, labelled with the slot of their local week.

Belongs here: parsing and the origins of the evaluation, fixed before any result was seen. Never: forecasts.
"""

from __future__ import annotations

import csv
import gzip
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forecasting.candidates import Panel
from forecasting.profile import DAY, HOUR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forecasting.profile import Floats, Ints

TWITTER = ("AAPL", "AMZN", "CRM", "CVS", "FB")
CRANE = range(8)
ORIGINS = 6
LONG, SHORT = 101, 25
"""Hours between test origins, so that they walk through weekdays and hours: for months and for days of history."""
_MONTH = 28


@dataclass(frozen=True, slots=True)
class Case:
    """One panel with its test origins (bucket indices, newest first); `group` joins panels of one kind."""

    group: str
    panel: Panel
    origins: tuple[int, ...]


def root() -> Path:
    """Where the public data lies: FORELOAD_SHARED, or beside the checkout."""
    return Path(os.environ.get("FORELOAD_SHARED", "../shared"))


def rows(name: str, folder: str = "series") -> list[list[str]]:
    """All lines of a file but its heading."""
    with gzip.open(root() / folder / f"{name}.csv.gz", "rt") as file:
        return list(csv.reader(file))[1:]


def cases(names: set[str] | None = None) -> Iterator[Case]:
    """Every panel, one at a time; only the named groups when given."""
    makers: dict[str, Callable[[], list[Panel]]] = {
        "Taylor": _taylor,
        "NYC": _nyc,
        "ELB 5 min": _elb,
        "Twitter 15 min": lambda: _twitter(3),
        "Twitter 5 min": lambda: _twitter(1),
        "ServeGen 10 min": _servegen,
        "Crane 5 min": lambda: _crane(5),
        "Crane 1 min": lambda: _crane(1),
    }
    for group, make in makers.items():
        if names is None or group in names:
            for panel in make():
                yield Case(group, panel, origins_of(panel))


def origins_of(panel: Panel) -> tuple[int, ...]:
    """Test origins: the newest sees exactly one day of truth."""
    length = panel.counts.shape[1]
    hours = LONG if length / panel.day >= _MONTH else SHORT
    stride = round(hours * HOUR / panel.bucket)
    return tuple(length - panel.day - k * stride for k in range(ORIGINS))


def slots(start: float, bucket: float, length: int, per_day: int) -> Ints:
    """Slot of the week of each bucket for a clock without jumps; `start` in seconds of local time."""
    at = start + np.arange(length) * bucket
    weekday = (at // DAY + 3) % 7  # the first of January 1970 was a Thursday
    return (weekday * per_day + at % DAY // (DAY / per_day)).astype(np.int64)


def panel_of(values: Floats, start: float, bucket: float, per_day: int) -> Panel:
    """A panel of series on one grid; NaN is a gap. A day of phases follows the data."""
    day = round(DAY / bucket)
    known = np.isfinite(values)
    phase = slots(start, bucket, values.shape[1] + day, per_day)
    return Panel(np.where(known, values, 0.0), known, phase, bucket, per_day)


def merged(values: Floats, times: int) -> Floats:
    """Sums of so many neighbours; an incomplete rest is dropped."""
    whole = values.shape[-1] // times * times
    return np.asarray(values[..., :whole].reshape(*values.shape[:-1], -1, times).sum(axis=-1))


def _second(stamp: str) -> float:
    return datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()


def _taylor() -> list[Panel]:
    values = np.array([[float(row[0]) for row in rows("darts_taylor")]])
    return [panel_of(values, _second("2000-06-05"), 1800.0, 48)]


def _nyc() -> list[Panel]:
    found = rows("nyc_taxi")
    return [panel_of(np.array([[float(row[1]) for row in found]]), _second(found[0][0]), 1800.0, 48)]


def _elb() -> list[Panel]:
    found = rows("elb_request_count_8c0756")
    start = _second(found[0][0]) // 300 * 300
    index = [int((_second(row[0]) - start) // 300) for row in found]
    values = np.full((1, index[-1] + 1), np.nan)
    values[0, index] = [float(row[1]) for row in found]
    return [panel_of(values, start, 300.0, 96)]


def _twitter(times: int) -> list[Panel]:
    found = [rows(f"Twitter_volume_{name}") for name in TWITTER]
    start = _second(found[0][0][0]) // 300 * 300
    skip = int(-start % (300 * times) // 300)
    length = min(len(one) for one in found)
    values = np.array([[float(row[1]) for row in one[skip:length]] for one in found])
    return [panel_of(merged(values, times), start + skip * 300, 300.0 * times, 96)]


def _crane(times: int) -> list[Panel]:
    """Gauges without a unit: scaled to a median of 100, since only their shape means something here."""
    by_grid: dict[tuple[float, int], list[Floats]] = {}
    for number in CRANE:
        found = rows(f"crane_input{number}")
        values = np.array([float(row[1]) for row in found])
        by_grid.setdefault((float(found[0][0]), len(found)), []).append(values / np.median(values) * 100)
    east = 8 * HOUR  # the services are in China
    return [
        panel_of(merged(np.stack(some), times), start + east, 60.0 * times, 96) for (start, _), some in by_grid.items()
    ]


def _servegen() -> list[Panel]:
    counts: dict[str, Floats] = {}
    for window, key, count in rows("servegen_mlarge_10min_counts", "traces"):
        counts.setdefault(key, np.zeros(2016))[int(window)] = float(count)
    # The calendar is hidden, local midnight is known: any Monday serves as the first day.
    return [panel_of(np.stack(list(counts.values())), 4 * DAY, 600.0, 144)]
