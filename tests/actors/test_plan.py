"""Plans: each answer, whom it chooses, whom it never chooses, and that asking leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.residency.ledger import Ledger
from actors.residency.model import ModelKey, Rules, Ticket, Trigger
from actors.residency.plan import Asking, Join, Load, Never, Plan, Ready, Wait, ceiling, plan
from actors.residency.policies import lru
from actors.residency.states import State
from tests.actors.books import KEY, bring, ledger_in, model

if TYPE_CHECKING:
    from actors.residency.ledger import Resident


def ask(book: Ledger, need: int = 10, *, now: float = 100.0, **options: int | bool) -> Plan:
    """The plan for `m@1`, which must leave the books as they were."""
    before = repr(book), [(repr(row), row.since, row.last_used) for row in book.rows()], book.overrun
    answer = plan(book, Asking(KEY, need, **options), score=lru, now=now)  # type: ignore[arg-type]
    assert (repr(book), [(repr(row), row.since, row.last_used) for row in book.rows()], book.overrun) == before
    return answer


def test_what_can_never_fit_is_told_with_the_numbers() -> None:
    """T5, F46: the ceiling is capacity without headroom; today's foreign bytes may go away and do not count."""
    book = Ledger(30, headroom=5)
    book.foreign = 20
    assert ask(book, 26) == Never(26, 25)
    assert ask(book, 25) != Never(25, 25)
    assert ceiling(book) == 25


def test_a_tier_for_no_model_at_all_never_takes_one() -> None:
    """A count of zero is a closed door, not a queue."""
    assert ask(Ledger(30, count=0)) == Never(10, 30)


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        (State.ABSENT, Load()),
        (State.LOADING, Join()),
        (State.RESIDENT, Ready()),
        (State.DRAINING, Wait("unloading")),
        (State.UNLOADING, Wait("unloading")),
    ],
)
def test_the_answer_for_a_model_that_is_there_in_some_way(state: State, answer: Plan) -> None:
    """F47, R23: what is being stopped is waited for, never used and never loaded beside itself."""
    assert ask(ledger_in(state)) == answer


def test_enough_free_bytes_need_no_victim() -> None:
    """R21: two small models that fit stay both."""
    book = Ledger(20)
    bring(book, model("a"))
    assert ask(book) == Load()


def test_the_least_recently_used_leaves_first_and_no_more_than_needed() -> None:
    """R10: enough and not one more."""
    book = Ledger(30)
    for now, name in enumerate("abc"):
        bring(book, model(name), now=float(now))
    assert ask(book) == Load((ModelKey("a@1"),))
    assert ask(book, 20) == Load((ModelKey("a@1"), ModelKey("b@1")))


def test_a_victim_that_turns_out_not_to_be_needed_stays() -> None:
    """The old small one was chosen first, but the next one alone suffices."""
    book = Ledger(30)
    bring(book, model("small", 5), now=0.0)
    bring(book, model("large", 25), now=1.0)
    assert ask(book, 20) == Load((ModelKey("large@1"),))


def test_an_idle_victim_is_better_than_an_older_leased_one() -> None:
    """F51: also an impatient demand drains leased residents only after the idle ones."""
    book = Ledger(20)
    bring(book, model("busy"), now=0.0, leases=(1,))
    bring(book, model("idle"), now=50.0)
    assert ask(book, impatient=True) == Load((ModelKey("idle@1"),))
    assert ask(book, 20, impatient=True) == Load((ModelKey("idle@1"), ModelKey("busy@1")))


def test_low_priority_leaves_before_the_policy_is_asked() -> None:
    """The operator's word outweighs recency."""
    book = Ledger(20)
    bring(book, model("old", rules=Rules(priority=1)), now=0.0)
    bring(book, model("new"), now=50.0)
    assert ask(book) == Load((ModelKey("new@1"),))


def test_what_is_already_leaving_counts_as_room() -> None:
    """R6: B waits for A's bytes instead of evicting C as well."""
    book = Ledger(20)
    bring(book, model("a"))
    bring(book, model("c"))
    book.retire(ModelKey("a@1"), now=1.0)
    assert ask(book) == Load()


def test_draining_residents_count_as_room_too() -> None:
    """A wish does not choose a second victim while its first one drains."""
    book = Ledger(20)
    bring(book, model("a"), leases=(1,))
    bring(book, model("c"))
    book.drain(ModelKey("a@1"), now=1.0)
    assert ask(book) == Load()


def test_claims_of_those_in_front_are_respected() -> None:
    """Bytes and places promised to an earlier wish are not given away twice."""
    book = Ledger(30)
    bring(book, model("a"))
    assert ask(book, 10, claimed=20) == Load((ModelKey("a@1"),))
    counted = Ledger(30, count=2)
    bring(counted, model("a"))
    assert ask(counted) == Load()
    assert ask(counted, claimed_places=1) == Load((ModelKey("a@1"),))


def test_a_full_count_needs_a_victim_although_bytes_are_free() -> None:
    """U10: the count is a guard beside the bytes."""
    book = Ledger(1000, count=2)
    bring(book, model("a"), now=0.0)
    bring(book, model("b"), now=1.0)
    assert ask(book) == Load((ModelKey("a@1"),))
    book.retire(ModelKey("a@1"), now=2.0)
    assert ask(book) == Load()


def test_a_load_that_may_not_evict_takes_free_room_or_none() -> None:
    """Warm loads and recoveries never push anybody out."""
    book = Ledger(20)
    bring(book, model("a"))
    assert ask(book, may_evict=False) == Load()
    bring(book, model("b"))
    assert ask(book, may_evict=False) == Wait("full")


def _pinned(row: Resident) -> None:
    row.pinned = True


def _adopted(row: Resident) -> None:
    row.adopted = True


@pytest.mark.parametrize(
    ("rules", "mark", "answer"),
    [
        (Rules(), _pinned, Wait("pinned")),
        (Rules(), _adopted, Wait("leased")),
        (Rules(min_residency=200.0), None, Wait("young", 200.0)),
    ],
)
def test_protected_residents_are_never_chosen(rules: Rules, mark: object, answer: Plan) -> None:
    """F45: the reason is named, with the instant at which it ends if that is known."""
    book = Ledger(10)
    row = bring(book, model("a", rules=rules))
    if callable(mark):
        mark(row)
    assert ask(book) == answer
    assert ask(book, impatient=True) == answer


def test_a_leased_resident_is_in_the_way_until_the_demand_is_impatient() -> None:
    """F45, F51: first wait, then drain."""
    book = Ledger(10)
    bring(book, model("a"), leases=(1,))
    assert ask(book) == Wait("leased")
    assert ask(book, impatient=True) == Load((ModelKey("a@1"),))


def test_the_obstacle_that_may_end_first_is_named_with_its_end() -> None:
    """Leases end at any time, and youth at a known one: the caller is woken for whichever comes first."""
    book = Ledger(20)
    bring(book, model("a"), leases=(1,))
    bring(book, model("b", rules=Rules(min_residency=150.0)))
    assert ask(book, 20) == Wait("leased", 150.0)


def test_pins_that_leave_too_little_are_named_whatever_else_is_in_the_way() -> None:
    """Only an unpin helps, so waiting for leases would be a lie."""
    book = Ledger(30)
    bring(book, model("pinned", 20, rules=Rules(pinned=True)))
    bring(book, model("busy"), leases=(1,))
    assert ask(book, 15) == Wait("pinned")
    assert ask(book, 10) == Wait("leased")


def test_loads_under_way_are_waited_for() -> None:
    """What is loading cannot be a victim yet, and will be one soon."""
    book = Ledger(10)
    book.reserve(model("a"), 10, now=0.0, trigger=Trigger.DEMAND)
    assert ask(book) == Wait("busy")
    free = Ledger(10)
    assert ask(free, claimed=5) == Wait("busy")


def test_pins_that_fill_every_place_are_named_although_bytes_are_free() -> None:
    """A count limit reached by pins alone."""
    book = Ledger(100, count=1)
    bring(book, model("a", rules=Rules(pinned=True)))
    assert ask(book) == Wait("pinned")


def test_too_many_small_victims_give_way_to_few_large_ones() -> None:
    """U9: an eviction spree is capped; the cap chooses otherwise before it gives up."""
    book = Ledger(100)
    for number in range(6):
        bring(book, model(f"s{number}", 5), now=float(number))
    bring(book, model("large", 30), now=50.0)
    bring(book, model("rest", 40, rules=Rules(pinned=True)), now=50.0)
    assert ask(book, 30, victims=3) == Load((ModelKey("large@1"),))
    assert ask(book, 30, victims=6) == Load(tuple(ModelKey(f"s{number}@1") for number in range(6)))
    assert ask(book, 45, victims=3) == Wait("victims")


ROW = st.fixed_dictionaries(
    {
        "size": st.integers(0, 20),
        "state": st.sampled_from([State.RESIDENT] * 5 + [State.LOADING, State.DRAINING, State.UNLOADING]),
        "leased": st.booleans(),
        "pinned": st.booleans(),
        "adopted": st.booleans(),
        "young": st.booleans(),
        "priority": st.integers(0, 1),
        "used": st.integers(0, 50),
    }
)


def _book(rows: list[dict[str, int | bool | State]], spare: int, count: int | None) -> Ledger:
    book = Ledger(sum(int(each["size"]) for each in rows) + spare, count=count)
    for number, each in enumerate(rows):
        rules = Rules(min_residency=1000.0 if each["young"] else 0.0, priority=int(each["priority"]))
        what = model(f"r{number}", int(each["size"]), rules=rules)
        book.reserve(what, what.footprint.device, now=0.0, trigger=Trigger.DEMAND)
        if each["state"] is State.LOADING:
            continue
        row = book.commit(what.key, what.footprint.device, now=float(each["used"]))
        row.pinned, row.adopted = bool(each["pinned"]), bool(each["adopted"])
        if each["state"] is State.UNLOADING:
            book.retire(what.key, now=60.0)
            continue
        if each["leased"]:
            book.lease(row, Ticket(number), now=float(each["used"]))
        if each["state"] is State.DRAINING:
            book.drain(what.key, now=60.0)
    book.check()
    return book


def _protected(row: Resident, *, impatient: bool) -> bool:
    young = 100.0 - row.loaded_at < row.model.rules.min_residency
    return row.state is not State.RESIDENT or row.pinned or row.adopted or young or (bool(row.leases) and not impatient)


def _suffices(book: Ledger, gone: list[Resident], asking: Asking) -> bool:
    leaving = [row for row in book.rows() if row.state in {State.DRAINING, State.UNLOADING}]
    room = book.free + sum(row.size for row in (*leaving, *gone)) - asking.claimed
    places = book.places
    enough = places is None or places + len(leaving) + len(gone) - asking.claimed_places >= 1
    return room >= asking.need and enough


@given(
    rows=st.lists(ROW, max_size=8),
    spare=st.integers(0, 20),
    need=st.integers(0, 80),
    claimed=st.integers(0, 20),
    claimed_places=st.integers(0, 2),
    impatient=st.booleans(),
    may_evict=st.booleans(),
    victims=st.integers(1, 6),
    counted=st.booleans(),
)
def test_a_plan_never_takes_the_protected_always_suffices_and_wastes_nobody(
    rows: list[dict[str, int | bool | State]], spare: int, *, counted: bool, **asked: int | bool
) -> None:
    """T2, I3, I7: over random books, and without a trace in them. A plan exists whenever enough may leave."""
    book = _book(rows, spare, len(rows) if counted and rows else None)
    asking = Asking(KEY, **asked)  # type: ignore[arg-type]
    answer = ask(book, **asked)
    may = [row for row in book.rows() if not _protected(row, impatient=asking.impatient)]
    match answer:
        case Load(evict):
            chosen = [row for key in evict if (row := book.get(key)) is not None]
            assert len(chosen) == len(evict) == len(set(evict)) <= asking.victims
            assert all(row in may for row in chosen)
            assert _suffices(book, chosen, asking)
            assert not any(_suffices(book, [row for row in chosen if row is not spared], asking) for spared in chosen)
            assert asking.may_evict or not evict
            busy = [bool(row.leases) for row in chosen]
            assert busy == sorted(busy), "an idle victim goes before one that has to be drained"
        case Never():
            assert asking.need > ceiling(book)
        case Wait("victims"):
            assert _suffices(book, may, asking)
        case Wait("full"):
            assert not asking.may_evict
            assert not _suffices(book, [], asking)
        case Wait(_, until):
            assert not _suffices(book, may, asking)
            assert until is None or until > 100.0
        case _:
            pytest.fail(f"{answer} for a model that is not there")
