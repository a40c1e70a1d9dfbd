"""Demotion from fit to fit: by a drift of what was counted, and until it is earned back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forecasting.fit import fit
from forecasting.fitted import Fitted
from forecasting.standing import Standing
from tests.forecasting.fleets import END, counted, daily


@pytest.fixture(scope="module")
def sound() -> Fitted:
    """Six models with a daily peak, nine days."""
    return fit(counted(daily(6, 9)).snapshot(), now=60.0 * END, deadline=1e6, top=0)


def saying(fitted: Fitted, *, falls: int | None = None, earned: bool = False) -> Fitted:
    """The same round with another verdict on its models."""
    demoted = np.arange(len(fitted.keys)) == falls
    return replace(fitted, demoted=demoted, earned=np.full(len(fitted.keys), earned) & ~demoted)


def test_who_fell_stays_down_until_it_is_earned(sound: Fitted) -> None:
    """A round that says nothing bad is not enough; one that says something good is. Both are told once."""
    standing, key = Standing(), sound.keys[2]
    served, change = standing.after(saying(sound, falls=2))
    assert change == ((key,), ())
    assert not served.skilled[2]
    served, change = standing.after(saying(sound))
    assert change == ((), ())
    assert served.demoted.tolist() == [False, False, True, False, False, False]
    served, change = standing.after(saying(sound, earned=True))
    assert change == ((), (key,))
    assert not served.demoted.any()
    assert repr(standing) == "<Standing 0 demoted>"


def test_a_model_that_a_round_left_out_stays_and_one_that_left_is_forgotten(sound: Fitted) -> None:
    """No verdict, no change."""
    standing = Standing()
    standing.after(saying(sound, falls=0))
    nobody = fit(counted({}).snapshot(), now=60.0 * END, deadline=1e6, top=0)
    served, change = standing.after(nobody)
    assert (change, served.demoted.tolist(), standing.demoted) == (((), ()), [], {sound.keys[0]})
    standing.forget(sound.keys[0])
    assert standing.demoted == frozenset()


def test_a_pattern_that_ended_is_demoted_by_the_fit(sound: Fitted) -> None:
    """One model falls silent; the eleven that kept their time keep their trust."""
    fleet = daily(12, 12)
    silent = next(iter(fleet))
    fleet[silent][-3 * 1440 :] = 0
    fitted = fit(counted(fleet).snapshot(), now=60.0 * END, deadline=1e6, top=0)
    own = np.array([key == silent for key in fitted.keys])
    np.testing.assert_array_equal(fitted.demoted, own)
    np.testing.assert_array_equal(fitted.earned, ~own)
    np.testing.assert_array_equal(Fitted.from_arrays(fitted.to_arrays()).demoted, own)
    assert not sound.demoted.any()
