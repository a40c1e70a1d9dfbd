"""Fitter side: the pooled non-negative fit of the rate blend, on random (model, bucket) cells of the last days.

A cell sees only buckets before it, and its target ends before the fit. Runs in the fitting worker, never on the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from forecasting.nextuse import expected, next_use
from forecasting.rates import COLUMNS, HALF_LIVES, R_6H, WEEK, Blend, columns, seasonal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

CELLS = 120_000
MODELS = 400
"""Models that cells are drawn from: the weights are pooled, so a fleet of any size costs the same."""
AHEAD = 600.0
"""Seconds of the blend's target."""


def cells(days: Floats, bucket: float, *, most: int = CELLS, seed: int = 0) -> tuple[Floats, Floats]:
    """Rows and targets from `days[n, D, B]` of bucket counts: cells of the last 7 days, each with 10 min ahead known.

    The first day only serves as history. Returns `[cells, 10]` in the order of `COLUMNS`, and mean rates to come.
    """
    models, length, buckets = days.shape
    ahead = max(round(AHEAD / bucket), 1)
    if length < 2 or buckets <= ahead:  # noqa: PLR2004  # a day of history and one to learn from
        msg = f"a fit needs two days of at least {ahead + 1} buckets, not {days.shape}"
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    if models > MODELS:
        order: Ints = np.asarray(rng.random(len(days)).argsort(), np.int64)
        days, models = days[np.sort(order[:MODELS])], MODELS
    flat = days.reshape(models, -1)
    first = max(length - WEEK, 1)
    each = -(-most // (length - first))
    decayed, age = history(flat, bucket)
    total = np.concatenate((np.zeros((models, 1)), np.cumsum(flat, axis=1)), axis=1)
    rows: list[Floats] = []
    targets: list[Floats] = []
    for day in range(first, length):
        model = _draw(rng, models, each)
        # The target of a cell must be over when the fit begins.
        place = _draw(rng, buckets - ahead + 1 if day == length - 1 else buckets, each)
        at: Ints = day * buckets + place
        season = seasonal(days[:, :day], bucket)[:, model, place]
        ttn = next_use(expected(days[:, :day]), bucket).rate[model, place]
        rows.append(columns(decayed[at, :, model], season, ttn, age[at, model]))
        targets.append((total[model, at + ahead] - total[model, at]) / (ahead * bucket))
    return np.concatenate(rows), np.concatenate(targets)


def _draw(rng: np.random.Generator, below: int, size: int) -> Ints:
    return np.asarray(rng.random(size) * below, np.int64)


def history(flat: Floats, bucket: float) -> tuple[Floats, Floats]:
    """Decayed rates `[T, 5, n]` and age `[T, n]` at the start of each bucket, from counts `[n, T]`.

    Requests count as spread evenly over their bucket.
    """
    models, length = flat.shape
    half = np.array(HALF_LIVES)[:, None]
    fade = 2.0 ** (-bucket / half)
    gain = (1.0 - fade) / bucket  # a steady stream has its own rate
    rates = np.zeros((length, len(HALF_LIVES), models))
    age = np.full((length, models), np.inf)
    for now in range(1, length):
        came = flat[:, now - 1]
        np.multiply(rates[now - 1], fade, out=rates[now])
        rates[now] += gain * came
        # The latest request of a bucket lies, on average, in its middle.
        age[now] = np.where(came > 0, bucket / 2, age[now - 1] + bucket)
    return rates, age


def fit_blend(x: Floats, y: Floats) -> Blend:
    """Find w = argmin over w >= 0 of ‖Xw - y‖, both sides divided by the root of (r_6h + S7 + 1e-5).

    `y` is the mean rate over the next 10 min. Raises `ValueError` on rows that are not finite.
    """
    if x.shape[1:] != (len(COLUMNS),) or y.shape != x.shape[:1] or not len(y):
        msg = f"rows and targets do not match: {x.shape} and {y.shape}"
        raise ValueError(msg)
    if not np.all(np.isfinite(x)) or not np.all(np.isfinite(y)):
        msg = "rows and targets must be finite"
        raise ValueError(msg)
    scale = 1.0 / np.sqrt(x[:, R_6H] + x[:, COLUMNS.index("s_week")] + 1e-5)
    weighted, target = x * scale[:, None], y * scale
    # The normal equations have ten unknowns whatever the number of cells; their root serves NNLS as well as X does.
    gram = weighted.T @ weighted
    size = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    algebra: Any = np.linalg
    root: Any = algebra.cholesky(gram / np.outer(size, size) + 1e-10 * np.eye(len(COLUMNS)))
    right: Any = algebra.solve(root, (weighted.T @ target) / size)
    return Blend(np.asarray(_nnls(root.T, right) / size, np.float64))


def _nnls(a: Any, b: Any) -> Floats:
    from scipy import optimize  # type: ignore[import-untyped]  # ships no types

    untyped: Any = optimize
    return np.asarray(untyped.nnls(a, b)[0], np.float64)
