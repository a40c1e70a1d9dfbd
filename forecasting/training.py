"""Fitter side: training rows for the occurrence regressions, drawn from past windows, and their fit.

A row sees only what `Activity` had seen at its instant. Runs in the fitting worker, never on the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forecasting.activity import Activity, Horizon
from forecasting.launch import launch_features
from forecasting.occurrence import Occurrence, features

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]

MOMENTS = 600
"""Past instants from which training rows are drawn."""
ROWS = 100_000
SHRUNK = 1e-3
"""Pseudo rows per row half a day ahead, fewer in proportion for shorter leads and none for the next window: the further
ahead, the more all rows of a day say the same, so that there are far fewer of them than they seem."""
HALF_A_DAY = 43_200.0

Solve: TypeAlias = "Callable[[Floats, Floats, float], Floats]"
"""Rows, answers and pseudo rows per row to coefficients: `glm.binomial`."""


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Past windows of `window` seconds: `counts[n, T]`, `known[n, T]` (False = gap), `phase[T]` slot of the week."""

    counts: Floats
    known: Bools
    phase: Ints
    window: float = 600.0

    def __post_init__(self) -> None:
        if self.counts.shape != self.known.shape or self.counts.shape[1:] != self.phase.shape:
            msg = f"counts {self.counts.shape}, known {self.known.shape}, phase {self.phase.shape} do not match"
            raise ValueError(msg)

    def answers(self, horizon: Horizon, now: int, rows: Ints) -> tuple[Ints, Floats]:
        """Which of these models have a known answer to a question asked before window `now`, and the answers."""
        first, last = now + horizon.lead, now + horizon.lead + horizon.span
        if last > self.phase.shape[0]:
            return rows[:0], np.zeros(0)
        usable = rows[self.known[rows, first:last].all(axis=1)]
        asked = self.counts[usable, first:last].max(axis=1) > 0
        return usable, np.asarray(asked, np.float64)


@dataclass(slots=True)
class Pairs:
    """Training rows and answers of one horizon, as they come, and how many pseudo rows for each draw it to zero."""

    rows: list[Floats] = field(default_factory=list["Floats"])
    answers: list[Floats] = field(default_factory=list["Floats"])
    shrunk: float = 0.0

    def add(self, rows: Floats, answers: Floats) -> None:
        """Append a batch, if there is anything in it."""
        if len(answers):
            self.rows.append(rows)
            self.answers.append(answers)

    def fit(self, solve: Solve) -> Floats:
        """Coefficients."""
        return solve(np.concatenate(self.rows), np.concatenate(self.answers), self.shrunk)


def sample(
    past: Windows, horizons: Sequence[Horizon], *, since: int, rows: int = ROWS, seed: int = 0
) -> Mapping[Horizon, Pairs]:
    """About `rows` training rows per horizon, from at most `MOMENTS` instants not before window `since`."""
    models, length = past.counts.shape
    rng = np.random.default_rng(seed)
    moments = _pick(rng, np.arange(since, length, dtype=np.int64), MOMENTS)
    each = min(models, -(-rows // max(len(moments), 1)))
    wanted = frozenset(moments.tolist())
    state = Activity(models, past.window, [horizon.span for horizon in horizons])
    found = {each: Pairs(shrunk=SHRUNK * min(1.0, each.lead * past.window / HALF_A_DAY)) for each in horizons}
    for now in range(length):
        slot = int(past.phase[now])
        if now in wanted:
            chosen = _pick(rng, np.arange(models, dtype=np.int64), each)
            for horizon, pairs in found.items():
                usable, answers = past.answers(horizon, now, chosen)
                pairs.add(features(state, horizon, slot, usable), answers)
        state.roll(slot, past.counts[:, now], past.known[:, now])
    return found


def launch_sample(
    past: Windows, horizons: Sequence[Horizon], shape: Floats, begins: Ints | None = None
) -> Mapping[Horizon, Pairs]:
    """Training rows of first days: `past` starts with each model's first window; `shape` is `fleet_shape`'s.

    `begins[n]` are the week slots of those first windows; without it they are the same for all, `past.phase[0]`.
    """
    state = Activity(len(past.counts), past.window, [horizon.span for horizon in horizons])
    found = {horizon: Pairs() for horizon in horizons}
    everyone = np.arange(len(past.counts), dtype=np.int64)
    for now in range(min(past.phase.shape[0], state.day)):
        slot = int(past.phase[now])
        for horizon, pairs in found.items():
            usable, answers = past.answers(horizon, now, everyone)
            at = slot if begins is None else begins[usable] + now
            pairs.add(launch_features(state, horizon, at, shape, usable), answers)
        state.roll(slot, past.counts[:, now], past.known[:, now])
    return found


def fit(
    samples: Mapping[Horizon, Pairs],
    solve: Solve,
    *,
    young: Mapping[Horizon, Pairs] | None = None,
) -> Occurrence:
    """One regression per horizon that has rows."""
    return Occurrence(
        {horizon: pairs.fit(solve) for horizon, pairs in samples.items() if pairs.rows},
        {horizon: pairs.fit(solve) for horizon, pairs in (young or {}).items() if pairs.rows},
    )


def _pick(rng: np.random.Generator, among: Ints, at_most: int) -> Ints:
    """Some of these, in order."""
    order = np.argsort(rng.random(len(among)), kind="stable")[:at_most]
    return among[np.sort(order)]
