"""The batcher alone: who shares a forward, in which order, and when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.batcher import Batcher, Group


@dataclass(slots=True, eq=False)
class Call:
    """A queued call; looking at it settles it if `bad`."""

    name: int
    shape: str = "a"
    rows: int = 1
    alone: bool = False
    bad: bool = False
    arrived: int = 0
    settled: bool = False


def group(call: Call) -> Group | None:
    """What the runner's decoding does."""
    call.settled |= call.bad
    return None if call.alone or call.bad else Group(call.shape, call.rows)


class Bench:
    """A batcher under a hand-driven clock."""

    def __init__(self) -> None:
        self.now = 0
        self.batcher: Batcher[Call] = Batcher(lambda: self.now, group)

    def add(self, *calls: Call, model: str = "m", max_size: int = 4, delay: float = 0.0) -> None:
        for call in calls:
            call.arrived = self.now
            self.batcher.add(model, call, max_size=max_size, delay=delay)

    def take(self) -> list[int]:
        return [call.name for call in self.batcher.take()]


def test_all_that_fit_run_together_in_order() -> None:
    """Up to the maximum size, counted in rows."""
    bench = Bench()
    bench.add(Call(1), Call(2, rows=2), Call(3), Call(4))
    assert bench.take() == [1, 2, 3]
    assert bench.take() == [4]
    assert bench.take() == []
    assert not bench.batcher


def test_size_one_turns_batching_off() -> None:
    """One call per forward."""
    bench = Bench()
    bench.add(Call(1), Call(2), max_size=1)
    assert [bench.take(), bench.take()] == [[1], [2]]


def test_other_shapes_wait_for_their_own_forward_and_keep_their_order() -> None:
    """A call looked past keeps its place."""
    bench = Bench()
    bench.add(Call(1), Call(2, "b"), Call(3), Call(4, "b"))
    assert [bench.take(), bench.take()] == [[1, 3], [2, 4]]


def test_a_later_call_of_the_same_shape_never_overtakes_one_that_did_not_fit() -> None:
    """Order holds within a shape."""
    bench = Bench()
    bench.add(Call(1, rows=3), Call(2, rows=2), Call(3, rows=1))
    assert [bench.take(), bench.take()] == [[1], [2, 3]]


def test_a_call_larger_than_the_maximum_runs_alone() -> None:
    """It is not refused, and takes nobody along."""
    bench = Bench()
    bench.add(Call(1, rows=9), Call(2))
    assert [bench.take(), bench.take()] == [[1], [2]]


def test_calls_that_cannot_share_run_alone() -> None:
    """No common first dimension: a forward of its own."""
    bench = Bench()
    bench.add(Call(1, alone=True), Call(2), Call(3, alone=True), Call(4))
    assert [bench.take(), bench.take(), bench.take()] == [[1], [2, 4], [3]]


def test_settled_calls_are_left_out() -> None:
    """Cancelled before, or refused while being decoded."""
    bench = Bench()
    bench.add(Call(1, settled=True), Call(2, bad=True), Call(3), Call(4, bad=True), Call(5))
    assert bench.take() == [3, 5]
    bench.add(Call(6, bad=True))
    assert bench.take() == []
    assert not bench.batcher


def test_models_take_turns() -> None:
    """A flood for one model delays another by one batch only."""
    bench = Bench()
    bench.add(*(Call(n) for n in range(12)), model="hot")
    bench.add(Call(100), Call(101), model="cold")
    assert [bench.take()[0] for _ in range(4)] == [0, 100, 4, 8]


def test_a_delay_holds_a_lone_call_until_it_is_old_or_the_batch_is_full() -> None:
    """`due` says how long; a full batch goes at once; without delay nobody waits."""
    bench = Bench()
    assert bench.batcher.due() is None
    bench.add(Call(1), delay=0.005)
    assert bench.take() == []
    assert bench.batcher.due() == 0.005
    bench.now = 5_000_000
    assert bench.batcher.due() == 0
    assert bench.take() == [1]
    bench.add(*(Call(n) for n in range(4)), delay=0.005)
    assert bench.take() == [0, 1, 2, 3]
    bench.add(Call(9), delay=0.005)
    bench.add(Call(10), model="other")
    assert bench.take() == [10]


calls = st.builds(
    Call,
    name=st.integers(0, 10**6),
    shape=st.sampled_from("ab"),
    rows=st.integers(1, 5),
    alone=st.booleans(),
    bad=st.booleans(),
)


@given(queues=st.lists(st.lists(calls, max_size=12), max_size=3), max_size=st.integers(1, 6))
def test_every_call_runs_exactly_once_in_order_within_its_shape(queues: list[list[Call]], max_size: int) -> None:
    """Whatever is queued: nobody is lost or doubled, batches are of one model and shape and within the maximum."""
    bench = Bench()
    for model, queue in enumerate(queues):
        bench.add(*queue, model=str(model), max_size=max_size)
    batches: list[list[Call]] = []
    while bench.batcher:
        batches.append(bench.batcher.take())
    ran = list(chain.from_iterable(batches))
    for queue in queues:
        for shape in "ab":
            wanted = [call for call in queue if call.shape == shape and not call.bad and not call.alone]
            assert [call for call in ran if call in wanted] == wanted
    assert len(ran) == sum(not call.bad for call in chain.from_iterable(queues))
    for batch in batches:
        assert len({call.shape for call in batch}) <= 1
        assert len(batch) <= 1 or sum(call.rows for call in batch) <= max_size
