"""Wishes: one per model, their order, their waiters and deadlines."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
from anyio import CancelScope
from hypothesis import given
from hypothesis import strategies as st

from actors.actor import Job, Reply
from actors.residency.ledger import Ledger
from actors.residency.model import Ticket, Trigger
from actors.residency.wishes import PATIENCE_OF_AGE, RANK, Waiter, Wish, Wishes
from tests.actors.books import KEY, model
from tests.actors.virtual import virtual

if TYPE_CHECKING:
    from actors.messages import Grant


def make(
    wishes: Wishes,
    name: str = "m",
    trigger: Trigger = Trigger.DEMAND,
    *,
    now: float = 0.0,
    size: int = 10,
    priority: int = 0,
) -> Wish:
    """Begin a wish whose load is called like its model."""
    return wishes.make(f"load-{name}", model(name, size), trigger, now=now, priority=priority)


def begin(wishes: Wishes, wish: Wish) -> None:
    """Start its load."""
    row = Ledger(1000).reserve(wish.model, 10, now=0.0, trigger=wish.trigger)
    wishes.begin(wish, row, Job(CancelScope()), now=0.0)


def waiter(ticket: int, *, deadline: float | None = None, patience: float | None = None) -> Waiter:
    """One ticket in the queue."""
    reply: Reply[Grant] = Reply()
    return Waiter(Ticket(ticket), f"r{ticket}", reply, 0.0, deadline, patience)


def names(wishes: list[Wish]) -> list[str]:
    """The models' names."""
    return [wish.model.name for wish in wishes]


def test_there_is_one_wish_per_model() -> None:
    """I2: single flight is a property of the books; a second wish for the same model is a bug."""
    wishes = Wishes()
    wish = make(wishes)
    assert wishes.of(KEY) is wish
    with pytest.raises(AssertionError, match="m@1"):
        make(wishes)
    wishes.check()


@virtual
async def test_waiters_are_found_by_ticket_and_leave_once() -> None:
    """F35: leaving takes exactly one waiter away, and leaving again none."""
    wishes = Wishes()
    wish = make(wishes)
    for ticket in (1, 2):
        wishes.join(wish, waiter(ticket))
    assert (wishes.waiting, wish.wanted) == (2, True)
    wishes.check()
    left = wishes.leave(Ticket(1))
    assert left is not None
    assert (left[0], left[1].ticket) == (wish, 1)
    assert wishes.leave(Ticket(1)) is None
    assert wishes.waiting == 1
    wishes.end(wish)
    assert (wishes.waiting, wishes.of(KEY), wishes.all()) == (0, None, [])
    wishes.check()


def test_a_higher_urgency_is_taken_over_and_a_lower_one_is_not() -> None:
    """F54: a demand raises a prefetch; a prefetch never lowers a demand."""
    wishes = Wishes()
    wish = make(wishes, trigger=Trigger.PREFETCH)
    assert wishes.raise_to(wish, Trigger.WARM, request="r1") is Trigger.PREFETCH
    assert wishes.raise_to(wish, Trigger.DEMAND, request="r2") is Trigger.WARM
    assert wishes.raise_to(wish, Trigger.PREFETCH, request="r3") is None
    assert wishes.raise_to(wish, Trigger.ADMIN) is None
    assert (wish.trigger, wish.request, wish.urgent) == (Trigger.DEMAND, "r1", True)


def test_the_best_named_priority_of_all_who_want_it_counts() -> None:
    """1 is the highest, none at all comes after every named one."""
    wishes = Wishes()
    wish = make(wishes)
    for given_, then in ((0, 0), (5, 5), (0, 5), (7, 5), (2, 2)):
        wishes.raise_to(wish, Trigger.DEMAND, priority=given_)
        assert wish.priority == then


@virtual
async def test_wishes_are_served_by_urgency_then_priority_then_age() -> None:
    """Who waits goes before what is only anticipated."""
    wishes = Wishes()
    make(wishes, "prefetch", Trigger.PREFETCH)
    make(wishes, "warm", Trigger.WARM)
    make(wishes, "recovery", Trigger.RECOVERY)
    make(wishes, "first")
    make(wishes, "second", Trigger.ADMIN)
    make(wishes, "low", priority=9)
    make(wishes, "high", priority=1)
    loading = make(wishes, "loading")
    begin(wishes, loading)
    order = ["high", "low", "first", "second", "recovery", "warm", "prefetch"]
    assert names(wishes.queued(0.0)) == order
    assert set(RANK) == set(Trigger)


def test_the_shortest_goes_first_on_a_disk_until_a_wish_is_old() -> None:
    """A small model does not wait for a large one's read, and a large one does not starve."""
    wishes = Wishes(shortest_first=True)
    make(wishes, "large", size=100)
    make(wishes, "small", size=1)
    sizes = {wish.key: wish.model.footprint.host for wish in wishes.all()}
    assert names(wishes.queued(1.0, sizes)) == ["small", "large"]
    assert names(wishes.queued(1.0)) == ["large", "small"]
    make(wishes, "fresh", now=PATIENCE_OF_AGE, size=2)
    sizes = {wish.key: wish.model.footprint.host for wish in wishes.all()}
    assert names(wishes.queued(PATIENCE_OF_AGE + 1, sizes)) == ["large", "small", "fresh"]
    plain = Wishes()
    make(plain, "large", size=100)
    make(plain, "small", size=1)
    assert names(plain.queued(1.0, sizes)) == ["large", "small"]


@virtual
async def test_deadlines_come_due_in_order_and_once() -> None:
    """The earlier of deadline and patience counts; who has left is not told; who has neither never is."""
    wishes = Wishes()
    wish = make(wishes)
    assert wishes.next_deadline == math.inf
    wishes.join(wish, waiter(1, deadline=5.0))
    wishes.join(wish, waiter(2, deadline=9.0, patience=3.0))
    wishes.join(wish, waiter(3))
    wishes.join(wish, waiter(4, patience=1.0))
    wishes.join(wish, waiter(5, patience=4.0))
    assert wishes.next_deadline == 1.0
    wishes.leave(Ticket(4))
    assert wishes.next_deadline == 3.0
    wishes.leave(Ticket(5))
    assert [each.ticket for each in wishes.overdue(2.0)] == []
    assert [each.ticket for each in wishes.overdue(5.0)] == [2, 1]
    assert [each.ticket for each in wishes.overdue(99.0)] == []
    assert wishes.next_deadline == math.inf


@virtual
async def test_a_deadline_at_the_loops_beginning_is_a_deadline() -> None:
    """Zero is an instant, not the absence of one."""
    wishes = Wishes()
    wishes.join(make(wishes), waiter(1, deadline=0.0))
    assert wishes.next_deadline == 0.0
    assert [each.ticket for each in wishes.overdue(0.0)] == [1]


@virtual
async def test_a_ticket_that_comes_back_has_its_new_deadline_only() -> None:
    """A deadline of a former stay in the queue says nothing about the present one."""
    wishes = Wishes()
    wish = make(wishes)
    wishes.join(wish, waiter(1, deadline=5.0))
    wishes.leave(Ticket(1))
    wishes.join(wish, waiter(1, deadline=50.0))
    assert [each.ticket for each in wishes.overdue(6.0)] == []
    assert [each.ticket for each in wishes.overdue(50.0)] == [1]


@virtual
async def test_a_given_up_load_keeps_its_channel_and_not_its_name() -> None:
    """F36: a new wish begins at once, while the old load is still being undone."""
    wishes = Wishes()
    old = make(wishes)
    begin(wishes, old)
    wishes.give_up(old)
    wishes.give_up(old)
    assert (wishes.of(KEY), wishes.loading) == (None, 1)
    new = wishes.make("load-2", model(), Trigger.DEMAND, now=1.0)
    wishes.check()
    wishes.end(old)
    assert (wishes.of(KEY), wishes.loading, wishes.under("load-m")) == (new, 0, None)
    wishes.check()


@virtual
async def test_a_load_that_may_be_tried_again_gets_another_name() -> None:
    """F58: events of the two tries cannot be confused."""
    wishes = Wishes()
    wish = make(wishes)
    begin(wishes, wish)
    assert (wish.loading, wishes.under("load-m"), wishes.begun()) == (True, wish, [wish])
    wishes.requeue(wish, "again")
    assert (wish.loading, wishes.under("load-m"), wish.load, wishes.begun()) == (False, None, "again", [])
    wishes.check()


@virtual
async def test_check_notices_a_waiter_that_is_in_no_live_wish() -> None:
    """T2: the queue's proof is worth something."""
    wishes = Wishes()
    wish = make(wishes)
    wishes.join(wish, waiter(1))
    wish.waiters.clear()
    with pytest.raises(AssertionError, match="no live wish"):
        wishes.check()


@virtual
async def test_check_notices_a_load_under_a_wrong_name_and_two_lives_at_once() -> None:
    """I2 is proved from the indices."""
    wishes = Wishes()
    wish = make(wishes)
    begin(wishes, wish)
    wish.given_up = True
    with pytest.raises(AssertionError, match="Wish load-m m@1"):
        wishes.check()
    wish.given_up = False
    wish.load = "renamed"
    with pytest.raises(AssertionError, match="under load-m"):
        wishes.check()


@virtual
async def test_wishes_print_themselves() -> None:
    """One line each: what, why, doing what, for how many."""
    wishes = Wishes()
    wish = make(wishes)
    wishes.join(wish, waiter(1))
    assert repr(wish) == "<Wish load-m m@1 demand queued waiters=1>"
    wish.blocked = "leased"
    assert repr(wish) == "<Wish load-m m@1 demand queued leased waiters=1>"
    begin(wishes, wish)
    assert repr(wish) == "<Wish load-m m@1 demand loading waiters=1>"
    assert repr(wishes) == "<Wishes 1 models, 1 loading, 1 waiting>"


WISH = st.tuples(st.sampled_from(sorted(Trigger)), st.integers(0, 3), st.integers(0, 99), st.floats(0, 100))


@given(wanted=st.lists(WISH, max_size=12), shortest=st.booleans())
def test_the_order_is_total_and_urgency_always_comes_first(
    *, wanted: list[tuple[Trigger, int, int, float]], shortest: bool
) -> None:
    """I7: whatever the sizes, ages and priorities, nothing anticipated is served before somebody who waits."""
    wishes = Wishes(shortest_first=shortest)
    for number, (trigger, priority, size, since) in enumerate(wanted):
        make(wishes, f"w{number}", trigger, now=since, size=size, priority=priority)
    sizes = {wish.key: wish.model.footprint.host for wish in wishes.all()}
    order = wishes.queued(100.0, sizes)
    assert sorted(names(order)) == sorted(names(wishes.all()))
    assert [RANK[wish.trigger] for wish in order] == sorted(RANK[wish.trigger] for wish in order)
    for before, after in itertools.pairwise(order):
        if RANK[before.trigger] == RANK[after.trigger]:
            assert (before.priority or math.inf) <= (after.priority or math.inf)
