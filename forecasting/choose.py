"""Which forecasts to believe, and how much: weights from what each would have said at past origins.

Belongs here: losses of candidates per horizon band, the mixture's weights, the guard against doing worse than
repeating yesterday. Never: making forecasts or touching histories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting.candidates import NAIVE_DAY, NAIVE_WEEK, Forecasts, groups
from forecasting.profile import HOUR, Bools, Floats, Ints, leads

if TYPE_CHECKING:
    from collections.abc import Sequence

BANDS = (HOUR, 6 * HOUR, 24 * HOUR)
"""Ends of the horizon bands in seconds; what lies beyond the last belongs to it."""
DECAY = 0.85
"""Weight of an origin against the next younger one."""
POWER = 3.0
CUSHION = 0.02
"""Share of the mean that is added to each loss, so that a lucky zero doesn't take all the weight."""
ORIGINS, STEP = 8, 7 * HOUR
"""Past origins, and their spacing: seven hours walk through all times of the day."""
LEAST_ORIGINS, LEAST_OTHER = 6, 2
"""What a specialist must have been judged on: origins, and how many of them on another weekday than the newest."""
_OWN = 0.5
_NAMED = 0.01
"""Weights below one percent are not worth a line."""
POOL = 0.3
"""How far a model's relative losses are drawn to those of its class: a few origins say little about a bursty one."""
_LEAST_POOL = 10


def band_of(horizon: int, bucket: float) -> Ints:
    """Band index of each bucket ahead, `[horizon]`."""
    return np.minimum(np.searchsorted(BANDS, leads(horizon, bucket)), len(BANDS) - 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Trials:
    """What every candidate said at past origins, newest first, and what came.

    `said[n, K, M, H]` with NaN where a candidate had no answer, `came[n, K, H]`, and `judged[n, K, H]` False for
    buckets that are not over yet or were gaps. `bucket` in seconds.
    """

    names: tuple[str, ...]
    said: Floats
    came: Floats
    judged: Bools
    bucket: float


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of the candidates, `[n, M, bands]`, that add up to 1.

    `loss[n, bands]` is the mixture's backtest loss in requests per bucket, `naive` that of the better seasonal naive;
    `guarded` says where the guard chose the naive one, and `averaged[n]` whose centre is the mean: specialists are all
    typical counts already, and their mean errs less than whichever weighs more.
    """

    names: tuple[str, ...]
    weights: Floats
    loss: Floats
    naive: Floats
    guarded: Bools
    averaged: Bools

    def of(self, forecasts: Forecasts, bucket: float) -> Floats:
        """The mixed mean `[n, H]` in requests per bucket, for rates; always finite and never negative."""
        said, weights = self._aligned(forecasts, bucket)
        mean: Floats = np.asarray((weights * said).sum(axis=1))
        return np.maximum(mean, 0.0)

    def centre(self, forecasts: Forecasts, bucket: float) -> Floats:
        """The weighted median of the candidates `[n, H]`: least absolute error, for intervals and displays.

        On bursty series it is far below the mean, and zero where most of the weight says zero: never a rate.
        """
        said, weights = self._aligned(forecasts, bucket)
        return np.maximum(_central(said, weights, self.averaged), 0.0)

    def _aligned(self, forecasts: Forecasts, bucket: float) -> tuple[Floats, Floats]:
        if forecasts.names != self.names:
            msg = f"weights are for {self.names}, forecasts for {forecasts.names}"
            raise ValueError(msg)
        band = band_of(forecasts.values.shape[2], bucket)
        return filled(forecasts.names, forecasts.values), self.weights[:, :, band]

    def where(self, rows: Bools, other: Mix) -> Mix:
        """This one for `rows[n]`, the other one for the rest; both of the same candidates."""
        if other.names != self.names:
            msg = f"weights are for {self.names}, the others for {other.names}"
            raise ValueError(msg)
        wide = rows[:, None]
        return Mix(
            self.names,
            np.where(wide[:, :, None], self.weights, other.weights),
            np.where(wide, self.loss, other.loss),
            np.where(wide, self.naive, other.naive),
            np.where(wide, self.guarded, other.guarded),
            np.where(rows, self.averaged, other.averaged),
        )

    def explain(self, row: int) -> dict[str, tuple[float, ...]]:
        """Weights per band of one model, by candidate, the useless ones left out."""
        table = {n: tuple(float(w) for w in self.weights[row, m]) for m, n in enumerate(self.names)}
        return {name: shares for name, shares in table.items() if max(shares) >= _NAMED}


def filled(names: Sequence[str], values: Floats) -> Floats:
    """`[..., M, H]` with the profile in place of missing answers and zero where even that is missing."""
    profile = values[..., [names.index("hier")], :]
    return np.nan_to_num(np.where(np.isnan(values), profile, values), nan=0.0, posinf=0.0, neginf=0.0)


def middle(said: Floats, weights: Floats) -> Floats:
    """Weighted median over the candidates: `[n, M, H]` twice to `[n, H]`."""
    order = np.argsort(said, axis=1)
    climbed = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1)
    first = (climbed >= 0.5 * climbed[:, -1:] - 1e-9).argmax(axis=1)[:, None]
    return np.take_along_axis(said, np.take_along_axis(order, first, axis=1), axis=1)[:, 0]


def losses(trials: Trials) -> tuple[Floats, Floats]:
    """Mean absolute error per candidate and band `[n, M, bands]`, NaN where untested, and the mean count `[n, bands]`.

    An origin's weight falls by `DECAY` with each younger one. A candidate that answered less than half of the
    buckets of a model is untested there.
    """
    weight, used = _weights(trials)
    said = filled(trials.names, trials.said)
    error = np.abs(said - trials.came[:, :, None, :])
    own = ((~np.isnan(trials.said)) & trials.judged[:, :, None, :]).sum(axis=(1, 3))
    enough = own >= _OWN * np.maximum(trials.judged.sum(axis=(1, 2)), 1)[:, None]
    total = np.einsum("nkmh,nkhb->nmb", error, used)
    loss = np.where(weight[:, None, :] > 0, total / np.maximum(weight, 1e-12)[:, None, :], np.nan)
    mean = np.where(weight > 0, np.einsum("nkh,nkhb->nb", trials.came, used) / np.maximum(weight, 1e-12), np.nan)
    return np.where(enough[:, :, None], loss, np.nan), mean


def _weights(trials: Trials) -> tuple[Floats, Floats]:
    """Weight of each judged bucket in its band `[n, K, H, bands]`, and the totals `[n, bands]` (first)."""
    band: Floats = np.eye(len(BANDS))[band_of(trials.came.shape[2], trials.bucket)]
    age = np.exp(math.log(DECAY) * (leads(trials.came.shape[1], 1.0) - 1.0))
    used: Floats = (trials.judged * age[None, :, None])[:, :, :, None] * band
    return np.asarray(used.sum(axis=(1, 2))), used


def _central(said: Floats, weights: Floats, averaged: Bools) -> Floats:
    """Weighted mean over the candidates where `averaged[n]`, else their weighted median, `[n, H]`."""
    mean = np.asarray((weights * said).sum(axis=1))
    return np.where(averaged[:, None], mean, middle(said, weights))


def mix(trials: Trials, *, admitted: Bools | None = None, kinds: Ints | None = None, averaged: bool = False) -> Mix:
    """Weights in proportion to (loss + 2 % of the mean) ** -3, one variant per family, under the guard.

    `kinds[n]` are activity classes: losses are drawn to those of the class before they are compared.

    `admitted[n, M]` excludes candidates; the guard may fall back on the naive ones even so. A band without any judged
    bucket takes the mean of the other bands' losses; without any at all the profile is alone.
    """
    loss, mean = losses(trials)
    naive = loss[:, [trials.names.index(name) for name in (NAIVE_DAY, NAIVE_WEEK)]]
    if admitted is not None:
        loss = np.where(admitted[:, :, None], loss, np.nan)
    loss, mean = _everywhere(loss), np.nan_to_num(_everywhere(mean[:, None, :]))[:, 0]
    if kinds is not None:
        loss = _pooled(loss, kinds)
    loss = _best_variant(trials.names, loss)
    scale = loss + CUSHION * mean[:, None, :] + 1e-9
    # Relative to the best one: the cube of a large count would not fit into a float for long.
    best = np.nanmin(np.where(np.isnan(scale), np.inf, scale), axis=1, keepdims=True)
    raw = np.where(np.isnan(scale), 0.0, np.power(best / np.where(np.isnan(scale), 1.0, scale), POWER))
    total: Floats = np.asarray(raw.sum(axis=1, keepdims=True))
    alone = (np.arange(len(trials.names)) == trials.names.index("hier"))[None, :, None]
    weights: Floats = np.where(total > 0, raw / np.maximum(total, 1e-12), alone.astype(np.float64))
    return _guard(trials, weights, naive, np.full(len(weights), averaged))


def _everywhere(loss: Floats) -> Floats:
    """A band without a judged bucket borrows the mean loss of the bands that have some."""
    tested = ~np.isnan(loss)
    count = tested.sum(axis=2, keepdims=True)
    borrowed = np.where(count > 0, np.nansum(loss, axis=2, keepdims=True) / np.maximum(count, 1), np.nan)
    return np.where(tested, loss, borrowed)


def _pooled(loss: Floats, kinds: Ints) -> Floats:
    """Losses drawn to the class, in logarithms relative to the model's own mean over the candidates."""
    tested = ~np.isnan(loss)
    count = np.maximum(tested.sum(axis=1, keepdims=True), 1)
    own = np.where(tested, loss, 0.0).sum(axis=1, keepdims=True) / count + 1e-9
    relative = np.log(np.maximum(np.where(tested, loss, 1.0) / own, 1e-3))
    result = loss.copy()
    for kind in np.unique(kinds):
        rows = kinds == kind
        if rows.sum() < _LEAST_POOL:
            continue
        typical = _median(np.where(tested[rows], relative[rows], np.nan))
        drawn = np.exp((1 - POOL) * relative[rows] + POOL * typical) * own[rows]
        result[rows] = np.where(tested[rows], drawn, np.nan)
    return result


def _median(values: Floats) -> Floats:
    """Median over the first axis without the NaN; zero where there is nothing else."""
    kept = np.sort(values, axis=0)  # NaN last
    count = (~np.isnan(values)).sum(axis=0, keepdims=True)
    middle_two = [np.take_along_axis(kept, np.maximum(at, 0), axis=0)[0] for at in ((count - 1) // 2, count // 2)]
    half: Floats = (middle_two[0] + middle_two[1]) / 2
    return np.nan_to_num(half)


def _best_variant(names: tuple[str, ...], loss: Floats) -> Floats:
    """NaN for every variant of a family but the best one of each model and band."""
    families = groups(names)
    result = np.full_like(loss, np.nan)
    for family in dict.fromkeys(families):
        rows = [m for m, own in enumerate(families) if own == family]
        part = np.where(np.isnan(loss[:, rows]), np.inf, loss[:, rows])
        first = part.argmin(axis=1)[:, None, :]
        chosen = np.arange(len(rows))[None, :, None] == first
        result[:, rows] = np.where(chosen & np.isfinite(part), part, np.nan)
    return result


def _guard(trials: Trials, weights: Floats, rivals: Floats, averaged: Bools) -> Mix:
    """Where the mixture's centre would have lost to repeating yesterday (or last week), do that instead."""
    weight, used = _weights(trials)
    mixed = past_centres(trials, weights, averaged)
    own = np.einsum("nkh,nkhb->nb", np.abs(mixed - trials.came), used) / np.maximum(weight, 1e-12)
    naive = np.array([trials.names.index(name) for name in (NAIVE_DAY, NAIVE_WEEK)])
    past = np.where(np.isnan(rivals), np.inf, rivals)
    best, least = naive[past.argmin(axis=1)], np.asarray(past.min(axis=1), np.float64)
    lost = (own > least) & (weight > 0)
    single = (np.arange(len(trials.names))[None, :, None] == best[:, None, :]).astype(np.float64)
    return Mix(
        trials.names,
        np.where(lost[:, None, :], single, weights),
        np.where(lost, least, own),
        least,
        lost,
        averaged,
    )


def past_centres(trials: Trials, weights: Floats, averaged: Bools) -> Floats:
    """What the mixture with these weights `[n, M, bands]` would have said at the past origins, `[n, K, H]`.

    `averaged[n]` as in `Mix`.
    """
    said = filled(trials.names, trials.said)
    ahead = weights[:, :, band_of(trials.came.shape[2], trials.bucket)]
    return np.stack([_central(said[:, k], ahead, averaged) for k in range(said.shape[1])], axis=1)


def admit(trials: Trials, weekdays: Ints, name: str, *, rival: str = "hier+lvl", margin: float = 0.05) -> Bools:
    """Which models a specialist has earned, `[n]`.

    It must beat the best variant of `rival` by `margin` over at least six origins, of which two fall on another
    weekday than the newest one. `weekdays[K]` are those of the origins, newest first; all judged buckets count the
    same here.
    """
    said = filled(trials.names, trials.said)
    families = groups(trials.names)
    column = trials.names.index(name)
    rivals = [m for m, own in enumerate(families) if own == rival]
    answered: Bools = np.any(~np.isnan(trials.said[:, :, column]) & trials.judged, axis=2)
    used = np.logical_and(trials.judged, np.expand_dims(answered, 2)).astype(np.float64)
    error = np.einsum("nkmh,nkh->nm", np.abs(said - trials.came[:, :, None, :]), used)
    other = np.logical_and(answered, weekdays != weekdays[0])
    enough = (answered.sum(axis=1) >= LEAST_ORIGINS) & (other.sum(axis=1) >= LEAST_OTHER)
    better: Bools = error[:, column] <= (1 - margin) * error[:, rivals].min(axis=1)
    earned: Bools = np.logical_and(enough, better)
    return earned
