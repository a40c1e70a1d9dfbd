"""Rates and probabilities as two sources of one outlook."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.activity import Horizon
from forecasting.outlook import Floor
from forecasting.sources import Estimate, combined, curve, from_chances, from_rates, highest

SURE = np.ones(1)
HORIZONS = (Horizon(0, 1), Horizon(0, 6), Horizon(6, 6), Horizon(18, 6), Horizon(72, 6))


def poisson(rate: float) -> dict[Horizon, np.ndarray]:
    """What an exact model would say of Poisson requests."""
    return {h: np.array([-math.expm1(-rate * h.span * 600)]) for h in HORIZONS}


@given(st.floats(1e-9, 1e-3))
def test_a_poisson_model_is_the_same_through_either_source(rate: float) -> None:
    """λ = -ln(1 - p)/t: chances of a steady rate give that rate back, at every horizon."""
    by_chance = from_chances("occurrence", poisson(rate), 600.0, SURE)
    by_rate = from_rates("blend", evict_rate=by_chance.evict_rate, prefetch_rate=by_chance.prefetch_rate,
                         next_use=by_chance.next_use, confidence=SURE)  # fmt: skip
    for number in (by_chance.rate, by_chance.evict_rate, by_chance.prefetch_rate, by_rate.rate):
        assert number[0] == pytest.approx(rate, rel=1e-6)
    for within in (60.0, 600.0, 5000.0, 46_800.0, 1e6):
        assert by_chance.chance(within)[0] == pytest.approx(-math.expm1(-rate * within), rel=1e-6)
        assert by_rate.chance(within)[0] == pytest.approx(by_chance.chance(within)[0], rel=1e-6)
    assert by_chance.next_use[0] == pytest.approx(0.7 / rate, rel=1e-6)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_any_chances_make_a_rising_curve(p: list[float]) -> None:
    """Contradictory horizons, zeros and certainties: finite, rising, and never below the shortest window."""
    said = {h: np.array([each]) for h, each in zip(HORIZONS, p, strict=True)}
    times, hazards = curve(said, 600.0)
    assert list(times) == sorted(set(times))
    assert np.all(np.diff(hazards[:, 0], prepend=0) >= -1e-12)
    estimate = from_chances("occurrence", said, 600.0, SURE)
    assert estimate.chance(600.0)[0] == pytest.approx(p[0], abs=1e-8)
    assert estimate.chance(3600.0)[0] >= p[1] - 1e-8
    prospect = estimate.outlook(["m@1"], 0.0, math.inf).of("m@1")
    assert prospect.chance(3600.0) == pytest.approx(estimate.chance(3600.0)[0], abs=1e-8)


def test_a_window_inside_another_adds_nothing_to_the_curve() -> None:
    """What the longer one has said of it stands."""
    said = {Horizon(0, 6): np.array([0.5]), Horizon(5, 1): np.array([0.9])}
    times, hazards = curve(said, 600.0)
    assert times == (3600.0,)
    assert hazards[0, 0] == pytest.approx(math.log(2))


def test_a_far_peak_is_the_next_use() -> None:
    """Nothing soon, nearly certain in three hours: that is when it is used."""
    p = {h: np.array([0.98 if h.lead == 18 else 0.001]) for h in HORIZONS}
    assert 2 * 3600 < from_chances("o", p, 600.0, SURE).next_use[0] < 4 * 3600


def test_a_model_that_never_comes_has_no_next_use() -> None:
    """Zero chances: infinite."""
    p = {h: np.zeros(1) for h in HORIZONS}
    estimate = from_chances("o", p, 600.0, SURE)
    assert estimate.next_use[0] == math.inf
    assert estimate.rate[0] == estimate.evict_rate[0] == 0
    with pytest.raises(ValueError, match="at least one"):
        curve({}, 600.0)


def plain(source: str, rate: float, **other: float) -> Estimate:
    """One model from one source."""
    numbers = {"evict_rate": rate, "prefetch_rate": rate, "next_use": 1 / rate, "confidence": 0.5, **other}
    return from_rates(source, **{name: np.array([number]) for name, number in numbers.items()})


def test_the_two_rates_may_come_from_two_sources() -> None:
    """λ_E of one, λ_P of the other, and the outlook says so."""
    both = combined(plain("rate", 1.0), plain("fitted", 2.0)).outlook(["m@1"], 5.0, 60.0).of("m@1")
    assert (both.evict_rate, both.prefetch_rate, both.next_use, both.source) == (1.0, 2.0, 1.0, "rate/fitted")


def test_two_sources_merge_by_the_higher_number() -> None:
    """Max in p and in rate, the earlier next use."""
    chances = from_chances("o", poisson(1e-4), 600.0, np.array([0.9]))
    both = highest(plain("b", 3e-4), chances)
    assert both.rate[0] == pytest.approx(3e-4)
    assert both.next_use[0] == pytest.approx(1 / 3e-4)
    assert both.confidence[0] == 0.9
    for within in (600.0, 7200.0):
        assert both.chance(within)[0] == pytest.approx(-math.expm1(-3e-4 * within))


def test_an_outlook_of_arrays_is_read_by_key() -> None:
    """Prospects are made when asked for; unknown keys expect nothing; floors lie on top without a copy."""
    outlook = plain("b", 0.5).outlook(["m@1"], 10.0, 60.0)
    assert outlook.of("m@1").rate == 0.5
    assert outlook.of("n@1").confidence == 0.0
    assert (list(outlook.prospects), len(outlook.prospects), "m@1" in outlook.prospects) == (["m@1"], 1, True)
    raised = outlook.raised({"n@1": Floor(rate=2.0)})
    assert raised.of("n@1").rate == 2.0
    assert raised.of("m@1") == outlook.of("m@1")
    assert sorted(raised.prospects) == ["m@1", "n@1"]
    with pytest.raises(ValueError, match="keys"):
        plain("b", 0.5).outlook([], 0.0, 60.0)


@pytest.mark.parametrize("name", ["evict_rate", "prefetch_rate", "next_use", "confidence"])
@pytest.mark.parametrize("bad", [math.nan, -1.0, -math.inf])
def test_absurd_numbers_stop_at_the_border(name: str, bad: float) -> None:
    """F72: a fitter's NaN or negative names its source and its column, and never reaches a policy."""
    with pytest.raises(ValueError, match=f"{name} of source 'b'|prefetch_rate|rate of source 'b'"):
        plain("b", 1.0, **{name: bad})


def test_hazards_must_match_their_times() -> None:
    """A curve of another length is refused."""
    one = np.ones(1)
    with pytest.raises(ValueError, match="hazards of source"):
        Estimate("b", one, one, one, one, one, (600.0,), np.zeros((2, 1)))
