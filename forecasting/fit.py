"""Fitter side: one round of fitting, from a snapshot of the counts to plain arrays. Runs in the fitting worker.

Synchronous, in chunks of models, and over soon after its budget whatever the counts hold: absurd ones are cut and
flagged, never raised. Never import it from serving code.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forecasting.budget import Budget
from forecasting.busiest import busiest
from forecasting.calendar import WEEK, slot_of
from forecasting.calibration import Reliability, total
from forecasting.contest import chosen
from forecasting.drift import drifting
from forecasting.fitted import Fitted
from forecasting.occurrence import COLUMNS as FEATURE_NAMES
from forecasting.onebyone import Part, fleet_gate, one_by_one
from forecasting.pooled import WEEK_DAYS, blend_weights, learned_chances, part_of, some_of, worked_out
from forecasting.profile import fleet_prior
from forecasting.rates import COLUMNS, HALF_LIVES
from forecasting.scenarios import HORIZONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from forecasting.onebyone import Chunk
    from forecasting.pooled import Learned
    from forecasting.snapshot import Snapshot

    Floats = NDArray[np.float64]

FEATURES: Final = len(FEATURE_NAMES)
SEASONAL: Final = tuple(COLUMNS.index(name) for name in ("s_week", "s_yesterday", "s_week_ago", "ttn"))
BY_SEASON: Final = 0.5
"""Share of the blend's weight on seasons from which on seasons say what to keep."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Models that are fitted at once, and models whose histories are in memory at once (4,000: 200 MB)."""

    chunk: int = 1000
    read: int = 4000


def fit(
    snapshot: Snapshot,
    *,
    now: float,
    deadline: float,
    top: int = 50,
    specialists: bool = True,
    sizes: Sizes | None = None,
    clock: Callable[[], float] = time.monotonic,
    cpu: Callable[[], float] = time.process_time,
) -> Fitted:
    """Fit everything that `deadline` seconds allow; `now` is UTC. Never raises, whatever was counted.

    Models that were not reached are left out of `keys`, and `complete` is False. `top` busy models are backtested one
    by one, and may try the `specialists`.
    """
    budget = Budget(clock, cpu, clock() + deadline)
    found = _Found(snapshot, snapshot.tiers.end // 15 * 900.0)
    if budget.left():
        # Rows are read for the blend, for the regressions, for each group of models and for the busiest.
        tiers = budget.run("read", partial(snapshot.tiers.laid_out, len(snapshot.table)))
        found.snapshot = snapshot = replace(snapshot, tiers=tiers)
        found.weights = budget.run("blend", partial(blend_weights, snapshot, found.origin))
    if budget.left():
        found.learned = budget.run("occurrence", partial(learned_chances, snapshot))
    for part in _parts(snapshot, sizes or Sizes(), budget):
        found.chunks.append(budget.run("models", partial(one_by_one, part, found.weights, found.origin)))
        if found.learned is not None and budget.left():
            found.tables.append(
                budget.run("chances", partial(worked_out, part.week, part.zone, part.age, found.learned))
            )
    if budget.left():
        found.ahead = budget.run("ahead", partial(busiest, snapshot, now, top, budget, specialists=specialists))
    return _assembled(found, budget)


def _parts(snapshot: Snapshot, sizes: Sizes, budget: Budget) -> Iterator[Part]:
    """Chunks of models with their histories, as long as there is time. Histories are read for several chunks at once.

    Reading costs the same for any number of models, as rows hold all of them.
    """
    if not budget.left():
        return
    sums, exposure = budget.run("read", snapshot.sums)
    days = [(day.actual.astype(np.float64), day.expected.astype(np.float64)) for day in snapshot.days()]
    alarm = budget.run("read", partial(drifting, days, len(snapshot.table)))[snapshot.rows]
    models = len(snapshot.keys)
    for first in range(0, models, sizes.read):
        if not budget.left():
            return
        group = slice(first, min(first + sizes.read, models))
        some = some_of(snapshot, np.arange(group.start, group.stop, dtype=np.int64))
        week, month = budget.run("read", partial(some.history, 300)), budget.run("read", partial(some.history, 900))
        for start in range(0, len(some.keys), sizes.chunk):
            if not budget.left():
                return
            rows = slice(start, start + sizes.chunk)
            whole = slice(first + start, min(first + start + sizes.chunk, group.stop))
            yield Part(
                part_of(week, rows),
                part_of(month, rows),
                sums[whole],
                exposure[whole],
                np.maximum(some.tiers.end - some.born[some.rows[rows]], 0) * 60.0,
                snapshot.zone,
                alarm[whole],
            )


@dataclass(slots=True)
class _Found:
    """What a round has come to so far."""

    snapshot: Snapshot
    origin: float
    weights: Floats = field(default_factory=lambda: np.zeros(len(COLUMNS)))
    learned: Learned | None = None
    chunks: list[Chunk] = field(default_factory=list["Chunk"])
    tables: list[NDArray[np.float16]] = field(default_factory=list["NDArray[np.float16]"])
    ahead: dict[str, NDArray[Any]] = field(default_factory=dict[str, "NDArray[Any]"])


def _assembled(found: _Found, budget: Budget) -> Fitted:
    chunks, weights = found.chunks, found.weights
    count = sum(len(chunk.profile) for chunk in chunks)
    losses = _joined([chunk.losses.transpose(1, 2, 0) for chunk in chunks], (0, WEEK_DAYS - 1, 2)).transpose(2, 0, 1)
    skilled = _joined([chunk.gate.skilled for chunk in chunks], (0,)).astype(np.bool_)
    profile = _joined([chunk.profile for chunk in chunks], (0, WEEK)).astype(np.float32)
    seasons, rest = float(weights[list(SEASONAL)].sum()), float(weights[: len(HALF_LIVES)].sum())
    tables, numbers = _further(found, count)
    return Fitted(
        keys=found.snapshot.keys[:count],
        at=float(found.snapshot.at),
        origin=found.origin,
        complete=budget.complete,
        skill=fleet_gate(losses, skilled),
        schedule=bool(seasons > 0 and seasons >= BY_SEASON * (seasons + rest)),
        profile=profile,
        prior=fleet_prior(profile, [{} for _ in profile], {}).astype(np.float32),
        slot=slot_of(found.origin, found.snapshot.zone),
        fast=_joined([chunk.fast for chunk in chunks], (0,)).astype(np.int8),
        # One instant of all models lies side by side: that is how they are read.
        season=_joined([chunk.season for chunk in chunks], (0, 288)).astype(np.float32, order="F"),
        use=_joined([chunk.use for chunk in chunks], (0, 96)).astype(np.float32, order="F"),
        weights=weights,
        saved=np.clip(_joined([chunk.gate.saved for chunk in chunks], (0,)), -1e6, 1).astype(np.float32),
        skilled=skilled,
        demoted=_joined([chunk.demoted for chunk in chunks], (0,)).astype(np.bool_),
        earned=_joined([chunk.earned for chunk in chunks], (0,)).astype(np.bool_),
        confidence=_joined([chunk.words for chunk in chunks], (0,)).astype(np.int8),
        absurd=_joined([chunk.absurd for chunk in chunks], (0,)).astype(np.bool_),
        source=chosen(numbers, possible="chances" in tables),
        tables=MappingProxyType(tables),
        numbers=MappingProxyType({f"cpu_{part}": seconds for part, seconds in budget.spent.items()} | numbers),
    )


def _further(found: _Found, count: int) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
    """Tables that a round may lack, and the judgement of the held-out day."""
    tables = dict(found.ahead)
    verdict = total([chunk.reliability for chunk in found.chunks])
    numbers = _numbers(verdict, "")
    if found.learned is not None:
        known, verdicts = found.learned.model.known, found.learned.verdicts
        tables["horizons"] = np.array([(each.lead, each.span) for each in HORIZONS], np.int64)
        tables["coefficients"] = np.stack([known.get(each, np.zeros(FEATURES)) for each in HORIZONS])
        numbers |= {f"cost_{source}": each for source, each in found.learned.costs.items() if math.isfinite(each)}
        numbers["launched"] = float(found.learned.launched)
        for horizon, each in verdicts.items():
            numbers |= _numbers(each, f"occurrence_{horizon.lead}_{horizon.span}_")
        verdict = verdicts.get(HORIZONS[0], verdict)
        whole = bool(found.tables) and sum(each.shape[3] for each in found.tables) == count
        if whole and all(_proved(verdicts.get(horizon)) for horizon in HORIZONS):
            tables["chances"] = np.concatenate(found.tables, axis=3)
    if verdict.n:
        tables["reliability"] = np.stack([verdict.count, verdict.stated, verdict.true], axis=1)
    return tables, numbers


def _proved(verdict: Reliability | None) -> bool:
    """Chances that told the held-out day worse than its own frequency are better not looked up."""
    return verdict is not None and verdict.n > 0 and verdict.brier <= verdict.climatology


def _numbers(verdict: Reliability, prefix: str) -> dict[str, float]:
    if not verdict.n:
        return {}
    return {
        f"{prefix}brier": verdict.brier,
        f"{prefix}climatology": verdict.climatology,
        f"{prefix}ece": verdict.ece,
        f"{prefix}judged": verdict.n,
    }


def _joined(parts: list[Any], empty: tuple[int, ...]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(empty)
