"""Promises of the batched Poisson regression."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import pytest

from forecasting.harmonic import COARSE, _design, _Gram, coarsen, fit, harmonics
from forecasting.profile import hier


def week(per_day: int, models: int, seed: int, passes: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Seasonal Poisson sums of a few models with uneven exposure."""
    draw = np.random.default_rng(seed)
    at = np.arange(7 * per_day) / per_day
    logs = 2 + np.sin(2 * np.pi * at)[None] * draw.uniform(0.2, 1, (models, 1)) + 0.3 * np.cos(2 * np.pi * at / 7)
    exposure = passes * draw.uniform(0.5, 1, (models, 7 * per_day))
    return draw.poisson(np.exp(logs) * exposure).astype(np.float64), exposure


def test_the_terms_are_53_and_distinct() -> None:
    """8 daily and 18 weekly harmonics; the weekly ones leave out what is daily already, or the fit is singular."""
    order = harmonics()
    assert len(set(order.tolist())) == 26
    assert sum(k % 7 == 0 for k in order.tolist()) == 8
    assert 2 * len(order) + 1 == 53


def test_the_fourier_gram_equals_the_product() -> None:
    """X' diag(w) X from one transform is the product that it replaces."""
    weights = np.random.default_rng(3).random((3, 168))
    design = _design(24, 24)
    assert _Gram(24).of(weights) == pytest.approx(np.einsum("sp,ns,sq->npq", design, weights, design), abs=1e-9)


def test_equals_statsmodels_on_the_same_slots() -> None:
    """Slot sums with exposure are GLM(Poisson) on slot rates with freq_weights; the ridge is off for the comparison."""
    sums, exposure = week(24, 3, seed=5)
    own = fit(sums, exposure, per_day=24, ridge=1e-9, scaled=False).rates(24)
    library: Any = importlib.import_module("statsmodels.api")
    for row in range(3):
        model = library.GLM(
            sums[row] / exposure[row], _design(24, 24), family=library.families.Poisson(), freq_weights=exposure[row]
        )
        assert own[row] == pytest.approx(model.fit().fittedvalues, rel=1e-4)


def test_the_ridge_solution_is_a_stationary_point() -> None:
    """With the ridge on, the penalised score is zero at the coefficients."""
    sums, exposure = week(24, 2, seed=6)
    made = fit(sums, exposure, per_day=24, scaled=False)
    mean = exposure * np.exp(made.beta @ _design(24, 24).T)
    slope = (sums - mean) @ _design(24, 24)
    slope[:, 1:] -= made.beta[:, 1:]
    assert np.abs(slope).max() < 1e-3


def test_coarse_slots_change_little() -> None:
    """Hourly slots give the profile of quarter hours within a few percent."""
    sums, exposure = week(96, 2, seed=7, passes=8.0)
    coarse, fine = fit(sums, exposure).rates(), fit(sums, exposure, coarse=None).rates()
    assert np.abs(np.log(coarse / fine)).mean() < 0.03


def test_coarsening_keeps_counts_and_checks_widths() -> None:
    """Counts add up, passes average, and widths that do not divide are refused."""
    sums, exposure = week(96, 1, seed=8)
    counts, passes = coarsen(sums, exposure, per_day=96, to=COARSE)
    assert counts.sum() == sums.sum()
    assert passes.mean() == pytest.approx(exposure.mean())
    with pytest.raises(ValueError, match="can't be merged"):
        coarsen(sums, exposure, per_day=96, to=7)


def test_silence_and_nothing_observed_stay_finite() -> None:
    """No request gives a rate of almost zero, no exposure anything finite; neither spoils its neighbours."""
    sums, exposure = week(24, 3, seed=9)
    alone = fit(sums[:1], exposure[:1], per_day=24).rates(24)[0]
    sums[1], exposure[2], sums[2] = 0.0, 0.0, 0.0
    rates = fit(sums, exposure, per_day=24).rates(24)
    assert np.isfinite(rates).all()
    assert rates[1].max() < 1e-3
    assert rates[0] == pytest.approx(alone)


def test_bursts_are_worth_less_evidence() -> None:
    """A model whose counts come in thousands at once is drawn towards its mean by the ridge."""
    draw = np.random.default_rng(10)
    bursts = 5000.0 * (draw.random((1, 168)) < 0.05)
    made, trusting = (fit(bursts, np.ones((1, 168)), per_day=24, scaled=scaled) for scaled in (True, False))
    assert made.dispersion[0] > 100
    assert np.log(made.rates(24)).std() < np.log(trusting.rates(24)).std() / 2
    sums, exposure = week(24, 1, seed=11)
    assert fit(sums, exposure, per_day=24).dispersion[0] < 3


def test_too_few_slots_for_the_harmonics_are_refused() -> None:
    """Aliasing would give a wrong curve silently."""
    with pytest.raises(ValueError, match="too few slots"):
        fit(np.ones((1, 56)), np.ones((1, 56)), per_day=8)


def test_a_thousand_models_take_less_than_a_second_of_cpu() -> None:
    """A tenth of goal 1 (10,000 in 10 CPU s), profile included; the whole is measured in the bench."""
    draw = np.random.default_rng(12)
    sums = draw.poisson(5.0, (1000, 672)).astype(np.float32)
    exposure = np.full(sums.shape, 2.0, np.float32)
    began = time.thread_time()
    hier(sums, exposure)
    fit(sums, exposure)
    assert time.thread_time() - began < 1.0
