"""Blend or occurrence: judged on a day that neither has seen, at what their decisions would have cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forecasting.contest import blend_chances, chosen, cost
from forecasting.fit import fit
from forecasting.fitted import Absurd, Fitted
from forecasting.pooled import part_of
from tests.forecasting.fleets import END, counted, daily

DAY = 86_400.0


def test_knowing_costs_nothing_and_knowing_nothing_saves_nothing() -> None:
    """A perfect forecast costs 0, the right constant as much as the better of always and never, a reversed one more."""
    came = np.random.default_rng(0).random(5_000) < 0.03
    assert cost(came.astype(float), came) == 0.0
    assert cost(np.full(came.shape, came.mean()), came) == pytest.approx(1.0)
    assert cost((~came).astype(float), came) > 1.5


def test_a_day_on_which_nothing_can_be_lost_judges_nobody() -> None:
    """No request, or one in every window: not a number, and no change of source."""
    p = np.full(10, 0.5)
    assert math.isnan(cost(p, np.zeros(10, bool)))
    assert math.isnan(cost(p, np.ones(10, bool)))


@pytest.mark.parametrize(
    ("blend", "occurrence", "possible", "source"),
    [
        (0.5, 0.4, True, "occurrence"),
        (0.5, 0.4, False, "blend"),
        (0.5, 0.495, True, "blend"),
        (0.4, 0.5, True, "blend"),
        (0.5, math.nan, True, "blend"),
        (math.nan, 0.1, True, "blend"),
    ],
)
def test_the_cheaper_source_serves(blend: float, occurrence: float, possible: bool, source: str) -> None:  # noqa: FBT001  # a table
    """By two percent at least, and only if it can be looked up."""
    assert chosen({"cost_blend": blend, "cost_occurrence": occurrence}, possible=possible) == source
    assert chosen({}, possible=True) == "blend"


def test_the_judged_day_is_not_looked_at_before_it_is_over() -> None:
    """What the blend says of the day's first half hour is the same whatever the day brings later."""
    past = part_of(counted(daily(8, 6)).snapshot().history(300), slice(None))
    end = 60.0 * END
    said = blend_chances(past, end, counted({}).zone)
    assert said is not None
    past.counts[:, -200:] = 9.0
    again = blend_chances(past, end, counted({}).zone)
    assert again is not None
    np.testing.assert_array_equal(said[:, : 288 - 200], again[:, : 288 - 200])
    assert (said[:, -100:] != again[:, -100:]).any()


def test_two_days_are_too_few_to_compare() -> None:
    """One to look back on, one to fit, one to judge."""
    past = part_of(counted(daily(4, 2)).snapshot().history(300), slice(None))
    assert blend_chances(past, 60.0 * END, counted({}).zone) is None


def test_a_fit_says_which_source_serves_and_what_both_cost() -> None:
    """Recorded with its figures, checked on the way, and an unknown one refused."""
    fitted = fit(counted(daily(12, 9)).snapshot(), now=60.0 * END, deadline=1e6, top=0)
    costs = [fitted.numbers[f"cost_{source}"] for source in ("blend", "occurrence")]
    assert all(0 < each < 0.9 for each in costs), costs
    assert fitted.source == ("occurrence" if costs[1] < 0.98 * costs[0] else "blend")
    arrays = fitted.to_arrays()
    assert Fitted.from_arrays(arrays).source == fitted.source
    arrays["said"] = np.frombuffer(arrays["said"].tobytes().replace(b'"source": "', b'"source": "no'), np.uint8)
    with pytest.raises(Absurd, match="source must be one of blend, occurrence"):
        Fitted.from_arrays(arrays)
