"""Promises of a pull under virtual time: limits, tries, order, and cancellation at every step."""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from actors.errors import CorruptWeights, FetchFailed
from runtime.catalog.manifest import FileRow
from runtime.tiers.disk import DiskStore
from runtime.tiers.origin import Answer, Passing, RangeIgnored, Replaced
from runtime.tiers.pull import Pace, Pull
from tests.actors.virtual import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from runtime.tiers.landing import Landing

CHUNK = 1000
CONTENT = hashlib.shake_128(b"content").digest(10 * CHUNK + 7)


async def direct(work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """An `Offload` without threads; as with them, others run meanwhile."""
    await anyio.lowlevel.checkpoint()
    return work(*args, **kwargs)


class Fake:
    """An origin of `content`; `slow` says how long a request takes, `wrong` raises what it does wrong."""

    def __init__(self, content: bytes = CONTENT, *, piece: int = 100) -> None:
        self.content = content
        self.piece = piece
        self.asked: list[tuple[int, int | None, float]] = []
        self.under_way = self.most = 0
        self.slow: Callable[[int], float] = lambda _: 0.0
        self.gap = 0.0
        self.wrong: Callable[[int], None] = lambda _: None
        self.tag = "v1"

    @asynccontextmanager
    async def read(self, start: int, end: int | None, tag: str) -> AsyncIterator[Answer]:
        self.asked.append((start, end, anyio.current_time()))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            self.wrong(len(self.asked))
            await anyio.sleep(self.slow(start))
            yield Answer(self._pieces(start, end), len(self.content), self.tag)
        finally:
            self.under_way -= 1

    async def _pieces(self, start: int, end: int | None) -> AsyncIterator[memoryview]:
        body = memoryview(self.content)[start:end]
        for at in range(0, len(body), self.piece):
            await anyio.sleep(self.gap)
            yield body[at : at + self.piece]

    async def close(self) -> None:
        """Nothing is open."""


def landing(folder: Path, content: bytes = CONTENT) -> Landing:
    """A landing that is entered."""
    row = FileRow(path="config.json", size=len(content), sha256=hashlib.sha256(content).hexdigest())
    made = DiskStore(folder / "cache", 1 << 30).landing(row, weights=False)
    while not made.enter():
        pass
    return made


def pull(origin: Fake, into: Landing, told: list[int] | None = None, **pace: Any) -> Pull:
    """A pull of it."""
    chosen = Pace(**{"chunk": CHUNK, "parallel": 3, "stall": 10.0, "total": 1000.0, **pace})
    hear = (told if told is not None else []).append
    return Pull(origin, into, len(CONTENT), pace=chosen, offload=direct, told=hear)


@virtual
async def run_whole(tmp_path: Path, origin: Fake, told: list[int]) -> None:
    into = landing(tmp_path)
    await pull(origin, into, told).run()
    assert into.path is not None
    assert into.path.read_bytes() == CONTENT
    into.close()


def test_chunks_that_arrive_in_any_order_are_written_in_theirs(tmp_path: Path) -> None:
    """Later chunks are faster: the file is right, progress only grows, and no more than the limit are asked for."""
    origin, told = Fake(), list[int]()
    origin.slow = lambda start: 5.0 - start / 3000
    run_whole(tmp_path, origin, told)
    assert told == sorted(told)
    assert told[-1] == len(CONTENT)
    assert origin.most == 3
    assert sorted(start for start, _, _ in origin.asked) == list(range(0, len(CONTENT), CHUNK))


def test_parallel_requests_save_their_latency(tmp_path: Path) -> None:
    """11 requests of a second each, three at a time: one alone, then four rounds."""
    origin = Fake()
    origin.slow = lambda _: 1.0

    @virtual
    async def timed() -> None:
        into = landing(tmp_path)
        started = anyio.current_time()
        await pull(origin, into).run()
        assert anyio.current_time() - started == pytest.approx(5.0)
        into.close()

    timed()


def failing(tmp_path: Path, origin: Fake, kind: type[Exception], match: str, **pace: Any) -> float:
    """Run a pull that fails so; gives the seconds that took."""
    took: list[float] = []

    @virtual
    async def run() -> None:
        into = landing(tmp_path)
        started = anyio.current_time()
        with pytest.raises(kind, match=match):
            await pull(origin, into, **pace).run()
        took.append(anyio.current_time() - started)
        assert into.path is None
        assert origin.under_way == 0
        into.close()

    run()
    assert not [path for path in (tmp_path / "cache" / "blobs").rglob("*") if path.is_file()]
    return took[0]


def test_a_source_that_does_not_answer_costs_the_stall_limit_per_try(tmp_path: Path) -> None:
    """Three tries of ten seconds, with short pauses between."""
    origin = Fake()
    origin.slow = lambda _: 1e6
    took = failing(tmp_path, origin, FetchFailed, "did not answer for 10 s", attempts=3)
    assert 30 <= took < 32
    assert len(origin.asked) == 3


def test_a_source_that_falls_silent_costs_the_same(tmp_path: Path) -> None:
    """In the middle of a body."""
    origin = Fake()
    origin.gap = 1e6
    assert 20 <= failing(tmp_path, origin, FetchFailed, "sent nothing for 10 s", attempts=2) < 22


def test_a_source_that_moves_is_cut_off_by_the_total_alone(tmp_path: Path) -> None:
    """Every piece within the stall limit, and the whole beyond its own."""
    origin = Fake()
    origin.gap = 9.0
    took = failing(tmp_path, origin, FetchFailed, "not fetched within 200 s", total=200.0)
    assert took == pytest.approx(200)


def test_a_slow_source_that_moves_is_waited_for(tmp_path: Path) -> None:
    """Longer than any stall limit in all, never silent for that long."""
    origin, told = Fake(), list[int]()
    origin.gap = 9.0
    run_whole(tmp_path, origin, told)


def test_tries_are_spread_out_and_bounded(tmp_path: Path) -> None:
    """Waits grow, up to their limit; jitter keeps many pullers apart."""
    origin = Fake()

    def wrong(_: int) -> None:
        raise Passing("the source answers 503")

    origin.wrong = wrong
    took = failing(tmp_path, origin, FetchFailed, "given up after 8 tries: the source answers 503", attempts=8)
    assert len(origin.asked) == 8
    assert took < 70


def test_one_bad_request_among_many_costs_one_request(tmp_path: Path) -> None:
    """Every fourth one breaks; the tries are each chunk's own."""
    origin, told = Fake(), list[int]()

    def wrong(number: int) -> None:
        if number % 4 == 0:
            raise Passing("broke")

    origin.wrong = wrong
    run_whole(tmp_path, origin, told)
    assert len(origin.asked) == 14


@pytest.mark.parametrize("error", [FetchFailed("gone"), CorruptWeights("bad")])
def test_what_will_not_pass_ends_all_requests_at_once(tmp_path: Path, error: Exception) -> None:
    """The fourth request fails for good while others would still take an hour: nobody waits for them."""
    origin = Fake()
    origin.slow = lambda start: 3600.0 if start > 3 * CHUNK else 0.0

    def wrong(number: int) -> None:
        if number == 4:
            raise error

    origin.wrong = wrong
    assert failing(tmp_path, origin, type(error), str(error), stall=1e6, total=1e6) < 1


def test_ranges_that_are_ignored_later_start_from_the_first_byte(tmp_path: Path) -> None:
    """F23: after three chunks the source forgets about ranges."""
    origin, told = Fake(), list[int]()

    def wrong(number: int) -> None:
        if number > 3 and origin.asked[-1][1] is not None:
            raise RangeIgnored

    origin.wrong = wrong
    run_whole(tmp_path, origin, told)
    assert [end for _, end, _ in origin.asked].count(None) == 1


def test_a_replaced_source_is_begun_anew_a_bounded_number_of_times(tmp_path: Path) -> None:
    """Twice is bad luck, a third time is a reason to stop."""
    origin = Fake()

    def wrong(number: int) -> None:
        if number % 4 == 0:
            raise Replaced

    origin.wrong = wrong
    failing(tmp_path, origin, FetchFailed, "keeps changing")


def test_two_versions_never_meet_in_one_file(tmp_path: Path) -> None:
    """Same length, other bytes, other tag, no word of it from the source: the tags differ, so it begins anew."""
    origin, told = Fake(bytes(len(CONTENT))), list[int]()

    def wrong(number: int) -> None:
        if number == 5:
            origin.content, origin.tag = CONTENT, "v2"

    origin.wrong = wrong
    run_whole(tmp_path, origin, told)


def test_a_source_without_versions_is_judged_by_the_hash(tmp_path: Path) -> None:
    """No tag at all: the mixture is found at the end, and nothing of it is kept."""
    origin = Fake(bytes(len(CONTENT)))
    origin.tag = ""

    def wrong(number: int) -> None:
        if number == 5:
            origin.content = CONTENT

    origin.wrong = wrong
    failing(tmp_path, origin, CorruptWeights, "sha256")
    assert not list((tmp_path / "cache" / "partial").iterdir())


@pytest.mark.parametrize("step", range(0, 60, 3))
def test_a_pull_cancelled_at_any_step_can_be_continued(tmp_path: Path, step: int) -> None:
    """What is on disk is a beginning of the file, whatever step it was; the next pull makes it whole."""

    @virtual
    async def run() -> None:
        origin = Fake()
        into = landing(tmp_path)
        steps = 0
        with anyio.CancelScope() as scope:

            async def counting(work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps * 3 >= step:
                    scope.cancel()
                return await direct(work, *args, **kwargs)

            first = pull(origin, into)
            first._offload = counting
            await first.run()
        assert origin.under_way == 0
        into.close()
        if into.path is not None:
            return
        again = landing(tmp_path)
        second = Fake()
        await pull(second, again).run()
        assert again.path is not None
        assert again.path.read_bytes() == CONTENT
        again.close()

    run()
