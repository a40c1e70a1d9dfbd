"""The outlook: the one value by which a forecast is seen, and what it refuses to be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting import UNKNOWN, Outlook, Prospect
from forecasting.outlook import NO_PROSPECT, Floor


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


# -- value rates, chances by horizon, floors ----------------------------------------------------------


def test_value_rates_follow_the_rate_unless_given() -> None:
    """λ_E and λ_P default to λ, and may differ from it."""
    assert (Prospect(rate=2.0).evict_rate, Prospect(rate=2.0).prefetch_rate) == (2.0, 2.0)
    assert (Prospect(2.0, evict_rate=0.0).evict_rate, Prospect(2.0, prefetch_rate=5.0).prefetch_rate) == (0.0, 5.0)


@pytest.mark.parametrize("bad", [-1.0, math.inf])
def test_a_value_rate_that_is_none_is_refused(bad: float) -> None:
    """F72: each rate is named."""
    with pytest.raises(ValueError, match="evict_rate must be finite"):
        Prospect(evict_rate=bad)
    with pytest.raises(ValueError, match="prefetch_rate must be finite"):
        Prospect(prefetch_rate=bad)


def test_chances_by_horizon_are_met_exactly_and_even_between() -> None:
    """At 10 min and 1 h what was said; between them an even hazard; beyond, Poisson at the rate."""
    prospect = Prospect(rate=1e-3, chances=((600.0, 0.5), (3600.0, 0.75)))
    assert prospect.chance(600.0) == pytest.approx(0.5)
    assert prospect.chance(300.0) == pytest.approx(1 - math.sqrt(0.5))
    assert prospect.chance(2100.0) == pytest.approx(1 - 0.5 * math.sqrt(0.5))
    assert prospect.chance(4600.0) == pytest.approx(1 - 0.25 * math.exp(-1))
    assert prospect.chance(-5.0) == 0.0


@pytest.mark.parametrize(
    "chances", [((600.0, 1.1),), ((600.0, -0.1),), ((0.0, 0.1),), ((600.0, 0.5), (3600.0, 0.4)), ((600.0, math.nan),)]
)
def test_chances_that_do_not_rise_are_refused(chances: tuple[tuple[float, float], ...]) -> None:
    """F72: a longer time cannot be less likely."""
    with pytest.raises(ValueError, match="chances must rise"):
        Prospect(chances=chances)


FLOORS = st.builds(Floor, st.floats(0, 1), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
CHANCES = st.sampled_from([(), ((600.0, 0.2),), ((600.0, 0.1), (3600.0, 0.9), (7200.0, 1.0))])


@given(st.floats(0, 1e3), st.floats(0, 1e7), st.floats(0, 1), CHANCES, FLOORS, st.floats(0, 1e7))
def test_a_declared_peak_is_a_floor(
    rate: float, next_use: float, confidence: float, chances: tuple[tuple[float, float], ...], floor: Floor, at: float
) -> None:
    """Max in p and in rate, the earlier use: no number of a forecast ever falls by what is declared."""
    before = Prospect(rate, next_use, confidence, chances=chances)
    after = before.raised(floor)
    assert after.rate >= max(before.rate, floor.rate)
    assert after.evict_rate >= max(before.evict_rate, floor.rate)
    assert after.prefetch_rate >= max(before.prefetch_rate, floor.rate)
    assert after.next_use == min(before.next_use, floor.next_use)
    assert after.confidence == max(before.confidence, floor.chance)
    assert after.chance(at) >= before.chance(at) - 1e-9
    near = max(floor.within, floor.next_use)
    if near > 0:
        assert after.chance(near) >= floor.chance - 1e-8


def test_a_peak_without_a_rate_stands_for_the_one_that_makes_it_come_true() -> None:
    """-ln(1 - p)/t; and the source says that it was declared."""
    after = Prospect(source="blend").raised(Floor(chance=0.98, next_use=300.0, within=600.0))
    assert after.evict_rate == pytest.approx(-math.log(0.02) / 600)
    assert after.source == "blend+scheduled"
    assert Prospect().raised(Floor(within=0.0, rate=3.0)).rate == 3.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("chance", 1.5), ("chance", math.nan), ("rate", -1.0), ("next_use", math.inf), ("within", math.nan)],
)
def test_a_floor_that_is_none_is_refused(name: str, value: float) -> None:
    """Bad declarations name themselves."""
    with pytest.raises(ValueError, match=name):
        Floor(**{name: value})


def test_an_outlook_ages() -> None:
    """An empty or stale one is not to be trusted; a future origin (clock steps) is."""
    outlook = Outlook(100.0, {"m@1": Prospect(1.0)}, valid=60.0)
    assert outlook.fresh(160.0)
    assert outlook.fresh(90.0)
    assert not outlook.fresh(160.1)
    assert not UNKNOWN.fresh(0.0)


def test_floors_lie_on_an_outlook_without_changing_it() -> None:
    """Raised keys are seen once each, the others through."""
    base = Outlook(0.0, {"m@1": Prospect(1.0), "n@1": Prospect(2.0)})
    assert base.raised({}) is base
    raised = base.raised({"m@1": Floor(rate=5.0), "o@1": Floor(rate=6.0)})
    assert [raised.of(key).rate for key in ("m@1", "n@1", "o@1", "p@1")] == [5.0, 2.0, 6.0, 0.0]
    assert sorted(raised.prospects) == ["m@1", "n@1", "o@1"]
    assert len(raised.prospects) == 3
    assert "o@1" in raised.prospects
    assert "p@1" not in raised.prospects
    assert base.of("m@1").rate == 1.0
