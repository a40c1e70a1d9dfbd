"""Rolling-origin evaluation: what the forecasts would have said, and how far off they would have been.

Belongs here: origins, trials, scores against the seasonal naive, the turns in which models are backtested.
Never: fitting beyond calling the candidates, or reading a clock; the caller stops when its budget is spent.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from forecasting.candidates import Forecasts, Panel, candidates, slot_sums
from forecasting.choose import BANDS, ORIGINS, STEP, Mix, Trials, admit, band_of, mix
from forecasting.profile import DAYS, Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_RATIO = 0.1
DENSE, INTERMITTENT = 0.9, 0.3
"""Shares of active hours where the classes begin."""
QUANTILES = (0.025, 0.1, 0.5, 0.9, 0.975)
SPECIALISTS = ("mstl", "sarimax", "direct")
"""Names of candidates that compete only once they are admitted."""
TURNS = DAYS * 24
"""Hourly turns in a week: each model is backtested in one of them."""


class Specialist(Protocol):
    """A per-model forecaster that was fitted elsewhere: `[n, horizon]` requests per bucket, NaN where it has none."""

    def __call__(self, origin: int, horizon: int) -> Floats:
        """Forecast of every model from one origin."""
        ...


def past_origins(origin: int, bucket: float, *, count: int = ORIGINS, step: float = STEP) -> tuple[int, ...]:
    """Origins before `origin`, newest first, that have anything before them."""
    stride = max(1, round(step / bucket))
    return tuple(origin - k * stride for k in range(1, count + 1) if origin - k * stride > 0)


@dataclass(frozen=True, slots=True)
class Rolled:
    """Forecasts of one panel at many origins, by origin."""

    panel: Panel
    horizon: int
    at: Mapping[int, Forecasts]

    def trials(self, now: int, origins: Sequence[int]) -> Trials:
        """The outcomes of past origins (newest first) as they stood at bucket `now`."""
        names = self.at[now].names
        index = np.array(origins, np.int64)[:, None] + np.arange(self.horizon)
        over = index < now
        index = np.where(over, index, 0)
        came = self.panel.counts[:, index]
        judged = over[None] & self.panel.known[:, index]
        said = np.stack([self.at[o].values for o in origins], axis=1)
        return Trials(names, said, np.where(judged, came, 0.0), judged, self.panel.bucket)


def roll(
    panel: Panel,
    origins: Sequence[int],
    horizon: int,
    specialists: Mapping[str, Specialist] | None = None,
) -> Rolled:
    """All candidates at all origins; only data before an origin is used for it."""
    found: dict[int, Forecasts] = {}
    for sums in slot_sums(panel, sorted(set(origins))):
        cheap = candidates(panel, sums, horizon)
        extra = {name: own(sums.origin, horizon) for name, own in (specialists or {}).items()}
        values = np.concatenate([cheap.values, *(one[:, None, :] for one in extra.values())], axis=1)
        found[sums.origin] = Forecasts((*cheap.names, *extra), values)
    return Rolled(panel, horizon, found)


def weighed(rolled: Rolled, origin: int, *, past: Sequence[int], admission: Sequence[int] = ()) -> Mix:
    """The mixture for `origin` from the `past` origins.

    Specialists are admitted by the origins in `admission`. One that is stands alone (averaged with another one that
    is): the mixture would dilute what it has just proved. It is weighed and guarded by that proof, which has seen a
    whole week: two days and a half of weekdays would call repeating yesterday better on the eve of a weekend.
    """
    trials = rolled.trials(origin, past)
    special = np.array([name in SPECIALISTS for name in trials.names])
    rows = len(rolled.panel.counts)
    kinds = activity_class(rolled.panel.active(origin))
    common = mix(trials, admitted=np.repeat(~special[None], rows, axis=0), kinds=kinds)
    if not (admission and special.any()):
        return common
    weekdays = np.array([rolled.panel.phase[o] // rolled.panel.per_day for o in admission], np.int64)
    proof = rolled.trials(origin, admission)
    earned = np.zeros((rows, len(trials.names)), np.bool_)
    for column in np.flatnonzero(special):
        earned[:, column] = admit(proof, weekdays, trials.names[column])
    return mix(proof, admitted=earned, averaged=True).where(np.any(earned, axis=1), common)


# -- scores ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """Mean absolute errors over the test origins, `[n]` overall and `[n, bands]`, of a forecast and the naive one."""

    error: Floats
    naive: Floats
    band_error: Floats
    band_naive: Floats

    @property
    def relative(self) -> Floats:
        """Ratio to the seasonal naive per model; NaN where the naive one was perfect."""
        return _ratio(self.error, self.naive)

    def geometric(self) -> float:
        """Geometric mean of the ratios over the models that have one."""
        return geometric(self.relative)

    def geometric_band(self, band: int) -> float:
        """The same for one horizon band."""
        return geometric(_ratio(self.band_error[:, band], self.band_naive[:, band]))


def residuals(trials: Trials, said: Floats) -> Floats:
    """Log1p residuals of past forecasts `[n, K, H]`, flat per model `[n, K * H]`, NaN where not judged: for `grids`."""
    gap = np.log1p(trials.came) - np.log1p(np.maximum(said, 0.0))
    return np.where(trials.judged, gap, np.nan).reshape(len(said), -1)


def _ratio(error: Floats, naive: Floats) -> Floats:
    return np.where(naive > 0, error / np.where(naive > 0, naive, 1.0), np.nan)


def geometric(ratios: Floats) -> float:
    """Geometric mean; a ratio below a tenth counts as a tenth, so that a lucky zero can't carry a panel."""
    good = ratios[np.isfinite(ratios)]
    return float(np.exp(np.log(np.maximum(good, LEAST_RATIO)).mean())) if good.size else float("nan")


def score(panel: Panel, forecasts: Mapping[int, Floats], naive: Mapping[int, Floats]) -> Score:
    """Errors of forecasts `[n, H]` by origin against the truth, side by side with the naive ones'."""
    horizon = next(iter(forecasts.values())).shape[1]
    band = np.eye(len(BANDS))[band_of(horizon, panel.bucket)]
    sums = np.zeros((2, len(panel.counts), len(BANDS)))
    weight = np.zeros((len(panel.counts), len(BANDS)))
    for origin, said in forecasts.items():
        cut = slice(origin, origin + horizon)
        known = panel.known[:, cut]
        truth = np.where(known, panel.counts[:, cut], 0.0)
        weight += known @ band
        for row, other in enumerate((said, np.where(np.isnan(naive[origin]), said, naive[origin]))):
            sums[row] += (np.abs(other - truth) * known) @ band
    total = np.maximum(weight.sum(axis=1), 1)
    every = np.maximum(weight, 1)
    return Score(sums[0].sum(axis=1) / total, sums[1].sum(axis=1) / total, sums[0] / every, sums[1] / every)


def pinball(truth: Floats, said: Floats, quantiles: Sequence[float]) -> Floats:
    """Quantile loss per case: `truth[...]`, `said[..., Q]`; twice the mean over the quantiles, a CRPS proxy."""
    levels = np.array(quantiles)
    gap = truth[..., None] - said
    loss: Floats = 2 * np.maximum(levels * gap, (levels - 1) * gap)
    return np.asarray(loss.mean(axis=-1))


def coverage(truth: Floats, low: Floats, high: Floats) -> float:
    """Share of cases inside the closed interval."""
    return float(((truth >= low) & (truth <= high)).mean()) if truth.size else float("nan")


def activity_class(active: Floats) -> Ints:
    """0 dense, 1 intermittent, 2 sparse, by the share of active hours `[n]`."""
    return np.where(active >= DENSE, 0, np.where(active >= INTERMITTENT, 1, 2)).astype(np.int64)


# -- whose turn it is --------------------------------------------------------------------------------


def turn_of(key: str, turns: int = TURNS) -> int:
    """The hour of the week in which a model is backtested: fixed by its key, so restarts don't bunch them."""
    return zlib.crc32(key.encode()) % turns


def due(keys: Sequence[str], hour: int, *, cost: float, budget: float, turns: int = TURNS) -> tuple[list[str], int]:
    """Whose turn it is in this hour, and how many of those must wait for the next week.

    `cost` is the CPU seconds that one model took the last time, `budget` what the round may spend. When the turn is
    too long, the week's number decides who comes first, so that nobody waits forever.
    """
    mine = sorted(key for key in keys if turn_of(key, turns) == hour % turns)
    most = len(mine) if cost <= 0 else int(budget / cost)
    if most >= len(mine):
        return mine, 0
    first = (hour // turns * most) % len(mine)
    ordered = mine[first:] + mine[:first]
    return ordered[:most], len(mine) - most
