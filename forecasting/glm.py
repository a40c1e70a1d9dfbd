"""Fitter side only: logistic regression, by Fisher scoring, by statsmodels where that fails, or with a ridge.

Never import this from serving code: statsmodels costs 150 MB.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

STEPS = 50
CLEAN = 15
INDEPENDENT = 1e-5
"""Least part of a column, of the size of one, that no other columns explain."""
ABSURD = 1e3
"""A coefficient that large is separation, not knowledge."""
LEAST = 1.0
"""Pseudo rows at least."""
MATRIX = 2
CLOSE = 1e-8
HALVINGS = 12


def binomial(x: Floats, y: Floats, shrunk: float = 0.0) -> Floats:
    """Coefficients of y (0 or 1) on x `[rows, columns]`, the intercept being a column of x: the most likely ones.

    Fisher scoring on the normal equations (McCullagh & Nelder 1989, section 2.5) finds what statsmodels' `GLM` finds
    by an SVD of all rows in each round, at a tenth of its cost; where it does not settle, statsmodels decides. Falls
    back to `ridge` when answers are separable or all alike. With `shrunk` pseudo rows per row it is a ridge from the
    start, and the intercept must be the first column. Raises `ValueError` on other input.
    """
    _check(x, y)
    if shrunk > 0:
        return ridge(x, y, max(LEAST, shrunk * len(y)))
    if 0 < y.mean() < 1:
        found = _scored(x, y)
        if found is None:
            found = _statsmodels(x, y)
        if found is not None and np.all(np.abs(found) < ABSURD):
            return found
    return ridge(x, y)


def _check(x: Floats, y: Floats) -> None:
    if x.ndim != MATRIX or y.shape != x.shape[:1] or not len(y):
        msg = f"rows and answers do not match: {x.shape} and {y.shape}"
        raise ValueError(msg)
    if not np.all(np.isfinite(x)) or not np.all((y == 0) | (y == 1)):
        msg = "rows must be finite and answers 0 or 1"
        raise ValueError(msg)


def _scored(x: Floats, y: Floats) -> Floats | None:
    """None when columns depend on each other, or when it has not settled after as many steps as clean data needs."""
    size = np.sqrt(np.einsum("ij,ij->j", x, x) / len(x))
    if not size.all():
        return None
    scaled = x / size
    algebra: Any = np.linalg
    weights = np.zeros(x.shape[1])
    for _ in range(CLEAN):
        p = 1.0 / (1.0 + np.exp(-np.clip(scaled @ weights, -30, 30)))
        spread = scaled * np.sqrt(p * (1 - p))[:, None]
        try:
            root: Any = algebra.cholesky(spread.T @ spread / len(x))
        except algebra.LinAlgError:
            return None
        if root.diagonal().min() < INDEPENDENT:
            return None
        half: Any = algebra.solve(root, scaled.T @ (y - p) / len(x))
        step = np.asarray(algebra.solve(root.T, half), np.float64)
        weights += step
        if np.abs(step).max() < CLOSE:
            return np.asarray(weights / size, np.float64)
    return None


def _statsmodels(x: Floats, y: Floats) -> Floats | None:
    """None when it does not converge, warns, or finds nothing finite."""
    import statsmodels.api  # type: ignore[import-untyped]  # ships no types
    from numpy.linalg import LinAlgError
    from statsmodels.tools.sm_exceptions import PerfectSeparationError  # type: ignore[import-untyped]  # ships no types

    sm: Any = statsmodels.api
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result: Any = sm.GLM(y, x, family=sm.families.Binomial()).fit(maxiter=STEPS)
        except (Warning, LinAlgError, PerfectSeparationError, ValueError):
            return None
    params: Floats = np.asarray(result.params, np.float64)
    return params if bool(result.converged) and np.all(np.isfinite(params)) else None


def ridge(x: Floats, y: Floats, strength: float = 1.0) -> Floats:
    """Maximum of the likelihood less a ridge of `strength` on every column but the first.

    A step that would make it worse is halved: on rare answers a whole Newton step may end anywhere.
    """
    _check(x, y)
    penalty = np.full(x.shape[1], strength)
    penalty[0] = 1e-6
    weights = np.zeros(x.shape[1])
    rate = np.clip(y.mean(), 1e-4, 1 - 1e-4)
    weights[0] = np.log(rate / (1 - rate))
    odds = x @ weights
    loss = _loss(odds, y, penalty, weights)
    for _ in range(STEPS):
        p = 1.0 / (1.0 + np.exp(-np.clip(odds, -30, 30)))
        curvature = np.maximum(p * (1 - p), 1e-9)
        gradient = x.T @ (y - p) - penalty * weights
        step = np.linalg.solve((x * curvature[:, None]).T @ x + np.diag(penalty), gradient)
        ahead = x @ step
        for _ in range(HALVINGS):
            after = _loss(odds + ahead, y, penalty, weights + step)
            if after <= loss:
                break
            step, ahead = step / 2, ahead / 2
        else:
            break
        weights, odds, loss = weights + step, odds + ahead, after
        if np.abs(step).max() < CLOSE:
            break
    return weights


def _loss(odds: Floats, y: Floats, penalty: Floats, weights: Floats) -> float:
    """Negative log likelihood and ridge; `odds` on the logarithmic scale."""
    return float((np.logaddexp(0.0, odds) - y * odds).sum() + 0.5 * (penalty * weights**2).sum())
