"""The outlook: the one value by which a forecast is seen, and what it refuses to be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting import UNKNOWN, Outlook, Prospect
from forecasting.outlook import NO_PROSPECT


def test_an_unknown_model_expects_nothing_with_no_confidence() -> None:
    """Policies fall back to recency where nothing is known."""
    assert UNKNOWN.of("m@1") == NO_PROSPECT == Prospect(0.0, math.inf, 0.0)
    assert UNKNOWN.of("m@1").chance(1e9) == 0.0


def test_a_known_model_has_its_prospect() -> None:
    """Prospects are found by key."""
    known = Prospect(rate=0.5, next_use=3.0, confidence=0.9)
    outlook = Outlook(origin=10.0, prospects={"m@1": known})
    assert outlook.of("m@1") is known
    assert outlook.of("n@1") is NO_PROSPECT


@pytest.mark.parametrize("rate", [-1.0, math.inf, -math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    """F72: a forecaster that returns nonsense is stopped at the border, not in a policy."""
    with pytest.raises(ValueError, match="rate must be finite"):
        Prospect(rate=rate)


@pytest.mark.parametrize("next_use", [-0.1, -math.inf, math.nan])
def test_a_next_use_in_the_past_is_refused(next_use: float) -> None:
    """F72: infinity means never, everything else is a duration."""
    with pytest.raises(ValueError, match="next_use must be a duration"):
        Prospect(next_use=next_use)


@pytest.mark.parametrize("confidence", [-0.1, 1.1, math.nan, math.inf])
def test_a_confidence_outside_its_range_is_refused(confidence: float) -> None:
    """F72: 0 is a guess and 1 a certainty."""
    with pytest.raises(ValueError, match="confidence must lie in"):
        Prospect(confidence=confidence)


def test_the_chance_is_that_of_poisson_arrivals() -> None:
    """1 - exp(-rate x seconds)."""
    assert Prospect(rate=2.0).chance(0.5) == pytest.approx(1 - math.exp(-1))
    assert Prospect(rate=2.0).chance(-1.0) == 0.0


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_chance_is_a_probability_that_grows_with_the_horizon(rate: float, within: float, more: float) -> None:
    """Total over everything that the types allow."""
    prospect = Prospect(rate=rate)
    assert 0.0 <= prospect.chance(within) <= prospect.chance(within + more) <= 1.0
