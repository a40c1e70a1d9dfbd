"""Promises of the specialists: what is kept is enough, what is absurd is refused, what is late is given up."""

from __future__ import annotations

import importlib
import itertools
import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from forecasting.specialists import (
    Deadline,
    Late,
    Regressed,
    Seasons,
    fit_direct,
    fit_regressed,
    fit_seasons,
    fourier,
    parameters,
    position,
    restored,
)
from tests.forecasting.panels import panel, wave

if TYPE_CHECKING:
    from collections.abc import Callable

    from forecasting.candidates import Panel
    from forecasting.direct import Direct

NEVER = Deadline(lambda: 0.0, 1.0)
FITS = (fit_seasons, fit_regressed, fit_direct)
ORIGIN = 26 * 24


@pytest.fixture(scope="module")
def weekly() -> Panel:
    """Four weeks of hourly counts; nothing changes it."""
    return panel(wave(29, seed=5))


@pytest.fixture(scope="module")
def fitted(weekly: Panel) -> tuple[Seasons, Regressed, Direct]:
    """All fits at one origin: they take a second together."""
    return (
        fit_seasons(weekly, 0, ORIGIN, NEVER),
        fit_regressed(weekly, 0, ORIGIN, NEVER),
        fit_direct(weekly, 0, ORIGIN, NEVER),
    )


def test_all_know_the_weekend(weekly: Panel, fitted: tuple[Seasons, Regressed, Direct]) -> None:
    """On a Friday night all foresee a quieter Saturday: less than half of what repeating Friday gets wrong."""
    truth = weekly.counts[0, ORIGIN : ORIGIN + 24]
    naive = np.abs(weekly.counts[0, ORIGIN - 24 : ORIGIN] - truth).mean()
    for one in fitted:
        said = one.forecast(weekly.counts[0], weekly.known[0], position(weekly), ORIGIN, 24)
        assert np.abs(said - truth).mean() < 0.5 * naive


def test_parameters_are_all_that_is_needed(weekly: Panel, fitted: tuple[Seasons, Regressed, Direct]) -> None:
    """Through JSON and back the forecast is the same: no pickled results."""
    for one in fitted:
        back = restored(json.loads(json.dumps(parameters(one))))
        before, after = (
            x.forecast(weekly.counts[0], weekly.known[0], position(weekly), ORIGIN + 5, 24) for x in (one, back)
        )
        assert np.array_equal(before, after)


def test_the_errors_recursion_equals_statsmodels(weekly: Panel, fitted: tuple[Seasons, Regressed, Direct]) -> None:
    """Our forecast from coefficients is what the state space model forecasts with them."""
    made = fitted[1]
    library: Any = importlib.import_module("statsmodels.tsa.statespace.sarimax")
    place = position(weekly)
    logs = np.log1p(weekly.counts[0, :ORIGIN])
    terms = fourier(place, made.span)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = library.SARIMAX(logs, exog=terms[:ORIGIN], order=(1, 0, 1), trend="n", concentrate_scale=True)
        result = model.smooth([*made.beta, made.ar, made.ma])
    theirs = np.expm1(result.forecast(24, exog=terms[ORIGIN : ORIGIN + 24]))
    own = made.forecast(weekly.counts[0], weekly.known[0], place, ORIGIN, 24)
    assert own == pytest.approx(theirs, rel=1e-3)


def test_new_counts_move_the_level_without_a_fit(weekly: Panel, fitted: tuple[Seasons, Regressed, Direct]) -> None:
    """Six hours at double rate raise the forecast; a gap of six hours does not."""
    counts, known = weekly.counts[0].copy(), weekly.known[0].copy()
    place, later = position(weekly), ORIGIN + 6
    counts[ORIGIN:later] *= 4
    for one in fitted[:2]:  # the direct regression carries over what used to carry over: nothing, in this noise
        usual = one.forecast(weekly.counts[0], weekly.known[0], place, later, 3)
        assert (one.forecast(counts, known, place, later, 3) > usual).all()
        hidden = known.copy()
        hidden[ORIGIN:later] = False
        gap = one.forecast(counts, hidden, place, later, 3)
        assert gap == pytest.approx(usual, rel=0.3)


def test_gaps_in_the_history_are_survived() -> None:
    """A lost night leaves all fits finite."""
    counts = wave(24, seed=6)
    known = np.ones(counts.shape, np.bool_)
    known[0, 200:212] = False
    data = panel(counts, known=known)
    for fit in FITS:
        said = fit(data, 0, 23 * 24, NEVER).forecast(data.counts[0], known[0], position(data), 23 * 24, 24)
        assert np.isfinite(said).all()


@pytest.mark.parametrize("fit", FITS)
def test_short_or_empty_histories_are_refused(fit: Callable[..., object]) -> None:
    """Two weeks at least, and more history than gap."""
    with pytest.raises(ValueError, match="14 days"):
        fit(panel(wave(10)), 0, 240, NEVER)
    data = panel(wave(15))
    data.known[:, ::3] = data.known[:, 1::3] = False
    with pytest.raises(ValueError, match="missing"):
        fit(data, 0, 15 * 24, NEVER)


@pytest.mark.parametrize("fit", FITS)
def test_a_late_fit_is_given_up(fit: Callable[..., object], weekly: Panel) -> None:
    """The deadline is asked during the fit, on the caller's clock."""
    ticks = itertools.count()
    with pytest.raises(Late):
        fit(weekly, 0, ORIGIN, Deadline(lambda: float(next(ticks)), 1.0 if fit is fit_seasons else 3.0))


def test_forecasts_have_a_ceiling() -> None:
    """An exponential run away stops at four times the largest count, and never goes below zero."""
    wild = Regressed(np.full(len(fourier(np.zeros(1, np.int64), 168)[0]), 30.0), 0.5, 0.1, most=10.0, span=168)
    data = panel(wave(2))
    said = wild.forecast(data.counts[0], data.known[0], position(data), 24, 24)
    assert said.max() <= 40.0
    assert said.min() >= 0


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({}, "kind must be"),
        ({"kind": "pickle"}, "kind must be"),
        ({"kind": ["direct"]}, "kind must be"),
        ({"kind": "direct", "weights": [[1.0]], "spread": 0.1, "most": float("inf")}, "not finite"),
        ({"kind": "regressed", "beta": [1.0]}, "not the parameters"),
        ({"kind": "regressed", "beta": [1.0], "ar": float("nan"), "ma": 0.0, "most": 1.0, "span": 7}, "not finite"),
    ],
)
def test_hostile_parameters_are_refused(stored: dict[str, object], message: str) -> None:
    """A store may hold anything: unknown kinds, missing and absurd numbers are errors here, not forecasts later."""
    with pytest.raises(ValueError, match=message):
        restored(stored)


def test_positions_survive_a_clock_change() -> None:
    """With slots as long as buckets the local slot decides; otherwise positions count on from the first bucket."""
    data = panel(wave(2))
    assert position(data) is data.phase
    coarse = panel(wave(2, day=48), bucket=1800.0)
    other = type(coarse)(coarse.counts, coarse.known, coarse.phase // 2, 1800.0, 24)
    assert position(other)[:3].tolist() == [0, 1, 2]
