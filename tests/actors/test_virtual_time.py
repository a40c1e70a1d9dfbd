"""The loop all stories run on: seconds that pass only when everybody waits, and a deadlock that fails at once."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runtime.simulation.loop import Stalled, VirtualLoop, run


def test_a_quarter_of_sleep_takes_no_time() -> None:
    """Only virtual seconds pass, and all of them."""

    async def main() -> float:
        await asyncio.sleep(90 * 86400)
        return anyio.current_time()

    before = time.monotonic()
    assert run(main) == 90 * 86400
    assert time.monotonic() - before < 5


def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    """Task groups and timers work unmodified."""
    woken: list[tuple[float, int]] = []

    async def sleeper(seconds: int) -> None:
        await anyio.sleep(seconds)
        woken.append((anyio.current_time(), seconds))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for seconds in (5, 1, 3):
                tasks.start_soon(sleeper, seconds)

    run(main)
    assert woken == [(1.0, 1), (3.0, 3), (5.0, 5)]


def test_timeouts_fire_at_their_virtual_instant() -> None:
    """`fail_after`, `move_on_after` and `wait_for` count virtual seconds."""

    async def main() -> list[float]:
        ends: list[float] = []
        with anyio.move_on_after(7):
            await anyio.sleep_forever()
        ends.append(anyio.current_time())
        with pytest.raises(TimeoutError):
            with anyio.fail_after(3):
                await asyncio.get_running_loop().create_future()
        ends.append(anyio.current_time())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2)
        ends.append(anyio.current_time())
        return ends

    assert run(main) == [7.0, 10.0, 12.0]


def test_a_deadlock_raises_instead_of_hanging() -> None:
    """R23: what would hang for ever in production is a failing test here, with the virtual time at which it stuck."""

    async def main() -> None:
        await anyio.sleep(2)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stalled, match=r"deadlock at virtual 2\.000000 s"):
        run(main)


def test_an_error_travels_out() -> None:
    """The runner hides nothing."""

    async def main() -> None:
        await checkpoint()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main)


def test_threads_are_refused() -> None:
    """Real time must not come in by the back door: neither asyncio's executor nor anyio's threads."""

    async def main() -> None:
        with pytest.raises(RuntimeError, match="no threads under virtual time"):
            await asyncio.to_thread(time.monotonic)
        with pytest.raises(RuntimeError, match="no threads under virtual time"):
            await asyncio.get_running_loop().run_in_executor(None, time.monotonic)

    before = threading.active_count()
    run(main)
    assert threading.active_count() == before


def order_of(seed: int | None) -> list[int]:
    """In which order twenty tasks that are runnable at once run."""
    order: list[int] = []

    async def one(number: int) -> None:
        await checkpoint()
        order.append(number)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(one, number)

    run(main, seed=seed)
    return order


def test_a_seed_shuffles_what_is_runnable_and_repeats_itself() -> None:
    """DST: another seed is another interleaving, the same seed the same one, and none loses a task."""
    assert order_of(None) == list(range(20))
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(10)}) > 5
    assert all(sorted(order_of(seed)) == list(range(20)) for seed in range(10))


def test_the_loop_starts_at_zero_and_can_be_closed() -> None:
    """Each run has a time of its own."""
    loop = VirtualLoop()
    assert loop.time() == 0.0
    loop.close()
    assert loop.is_closed()
