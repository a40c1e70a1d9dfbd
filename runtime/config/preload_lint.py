"""Predicts trouble that legal scheduled peaks will have: on this day, with these models, in this much memory.

Pure; the instant, the models and the room are arguments. What is wrong on every day is in `preload_checks.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from forecasting.peaks import Peak, agenda, next_start
from runtime.config.preload_peaks import peaks_of
from runtime.config.units import print_ratio, round_bytes
from runtime.config.yaml import Fault, closest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from forecasting.merge import Window
    from runtime.config.document import KeyPath
    from runtime.config.preload import Preload, When

_HORIZON: Final = 35 * 86_400.0
_MOST: Final = 10

Level: TypeAlias = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Known:
    """A model that is served: its key, the bytes it needs on a device (None: unknown), its labels."""

    key: str
    size: int | None = None
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Remark:
    """One prediction: how bad, and where, what and what to do about it."""

    level: Level
    fault: Fault


def inspect(preload: Preload, *, now: float, known: Sequence[Known], room: int | None) -> list[Remark]:
    """Look at every entry as of `now`, UTC epoch seconds. `room`: bytes of all devices together, None if unknown."""
    peaks = peaks_of(preload)
    found = [*_models(preload, peaks, known), *_expired(preload, peaks, now)]
    if preload.defaults.mode == "observe" and preload.peaks:
        text = "observe plans and reports, and loads nothing ahead"
        found.append(Remark("note", Fault(("preload", "defaults", "mode"), text, "say act once the plan is right")))
    if room is not None:
        found += _room(preload, peaks, known, now, room)
    return found


def labels_of(known: Sequence[Known]) -> dict[str, Mapping[str, str]]:
    """Labels per key, as `forecasting` takes them."""
    return {each.key: dict(each.labels) for each in known}


def _at(index: int, *rest: str | int) -> KeyPath:
    return ("preload", "peaks", index, *rest)


def _models(preload: Preload, peaks: Sequence[Peak], known: Sequence[Known]) -> Iterator[Remark]:
    keys, labels = [each.key for each in known], labels_of(known)
    names = {key.partition("@")[0] for key in keys}
    expected: dict[str, KeyPath] = {}
    for index, (entry, peak) in enumerate(zip(preload.peaks, peaks, strict=True)):
        level: Level = "warning" if entry.allow_missing or not entry.enabled else "error"
        for place, pattern in enumerate(entry.models):
            if pattern == "*" or replace(peak, models=(pattern,), labels=()).selects(keys):
                continue
            if entry.allow_missing:
                expected.setdefault(pattern, _at(index, "models", place))
                continue
            hint = closest(pattern, keys if "@" in pattern else names) or "no model is served"
            yield Remark(level, Fault(_at(index, "models", place), f"no model {pattern} is served", hint))
        if entry.selector and not replace(peak, models=()).selects(keys, labels):
            yield Remark(level, Fault(_at(index, "selector"), "selects no model", _labels_hint(known)))
    if expected:
        # One line, however many: that they may be missing was said on purpose.
        what = f"not served, which allow_missing accepts: {', '.join(sorted(expected))}"
        yield Remark("warning", Fault(next(iter(expected.values())), what))


def _labels_hint(known: Sequence[Known]) -> str:
    have = sorted({f"{name}: {value}" for each in known for name, value in each.labels})
    return f"labels there are: {', '.join(have[:20])}" if have else "no model has labels; they are in its manifest"


def _expired(preload: Preload, peaks: Sequence[Peak], now: float) -> Iterator[Remark]:
    for index, (entry, peak) in enumerate(zip(preload.peaks, peaks, strict=True)):
        if not entry.enabled:
            yield Remark("note", Fault(_at(index, "enabled"), "is switched off"))
            continue
        running = agenda([replace(peak, models=("*",))], now, math.nextafter(now, math.inf), ["any@1"])
        if running.windows or running.quiet or next_start(peak, now) is not None:
            continue
        if peak.valid_until <= now:
            fault = Fault(_at(index, "valid_until"), "has passed", "remove the entry, or extend it")
        elif next_start(replace(peak, only_on=(), except_on=(), valid_until=math.inf), now) is None:
            what = "is in the past" if entry.when.once else "does not fire again; its COUNT or UNTIL is in the past"
            fault = Fault(_at(index, "when", _key(entry.when)), what, "remove the entry, or give it a later time")
        else:
            key = "only_on" if entry.only_on else "except_on" if entry.except_on else "valid_until"
            fault = Fault(_at(index, key), "leaves no date in the next five years", "are its dates in the past?")
        yield Remark("error", fault)


def _key(when: When) -> str:
    return next(key for key in ("at", "cron", "rrule", "once") if getattr(when, key) is not None)


# -- room --------------------------------------------------------------------------------------------


def _room(preload: Preload, peaks: Sequence[Peak], known: Sequence[Known], now: float, room: int) -> Iterator[Remark]:
    sizes = {each.key: each.size for each in known}
    order = {peak.name: index for index, peak in enumerate(peaks)}
    share = preload.defaults.max_gpu_fraction
    seen: set[frozenset[str]] = set()
    for window, active in _crowds(_ahead(peaks, known, now)):
        held = frozenset(each.model for each in active)
        need = sum(sizes.get(model) or 0 for model in held)
        if need <= share * room or held in seen or len(seen) >= _MOST:
            continue
        seen.add(held)
        # Named is the entry that would go short.
        index = min((e.require, e.priority, -max(order[name] for name in e.cause)) for e in active)[2] * -1
        at = datetime.fromtimestamp(window.ready_by, peaks[index].zone).isoformat(timespec="minutes")
        listed = ", ".join(f"{model} ({round_bytes(sizes.get(model) or 0)})" for model in sorted(held))
        if need > room:
            what = f"infeasible at {at}: {listed} need {round_bytes(need)}, the devices have {round_bytes(room)}"
            hint = "shorten or move a window, or name fewer models; the lowest priority will be cold"
            yield Remark("error", Fault(_at(index), what, hint))
        else:
            most = f"{print_ratio(share)} of {round_bytes(room)}"
            what = f"at {at} {listed} need {round_bytes(need)}, over max_gpu_fraction ({most})"
            yield Remark("warning", Fault(_at(index), what, "raise it, or name fewer models"))


def _ahead(peaks: Sequence[Peak], known: Sequence[Known], now: float) -> list[Window]:
    """Windows of the next five weeks, and those around the next start of entries that come later."""
    keys, labels = [each.key for each in known], labels_of(known)
    found = dict.fromkeys(agenda(peaks, now, now + _HORIZON, keys, labels).windows)
    for peak in peaks:
        start = next_start(peak, now)
        if start is not None and start >= now + _HORIZON:
            found |= dict.fromkeys(agenda(peaks, start - peak.lead, start + peak.duration, keys, labels).windows)
    return sorted(found, key=lambda window: (window.ready_by, window.start, window.model))


def _crowds(windows: Sequence[Window]) -> Iterator[tuple[Window, list[Window]]]:
    """Whenever a window's models must be ready: which windows are then to be held at once."""
    active: list[Window] = []
    for index, window in enumerate(windows):
        active = [each for each in active if each.end > window.ready_by] + [window]
        more = windows[index + 1] if index + 1 < len(windows) else None
        if more is None or more.ready_by > window.ready_by:
            yield window, active
