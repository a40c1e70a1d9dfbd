"""Fitter side: what is learned from all models together: the blend's weights and the occurrence regressions.

Both are fitted on a sample of models, so that a fleet of any size costs the same. Runs in the fitting worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from forecasting import training
from forecasting.calibration import Reliability, judge, total
from forecasting.cells import cells, fit_blend
from forecasting.contest import blend_chances, cost
from forecasting.daily import by_day
from forecasting.fitted import DAY, MOST_RATE, sound
from forecasting.glm import binomial
from forecasting.launches import launches, shape_of
from forecasting.rates import COLUMNS
from forecasting.scenarios import AHEAD, HORIZONS, WINDOW, chances, state_after, window_slots, windows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.activity import Horizon
    from forecasting.occurrence import Occurrence
    from forecasting.scenarios import Windows
    from forecasting.snapshot import Snapshot
    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

BLENDED: Final = 400
"""Models that the blend is fitted on."""
POOLED: Final = 1000
"""Models that the occurrence regressions are fitted on, and `ROWS` windows of theirs."""
ROWS: Final = 40_000
JUDGED: Final = 400
"""Models that judge the regressions."""
LEAST_DAYS: Final = 3
"""Days of windows before the judging one that a regression needs."""
WEEK_DAYS: Final = 8


def some_of(snapshot: Snapshot, rows: Ints) -> Snapshot:
    """The same for some of its models."""
    return replace(snapshot, keys=tuple(snapshot.keys[int(row)] for row in rows), rows=snapshot.rows[rows])


def part_of(past: History, rows: slice | Ints) -> History:
    """The same for some of its models, absurd counts cut."""
    counts, _ = sound(past.counts[rows], MOST_RATE * past.bucket)
    return replace(past, counts=counts, known=past.known[rows])


def _drawn(snapshot: Snapshot, most: int, seed: int) -> tuple[History, Ints]:
    """5-minute counts of some models, and the minute since the epoch in which each was first seen."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(snapshot.keys))[:most])
    some = some_of(snapshot, rows)
    return part_of(some.history(300), slice(None)), some.born[some.rows]


def blend_weights(snapshot: Snapshot, origin: float) -> Floats:
    """Ten weights (`rates.COLUMNS`); zeros without two days of history, or when nothing can be fitted to it."""
    days = by_day(_drawn(snapshot, BLENDED, 0)[0], origin, snapshot.zone, WEEK_DAYS)
    if days.counts.shape[1] < 2 or not days.counts.any():  # noqa: PLR2004  # one day to look back on
        return np.zeros(len(COLUMNS))
    try:
        return sound(fit_blend(*cells(days.counts, days.bucket)).weights, MOST_RATE)[0]
    except (ValueError, RuntimeError, np.linalg.LinAlgError):
        return np.zeros(len(COLUMNS))


@dataclass(frozen=True, slots=True)
class Learned:
    """Coefficients by horizon, and what their forecasts of the held-out day were worth."""

    model: Occurrence
    verdicts: Mapping[Horizon, Reliability]
    costs: Mapping[str, float]
    """Of deciding loads by either source on that day (`contest.cost`); empty without a blend to compare with."""
    shape: Floats
    """The fleet's P(active) by slot of the day."""
    launched: int
    """Models whose first day the launch regression has learned from that really appeared; others stand in for more."""


def learned_chances(snapshot: Snapshot) -> Learned | None:
    """The regressions, from all days but the last, which judges them; None without four days or any request."""
    drawn, born = _drawn(snapshot, POOLED, 1)
    past = windows(drawn)
    day = round(DAY / WINDOW)
    length = past.counts.shape[1] - day
    if length < LEAST_DAYS * day or not past.counts.any():
        return None
    slots = past.phase(snapshot.zone)
    before = training.Windows(past.counts[:, :length], past.known[:, :length], slots[:length], WINDOW)
    shape, first = shape_of(before), launches(before, born // round(WINDOW / 60) - past.first)
    try:
        model = training.fit(
            training.sample(before, HORIZONS, since=day, rows=ROWS),
            binomial,
            young=training.launch_sample(first.past, HORIZONS, shape, first.begins),
        )
    except (ValueError, RuntimeError, np.linalg.LinAlgError):
        return None
    rows = np.arange(min(len(past.counts), JUDGED), dtype=np.int64)
    end = WINDOW * (past.first + past.counts.shape[1])
    other = blend_chances(part_of(drawn, rows), end, snapshot.zone)
    return Learned(model, *_judged(past, slots, model, other), shape, first.real)


def _judged(
    past: Windows, slots: Ints, model: Occurrence, other: Floats | None
) -> tuple[dict[Horizon, Reliability], dict[str, float]]:
    """Ask for some models before each third window of the last day, and the blend (`other`) for the same of the first.

    The verdicts by horizon, and what deciding by either of them would have cost.
    """
    day, length = round(DAY / WINDOW), past.counts.shape[1]
    rows = np.arange(min(len(past.counts), JUDGED), dtype=np.int64)
    whole = training.Windows(past.counts[rows], past.known[rows], slots, WINDOW)
    begin = length - day
    state = state_after(whole.counts[:, :begin], whole.known[:, :begin], slots[:begin])
    parts: dict[Horizon, list[Reliability]] = {horizon: [] for horizon in model.known}
    asked: list[tuple[Floats, Floats, Bools]] = []
    for now in range(begin, length):
        slot = int(slots[now])
        if now % 3 == 0:
            for horizon, verdicts in parts.items():
                usable, came = whole.answers(horizon, now, rows)
                said = model.chance(state, horizon, slot)[usable]
                verdicts.append(judge(said, came > 0))
                if other is not None and horizon == HORIZONS[0]:
                    asked.append((other[usable, 2 * (now - length + day)], said, came > 0))
        state.roll(slot, whole.counts[:, now], whole.known[:, now])
    return {horizon: total(verdicts) for horizon, verdicts in parts.items()}, _costs(asked)


def _costs(asked: list[tuple[Floats, Floats, Bools]]) -> dict[str, float]:
    if not asked:
        return {}
    blend, occurrence, came = (np.concatenate(column) for column in zip(*asked, strict=True))
    return {"blend": cost(blend, came), "occurrence": cost(occurrence, came)}


def worked_out(week: History, zone: tzinfo, age: Floats, learned: Learned) -> NDArray[np.float16]:
    """Chances of some models of some `age` in seconds for what may happen after the fit, as `scenarios.chances`."""
    past = windows(week)
    after = window_slots(past.first + past.counts.shape[1], AHEAD, zone)
    state = state_after(past.counts, past.known, past.phase(zone))
    # Windows from before a model appeared are no part of its age.
    state.age = np.minimum(state.age, np.ceil(age / WINDOW)).astype(np.int32)
    return chances(state, learned.model, after, learned.shape)
