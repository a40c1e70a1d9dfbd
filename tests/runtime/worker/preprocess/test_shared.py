"""A result that many want is made once, and what is kept never outgrows its bound."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from runtime.worker.preprocess.bad import Undecodable
from runtime.worker.preprocess.shared import SharedResults
from runtime.workers.pipelines import AudioPipeline, ImagePipeline, Prepared, identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


def made(value: int, size: int = 100) -> Callable[[], NDArray[Any]]:
    """Makes so many bytes."""
    return lambda: np.full(size, value, np.uint8)


def test_what_was_made_is_kept_and_nobody_can_write_to_it() -> None:
    """The same array for everyone; a model that works in place gets a copy from whoever hands it over."""
    results = SharedResults(1000)
    one = results.get(b"a", made(1))
    assert results.get(b"a", made(2)) is one
    with pytest.raises(ValueError, match="read-only"):
        one[0] = 9
    assert results.snapshot() == Prepared(hits=1, misses=1, bytes=100)


def test_the_least_recently_used_goes_first() -> None:
    """Room for two: the one that was looked at stays."""
    results = SharedResults(250)
    for key in (b"a", b"b", b"a", b"c"):
        results.get(key, made(1))
    assert results.snapshot() == Prepared(hits=1, misses=3, bytes=200)
    results.get(b"a", made(1))
    results.get(b"b", made(1))
    assert results.snapshot() == Prepared(hits=2, misses=4, bytes=200)


def test_a_view_does_not_keep_what_it_was_cut_from() -> None:
    """Ten bytes of a million count as ten, so they must be ten."""
    results = SharedResults(1000)
    kept = results.get(b"a", lambda: np.zeros(1_000_000, np.uint8)[:10])
    assert kept.base is None
    assert results.snapshot().bytes == 10


@pytest.mark.parametrize("capacity", [0, 99])
def test_what_is_larger_than_the_cache_is_given_and_not_kept(capacity: int) -> None:
    """Nothing else has to go for it."""
    results = SharedResults(capacity)
    assert (results.get(b"a", made(7)) == 7).all()
    results.get(b"a", made(7))
    assert results.snapshot() == Prepared(hits=0, misses=2, bytes=0)


def test_many_at_once_wait_for_one_maker() -> None:
    """Eight threads, one result, even where nothing is kept."""
    results = SharedResults(0)
    entered, go, count = threading.Event(), threading.Event(), 0

    def slow() -> NDArray[Any]:
        nonlocal count
        count += 1
        entered.set()
        assert go.wait(10)
        return np.zeros(4)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(results.get, b"a", slow)
        assert entered.wait(10)
        others = [pool.submit(results.get, b"a", slow) for _ in range(7)]
        held = results._making[b"a"].done._cond._waiters  # type: ignore[attr-defined]
        while len(held) < 7:  # every one of them waits by now
            time.sleep(0.001)
        go.set()
        found = [one.result(10) for one in (first, *others)]
    assert count == 1
    assert all(one is found[0] for one in found)
    assert results.snapshot() == Prepared(hits=7, misses=1, bytes=0)


def test_a_files_fault_is_told_to_all_who_waited() -> None:
    """They would find the same."""
    results = SharedResults(1000)
    entered, go = threading.Event(), threading.Event()

    def broken() -> NDArray[Any]:
        entered.set()
        assert go.wait(10)
        raise Undecodable("is broken")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(results.get, b"a", broken)
        assert entered.wait(10)
        second = pool.submit(results.get, b"a", broken)
        go.set()
        for asked in (first, second):
            with pytest.raises(Undecodable, match="is broken"):
                asked.result(10)
    assert (results.get(b"a", made(3)) == 3).all()


def test_another_failure_is_its_own_and_the_next_one_tries() -> None:
    """Memory that ran out for one may be there for the other; no maker is waited for who is gone."""
    results = SharedResults(1000)
    entered, go = threading.Event(), threading.Event()

    def starved() -> NDArray[Any]:
        entered.set()
        assert go.wait(10)
        raise MemoryError

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(results.get, b"a", starved)
        assert entered.wait(10)
        second = pool.submit(results.get, b"a", made(5))
        go.set()
        with pytest.raises(MemoryError):
            first.result(10)
        assert (second.result(10) == 5).all()


def test_random_use_from_many_threads_keeps_the_books() -> None:
    """Hits and misses add up to what was asked, and the bytes stay under the bound."""
    results = SharedResults(1000)

    def use(seed: int) -> None:
        random = np.random.default_rng(seed)
        for key in random.integers(0, 30, 300):
            found = results.get(bytes([key]), made(int(key), int(key) * 20 + 1))
            assert len(found) == key * 20 + 1
            assert results.snapshot().bytes <= 1000

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    told = results.snapshot()
    assert told.hits + told.misses == 1200
    assert told.hits > 0


def test_an_identity_is_the_declaration_and_nothing_else() -> None:
    """Equal declarations share, and each key tells them apart."""
    plain = ImagePipeline("FP32", (8, 8), "exact")
    assert identity(plain) == identity(ImagePipeline("FP32", (8, 8), "exact"))
    others = [
        ImagePipeline("FP16", (8, 8), "exact"),
        ImagePipeline("FP32", (8, 9), "exact"),
        ImagePipeline("FP32", (8, 8), "letterbox"),
        ImagePipeline("FP32", (8, 8), "exact", "bicubic"),
        ImagePipeline("FP32", (8, 8), "exact", mean=(0.5,) * 3),
        ImagePipeline("FP32", (8, 8), "exact", std=(0.5,) * 3),
        ImagePipeline("FP32", (8, 8), "exact", upright=False),
        AudioPipeline("FP32", 16_000),
        AudioPipeline("FP32", 16_000, window=8, hop=8),
    ]
    assert len({identity(one) for one in (plain, *others)}) == len(others) + 1
    assert len(identity(plain)) == 32
