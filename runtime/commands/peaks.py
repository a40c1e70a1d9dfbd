"""What the `peaks` verbs do: look at scheduled peaks against the models there are, and lay them out in time.

No words of the command line and no drawing here (`peaksplot.py`). The clock is an argument.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from forecasting.calendar import zone_of
from forecasting.peaks import Agenda, agenda
from runtime.catalog.repository import Repository, Source
from runtime.config.document import Document, dotted, read_file
from runtime.config.lint import Finding, Level
from runtime.config.load import load
from runtime.config.preload_lint import Known, Remark, inspect, labels_of
from runtime.config.preload_peaks import peaks_of
from runtime.config.units import print_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import tzinfo
    from pathlib import Path

    from forecasting.merge import Cut, Quiet, Window
    from runtime.config.schema import Config, Device

COLUMNS: Final = ("local time", "UTC", "what", "models", "rps", "cause", "remarks")
_SHOWN: Final = 4


# -- models and room ---------------------------------------------------------------------------------


def known_models(config: Config) -> list[Known]:
    """Models that the configuration serves, by name and version, with the bytes they need on a device.

    Looks at the model folders; a model that is listed but whose folder cannot be read yet counts with what is declared.
    """
    entries = tuple(Source(each.name, each.source, each.version) for each in config.models)
    repository = Repository(tuple(config.repository), entries)
    repository.refresh()
    declared = {f"{e.name}@{e.version}": e.footprint.device for e in config.models if e.footprint}
    found: dict[str, Known] = {}
    for record in repository.records():
        sizes = record.manifest.footprint
        size = declared.get(record.key) or (sizes.device if sizes and sizes.device else record.weights_bytes)
        found[record.key] = Known(record.key, size, tuple(sorted(record.manifest.labels.items())))
    for each in config.models:
        key = f"{each.name}@{each.version}"
        found.setdefault(key, Known(key, declared.get(key)))
    return list(found.values())


def room_of(config: Config, machine: int | None) -> int | None:
    """Bytes that models may take on all devices together; None if a device's memory is only known elsewhere."""
    rooms = [_room(device, machine) for device in config.devices]
    known = [room for room in rooms if room is not None]
    return sum(known) if len(known) == len(rooms) else None


def _room(device: Device, machine: int | None) -> int | None:
    if device.memory.size is not None:
        return device.memory.size - device.headroom
    if machine is None or not device.id.startswith("cpu"):
        return None
    return device.memory.of(machine) - device.headroom


# -- lint --------------------------------------------------------------------------------------------


def lint(file: Path, environ: Mapping[str, str], now: float, machine: int | None = None) -> list[dict[str, str]]:
    """Look at the peaks of a configuration as of `now`: rows of level, place, path, text and hint, by line.

    Raises `ConfigError` for a file that is refused on any day.
    """
    config = load(file, environ)
    document = read_file(file)
    remarks = inspect(config.preload, now=now, known=known_models(config), room=room_of(config, machine))
    remarks.sort(key=lambda each: (document.line(each.fault.path), dotted(each.fault.path)))
    return [_row(each, document) for each in remarks]


def findings(config: Config, now: float, machine: int | None = None) -> list[Finding]:
    """Say the same as advice about a whole configuration: nothing here keeps a server from starting."""
    remarks = inspect(config.preload, now=now, known=known_models(config), room=room_of(config, machine))
    return [_finding(each) for each in remarks]


def _finding(remark: Remark) -> Finding:
    fault = remark.fault
    level = Level.NOTE if remark.level == "note" else Level.WARNING
    return Finding(level, dotted(fault.path), f"{fault.what} ({fault.hint})" if fault.hint else fault.what)


def _row(remark: Remark, document: Document) -> dict[str, str]:
    fault = remark.fault
    return {
        "level": remark.level,
        "place": document.place(fault.path),
        "path": dotted(fault.path),
        "text": fault.what,
        "hint": fault.hint,
    }


# -- preview -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preview:
    """The plan for a span of time: what the planner would be given, and the zone in which it is shown."""

    start: float
    end: float
    zone: tzinfo
    zone_name: str
    agenda: Agenda
    mode: str
    missing: tuple[str, ...] = ()


def preview(config: Config, now: float, span: float, zone: str | None = None) -> Preview:
    """Lay out the windows of the next `span` seconds. Raises `ValueError` for an unknown zone.

    A model that is named but not served is shown under its name.
    """
    name = zone or config.preload.defaults.timezone or "UTC"
    known = known_models(config)
    peaks = peaks_of(config.preload)
    keys = [each.key for each in known]
    wanted = dict.fromkeys(pattern for peak in peaks for pattern in peak.models if not set(pattern) & set("*?"))
    served = {key.partition("@")[0] for key in keys} | set(keys)
    missing = tuple(pattern for pattern in wanted if pattern not in served)
    found = agenda(peaks, now, now + span, [*keys, *missing], labels_of(known))
    return Preview(now, now + span, zone_of(name), name, found, config.preload.defaults.mode, missing)


def rows(plan: Preview) -> list[dict[str, Any]]:
    """Write a preview as rows for programs, by start: windows (`preload`), `suppress`, and what was `suppressed`."""
    found = [*_windows(plan), *_quiet(plan), *_cuts(plan)]
    return sorted(found, key=lambda row: (row["start_utc"], row["what"], row["models"]))


def cells(row: Mapping[str, Any], plan: Preview) -> list[str]:
    """One row as the cells of a table."""
    models = row["models"]
    listed = ", ".join(models[:_SHOWN]) + (f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else "")
    return [
        _span(row["start"], row["end"], plan.zone_name),
        _span(row["start_utc"], row["end_utc"], "UTC"),
        row["what"],
        listed,
        f"{row['rps']:g}" if row.get("rps") else "",
        ", ".join(row["cause"]),
        "; ".join(row["remarks"]),
    ]


def _windows(plan: Preview) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[object, ...], list[Window]] = {}
    for window in plan.agenda.windows:
        same = (window.start, window.end, window.ready_by, window.rps, window.require, window.cause)
        alike.setdefault(same, []).append(window)
    for windows in alike.values():
        window = windows[0]
        yield {
            "what": "preload",
            **_times(plan, window),
            "ready_by": _local(plan, window.ready_by),
            "ready_by_utc": _utc(window.ready_by),
            "models": sorted(each.model for each in windows),
            "rps": window.rps,
            "ramp": window.ramp,
            "priority": window.priority,
            "confidence": window.confidence,
            "require": window.require,
            "cause": list(window.cause),
            "remarks": list(_remarks(plan, windows)),
        }


def _quiet(plan: Preview) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[object, ...], list[Quiet]] = {}
    for quiet in plan.agenda.quiet:
        alike.setdefault((quiet.start, quiet.end, quiet.cause), []).append(quiet)
    for quiets in alike.values():
        yield {
            "what": "suppress",
            **_times(plan, quiets[0]),
            "models": sorted(each.model for each in quiets),
            "cause": list(quiets[0].cause),
            "remarks": ["nothing is loaded ahead"],
        }


def _cuts(plan: Preview) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[object, ...], list[Cut]] = {}
    for cut in plan.agenda.cuts:
        alike.setdefault((cut.start, cut.end, cut.cause, cut.by), []).append(cut)
    for cuts in alike.values():
        yield {
            "what": "suppressed",
            **_times(plan, cuts[0]),
            "models": sorted(each.model for each in cuts),
            "cause": [cuts[0].cause],
            "remarks": [f"by {', '.join(cuts[0].by)}"],
        }


def _remarks(plan: Preview, windows: Sequence[Window]) -> Iterator[str]:
    window = windows[0]
    yield f"ready {print_seconds(round(window.start - window.ready_by))} before"
    if window.require:
        yield "required"
    moved = sorted({part.cause for part in window.parts if part.moved})
    if moved:
        yield f"{', '.join(moved)}: that local time does not exist, moved to the first that does"
    absent = [each.model for each in windows if each.model in plan.missing]
    if absent:
        yield f"not served: {', '.join(absent)}"


def _times(plan: Preview, each: Window | Quiet | Cut) -> dict[str, str]:
    return {
        "start": _local(plan, each.start),
        "end": _local(plan, each.end),
        "start_utc": _utc(each.start),
        "end_utc": _utc(each.end),
    }


def _local(plan: Preview, at: float) -> str:
    return datetime.fromtimestamp(at, plan.zone).isoformat()


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _span(start: str, end: str, zone: str) -> str:
    """`Mon 2026-11-30 10:00-12:00`; the date is repeated where it changes, the offset shown where that does."""
    begin, finish = datetime.fromisoformat(start), datetime.fromisoformat(end)
    last = "%H:%M" if begin.date() == finish.date() else "%a %Y-%m-%d %H:%M"
    offset = "" if zone == "UTC" else f" {begin:%z}"
    if begin.utcoffset() != finish.utcoffset():
        return f"{begin:%a %Y-%m-%d %H:%M %z} - {finish.strftime(last)} {finish:%z}"
    return f"{begin:%a %Y-%m-%d %H:%M} - {finish.strftime(last)}{offset}"


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
