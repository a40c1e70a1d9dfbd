"""What to expect of a model in its first day, when it has no profile of its own: nine columns and an intercept.

The fleet's shape of the day stands in for its own. After its first day a model belongs to `occurrence.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forecasting.odds import logit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forecasting.activity import Activity, Horizon

    Floats = NDArray[np.float64]
    Rows = NDArray[np.int64]

LAUNCH_COLUMNS = (
    "intercept", "share", "share_3h", "active", "since", "volume", "fleet", "age", "share_age", "active_age",
)  # fmt: skip
CLIP = 0.005
PSEUDO_SECONDS = 3600.0
"""How long a model must be known for its own share to weigh as much as the fleet's."""
VOLUME_SCALE = 5.0


def fleet_shape(state: Activity) -> Floats:
    """The fleet's P(active) per slot of the day, `[day]`; slots that nobody saw get the mean, an empty fleet .5."""
    seen = (state.slots[0] + state.slots[2]).sum(axis=1, dtype=np.float64)
    active = (state.slots[1] + state.slots[3]).sum(axis=1, dtype=np.float64)
    mean = active.sum() / seen.sum() if seen.sum() else 0.5
    return np.asarray((active + mean) / (seen + 1.0), np.float64)


def launch_features(state: Activity, horizon: Horizon, slot: int | Rows, shape: Floats, rows: Rows) -> Floats:
    """The `LAUNCH_COLUMNS` of some models, `[rows, 10]`; `slot` is the week slot of the window after now.

    One for all, or one for each of `rows`.
    """
    pseudo = PSEUDO_SECONDS / state.window
    seen = state.weight[2, rows]
    share = logit((state.active[2, rows] + pseudo * shape.mean()) / (seen + pseudo), CLIP)
    short = (state.active[0, rows] + shape.mean()) / (state.weight[0, rows] + 1.0)
    active = state.last[rows].astype(np.float64)
    age = np.log1p(state.age[rows])
    volume = state.volume[rows] / np.maximum(state.weight[0, rows], 1e-9) / VOLUME_SCALE
    first = np.broadcast_to(np.asarray(slot, np.int64), rows.shape) + horizon.lead
    day = (first[:, None] + np.arange(horizon.span)) % state.day
    fleet = logit(shape[day], CLIP).mean(axis=1) - logit(shape, CLIP).mean()
    columns = (
        np.ones(len(rows)), share, logit(short, CLIP), active, np.log1p(state.since[rows]), volume, fleet, age,
        share * age, active * age,
    )  # fmt: skip
    return np.stack(columns, axis=1)
