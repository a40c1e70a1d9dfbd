"""The ledger: every move, every illegal one, and a proof that notices every kind of wrong book."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.residency.ledger import Ledger, LedgerBroken
from actors.residency.model import ModelKey, Rules, Ticket, Trigger
from actors.residency.states import MOVES, IllegalMove, Move, State, after
from tests.actors.books import KEY, bring, ledger_in, model

if TYPE_CHECKING:
    from collections.abc import Callable

MAKE: dict[Move, Callable[[Ledger], object]] = {
    Move.RESERVE: lambda book: book.reserve(model(), 10, now=1.0, trigger=Trigger.DEMAND),
    Move.ADOPT: lambda book: book.adopt(model(), 10, now=1.0, idle=True),
    Move.COMMIT: lambda book: book.commit(KEY, 10, now=1.0),
    Move.ABORT: lambda book: book.abort(KEY, now=1.0),
    Move.DRAIN: lambda book: book.drain(KEY, now=1.0),
    Move.RESUME: lambda book: book.resume(KEY, now=1.0),
    Move.RETIRE: lambda book: book.retire(KEY, now=1.0),
    Move.FORGET: lambda book: book.forget(KEY),
}
"""How each move of the table is made."""


@pytest.mark.parametrize(("state", "move"), sorted(MOVES))
def test_a_legal_move_leads_where_the_table_says_and_the_books_still_add_up(state: State, move: Move) -> None:
    """The table is the whole life of a resident."""
    book = ledger_in(state)
    MAKE[move](book)
    row = book.get(KEY)
    assert (State.ABSENT if row is None else row.state) is MOVES[state, move]
    book.check()


@pytest.mark.parametrize(
    ("state", "move"), sorted((state, move) for state in State for move in Move if (state, move) not in MOVES)
)
def test_any_other_move_raises_and_changes_nothing(state: State, move: Move) -> None:
    """Double loads, late commits, unloading twice: refused by the table, books untouched."""
    book = ledger_in(state)
    before = repr(book), [repr(row) for row in book.rows()]
    with pytest.raises(IllegalMove, match=f"cannot {move} what is {state}"):
        MAKE[move](book)
    assert (repr(book), [repr(row) for row in book.rows()]) == before
    book.check()
    with pytest.raises(IllegalMove):
        after(state, move)


def test_every_state_can_be_reached_and_left() -> None:
    """No state is a trap, and none is decoration."""
    assert set(MOVES.values()) == set(State)
    assert {start for start, _ in MOVES} == set(State)
    assert {move for _, move in MOVES} == set(Move)


def test_bytes_follow_the_model_through_its_life() -> None:
    """Loading, resident, unloading: the bytes are counted somewhere until they are observed free."""
    book = Ledger(100, headroom=20)
    assert (book.budget, book.used, book.free) == (80, 0, 80)
    book.reserve(model(), 30, now=0.0, trigger=Trigger.DEMAND)
    assert (book.bytes_in(State.LOADING), book.free) == (30, 50)
    book.commit(KEY, 25, now=1.0)
    assert (book.bytes_in(State.LOADING), book.bytes_in(State.RESIDENT), book.free) == (0, 25, 55)
    book.drain(KEY, now=2.0)
    assert book.bytes_in(State.RESIDENT) == 25
    book.retire(KEY, now=3.0)
    assert (book.bytes_in(State.RESIDENT), book.bytes_in(State.UNLOADING), book.free) == (0, 25, 55)
    book.forget(KEY)
    assert (book.used, book.free) == (0, 80)


def test_an_aborted_load_keeps_its_bytes_until_they_are_observed_free() -> None:
    """I6: giving up is not the same as being free again."""
    book = ledger_in(State.LOADING)
    book.abort(KEY, now=1.0)
    assert (book.bytes_in(State.LOADING), book.bytes_in(State.UNLOADING)) == (0, 10)
    book.forget(KEY)
    assert book.used == 0


def test_more_than_is_free_cannot_be_reserved() -> None:
    """I1: overbooking is refused with the numbers, and leaves no row behind."""
    book = Ledger(15)
    bring(book, model("a"))
    with pytest.raises(LedgerBroken, match="reserving 10 B for m@1 with 5 B"):
        book.reserve(model(), 10, now=0.0, trigger=Trigger.DEMAND)
    assert book.get(KEY) is None
    book.check()


def test_a_count_limits_how_many_models_are_there_at_all() -> None:
    """R2: the limit counts loading and unloading models too."""
    book = Ledger(100, count=1)
    assert book.places == 1
    bring(book, model("a"))
    assert book.places == 0
    with pytest.raises(LedgerBroken, match="0 places"):
        book.reserve(model(), 1, now=0.0, trigger=Trigger.DEMAND)
    book.retire(ModelKey("a@1"), now=1.0)
    assert book.places == 0
    book.forget(ModelKey("a@1"))
    assert book.places == 1
    assert Ledger(1).places is None


def test_a_model_that_needs_more_than_reserved_is_booked_as_an_overrun() -> None:
    """F58: reality wins over the estimate; free turns negative and recovers when room is made."""
    book = Ledger(30)
    bring(book, model("a"))
    book.reserve(model(), 20, now=0.0, trigger=Trigger.DEMAND)
    book.commit(KEY, 26, now=1.0)
    assert (book.free, book.overrun) == (-6, 6)
    book.check()
    book.retire(ModelKey("a@1"), now=2.0)
    book.forget(ModelKey("a@1"))
    assert (book.free, book.overrun) == (4, 0)
    book.check()


def test_an_overrun_that_still_fits_is_none() -> None:
    """Only bytes beyond the budget count."""
    book = Ledger(30)
    bring(book, model(size=10), size=20)
    assert (book.free, book.overrun) == (10, 0)


def test_foreign_bytes_shrink_the_budget_and_never_below_zero() -> None:
    """F62, F60: what others hold, or what leaked, cannot be promised to models."""
    book = Ledger(30, headroom=5)
    bring(book, model("a"))
    book.foreign = 12
    assert (book.budget, book.free) == (13, 3)
    book.foreign = 100
    assert (book.budget, book.free) == (0, -10)
    book.check()


def test_an_adopted_row_is_resident_and_not_idle_until_that_is_known() -> None:
    """F65: what a new incarnation finds may be in use by a request it knows nothing of."""
    book = Ledger(30)
    busy = book.adopt(model("a"), 10, now=5.0, idle=False)
    free = book.adopt(model("b", rules=Rules(pinned=True)), 10, now=5.0, idle=True)
    assert (busy.idle, busy.adopted, busy.pinned) == (False, True, False)
    assert (free.idle, free.adopted, free.pinned) == (True, False, True)
    assert (busy.loaded_at, busy.last_used, book.overrun) == (5.0, 5.0, 0)
    book.check()
    book.adopt(model("c", 20), 20, now=6.0, idle=True)
    assert book.overrun == 10
    book.check()


def test_leases_are_counted_and_timed() -> None:
    """A ticket holds one thing once; giving it back tells what and for how long."""
    book = Ledger(30)
    row = bring(book, model(), leases=(1, 2))
    assert (book.leases, row.uses, row.idle) == (2, 2, False)
    assert book.holder(Ticket(1)) is row
    assert book.release(Ticket(1), now=3.0) == (row, 3.0)
    assert book.release(Ticket(1), now=4.0) is None
    assert book.holder(Ticket(1)) is None
    assert (book.leases, row.last_used, row.idle) == (1, 3.0, False)
    assert book.release(Ticket(2), now=5.0) == (row, 5.0)
    assert row.idle
    book.check()


@pytest.mark.parametrize("state", [State.LOADING, State.DRAINING, State.UNLOADING])
def test_only_a_resident_can_be_leased(state: State) -> None:
    """I3, F48: a lease on something that is coming or leaving is a bug, not a race."""
    book = ledger_in(state)
    row = book.get(KEY)
    assert row is not None
    with pytest.raises(LedgerBroken, match="leasing"):
        book.lease(row, Ticket(1), now=1.0)
    assert book.leases == 0
    book.check()


def test_a_ticket_cannot_lease_twice() -> None:
    """Its holder could give back only one of them."""
    book = Ledger(30)
    row = bring(book, model(), leases=(1,))
    with pytest.raises(LedgerBroken, match="ticket 1"):
        book.lease(row, Ticket(1), now=1.0)


def test_a_leased_model_cannot_be_retired_but_can_drain() -> None:
    """I3: the lease goes on while it drains, and only its end opens the way."""
    book = Ledger(30)
    row = bring(book, model(), leases=(1,))
    with pytest.raises(LedgerBroken, match="retiring"):
        book.retire(KEY, now=1.0)
    book.drain(KEY, now=1.0)
    with pytest.raises(LedgerBroken, match="retiring"):
        book.retire(KEY, now=1.0)
    assert row.state is State.DRAINING
    book.check()
    book.release(Ticket(1), now=2.0)
    book.retire(KEY, now=2.0)
    book.check()


def test_clearing_forgets_rows_leases_and_overruns() -> None:
    """F57: the process that held the models is gone, and every byte with it."""
    book = Ledger(20)
    bring(book, model("a"), leases=(1,), size=15)
    bring(book, model("b", 5), size=9)
    assert [row.key for row in book.clear()] == ["a@1", "b@1"]
    assert (book.used, book.leases, book.overrun, list(book.rows())) == (0, 0, 0, [])
    assert book.release(Ticket(1), now=1.0) is None
    book.check()


@pytest.mark.parametrize(("capacity", "headroom"), [(-1, 0), (10, -1), (10, 11)])
def test_an_impossible_budget_is_refused(capacity: int, headroom: int) -> None:
    """Bad configuration is an error at once, with the numbers."""
    with pytest.raises(ValueError, match=f"capacity={capacity} headroom={headroom}"):
        Ledger(capacity, headroom=headroom)


def _twist(book: Ledger, twist: str) -> None:
    row = book.get(KEY)
    assert row is not None
    match twist:
        case "size":
            row.size += 1
        case "negative":
            row.size = -1
        case "absent":
            row.state = State.ABSENT
        case "key":
            row.model = model("other")
        case "state":
            row.state = State.UNLOADING
        case "unindexed":
            row.leases[Ticket(99)] = 0.0
        case "lost":
            row.leases.clear()
        case "count":
            book.count = 0
        case _:
            book.capacity = 5


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        ("size", "but rows say"),
        ("negative", "odd row"),
        ("absent", "odd row"),
        ("key", "odd row"),
        ("state", "leased while unloading"),
        ("unindexed", "ticket 99"),
        ("lost", "a ticket leases nothing"),
        ("count", "1 models, 0 allowed"),
        ("capacity", "10 B used of 5 B"),
    ],
)
def test_check_notices(twist: str, message: str) -> None:
    """The proof is worth something: each kind of wrong book is found and named."""
    book = Ledger(30)
    bring(book, model(), leases=(1,))
    book.check()
    _twist(book, twist)
    with pytest.raises(LedgerBroken, match=message):
        book.check()


def test_books_and_rows_print_themselves() -> None:
    """One line each, as an operator reads it."""
    book = Ledger(100, headroom=10)
    row = bring(book, model(rules=Rules(pinned=True)), leases=(1, 2))
    assert repr(book) == "<Ledger 10/90 B: 0 loading, 10 resident, 0 unloading; 1 models, 2 leases>"
    assert repr(row) == "<m@1 resident 10 B leases=2 pinned>"
    assert repr(book.adopt(model("a"), 5, now=0.0, idle=False)) == "<a@1 resident 5 B leases=0 adopted>"


MOVE = st.tuples(st.sampled_from(sorted(Move)), st.integers(0, 2), st.integers(0, 40), st.integers(0, 5))


@given(
    st.lists(st.one_of(MOVE, st.tuples(st.sampled_from(["lease", "release"]), *[st.integers(0, 5)] * 3)), max_size=40)
)
def test_no_sequence_of_moves_breaks_the_books(steps: list[tuple[str, int, int, int]]) -> None:
    """T2: whatever is tried in whatever order, a move either succeeds or is refused, and the sums hold."""
    book = Ledger(60, headroom=10, count=2)
    for move, who, size, ticket in steps:
        what = model("abc"[who % 3], size)
        row = book.get(what.key)
        try:
            match move:
                case Move.RESERVE:
                    book.reserve(what, size, now=0.0, trigger=Trigger.DEMAND)
                case Move.COMMIT:
                    book.commit(what.key, size, now=0.0)
                case Move.FORGET:
                    book.forget(what.key)
                case "lease" if row is not None:
                    book.lease(row, Ticket(ticket), now=0.0)
                case "release":
                    book.release(Ticket(ticket), now=0.0)
                case Move.ABORT | Move.DRAIN | Move.RESUME | Move.RETIRE:
                    getattr(book, move)(what.key, now=0.0)
        except (IllegalMove, LedgerBroken):
            pass
        book.check()
