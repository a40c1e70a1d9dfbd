"""Fitter side: chances of a request worked out ahead, for each thing that may have happened since the fit.

The state behind occurrence forecasts is too large and too slow for the serving process. Between two fits only little
can happen to a model: nothing, a request just now, or one some windows ago. All three are worked out here, for each
window to come, and looked up at decision time (`estimate.py`). Never: fitting coefficients, clocks.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from forecasting.activity import HALF_LIVES, Activity, Horizon
from forecasting.calendar import SLOT, WEEK, slots_of
from forecasting.occurrence import season_of
from forecasting.replay import settled

if TYPE_CHECKING:
    from datetime import tzinfo

    from numpy.typing import NDArray

    from forecasting.occurrence import Occurrence
    from forecasting.tiers import History

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

WINDOW: Final = 600.0
HORIZONS: Final = (Horizon(0, 1), Horizon(0, 6), Horizon(18, 6), Horizon(72, 6))
"""The next 10 minutes, the next hour, an hour in 3 and in 12 hours."""
SPANS: Final = (1, 6)
AHEAD: Final = 9
"""Windows after the fit that are worked out: an hour and a half, a fit being due each hour."""
IDLE: Final = (1, 2, 4, 8)
"""Idle windows since a request that came after the fit."""
QUIET, ACTIVE = 0, 1
SCENARIOS: Final = 2 + len(IDLE)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of 10 minutes: `counts[n, T]`, `known` alike, `first` their number since the epoch."""

    counts: Floats
    known: Bools
    first: int

    def phase(self, zone: tzinfo, more: int = 0) -> Ints:
        """Slot of the local week, in windows, of each window and `more` to come."""
        return window_slots(self.first, self.counts.shape[1] + more, zone)


def window_slots(first: int, count: int, zone: tzinfo) -> Ints:
    """Slots of the local week (0..1007) of windows by number; local time is exact over clock changes."""
    begins = WINDOW * np.arange(first, first + count, dtype=np.float64)
    minute = begins % SLOT  # offsets are whole quarters of an hour nearly everywhere; a rest moves a slot by minutes
    found = np.floor((slots_of(begins, zone) * SLOT + minute) / WINDOW)
    return np.asarray(found % (WEEK * SLOT / WINDOW), np.int64)


def windows(past: History) -> Windows:
    """Pairs of 5-minute buckets."""
    skip = int(past.start // 300) % 2
    pairs = (past.counts.shape[1] - skip) // 2
    cut = slice(skip, skip + 2 * pairs)
    shape = (len(past.counts), pairs, 2)
    counts, known = past.counts[:, cut].reshape(shape), past.known[:, cut].reshape(shape)
    return Windows(counts.sum(axis=2), np.asarray(known.all(axis=2), np.bool_), int(past.start // 300 + skip) // 2)


def state_after(counts: Floats, known: Bools, phase: Ints) -> Activity:
    """The state after windows `[n, T]` whose week slots are `phase[T]`, with fresh hazards."""
    found = settled(counts, known, phase, WINDOW, SPANS)
    if found is not None:
        return found
    state = Activity(len(counts), WINDOW, SPANS)
    for now, slot in enumerate(phase.tolist()):
        state.roll(slot, counts[:, now], known[:, now])
    state.gaps.refresh(np.arange(len(state), dtype=np.int64), state.share(2))
    return state


def chances(state: Activity, model: Occurrence, slots: Ints, shape: Floats | None = None) -> NDArray[np.float16]:
    """P by horizon, scenario, window after the state's last one, and model: `[4, 6, AHEAD, n]`.

    `slots` are the week slots of the windows from the state on. Scenario 0: no request since; 1: one in this window
    or the last; 2 and on: the last one `IDLE` windows ago. `shape` is the fleet's day, for models that are new.
    """
    found = np.zeros((len(HORIZONS), SCENARIOS, AHEAD, len(state)), np.float16)
    was, quiet = state.last.copy(), state
    for ahead in range(AHEAD):
        slot = int(slots[ahead])
        cases = [quiet, *(_with_request(quiet, was, idle, ahead) for idle in (0, *IDLE))]
        for place, horizon in enumerate(HORIZONS):
            if horizon in model.known:
                season = season_of(quiet, horizon, slot)
                for scenario, case in enumerate(cases):
                    found[place, scenario, ahead] = model.chance(case, horizon, slot, shape, season=season)
        quiet = _quieter(quiet)
    return found


def _quieter(state: Activity) -> Activity:
    """One more window without a request. Seasons and hazards stay as they are: a window changes them too little."""
    decay = 2.0 ** (-state.window / np.array(HALF_LIVES))
    later = copy(state)
    later.weight = state.weight * decay[:, None] + 1
    later.active = state.active * decay[:, None]
    later.volume = state.volume * decay[0]
    later.since = state.since + np.int32(1)
    later.last = np.zeros_like(state.last)
    later.age = state.age + np.int32(1)
    return later


def _with_request(quiet: Activity, was: Bools, idle: int, ahead: int) -> Activity:
    """The same if the last request came `idle` windows before; whoever was active at the fit stayed so until then."""
    decay = 2.0 ** (-quiet.window / np.array(HALF_LIVES))[:, None]
    stayed = max(ahead - idle, 0)
    case = copy(quiet)
    # What so many active windows, the last of them `idle` windows ago, add to the memories.
    run = decay**idle * (1 - decay**stayed) / (1 - decay)
    one = decay**idle
    case.active = np.minimum(quiet.active + np.where(was, run, np.where(stayed > 0, one, 0.0)), quiet.weight)
    typical = quiet.volume / np.maximum(quiet.active[0], 1e-9)
    case.volume = quiet.volume + np.clip(typical, np.log(2.0), 20.0) * (case.active[0] - quiet.active[0])
    case.since = np.full_like(quiet.since, idle)
    case.last = np.full_like(quiet.last, idle == 0)
    return case
