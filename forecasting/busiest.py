"""Fitter side: the few busiest models, each backtested: which forecasts to mix, specialists included, and the next day.

Runs in the fitting worker, with what is left of its budget. Never: models that nobody waits for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forecasting.backtest import SPECIALISTS, past_origins, roll, weighed
from forecasting.calendar import slots_of
from forecasting.candidates import Panel
from forecasting.fitted import MOST_SLOT, sound
from forecasting.ladder import top as busiest_keys
from forecasting.pooled import part_of, some_of
from forecasting.profile import DAYS
from forecasting.specialists import LEAST_DAYS, Deadline, Late, Seasons, fit_direct, fit_regressed, fit_seasons

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from forecasting.backtest import Specialist
    from forecasting.budget import Budget
    from forecasting.snapshot import Snapshot
    from forecasting.specialists import Fitted

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

HORIZON: Final = 96
"""Quarters of an hour ahead: a day."""
CHUNK: Final = 10
SPECIAL: Final = 10
"""Of the busiest, how many may try the specialists in one round: nearly two CPU seconds each."""
ADMISSION: Final = 6
FAMILIES: Final = (
    "hier",
    "hier+lvl",
    "harm+lvl",
    "naive day",
    "naive week",
    "level",
    "typical",
    "median",
    *SPECIALISTS,
)
"""Families of candidates, the order of `mix`'s columns."""


def busiest(snapshot: Snapshot, now: float, top: int, budget: Budget, *, specialists: bool) -> dict[str, NDArray[Any]]:
    """Tables `ahead_rows[m]`, `ahead[m, 96]` in requests per quarter from the last full one, and `mix[m, families]`.

    Models with less than a week of history are left out. Weights are those of the next six to 24 hours.
    """
    rates = snapshot.rates(max(now - snapshot.at, 0.0))
    keys = busiest_keys(snapshot.keys, sound(rates[:, 3], 1e9)[0].tolist(), [1.0] * len(rates), top)
    place = {key: row for row, key in enumerate(snapshot.keys)}
    rows = np.array([place[key] for key in keys], np.int64)
    done: list[Ints] = []
    ahead: list[Floats] = []
    mixes: list[Floats] = []
    for first in range(0, len(rows), CHUNK):
        if not budget.left():
            break
        some = rows[first : first + CHUNK]
        found = _mixed(snapshot, some, budget, specialists=specialists and first < SPECIAL)
        if found is None:
            break
        done.append(some)
        ahead.append(found[0])
        mixes.append(found[1])
    if not done:
        return {}
    return {
        "ahead_rows": np.concatenate(done),
        "ahead": np.concatenate(ahead).astype(np.float32),
        "mix": np.concatenate(mixes).astype(np.float32),
    }


def _mixed(snapshot: Snapshot, rows: Ints, budget: Budget, *, specialists: bool) -> tuple[Floats, Floats] | None:
    past = part_of(some_of(snapshot, rows).history(900), slice(None))
    length = past.counts.shape[1]
    if length < DAYS * HORIZON:
        return None
    phase = slots_of(past.start + 900.0 * np.arange(length + HORIZON, dtype=np.float64), snapshot.zone)
    panel = Panel(past.counts, past.known, phase, 900.0, HORIZON)
    trials = past_origins(length, 900.0)
    admission: Sequence[int] = ()
    special: dict[str, Specialist] = {}
    if specialists and length >= (LEAST_DAYS + 2) * HORIZON:
        admission = [length - step * HORIZON * 3 // 4 for step in range(1, ADMISSION + 1)]
        special = _special(panel, min(admission), budget)
    try:
        rolled = roll(panel, [length, *trials, *admission], HORIZON, special)
        mix = weighed(rolled, length, past=trials, admission=admission if special else ())
        ahead, _ = sound(mix.of(rolled.at[length], 900.0), MOST_SLOT)
    except (ValueError, ArithmeticError, np.linalg.LinAlgError):
        return None
    names = [name.split("/", 1)[0] for name in mix.names]
    shares = np.zeros((len(rows), len(FAMILIES)))
    for column, name in enumerate(names):
        shares[:, FAMILIES.index(name)] += mix.weights[:, column, -1]
    return ahead, np.clip(shares, 0.0, 1.0)


def _special(panel: Panel, origin: int, budget: Budget) -> dict[str, Specialist]:
    """Specialists fitted on what was known at the oldest origin of their admission, so that none has seen its test."""
    deadline = Deadline(budget.clock, budget.until)
    fits: dict[str, list[Fitted | None]] = {name: [] for name in SPECIALISTS}
    ways: tuple[Callable[[Panel, int, int, Deadline], Fitted], ...] = (fit_seasons, fit_regressed, fit_direct)
    for row in range(len(panel.counts)):
        for name, one in zip(SPECIALISTS, ways, strict=True):
            fits[name].append(_tried(one, panel, row, origin, deadline))
    return {name: _Forecaster(panel, tuple(each)) for name, each in fits.items()}


def _tried(
    one: Callable[[Panel, int, int, Deadline], Fitted],
    panel: Panel,
    row: int,
    origin: int,
    deadline: Deadline,
) -> Fitted | None:
    """None for a fit that failed: the cheap candidates remain."""
    linalg: Any = importlib.import_module("numpy.linalg")
    try:
        return one(panel, row, origin, deadline)
    except (ValueError, ArithmeticError, IndexError, Late, linalg.LinAlgError):
        return None


class _Forecaster:
    """The forecasts of one specialist for every model of a panel; NaN where it has no fit."""

    def __init__(self, panel: Panel, fits: tuple[Fitted | None, ...]) -> None:
        self._panel = panel
        self._fits = fits

    def __call__(self, origin: int, horizon: int) -> Floats:
        found = np.full((len(self._fits), horizon), np.nan)
        for row, fitted in enumerate(self._fits):
            if fitted is not None and not (isinstance(fitted, Seasons) and origin < fitted.origin):
                counts, known = self._panel.counts[row], self._panel.known[row]
                found[row] = fitted.forecast(counts, known, self._panel.phase, origin, horizon)
        return found
