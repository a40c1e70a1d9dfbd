"""The books of an arena: nothing is given twice, nothing is lost, and every tensor lies whole in one extent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runtime.worker.extents import ALIGN, Extent, Extents, Layout, NoRoom

UNIT = 1024


def test_the_smallest_run_that_holds_it_is_taken() -> None:
    """Best fit leaves the large runs to large models."""
    books = Extents(10 * UNIT, UNIT)
    first, second, third = (books.lay([size * UNIT]) for size in (4, 1, 2))
    books.give(first)
    assert (books.free, books.largest) == (7 * UNIT, 4 * UNIT)
    assert books.lay([3 * UNIT]).extents == (Extent(7 * UNIT, 3 * UNIT),)
    books.give(third)
    assert books.fragmentation == pytest.approx(1 - 4 / 6)
    books.give(second)
    assert books.fragmentation == 0


def test_a_model_comes_back_to_its_addresses_if_they_are_free() -> None:
    """Captured graphs and warm caches know addresses."""
    books = Extents(8 * UNIT, UNIT)
    one = books.lay([UNIT, UNIT])
    two = books.lay([2 * UNIT])
    books.give(one)
    assert books.lay([UNIT, UNIT], one) == one
    books.give(one)
    books.give(two)
    other = books.lay([UNIT])
    assert other.extents[0].start == 0
    again = books.lay([UNIT, UNIT], one)
    assert again != one


def test_a_model_is_spread_but_a_tensor_is_not() -> None:
    """Two holes of two units hold two tensors of 1.5, not one of 3."""
    books = Extents(5 * UNIT, UNIT)
    left, wall, right = books.lay([2 * UNIT]), books.lay([UNIT]), books.lay([2 * UNIT])
    books.give(left)
    books.give(right)
    with pytest.raises(NoRoom) as caught:
        books.lay([3 * UNIT])
    assert (caught.value.wanted, caught.value.free, caught.value.largest) == (3 * UNIT, 4 * UNIT, 2 * UNIT)
    spread = books.lay([3 * UNIT // 2, 3 * UNIT // 2])
    assert spread.extents == (Extent(0, 2 * UNIT), Extent(3 * UNIT, 2 * UNIT))
    assert books.free == 0
    books.give(wall)
    books.give(spread)
    assert books.largest == 5 * UNIT


def test_what_is_free_cannot_be_given_back() -> None:
    """Twice, a part of it, or what lies outside: said, and nothing changed."""
    books = Extents(4 * UNIT, UNIT)
    one = books.lay([UNIT])
    books.give(one)
    for extent in (one.extents[0], Extent(UNIT, UNIT), Extent(4 * UNIT, UNIT)):
        with pytest.raises(ValueError, match="free already"):
            books.give(Layout((0,), (extent,)))
    assert (books.free, books.largest) == (4 * UNIT, 4 * UNIT)


def test_nothing_takes_no_room_and_a_rest_is_unused() -> None:
    """Empty tensors, empty models, an arena smaller than a unit."""
    books = Extents(UNIT + 1, UNIT)
    assert books.total == UNIT
    assert books.lay([0, 0]) == Layout((0, 0), ())
    assert books.lay([]) == Layout((), ())
    assert Extents(10, UNIT).largest == 0
    with pytest.raises(NoRoom):
        Extents(10, UNIT).lay([1])


@given(st.lists(st.integers(0, 5 * UNIT), max_size=12))
def test_tensors_lie_aligned_in_order_of_a_run_and_apart(sizes: list[int]) -> None:
    """Offsets are aligned, tensors overlap nowhere, each is inside one extent."""
    layout = Extents(200 * UNIT, UNIT).lay(sizes)
    spans = sorted((at, at + size) for at, size in zip(layout.offsets, sizes, strict=True) if size)
    assert all(at % ALIGN == 0 for at, _ in spans)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    assert all(any(ext.start <= at and end <= ext.end for ext in layout.extents) for at, end in spans)


class Machine(RuleBasedStateMachine):
    """Any order of taking and giving back, checked against a map of single units."""

    layouts = Bundle("layouts")

    def __init__(self) -> None:
        super().__init__()
        self.books = Extents(32 * UNIT, UNIT)
        self.owner: dict[int, int] = {}
        self.count = 0

    @rule(target=layouts, sizes=st.lists(st.integers(1, 6 * UNIT), min_size=1, max_size=5))
    def take(self, sizes: list[int]) -> tuple[int, Layout] | None:
        free = self.books.free
        try:
            layout = self.books.lay(sizes)
        except NoRoom:
            assert self.books.free == free
            assert self.books.largest < sum(-(-size // ALIGN) * ALIGN for size in sizes)
            return None
        self.count += 1
        for extent in layout.extents:
            for unit in range(extent.start // UNIT, extent.end // UNIT):
                assert unit not in self.owner
                self.owner[unit] = self.count
        for at, size in zip(layout.offsets, sizes, strict=True):
            assert {self.owner.get(byte // UNIT) for byte in (at, at + size - 1)} == {self.count}
        return self.count, layout

    @rule(held=consumes(layouts))
    def give(self, held: tuple[int, Layout] | None) -> None:
        if held is not None:
            self.books.give(held[1])
            self.owner = {unit: owner for unit, owner in self.owner.items() if owner != held[0]}

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.books.free == (32 - len(self.owner)) * UNIT
        assert 0 <= self.books.fragmentation < 1


TestMachine = Machine.TestCase
