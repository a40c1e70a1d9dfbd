"""Draws what `forecast explain` and `backtest` say. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from runtime.commands.peaksplot import PlotMissing

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from runtime.commands.foresight import Backtest, Explanation

_BLUE: Final = "#3b6fb6"
_ORANGE: Final = "#d9822b"
_GREEN: Final = "#4c9a52"
_GREY: Final = "#9a9a9a"
_CROWDED: Final = 40


def _figure(width: float, height: float, columns: int, rows: int = 1, **how: Any) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotMissing("a plot needs matplotlib; install foreload[plot]") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **how)


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


def draw_explanation(said: Explanation, path: Path) -> None:
    """Write expected requests, their interval and chances to a file. Raises `PlotMissing`, `OSError`, `ValueError`."""
    figure, grid = _figure(13, 5.2, 2, width_ratios=(3.2, 1))
    _curve(grid[0][0], said)
    _chances(grid[0][1], said)
    figure.suptitle(
        f"{said.key}: expected in the next 24 h, from {datetime.fromtimestamp(said.times[0], said.zone):%a %d %b %H:%M}"
        f" ({said.zone_name})",
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)


def _curve(axes: Axes, said: Explanation) -> None:
    from matplotlib import dates as library
    from matplotlib.ticker import MaxNLocator

    library_: Any = library
    when = library_.date2num([datetime.fromtimestamp(at, said.zone) for at in said.times])
    step = when[1] - when[0]
    edges = np.append(when, when[-1] + step)
    named: set[str] = set()
    for start, end, cause in said.windows:
        first, last = (library_.date2num(datetime.fromtimestamp(at, said.zone)) for at in (start, end))
        label = "" if cause in named else f"scheduled: {cause}"
        named.add(cause)
        axes.axvspan(max(first, edges[0]), min(last, edges[-1]), color=_GREEN, alpha=0.16, linewidth=0, label=label)
    axes.stairs(said.high, edges, baseline=said.low, fill=True, color=_BLUE, alpha=0.2, label="80 % of days")
    axes.stairs(said.past, edges, baseline=None, color=_GREY, linewidth=1.0, label="the day before")
    axes.stairs(said.expected, edges, baseline=None, color=_BLUE, linewidth=2.0, label="expected")
    axes.set_xlim(edges[0], edges[-1])
    top = max(float(np.nanmax(said.expected)), float(np.nanmax(np.append(said.past, 0))), 0.1)
    # A wide interval must not flatten the curve.
    axes.set_ylim(0, min(max(float(said.high.max()), top), 3 * top) * 1.08)
    axes.set_ylabel("requests per 15 min")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=top > 5))  # noqa: PLR2004
    axes.xaxis.set_major_locator(library_.HourLocator(byhour=range(0, 24, 3), tz=said.zone))
    axes.xaxis.set_major_formatter(library_.DateFormatter("%H:%M", tz=said.zone))
    _plain(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), frameon=False, fontsize=9, ncols=5)


def _chances(axes: Axes, said: Explanation) -> None:
    names = list(said.chances)
    places = np.arange(len(names))
    blend = [each["blend"] or 0.0 for each in said.chances.values()]
    other = [each["occurrence"] for each in said.chances.values()]
    both = any(each is not None for each in other)
    height = 0.38 if both else 0.6
    bars = [axes.barh(places - (height / 2 if both else 0), blend, height, color=_BLUE, label="from rates")]
    if both:
        values = [each if each is not None else 0.0 for each in other]
        bars.append(axes.barh(places + height / 2, values, height, color=_ORANGE, label="from occurrence"))
    for group in bars:
        axes.bar_label(group, fmt=lambda value: f"{value:.0%}", padding=3, fontsize=8)
    axes.set_yticks(places, [f"within {name}" for name in names])
    axes.set_xlim(0, 1.18)
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.invert_yaxis()
    axes.set_title("chance of a request", fontsize=10, loc="left")
    _plain(axes)
    if both:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.08), frameon=False, fontsize=8, ncols=2)


def draw_backtest(found: Backtest, path: Path) -> None:
    """Write calibration, skill by horizon and what was saved to a file. Raises as `draw_explanation`."""
    figure, grid = _figure(13, 4.6, 3)
    _reliable(grid[0][0], found)
    _skill(grid[0][1], found)
    _saved(grid[0][2], found)
    rows = found.rows
    figure.suptitle(
        f"{rows['models']} models, {rows['requests']:,} requests, {rows['days']:g} days: the gate is {rows['gate']}"
        + (f" for {rows['skilled']} of them" if rows["skilled"] else ""),
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)


def _reliable(axes: Axes, found: Backtest) -> None:
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle="--")
    for pairs in found.reliability.values():
        if pairs:
            stated, seen, number = (np.array(column) for column in zip(*pairs, strict=True))
            axes.scatter(
                stated, seen, s=12 + 150 * np.sqrt(number / number.max()), color=_BLUE, alpha=0.55, linewidth=0
            )
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    axes.set_aspect("equal")
    axes.set_xlabel("stated chance of a request in 10 min")
    axes.set_ylabel("observed frequency")
    axes.set_title("calibration on the held-out day", fontsize=10, loc="left")
    _plain(axes)
    if not any(found.reliability.values()):
        axes.text(0.5, 0.5, "not enough history", transform=axes.transAxes, ha="center", color=_GREY)


def _skill(axes: Axes, found: Backtest) -> None:
    bands = found.rows["relative_mae"]
    axes.set_title("error relative to repeating yesterday", fontsize=10, loc="left")
    _plain(axes)
    if not bands:
        axes.text(0.5, 0.5, "not enough history", transform=axes.transAxes, ha="center", color=_GREY)
        return
    values = list(bands.values())
    bars = axes.bar(list(bands), values, color=[_GREEN if value <= 1 else _ORANGE for value in values], width=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
    axes.axhline(1.0, color=_GREY, linewidth=1, linestyle="--")
    axes.set_ylim(0, max(1.15, 1.15 * max(values)))
    axes.set_xlabel("how far ahead")


def _saved(axes: Axes, found: Backtest) -> None:
    order = np.argsort(-found.saved, kind="stable")
    values = np.clip(found.saved[order], -1, 1)
    colours = np.where(found.skilled[order] & (found.rows["gate"] == "open"), _GREEN, _GREY)
    width = 0.8 if len(values) <= _CROWDED else 1.0
    axes.bar(np.arange(len(values)), values, color=colours.tolist(), width=width)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylim(min(-0.1, 1.1 * float(values.min(initial=0))), max(0.2, 1.1 * float(values.max(initial=0))))
    axes.set_xticks([])
    axes.set_xlabel("models, the best first (green: may be loaded ahead)")
    axes.set_title("loss saved against a constant rate", fontsize=10, loc="left")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _plain(axes)
    axes.grid(visible=False, axis="x")
