"""Promises of the direct regression: the usual week survives a holiday, the day's level carries over, nothing peeks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.direct import LEAST, Direct, _back, fitted
from tests.forecasting.panels import panel, wave

DAY = 24
WEEK = 7 * DAY


def made(counts: np.ndarray, known: np.ndarray | None = None) -> tuple[Direct, np.ndarray, np.ndarray]:
    """A fit on one hourly history from a Monday on, what is known of it, and its positions in the week."""
    data = panel(counts, known=known)
    return (
        fitted(data.counts[0], data.known[0], data.phase[: counts.shape[1]], DAY, lambda: None),
        data.known[0],
        data.phase,
    )


def test_a_holiday_is_not_what_usually_happens() -> None:
    """A silent Wednesday last week leaves this Wednesday's forecast near what comes."""
    last, origin = 6 * WEEK + 2 * DAY, 7 * WEEK + 2 * DAY
    counts, truth = wave(59, seed=1), wave(59, seed=3)[0, origin : origin + DAY]
    counts[0, last : last + DAY] = 0
    one, known, phase = made(counts[:, :origin])
    said = one.forecast(counts[0, :origin], known, phase, origin, DAY)
    assert np.abs(said - truth).mean() < 0.15 * truth.mean()


def test_the_level_of_a_day_carries_over() -> None:
    """Where days go up and down for days on end, three days at double rate foresee a fourth that is above usual."""
    draw = np.random.default_rng(4)
    logs = np.zeros(70)
    for day in range(1, 70):
        logs[day] = 0.8 * logs[day - 1] + 0.2 * draw.normal()
    rate = wave(70, seed=5) * np.exp(np.repeat(logs, DAY))
    counts = draw.poisson(rate).astype(float)
    one, known, phase = made(counts)
    quiet, busy = counts.copy(), counts.copy()
    busy[0, -3 * DAY :] *= 2
    usual, raised = (one.forecast(c[0], known, phase, 70 * DAY, DAY) for c in (quiet, busy))
    assert raised.sum() > 1.2 * usual.sum()


def test_nothing_from_the_origin_on_is_looked_at() -> None:
    """A forecast is the same whatever stands in the history after its origin."""
    counts = wave(40, seed=6)
    one, known, phase = made(counts[:, : 30 * DAY])
    wild, hidden = counts.copy(), np.ones(40 * DAY, np.bool_)
    wild[0, 30 * DAY :] = 1e6
    hidden[30 * DAY :] = False
    phase = np.arange(42 * DAY) % WEEK
    plain = one.forecast(counts[0], np.ones(40 * DAY, np.bool_), phase, 30 * DAY, DAY)
    assert np.array_equal(plain, one.forecast(wild[0], hidden, phase, 30 * DAY, DAY))
    assert known.all()


def test_too_little_history_and_too_far_ahead_are_refused() -> None:
    """Three weeks at least, and a day ahead at most."""
    with pytest.raises(ValueError, match=f"{LEAST} days"):
        made(wave(LEAST - 1))
    one, known, phase = made(wave(LEAST))
    with pytest.raises(ValueError, match="a day ahead"):
        one.forecast(wave(LEAST)[0], known, phase, LEAST * DAY, DAY + 1)


@pytest.mark.parametrize("counts", [np.zeros((1, 30 * DAY)), np.full((1, 30 * DAY), 7.0), wave(30) * 1e7])
def test_counts_without_any_spread_are_survived(counts: np.ndarray) -> None:
    """Never asked, always the same, enormous: a finite forecast, not above what was ever seen by much."""
    one, known, phase = made(counts)
    said = one.forecast(counts[0], known, phase, 30 * DAY, DAY)
    assert np.isfinite(said).all()
    assert said.max() <= 4 * counts.max()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3 * WEEK), st.sampled_from([-2, -1, 1, 2]), st.sampled_from([DAY, WEEK, 3 * WEEK]))
def test_the_same_local_time_is_found_over_a_change_of_the_clock(change: int, jump: int, lag: int) -> None:
    """Once the clock has moved by an hour or two, what was at ten o'clock is sought at ten, and only in the past."""
    at = np.arange(4 * WEEK)
    position = (at + np.where(at >= change, jump, 0)) % WEEK
    source = _back(position.astype(np.int64), lag, DAY)
    there = source >= 0
    assert (source < at).all()
    assert ((position[source[there]] - position[there] + lag) % WEEK == 0).mean() > 0.98
