"""Will a model be asked for in a given window: 25 columns per model and one pooled logistic regression per horizon.

Prediction needs the coefficients only; `training.py` and `glm.py` find them, in the fitting worker. Features come
from `Activity` and therefore from windows that are over. Counts of requests never: that is another question.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from forecasting.activity import Activity, Horizon
from forecasting.launch import LAUNCH_COLUMNS, fleet_shape, launch_features
from forecasting.odds import expit, logit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]

COLUMNS = (
    "intercept",
    "profile", "share_4d", "share_3h", "share_1d", "active", "since", "yesterday", "last_week", "volume",
    "profile_active", "since_over_day",
    "onset_idle", "onset_wide_idle", "stay_active", "hazard_idle", "hazard_active", "onset_yesterday_idle",
    "since_idle_share", "since_squared_idle", "onset_wide_since_idle", "yesterday_idle", "last_week_idle",
    "share_3h_active", "volume_active",
)  # fmt: skip
"""Base columns first, then those that describe onsets."""

Number = TypeVar("Number", np.float64, np.int8)

CLIP = 0.0005
"""Of every probability before its log odds; .005 for the base columns was worse on training days at short leads."""
PRIOR = 0.5
WIDE = 3
"""Slots to each side of the wide onset profile."""
VOLUME_SCALE = 5.0
_NAME = re.compile(r"(known|young)/([0-9]{1,6})/([0-9]{1,6})")


def _smooth(sums: NDArray[np.float32], slots: Sequence[int], weights: Sequence[float], rows: Rows | None) -> Floats:
    """A weighted sum over slots, one row for each of `sums`."""
    total: NDArray[np.float32] | None = None
    for slot, weight in zip(slots, weights, strict=True):
        here = sums[:, slot % sums.shape[1]]
        # All models lie side by side: looking each of them up by number would take most of the time.
        part = np.float32(weight) * (here if rows is None else here[:, rows])
        total = part if total is None else np.add(total, part, out=total)
    return np.asarray(total, np.float64)


def _of(numbers: NDArray[Number], rows: Rows | None) -> NDArray[Number]:
    """Some models, on the last axis."""
    return numbers if rows is None else numbers[..., rows]


def _kernel(first: int, span: int, reach: int) -> tuple[list[int], list[float]]:
    """Slots around a span and their weights: .25/.5/.25 for a reach of one, flat beyond; they sum up to one slot."""
    slots = list(range(first - reach, first + span + reach))
    weights = np.ones(len(slots))
    if reach == 1:
        weights[0] = weights[-1] = 0.5
        return slots, list(weights / (span + 1))
    return slots, list(weights)


@dataclass(frozen=True, slots=True)
class Season:
    """What a horizon's columns take from the times of day and week alone, `[rows]` each.

    `seen` and `active` passes of the target's time of day and the `share` they are pulled to (None: the model's own
    over 4 days); which windows were active yesterday and a week ago (-1: unknown); whether one began around then; the
    log odds of an onset, at one slot and at three, and of staying active.
    """

    seen: Floats
    active: Floats
    share: Floats | None
    yesterday: NDArray[np.int8]
    week_ago: NDArray[np.int8]
    begun: Floats
    onset: Floats
    wide: Floats
    stay: Floats


def season_of(state: Activity, horizon: Horizon, slot: int, rows: Rows | None = None) -> Season:
    """The same for states that differ in what happened last only: most of the work of `features`."""
    target = (slot + horizon.lead) % state.week
    here, span = target % state.day, horizon.span
    seen, active, share = _profile(state, here, span, rows)
    around = (target - state.day + np.arange(-WIDE, span + 2)) % state.week
    past = _of(state.ring[around], rows)
    onset, stay = _moves(state, horizon, here, 1, rows)
    wide, _ = _moves(state, horizon, here, WIDE, rows)
    return Season(
        seen,
        active,
        share,
        past[WIDE : WIDE + span].max(axis=0),
        _of(state.ring[(target + np.arange(span)) % state.week], rows).max(axis=0),
        ((past[1:] == 1) & (past[:-1] == 0)).any(axis=0).astype(np.float64),
        logit(1.0 - (1.0 - np.clip(onset, 0, 1)) ** span, CLIP),
        logit(1.0 - (1.0 - np.clip(wide, 0, 1)) ** span, CLIP),
        logit(stay, CLIP),
    )


def _profile(state: Activity, slot: int, span: int, rows: Rows | None) -> tuple[Floats, Floats, Floats | None]:
    """Passes of this time of day, ±1 slot, and active ones; and what they are pulled to by half a pseudo day."""
    slots, weights = [slot - 1, slot, slot + 1], [0.25, 0.5, 0.25]
    if span in state.profiles:
        seen, active = _smooth(state.profiles[span], slots, weights, rows)
        total = _of(state.overall[span], rows)
        return seen, active, np.asarray(total[1] / np.maximum(total[0], 1e-9), np.float64)
    idle, started, busy, stayed = _smooth(state.slots, slots, weights, rows)
    return idle + busy, started + stayed, None


def _moves(state: Activity, horizon: Horizon, slot: int, reach: int, rows: Rows | None) -> tuple[Floats, Floats]:
    """P(starts | idle) and P(stays | active) per window around the target, shrunk to the model's own 4-day shares."""
    slots, weights = _kernel(slot, horizon.span, reach)
    idle, started, busy, stayed = _smooth(state.slots, slots, weights, rows)
    all_idle, all_started, all_busy, all_stayed = _of(state.moves, rows)
    onset = (started + PRIOR * all_started / np.maximum(all_idle, 1.0)) / (idle + PRIOR)
    stay = (stayed + PRIOR * all_stayed / np.maximum(all_busy, 1.0)) / (busy + PRIOR)
    return onset, stay


def _known(best: NDArray[np.int8], otherwise: Floats) -> Floats:
    """1 where a window was active, 0 where none was, `otherwise` where nothing is known."""
    return np.where(best < 0, otherwise, best.astype(np.float64))


def features(
    state: Activity, horizon: Horizon, slot: int, rows: Rows | None = None, season: Season | None = None
) -> Floats:
    """The 25 `COLUMNS` of some models (default all), `[rows, 25]`; `slot` is the week slot of the window after now.

    `season` is what `season_of` says of the same, for a caller who has it.
    """
    when = season_of(state, horizon, slot, rows) if season is None else season
    chosen = np.arange(len(state), dtype=np.int64) if rows is None else rows
    act = state.last[chosen].astype(np.float64)
    idle = 1.0 - act
    shares = [logit(state.share(memory)[chosen], CLIP) for memory in range(3)]
    since = state.since[chosen]
    long = np.log1p(since)
    volume = state.volume[chosen] / np.maximum(state.weight[0, chosen], 1e-9) / VOLUME_SCALE
    share = _of(state.share(2), rows) if when.share is None else when.share
    chance: Floats = np.asarray((when.active + PRIOR * share) / (when.seen + PRIOR), np.float64)
    profile = logit(chance, CLIP)
    day_ago, week_ago = _known(when.yesterday, chance), _known(when.week_ago, chance)
    hazard = logit(state.gaps.chance(chosen, since + 1 + horizon.lead, horizon.span), CLIP)
    columns = (
        np.ones(len(chosen)),
        profile, shares[2], shares[0], shares[1], act, long, day_ago, week_ago, volume,
        profile * act, (since > state.day).astype(np.float64),
        when.onset * idle, when.wide * idle, when.stay * act, hazard * idle, hazard * act, when.begun * idle,
        long * idle * shares[2], long**2 * idle, when.wide * long * idle, day_ago * idle, week_ago * idle,
        shares[0] * act, volume * act,
    )  # fmt: skip
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Occurrence:
    """Coefficients per horizon: `known` for models with a day of history, `[25]`; `young` for others, `[10]`."""

    known: Mapping[Horizon, Floats]
    young: Mapping[Horizon, Floats] = field(default_factory=dict["Horizon", "Floats"])

    def __post_init__(self) -> None:
        for group, width in ((self.known, len(COLUMNS)), (self.young, len(LAUNCH_COLUMNS))):
            for horizon, weights in group.items():
                if weights.shape != (width,) or not np.all(np.isfinite(weights)):
                    msg = f"{horizon} needs {width} finite coefficients"
                    raise ValueError(msg)

    def chance(
        self,
        state: Activity,
        horizon: Horizon,
        slot: int,
        shape: Floats | None = None,
        season: Season | None = None,
    ) -> Floats:
        """P(any request in the horizon's windows) of every model; `slot` is the week slot of the window after now.

        Models younger than a day follow the launch regression when there is one; `shape` is what `fleet_shape`
        says (default: of this state), `season` what `season_of` says. Raises `KeyError` for a horizon that was not
        fitted.
        """
        p = expit(features(state, horizon, slot, season=season) @ self.known[horizon])
        young = np.flatnonzero(state.age < state.day)
        if young.size and horizon in self.young:
            fleet = fleet_shape(state) if shape is None else shape
            p[young] = expit(launch_features(state, horizon, slot, fleet, young) @ self.young[horizon])
        return p

    def arrays(self) -> dict[str, Floats]:
        """Plain arrays to persist."""
        groups = (("known", self.known), ("young", self.young))
        return {f"{name}/{h.lead}/{h.span}": weights for name, group in groups for h, weights in group.items()}

    @classmethod
    def restore(cls, arrays: Mapping[str, Floats]) -> Occurrence:
        """The inverse of `arrays`. Raises `ValueError` on anything else."""
        groups: dict[str, dict[Horizon, Floats]] = {"known": {}, "young": {}}
        for name, weights in arrays.items():
            found = _NAME.fullmatch(name)
            if found is None:
                msg = f"no coefficients of a horizon: {name[:40]!r}"
                raise ValueError(msg)
            groups[found[1]][Horizon(int(found[2]), int(found[3]))] = np.asarray(weights, np.float64)
        return cls(groups["known"], groups["young"])
