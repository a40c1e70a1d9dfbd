"""The contract of every eviction policy, whichever it is; a new one is tested by being registered."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.residency.ledger import Resident
from actors.residency.model import Footprint, Model, Rules, Ticket, Trigger
from actors.residency.policies import POLICIES, expires_at, jitter, order
from actors.residency.states import State
from forecasting.outlook import UNKNOWN, Outlook, Prospect

SECONDS = st.floats(0, 1e9)
DURATION = st.none() | st.floats(0.001, 1e6)
PROSPECT = st.builds(Prospect, st.floats(0, 1e6), st.floats(0, 1e9) | st.just(math.inf), st.floats(0, 1))
RULES = st.builds(Rules, DURATION, DURATION, st.floats(0, 1e6), st.booleans(), st.integers(-3, 3))


@st.composite
def residents(draw: st.DrawFn, name: str = "m") -> Resident:
    """Any row that a ledger could hold."""
    size = draw(st.integers(0, 1 << 50))
    loaded = draw(SECONDS)
    what = Model(name, "1", "f", Footprint(size, size), draw(RULES), draw(st.floats(0, 1e5)))
    uses = draw(st.integers(0, 1 << 40))
    row = Resident(
        what, State.RESIDENT, size, loaded, loaded, loaded + draw(SECONDS), uses, draw(st.sampled_from(Trigger))
    )
    row.pinned = what.rules.pinned
    if draw(st.booleans()):
        row.leases[Ticket(1)] = row.last_used
    return row


OUTLOOK = st.builds(Outlook, SECONDS, st.dictionaries(st.sampled_from(["m@1", "n@1"]), PROSPECT, max_size=2))


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestEveryPolicy:
    """What `plan` relies on."""

    @given(row=residents(), outlook=OUTLOOK, ahead=SECONDS)
    def test_is_total_never_nan_and_deterministic(
        self, name: str, row: Resident, outlook: Outlook, ahead: float
    ) -> None:
        """A NaN would make every comparison false and the order of victims depend on the order of rows."""
        now = row.last_used + ahead
        score = POLICIES[name]
        value = score(row, now, outlook)
        assert isinstance(value, float)
        assert not math.isnan(value)
        assert score(row, now, outlook) == value

    @given(row=residents(), outlook=OUTLOOK)
    def test_leaves_no_trace(self, name: str, row: Resident, outlook: Outlook) -> None:
        """Asking a thousand times changes nothing: a score is a question."""
        before = replace(row, leases=dict(row.leases)), dict(outlook.prospects)
        POLICIES[name](row, row.last_used, outlook)
        assert repr(before) == repr((row, dict(outlook.prospects)))
        assert (row.uses, row.last_used, row.size) == (before[0].uses, before[0].last_used, before[0].size)

    @given(rows=st.lists(st.sampled_from("abcdefgh").flatmap(residents), max_size=6, unique_by=lambda row: row.key))
    def test_orders_any_residents_in_one_way_only(self, name: str, rows: list[Resident]) -> None:
        """The victim does not depend on the order in which rows are looked at."""

        def key(row: Resident) -> tuple[int, float, float, int, str]:
            return order(row, POLICIES[name], 2e9, UNKNOWN)

        backwards = [*reversed(rows)]
        assert sorted(rows, key=key) == sorted(backwards, key=key)

    @given(row=residents(), other=st.integers(-3, 3))
    def test_an_operators_priority_outweighs_the_score(self, name: str, row: Resident, other: int) -> None:
        """Lower priority leaves first, whatever a policy thinks."""
        rival = replace(row, model=replace(row.model, rules=replace(row.model.rules, priority=other)), last_used=1e12)
        mine, theirs = (order(each, POLICIES[name], 1e12, UNKNOWN) for each in (row, rival))
        if row.model.rules.priority != other:
            assert (mine < theirs) == (row.model.rules.priority < other)

    @given(row=residents(), cost=st.floats(0, 1e5), size=st.integers(0, 1 << 50))
    def test_ties_go_cheap_first_then_small_first_then_by_name(
        self, name: str, row: Resident, cost: float, size: int
    ) -> None:
        """What is quickly reloaded leaves before what is not, and the order never depends on chance."""
        rival = replace(row, model=replace(row.model, name="zz", load_seconds=cost), size=size)
        score = POLICIES[name]
        if score(row, 2e9, UNKNOWN) != score(rival, 2e9, UNKNOWN):
            return  # no tie under this policy
        mine, theirs = (order(each, score, 2e9, UNKNOWN) for each in (row, rival))
        assert (mine < theirs) == ((row.model.load_seconds, row.size, "m") < (cost, size, "zz"))


@pytest.mark.parametrize("name", ["lru", "lru_ttl"])
@given(
    rows=st.lists(st.sampled_from("abcdefgh").flatmap(residents), min_size=2, max_size=6, unique_by=lambda row: row.key)
)
def test_lru_is_the_order_of_last_use(name: str, rows: list[Resident]) -> None:
    """The least recently used has the smallest score."""
    by_score = sorted(rows, key=lambda row: POLICIES[name](row, 2e9, UNKNOWN))
    assert [row.last_used for row in by_score] == sorted(row.last_used for row in rows)


@given(row=residents())
def test_a_resident_expires_by_the_earlier_of_its_limits(row: Resident) -> None:
    """U19: idle and absolute limit are two settings; a pin overrides only the idle one; jitter stays within 5 %."""
    rules, end = row.model.rules, expires_at(row)
    absolute = None if rules.ttl is None else row.loaded_at + rules.ttl * jitter(row)
    idle = None if rules.ttl_idle is None or row.pinned else row.last_used + rules.ttl_idle * jitter(row)
    limits = {"ttl": absolute, "ttl_idle": idle}
    if end is None:
        assert absolute is None
        assert idle is None
    else:
        at, reason = end
        assert limits[reason] == at == min(each for each in limits.values() if each is not None)
    assert 0.95 <= jitter(row) <= 1.05


def test_jitter_spreads_models_that_were_loaded_together() -> None:
    """A warm list loaded at once does not expire at once, and each model keeps its own factor."""
    rows = [Resident(Model(f"m{number}", "1", "f", Footprint(1, 1)), State.RESIDENT, 1, 0.0) for number in range(100)]
    factors = {jitter(row) for row in rows}
    assert len(factors) > 90
    assert {jitter(row) for row in rows} == factors
    assert jitter(rows[0], 0.0) == 1.0


def test_the_list_of_policies_cannot_be_changed_by_accident() -> None:
    """Registering is done in one place."""
    with pytest.raises(TypeError):
        POLICIES["mine"] = POLICIES["lru"]  # type: ignore[index]


# -- policies that read the outlook ------------------------------------------------------------------


def resident(name: str, *, size: int = 100, cost: float = 1.0, used: float = 0.0) -> Resident:
    """An idle row."""
    what = Model(name, "1", "f", Footprint(size, size), load_seconds=cost)
    return Resident(what, State.RESIDENT, size, 0.0, 0.0, used)


def leaving(name: str, rows: list[Resident], outlook: Outlook, now: float = 1000.0) -> list[str]:
    """Names in the order in which a policy lets them go."""
    return [row.model.name for row in sorted(rows, key=lambda row: order(row, POLICIES[name], now, outlook))]


def expecting(**prospects: Prospect) -> Outlook:
    """A fresh outlook of these models."""
    return Outlook(1000.0, {f"{name}@1": prospect for name, prospect in prospects.items()}, valid=120.0)


@pytest.mark.parametrize("name", ["rate", "ttn"])
@pytest.mark.parametrize("outlook", [UNKNOWN, Outlook(0.0, {"a@1": Prospect(9.0, 1.0)}, valid=120.0)])
@given(
    rows=st.lists(st.sampled_from("abcdefgh").flatmap(residents), min_size=2, max_size=6, unique_by=lambda row: row.key)
)
def test_without_a_fresh_outlook_recency_decides(name: str, outlook: Outlook, rows: list[Resident]) -> None:
    """A dead or late forecaster leaves exactly LRU, for every model alike."""
    assert [POLICIES[name](row, 2e9, outlook) for row in rows] == [row.last_used for row in rows]


def test_rate_weighs_requests_by_what_reloading_costs_per_byte() -> None:
    """The smallest λ_E·c/s leaves first."""
    rows = [resident("often"), resident("seldom"), resident("dear", cost=50.0), resident("big", size=1000)]
    outlook = expecting(
        often=Prospect(1.0), seldom=Prospect(0.05), dear=Prospect(0.05), big=Prospect(1.0, evict_rate=0.3)
    )
    assert leaving("rate", rows, outlook) == ["big", "seldom", "often", "dear"]


def test_ttn_keeps_what_is_used_next() -> None:
    """The later the next use, the earlier it leaves, whatever its rate; time passes after the outlook was made."""
    rows = [resident("soon"), resident("late"), resident("never")]
    outlook = expecting(soon=Prospect(0.0, 200.0), late=Prospect(9.0, 5000.0), never=Prospect(0.0))
    assert leaving("ttn", rows, outlook) == ["never", "late", "soon"]
    before, after = (POLICIES["ttn"](rows[0], now, outlook) for now in (1000.0, 1100.0))
    assert after > before


@pytest.mark.parametrize("name", ["rate", "ttn"])
def test_models_of_which_nothing_is_expected_leave_by_recency(name: str) -> None:
    """Equal zeros are no tie: the longest idle goes first."""
    rows = [resident("old", used=1.0, cost=9.0), resident("new", used=900.0, cost=9.0)]
    assert leaving(name, rows, expecting(old=Prospect(), new=Prospect())) == ["old", "new"]


@pytest.mark.parametrize("name", ["rate", "ttn"])
def test_a_model_that_the_forecast_does_not_know_is_judged_by_its_idleness(name: str) -> None:
    """A newcomer neither blocks memory for ever nor leaves at once."""
    rows = [resident("new", used=990.0), resident("busy"), resident("quiet")]
    outlook = expecting(busy=Prospect(1.0, 60.0), quiet=Prospect(1e-6, 1e6))
    assert leaving(name, rows, outlook) == ["quiet", "new", "busy"]
