"""What `forecast explain` and `backtest` do: read what was counted, fit it here and now, and say what came of it.

No words of the command line and no drawing here (`foresightplot.py`). The clock is an argument.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forecasting.backtest import past_origins, roll, score, weighed
from forecasting.budget import Budget
from forecasting.busiest import FAMILIES, HORIZON, busiest
from forecasting.calendar import slots_of, zone_of
from forecasting.candidates import NAIVE_DAY, Panel
from forecasting.choose import BANDS, ORIGINS
from forecasting.counts import Counts
from forecasting.estimate import allowed, estimate
from forecasting.fit import fit
from forecasting.fitted import SOURCES
from forecasting.history import read_logs
from forecasting.intervals import around, grids
from forecasting.pooled import part_of, some_of
from forecasting.scenarios import HORIZONS, WINDOW
from forecasting.standing import Standing
from forecasting.store import STORE, Store, StoreFailed
from runtime.commands.peaks import preview

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.fitted import Fitted
    from forecasting.history import Imported
    from forecasting.sources import Estimate
    from forecasting.tiers import History
    from runtime.config.schema import Config

    Floats = NDArray[np.float64]

PEERS: Final = 300
"""Other models that the pooled parts are fitted on for one explanation."""
DAY: Final = 86_400.0
QUARTER: Final = 900.0
_TRIES: Final = 3
_JUDGED: Final = 50
_DAYS_BACK: Final = 36_500


class NotKnown(Exception):
    """There is nothing to say, and the message says why."""


# -- one model ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is expected of one model in the next 24 hours.

    `times[96]` UTC seconds of the quarters of an hour to come, `expected`, `low` and `high` requests in each (the two
    last hold 80 % of days), `past` the same 24 hours before; `rows` everything else, for programs.
    """

    key: str
    zone: tzinfo
    zone_name: str
    at: float
    times: Floats
    expected: Floats
    low: Floats
    high: Floats
    past: Floats
    chances: Mapping[str, Mapping[str, float | None]]
    windows: tuple[tuple[float, float, str], ...]
    rows: Mapping[str, Any]


def counted(folder: Path, wall: float, zone: tzinfo) -> Counts:
    """The counts that a server keeps in `folder`. Raises `NotKnown`.

    A copy is read: a running server holds the file, and a damaged one must stay where it is.
    """
    path = folder / STORE
    if not path.exists():
        raise NotKnown(f"nothing was counted yet: there is no {STORE} in the folder of the disk tier")
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / STORE
            try:
                for suffix in ("-wal", ""):  # the journal first: what it lacks is in the file by then
                    source = path.with_name(path.name + suffix)
                    if source.exists():
                        shutil.copyfile(source, copy.with_name(copy.name + suffix))
                store, aside = Store.open(copy)
                with store:
                    saved, damaged = store.load()
            except (OSError, StoreFailed) as error:
                raise NotKnown(f"the counts cannot be read: {error}") from error
            if saved is not None and not aside and not damaged:
                return Counts.restore(saved, max(wall, saved.snapshot.at), 0.0, zone=zone)[0]
    raise NotKnown("the counts cannot be read: the file is empty, damaged, or being written just now")


def explain(config: Config, model: str, now: float) -> Explanation:
    """Fit a sample of the fleet and this model, and put together all that is known of it. Raises `NotKnown`."""
    zone_name = config.preload.defaults.timezone or "UTC"
    zone = zone_of(zone_name)
    counts = counted(config.disk.path, now, zone)
    key = _key(model, counts.keys)
    snapshot = counts.snapshot()
    own = snapshot.keys.index(key)
    others = np.random.default_rng(0).permutation(len(snapshot.keys))[:PEERS]
    rows = np.unique(np.append(others, own)).astype(np.int64)
    fitted, _ = Standing().after(fit(some_of(snapshot, rows), now=now, deadline=120.0, top=0))
    row = fitted.keys.index(key)
    budget = Budget(time.monotonic, time.process_time, time.monotonic() + 60.0)
    alone = some_of(snapshot, np.array([own], np.int64))
    ahead = busiest(alone, now, 1, budget, specialists=True)
    month = part_of(alone.history(900), slice(None))
    curve = _curve(month, fitted, row, ahead, zone)
    looks = {
        source: estimate(counts, fitted, wall=now, monotonic=0.0, mode=source) for source in ("blend", "occurrence")
    }
    windows = _declared(config, key, now)
    chances = {
        _words(t): {"blend": float(looks["blend"].chance(t)[own]), "occurrence": _chance(looks["occurrence"], own, t)}
        for t in _WITHIN
    }
    said: dict[str, Any] = {
        "model": key,
        "at": _stamp(now, zone),
        "zone": zone_name,
        "source": fitted.source if config.forecast.source == "auto" else config.forecast.source,
        "source_costs": _costs(fitted),
        "allowed": bool(allowed(counts, fitted, wall=now)[own]),
        **_known(month),
        **_fit(fitted, row),
        **_rates(looks["blend"], own),
        "mix": _mix(ahead),
        "peaks": [_window(each, zone) for each in windows],
        "chances": chances,
        "curve": _listed(curve, zone),
    }
    said["why"] = [*_why(fitted, row, said), _why_source(config.forecast.source, said)]
    return Explanation(key, zone, zone_name, now, *curve, chances, tuple(windows), said)


_WITHIN: Final = (600.0, 3600.0, 4 * 3600.0, 13 * 3600.0)


def _chance(look: Estimate, row: int, within: float) -> float | None:
    return float(look.chance(within)[row]) if look.source == "occurrence" else None


def _words(seconds: float) -> str:
    return f"{seconds / 3600:g}h" if seconds >= 3600 else f"{seconds / 60:g}m"  # noqa: PLR2004 - an hour


def _key(model: str, keys: tuple[str, ...]) -> str:
    """The counted key of a name, with or without its version."""
    if model in keys:
        return model
    versions = [key for key in keys if key.partition("@")[0] == model]
    if not versions:
        raise NotKnown(f"no request for {model!r} was counted; {len(keys)} models are known")
    return max(versions, key=lambda key: (len(key), key))


def _curve(
    month: History, fitted: Fitted, row: int, ahead: Mapping[str, NDArray[Any]], zone: tzinfo
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Times, expected counts, both ends of the 80 % interval, and what was counted a day before."""
    length = month.counts.shape[1]
    start = month.start + QUARTER * length
    times = start + QUARTER * np.arange(HORIZON, dtype=np.float64)
    profile = fitted.profile[row].astype(np.float64)
    expected = ahead["ahead"][0].astype(np.float64) if "ahead" in ahead else profile[slots_of(times, zone)]
    cut = slice(max(length - 7 * HORIZON, 0), length)
    then = month.start + QUARTER * np.arange(length, dtype=np.float64)[cut]
    off = np.log1p(month.counts[:, cut]) - np.log1p(profile[slots_of(then, zone)])
    off[~month.known[:, cut]] = np.nan
    grid = grids(off, np.zeros(1, np.int64))
    span = around(expected[None], grid, (0.1, 0.9))[0]
    past = np.full(HORIZON, np.nan)
    last = month.counts[0, -HORIZON:]
    past[HORIZON - len(last) :] = np.where(month.known[0, -HORIZON:], last, np.nan)
    return times, expected, span[:, 0], span[:, 1], past


def _known(month: History) -> dict[str, float]:
    return {
        "history_days": round(float(month.known[0].sum() * QUARTER / DAY), 2),
        "requests_last_day": float(month.counts[0, -HORIZON:].sum()),
        "requests_known": float(month.counts[0].sum()),
    }


def _fit(fitted: Fitted, row: int) -> dict[str, Any]:
    return {
        "confidence": str(fitted.word(row)),
        "saved": round(float(fitted.saved[row]), 4),
        "blend": {name: round(weight, 6) for name, weight in fitted.blend().items() if weight > 0},
        "fleet": {name: value for name, value in fitted.numbers.items() if not name.startswith("cpu_")},
    }


def _rates(blend: Estimate, own: int) -> dict[str, float | None]:
    use = float(blend.next_use[own])
    return {
        "evict_rate": float(blend.evict_rate[own]),
        "prefetch_rate": float(blend.prefetch_rate[own]),
        "next_use_seconds": use if np.isfinite(use) else None,
    }


def _why(fitted: Fitted, row: int, said: Mapping[str, Any]) -> list[str]:
    """Reasons, for people."""
    if said["allowed"]:
        gate = "may be loaded ahead by what was learned: its backtest beat a constant rate"
    elif fitted.skill:
        gate = "not loaded ahead by what was learned: its backtest did not beat a constant rate for sure"
    else:
        gate = "not loaded ahead by what was learned: nothing in the fleet beat a constant rate in the backtest"
    keep = "seasons (its next use)" if fitted.schedule else "recency (the last hour's rate)"
    reasons = [gate, f"kept by {keep}"]
    if said["history_days"] < 2:  # noqa: PLR2004 - days
        reasons.append("learning needs two days of history")
    if fitted.demoted[row]:
        reasons.append(
            "demoted to the last hour's rate: on the last days its forecast was worse than that"
            " (two days without that, and it is trusted again)"
        )
    if fitted.absurd[row]:
        reasons.append("its counts were impossible and were cut")
    return reasons


def _costs(fitted: Fitted) -> dict[str, float]:
    return {each: round(fitted.numbers[f"cost_{each}"], 4) for each in SOURCES if f"cost_{each}" in fitted.numbers}


def _why_source(setting: str, said: Mapping[str, Any]) -> str:
    costs = said["source_costs"]
    if setting != "auto":
        return f"rates come from {setting}, as forecast.source says"
    if not costs:
        return f"rates come from {said['source']}: there is too little history to compare the sources"
    told = ", ".join(f"{name} {cost:.3f}" for name, cost in costs.items())
    return f"rates come from {said['source']}: cost of loading by it on a held-out day, always or never being 1: {told}"


def _mix(ahead: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    if "mix" not in ahead:
        return {}
    shares = dict(zip(FAMILIES, ahead["mix"][0].tolist(), strict=True))
    return {name: round(share, 3) for name, share in shares.items() if share >= 0.01}  # noqa: PLR2004 - one percent


def _declared(config: Config, key: str, now: float) -> list[tuple[float, float, str]]:
    """Scheduled windows of the next day that hold this model."""
    found = preview(config, now, DAY).agenda.windows
    names = {key, key.partition("@")[0]}
    return [(each.start, each.end, ", ".join(each.cause)) for each in found if each.model in names]


def _window(window: tuple[float, float, str], zone: tzinfo) -> dict[str, str]:
    return {"start": _stamp(window[0], zone), "end": _stamp(window[1], zone), "cause": window[2]}


def _stamp(at: float, zone: tzinfo) -> str:
    return datetime.fromtimestamp(at, zone).isoformat(timespec="minutes")


def _listed(curve: tuple[Floats, ...], zone: tzinfo) -> list[dict[str, Any]]:
    times, expected, low, high, _ = curve
    return [
        {"time": _stamp(t, zone), "expected": round(e, 3), "low": round(a, 3), "high": round(b, 3)}
        for t, e, a, b in zip(times.tolist(), expected.tolist(), low.tolist(), high.tolist(), strict=True)
    ]


# -- a log -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backtest:
    """What would have been forecast from a log. `rows` for programs; `reliability` and `saved` for the plot."""

    rows: Mapping[str, Any]
    reliability: Mapping[str, tuple[tuple[float, float, int], ...]]
    saved: Floats
    skilled: NDArray[np.bool_]


def backtest(log: Path, now: float, zone_name: str = "UTC", *, budget: float = 600.0) -> Backtest:
    """Import a log, fit on it as a server would, and judge the forecasts on days they had not seen.

    Raises `NotKnown` for a log without requests, ValueError for one that cannot be opened or an unknown zone.
    """
    zone = zone_of(zone_name)
    imported = read_logs([log], now=now, zone=zone, days=_DAYS_BACK)
    if not imported.cells:
        shown = f"; first bad line: {imported.report.shown[0]}" if imported.report.shown else ""
        raise NotKnown(f"no request was found in {imported.report.lines} lines{shown}")
    counts = Counts(60.0 * imported.end, 0.0, zone=zone)
    counts.load_history(imported)
    snapshot = counts.snapshot()
    fitted = fit(snapshot, now=snapshot.at, deadline=budget, top=0)
    skill, judged = _skill(counts, zone)
    rows = _told(imported, fitted, zone) | {"relative_mae": skill, "models_in_relative_mae": judged}
    table = fitted.tables.get("reliability")
    pairs = [] if table is None else [(s / n, t / n, int(n)) for n, s, t in table.tolist() if n]
    return Backtest(rows, {"next 10 minutes": tuple(pairs)}, fitted.saved.astype(np.float64), fitted.skilled)


def _told(imported: Imported, fitted: Fitted, zone: tzinfo) -> dict[str, Any]:
    report = imported.report
    chances = {
        f"{_words(h.span * WINDOW)} in {_words(h.lead * WINDOW)}" if h.lead else f"next {_words(h.span * WINDOW)}": {
            name: fitted.numbers[f"occurrence_{h.lead}_{h.span}_{name}"] for name in ("brier", "climatology", "ece")
        }
        for h in HORIZONS
        if f"occurrence_{h.lead}_{h.span}_brier" in fitted.numbers
    }
    totals = {key: int(counts.sum()) for key, (_, counts) in imported.cells.items()}
    models = [
        {
            "model": key,
            "requests": totals[key],
            "saved": round(float(fitted.saved[row]), 4),
            "allowed": bool(fitted.skill and fitted.skilled[row]),
            "confidence": str(fitted.word(row)),
        }
        for row, key in enumerate(fitted.keys)
    ]
    models.sort(key=lambda each: -int(each["requests"]))  # type: ignore[call-overload]  # a count
    return {
        "lines": report.lines,
        "requests": report.counted,
        "bad_lines": report.bad,
        "problems": list(report.problems),
        "from": _stamp(60.0 * imported.start, zone),
        "to": _stamp(60.0 * imported.end, zone),
        "days": round((imported.end - imported.start) / 1440, 2),
        "gate": "open" if fitted.skill else "shut",
        "models": len(fitted.keys),
        "skilled": int(fitted.skilled.sum()) if fitted.skill else 0,
        "complete": fitted.complete,
        "keep_by": "seasons" if fitted.schedule else "recency",
        "blend": {name: round(weight, 6) for name, weight in fitted.blend().items() if weight > 0},
        "blend_10m": {name: fitted.numbers[name] for name in ("brier", "climatology", "ece") if name in fitted.numbers},
        "occurrence": chances,
        "source": fitted.source,
        "source_costs": _costs(fitted),
        "cpu_seconds": round(sum(v for k, v in fitted.numbers.items() if k.startswith("cpu_")), 2),
        "by_model": models,
    }


def _skill(counts: Counts, zone: tzinfo) -> tuple[dict[str, float], int]:
    """MAE of the mixture relative to repeating yesterday, per band of horizons: geometric mean over busy models."""
    snapshot = counts.snapshot()
    rows = np.argsort(-snapshot.rates()[:, 4], kind="stable")[:_JUDGED]
    past = part_of(some_of(snapshot, rows.astype(np.int64)).history(900), slice(None))
    length = past.counts.shape[1]
    origins = [length - HORIZON * (day + 1) for day in range(6) if length - HORIZON * (day + 1) >= 3 * HORIZON]
    if not origins:
        return {}, 0
    phase = slots_of(past.start + QUARTER * np.arange(length + HORIZON, dtype=np.float64), zone)
    panel = Panel(past.counts, past.known, phase, QUARTER, HORIZON)
    trials = {origin: past_origins(origin, QUARTER, count=ORIGINS) for origin in origins}
    rolled = roll(panel, sorted({*origins, *(each for some in trials.values() for each in some)}), HORIZON)
    said, naive = {}, {}
    for origin in origins:
        forecasts = rolled.at[origin]
        said[origin] = weighed(rolled, origin, past=trials[origin]).centre(forecasts, QUARTER)
        naive[origin] = forecasts.of(NAIVE_DAY)
    result = score(panel, said, naive)
    names = ("up to 1h", "1h to 6h", "6h to 24h")
    found = {name: result.geometric_band(band) for band, name in zip(range(len(BANDS)), names, strict=True)}
    return {name: round(value, 3) for name, value in found.items() if np.isfinite(value)}, len(rows)
