"""Draws a preview as a chart of bars over time, one line per model. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

import importlib
import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from runtime.commands.peaks import Preview

_COLOURS: Final = ("#3b6fb6", "#d9822b", "#4c9a52", "#8a5fb0", "#c0504d", "#4aa3a8", "#9c755f", "#b5a642")
_QUIET: Final = "#9a9a9a"
_HOURLY: Final = timedelta(days=4)
_MOST_TICKS: Final = 16
_MOST_SHADED: Final = timedelta(days=92)
_SATURDAY: Final = 5
_MOST_LINES: Final = 60
_LEAST_SHARE: Final = 0.004
"""Part of the width that even a short window gets, so that it can be seen."""


class PlotMissing(Exception):
    """matplotlib is not installed."""


def draw(plan: Preview, path: Path) -> None:
    """Write the chart to a file; its ending chooses the format. Raises `PlotMissing`, `OSError` or `ValueError`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotMissing("a plot needs matplotlib; install foreload[plot]") from None
    models = sorted({each.model for each in plan.agenda.windows} | {each.model for each in plan.agenda.quiet})
    shown = models[:_MOST_LINES]
    figure = Figure(figsize=(13, 1.9 + 0.42 * max(len(shown), 2)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    patches = _bars(axes, plan, shown)
    _frame(axes, plan, shown, len(models) - len(shown))
    if patches:
        figure.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 6), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _bars(axes: Axes, plan: Preview, models: Sequence[str]) -> list[Patch]:
    """Draw what is planned, and give what the legend is to explain."""
    from matplotlib.patches import Patch

    line = {model: index for index, model in enumerate(models)}
    causes = sorted({", ".join(window.cause) for window in plan.agenda.windows})
    colour = {cause: _COLOURS[index % len(_COLOURS)] for index, cause in enumerate(causes)}
    least = (plan.end - plan.start) * _LEAST_SHARE
    for window in plan.agenda.windows:
        if window.model not in line:
            continue
        at, fill = line[window.model], colour[", ".join(window.cause)]
        edge = "black" if window.require else "none"
        _bar(axes, at, window.ready_by, window.start, plan.zone, height=0.22, color=fill, alpha=0.45)
        end = max(window.end, window.start + least)
        _bar(axes, at, window.start, end, plan.zone, height=0.62, color=fill, edgecolor=edge, linewidth=1.4)
    for quiet in plan.agenda.quiet:
        if quiet.model in line:
            _bar(
                axes, line[quiet.model], quiet.start, max(quiet.end, quiet.start + least), plan.zone,
                height=0.86, facecolor="none", edgecolor=_QUIET, hatch="////", linewidth=0.8,
            )  # fmt: skip
    patches = [Patch(color=colour[cause], label=cause) for cause in causes]
    if any(window.require for window in plan.agenda.windows):
        patches.append(Patch(facecolor="white", edgecolor="black", label="required"))
    if plan.agenda.quiet:
        patches.append(Patch(facecolor="none", edgecolor=_QUIET, hatch="////", label="nothing loaded ahead"))
    return patches


def _bar(axes: Axes, line: int, start: float, end: float, zone: tzinfo, *, height: float, **style: Any) -> None:
    left, right = (_dates().date2num(datetime.fromtimestamp(at, zone)) for at in (start, end))
    axes.broken_barh([(left, right - left)], (line - height / 2, height), **style)


def _frame(axes: Axes, plan: Preview, models: Sequence[str], left_out: int) -> None:
    dates = _dates()
    begin, end = (datetime.fromtimestamp(at, plan.zone) for at in (plan.start, plan.end))
    axes.set_xlim(dates.date2num(begin), dates.date2num(end))
    _weekends(axes, begin, end)
    if end - begin > _HOURLY:
        step = max(1, math.ceil((end - begin) / timedelta(days=_MOST_TICKS)))
        days = [day for day in _midnights(begin, end) if day > begin][::step]
        axes.set_xticks(dates.date2num(days), [f"{day:%a}\n{day:%d %b}" for day in days])
    else:
        locator = dates.AutoDateLocator(tz=plan.zone, minticks=5, maxticks=16)
        formats = ["%Y", "%b %Y", "%a\n%d %b", "%H:%M", "%H:%M", "%H:%M:%S"]
        zeros = ["%Y", "%b %Y", "%d %b", "%a\n%d %b", "%H:%M", "%H:%M"]
        look = dates.ConciseDateFormatter(locator, tz=plan.zone, formats=formats, zero_formats=zeros, show_offset=False)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(look)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(max(len(models), 1) - 0.4, -0.6)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    more = f", {left_out} models more" if left_out else ""
    axes.set_title(
        f"Scheduled peaks, {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}, {plan.zone_name}{more}", loc="left"
    )
    if not models:
        axes.text(0.5, 0.5, "nothing is scheduled", transform=axes.transAxes, ha="center", color="#666666")


def _weekends(axes: Axes, begin: datetime, end: datetime) -> None:
    """Shade Saturdays and Sundays, as long as they can be told apart."""
    if end - begin > _MOST_SHADED:
        return
    for day in _midnights(begin, end):
        if day.weekday() >= _SATURDAY:
            ends = _dates().date2num([day, day + timedelta(days=1)])
            axes.axvspan(*ends, color="#f3f3f3", zorder=0, linewidth=0)


def _midnights(begin: datetime, end: datetime) -> list[datetime]:
    """Local midnights from the one before `begin` on; adding days to a local time keeps its hour."""
    first = begin.replace(hour=0, minute=0, second=0, microsecond=0)
    count = math.ceil((end - first) / timedelta(days=1))
    return [first + timedelta(days=number) for number in range(count)]


def _dates() -> Any:
    """Dates of matplotlib, which carry no annotations."""
    return importlib.import_module("matplotlib.dates")
