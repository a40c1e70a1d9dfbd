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
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from forecasting.calendar import slot_of, slots_of
from forecasting.calibration import Reliability, judge, total
from forecasting.cells import cells, fit_blend
from forecasting.daily import Days, by_day, held_out
from forecasting.drift import Gate, Watch, noise_gate
from forecasting.fitted import DAY, MOST_RATE, MOST_SLOT, MOST_USE, WORDS, Fitted, sound
from forecasting.ladder import confidence
from forecasting.nextuse import expected, next_use
from forecasting.profile import fleet_prior, hier
from forecasting.rates import COLUMNS, Blend, seasonal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from forecasting.snapshot import Snapshot
    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

T = TypeVar("T")

CHUNK: Final = 1000
JUDGED: Final = 250
"""Models whose held-out days are judged at once: 25 MB."""
SAMPLE: Final = 400
"""Models that the pooled blend is fitted on."""
WEEK_DAYS: Final = 8
MONTH_DAYS: Final = 28
SEASONAL: Final = tuple(COLUMNS.index(name) for name in ("s_week", "s_yesterday", "s_week_ago", "ttn"))
BY_SEASON: Final = 0.5
"""Share of the blend's weight on seasons from which on seasons say what to keep."""
LUCK: Final = 0.02
"""Share of models that pass the gate on pure noise, at most."""


@dataclass(slots=True)
class _Budget:
    """What may still be spent, and what has been, by part."""

    clock: Callable[[], float]
    cpu: Callable[[], float]
    until: float
    spent: dict[str, float] = field(default_factory=dict[str, float])
    complete: bool = True

    def left(self) -> bool:
        """Is there time for another chunk? If not, the round is incomplete."""
        if self.clock() >= self.until:
            self.complete = False
        return self.complete

    def run(self, part: str, work: Callable[[], T]) -> T:
        """Run it, and add its CPU seconds to a part."""
        began = self.cpu()
        try:
            return work()
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + self.cpu() - began


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one chunk of models came to, row by row."""

    profile: Floats
    season: Floats
    use: Floats
    gate: Gate
    losses: Floats
    words: Ints
    demoted: Bools
    absurd: Bools
    reliability: Reliability


def fit(
    snapshot: Snapshot,
    *,
    now: float,
    deadline: float,
    top: int = 50,
    specialists: bool = True,
    clock: Callable[[], float] = time.monotonic,
    cpu: Callable[[], float] = time.process_time,
) -> Fitted:
    """Fit everything that `deadline` seconds allow; `now` is UTC. Never raises, whatever was counted.

    Models that were not reached are left out of `keys`, and `complete` is False. `top` busy models may try the
    `specialists`.
    """
    budget = _Budget(clock, cpu, clock() + deadline)
    sums, exposure, strange = _sums(snapshot)
    origin = snapshot.tiers.end // 15 * 900.0
    weights = budget.run("blend", lambda: _blend(snapshot, origin)) if budget.left() else np.zeros(len(COLUMNS))
    done: list[_Chunk] = []
    for rows in _chunks(len(snapshot.keys)):
        if not budget.left():
            break
        part = Part(_part(snapshot, rows), sums[rows], exposure[rows], strange[rows])
        done.append(budget.run("models", partial(_models, part, weights, origin)))
    return _assembled(snapshot, done, weights, origin, budget)


def _chunks(models: int) -> Iterator[slice]:
    return (slice(first, min(first + CHUNK, models)) for first in range(0, models, CHUNK))


def _part(snapshot: Snapshot, rows: slice | Ints) -> Snapshot:
    """The same for some of its models."""
    index = np.arange(len(snapshot.keys))[rows]
    return replace(snapshot, keys=tuple(snapshot.keys[row] for row in index), rows=snapshot.rows[index])


def _sums(snapshot: Snapshot) -> tuple[NDArray[np.float32], NDArray[np.float32], Bools]:
    """Week sums and exposure, and whose were impossible."""
    sums, exposure = snapshot.sums()
    strange = np.zeros(len(sums), np.bool_)
    for rows in _chunks(len(sums)):
        for array, most in ((sums, MOST_SLOT), (exposure, 1e3)):
            values, changed = sound(array[rows], most)
            if changed.any():
                array[rows] = values
                strange[rows] |= changed
    return sums, exposure, strange


def _history(snapshot: Snapshot, bucket: int) -> tuple[History, Bools]:
    past = snapshot.history(bucket)
    counts, strange = sound(past.counts, MOST_RATE * bucket)
    return replace(past, counts=counts), strange


# -- the pooled blend --------------------------------------------------------------------------------


def _blend(snapshot: Snapshot, origin: float) -> Floats:
    """Ten weights; zeros without two days of history."""
    models = len(snapshot.keys)
    rows = np.sort(np.random.default_rng(0).permutation(models)[:SAMPLE])
    past, _ = _history(_part(snapshot, rows), 300)
    days = by_day(past, origin, snapshot.zone, WEEK_DAYS)
    if not models or days.counts.shape[1] < 2 or not days.counts.any():  # noqa: PLR2004  # one to look back on
        return np.zeros(len(COLUMNS))
    try:
        weights = fit_blend(*cells(days.counts, days.bucket)).weights
    except (ValueError, RuntimeError, np.linalg.LinAlgError):
        return np.zeros(len(COLUMNS))
    return sound(weights, MOST_RATE)[0]


# -- model by model ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of models: their snapshot, week sums and exposure `[n, 672]`, and whose sums were impossible."""

    counts: Snapshot
    sums: NDArray[np.float32]
    exposure: NDArray[np.float32]
    strange: Bools


def _models(chunk: Part, weights: Floats, origin: float) -> _Chunk:
    """Profile, next use, seasonal rates and the gate of some models."""
    part = chunk.counts
    profile, wild = sound(hier(chunk.sums, chunk.exposure), MOST_SLOT)
    month, month_wild = _history(part, 900)
    week, week_wild = _history(part, 300)
    days = by_day(week, origin, part.zone, WEEK_DAYS)
    blend = Blend(weights)
    use = _use(by_day(month, origin, part.zone, MONTH_DAYS))
    season, season_wild = sound(_season(days, blend), MOST_RATE)
    gate, losses, reliability = _gate(days, blend)
    covered = _coverage(month, profile, part)
    watch = Watch.fresh(len(profile))
    nothing = np.full(len(profile), np.nan)
    for review in (covered[:, 0], covered[:, 1]):
        watch = watch.after(review, nothing, nothing)
    history = np.maximum(part.tiers.end - part.born[part.rows], 0) * 60.0
    words = [
        WORDS.index(confidence(float(age), skill=float(saved), coverage80=float(share)))
        for age, saved, share in zip(history, gate.saved, covered[:, 1], strict=True)
    ]
    absurd = chunk.strange | wild | month_wild | week_wild | season_wild
    return _Chunk(profile, season, use, gate, losses, np.array(words, np.int64), watch.demoted, absurd, reliability)


def _use(days: Days) -> Floats:
    """Seconds to the next use for each bucket of the next 24 hours."""
    if not days.counts.shape[1]:
        return np.full((len(days.counts), days.counts.shape[2]), np.inf)
    seconds = next_use(expected(days.counts, days.known), days.bucket).seconds
    return np.where(seconds <= MOST_USE, seconds, np.inf)


def _season(days: Days, blend: Blend) -> Floats:
    """The part of λ_P that depends on the time of day alone, without the next use."""
    if not days.counts.shape[1] or not blend.weights.any():
        return np.zeros((len(days.counts), days.counts.shape[2]))
    first = COLUMNS.index("s_week")
    return np.asarray(
        np.einsum("knb,k->nb", seasonal(days.counts, days.bucket), blend.weights[first : first + 3]), np.float64
    )


def _gate(days: Days, blend: Blend) -> tuple[Gate, Floats, Reliability]:
    """Whose held-out days were told better than by a constant rate; losses `[2, n, days]` for the fleet's own gate."""
    models, length, _ = days.counts.shape
    if length < 2 or not blend.weights.any():  # noqa: PLR2004  # one to look back on
        shut = Gate(np.zeros(models), np.zeros(models, np.bool_))
        return shut, np.full((2, models, WEEK_DAYS - 1), np.nan), total([])
    losses = np.full((2, models, WEEK_DAYS - 1), np.nan)
    verdicts: list[Reliability] = []
    for first in range(0, models, JUDGED):
        rows = slice(first, first + JUDGED)
        held = held_out(Days(days.counts[rows], days.known[rows], days.bucket), blend)
        losses[:, rows, : length - 1] = held.learned, held.constant
        verdicts.append(judge(held.said[held.known], held.came[held.known]))
    return noise_gate(*losses), losses, total(verdicts)


def _coverage(month: History, profile: Floats, part: Snapshot) -> Floats:
    """Share of the day before yesterday's and of yesterday's counts inside the 80 % of the days before, `[n, 2]`."""
    length = month.counts.shape[1]
    per = round(DAY / 900)
    found = np.full((len(profile), 2), np.nan)
    if length < 4 * per:
        return found
    cut = slice(max(length - 9 * per, 0), length)
    slots = slots_of(month.start + 900.0 * np.arange(length, dtype=np.float64)[cut], part.zone)
    off = np.log1p(month.counts[:, cut]) - np.log1p(profile[:, slots])
    off[~month.known[:, cut]] = np.nan
    for place, back in enumerate((2, 1)):
        before, there = off[:, : -back * per], off[:, off.shape[1] - back * per : off.shape[1] - (back - 1) * per]
        usable = np.isfinite(before).sum(axis=1) >= 2 * per
        rows = np.flatnonzero(usable & np.isfinite(there).any(axis=1))
        if rows.size:
            low, high = np.nanquantile(before[rows], (0.1, 0.9), axis=1)
            inside = (there[rows] >= low[:, None] - 1e-9) & (there[rows] <= high[:, None] + 1e-9)
            found[rows, place] = np.where(np.isfinite(there[rows]), inside, np.nan).sum(axis=1) / np.isfinite(
                there[rows]
            ).sum(axis=1)
    return found


# -- together ----------------------------------------------------------------------------------------


def fleet_gate(losses: Floats, skilled: Bools) -> bool:
    """Whether the fleet has skill: all models together, each counting the same, or more of them than luck gives."""
    scale = np.nansum(losses[1], axis=1)
    used = scale > 0
    if not used.any():
        return False
    relative = losses[:, used] / scale[used][None, :, None]
    tested = np.isfinite(relative).any(axis=1)
    pooled = np.where(tested, np.nansum(relative, axis=1), np.nan)
    if noise_gate(pooled[0][None], pooled[1][None]).fleet:
        return True
    luck = LUCK * len(skilled)
    return bool(skilled.sum() > luck + 3 * math.sqrt(luck))


def _assembled(snapshot: Snapshot, done: list[_Chunk], weights: Floats, origin: float, budget: _Budget) -> Fitted:
    count = sum(len(chunk.profile) for chunk in done)
    losses = _joined([chunk.losses.transpose(1, 2, 0) for chunk in done], (0, WEEK_DAYS - 1, 2)).transpose(2, 0, 1)
    skilled = _joined([chunk.gate.skilled for chunk in done], (0,)).astype(np.bool_)
    profile = _joined([chunk.profile for chunk in done], (0, 672)).astype(np.float32)
    verdict = total([chunk.reliability for chunk in done])
    numbers = {f"cpu_{part}": seconds for part, seconds in budget.spent.items()}
    if verdict.n:
        numbers |= {"brier": verdict.brier, "climatology": verdict.climatology, "ece": verdict.ece, "judged": verdict.n}
    seasons = float(weights[list(SEASONAL)].sum())
    rest = float(weights[:5].sum())
    return Fitted(
        keys=snapshot.keys[:count],
        at=float(snapshot.at),
        origin=origin,
        complete=budget.complete,
        skill=fleet_gate(losses, skilled),
        schedule=bool(seasons > 0 and seasons >= BY_SEASON * (seasons + rest)),
        profile=profile,
        prior=fleet_prior(profile, [{}] * len(profile), {}).astype(np.float32),
        slot=slot_of(origin, snapshot.zone),
        fast=np.full(count, 2, np.int8),
        season=_joined([chunk.season for chunk in done], (0, 288)).astype(np.float32),
        use=_joined([chunk.use for chunk in done], (0, 96)).astype(np.float32),
        weights=weights,
        saved=np.clip(_joined([chunk.gate.saved for chunk in done], (0,)), -1e6, 1).astype(np.float32),
        skilled=skilled,
        demoted=_joined([chunk.demoted for chunk in done], (0,)).astype(np.bool_),
        confidence=_joined([chunk.words for chunk in done], (0,)).astype(np.int8),
        absurd=_joined([chunk.absurd for chunk in done], (0,)).astype(np.bool_),
        tables=MappingProxyType(
            {"reliability": np.stack([verdict.count, verdict.stated, verdict.true], axis=1)} if verdict.n else {}
        ),
        numbers=MappingProxyType(numbers),
    )


def _joined(parts: list[Any], empty: tuple[int, ...]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(empty)
