"""A second life that waits with its context: it takes over at once, holds nothing before, and never gets in the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest

from runtime.workers.port import Call
from tests.runtime.workers.test_zygote import children, state
from tests.runtime.workers.worker_kit import eventually, process_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.runtime.workers.worker_kit import Rig

    Start = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def started(tmp_path: Path) -> Start:
    """A worker of a device like a GPU, with a standby; contexts are files of `tmp_path`."""
    return partial(
        process_worker,
        device="cuda:0",
        core="tests.runtime.workers.cuda_like:CudaLike",
        allow=(str(tmp_path),),
        standby=True,
    )


def contexts(folder: Path) -> list[str]:
    """One name per context that was ever made, with its process."""
    return [path.name.removeprefix("context-") for path in folder.glob("context-*")]


async def waiting(rig: Rig) -> int:
    """The process that stands by."""
    await eventually(lambda: rig.worker._standby.pid)
    return int(rig.worker._standby.pid)


async def kill(rig: Rig, count: int) -> None:
    """Kill the worker and wait for its `count`th life."""
    os.kill(rig.worker.pid, signal.SIGKILL)
    await eventually(lambda: len(rig.ready) == count and rig.worker.pid == rig.ready[-1])


async def test_the_one_that_waits_takes_over_with_the_context_it_has(started: Start) -> None:
    """The next life was born before the former one died, and another one waits behind it."""
    async with started() as rig:
        await rig.worker.load(rig.model("a"))
        first, second = rig.worker.pid, await waiting(rig)
        killed = time.monotonic()
        await kill(rig, 2)
        assert rig.worker.pid == second
        assert await rig.worker.inventory() == ()
        await rig.worker.load(rig.model("a"))
        pid, born = json.loads((await rig.worker.infer(Call("a@1", b"born"))).body)
        assert pid == second
        assert born < killed
        assert rig.lost == [(first, "killed by SIGKILL (out of memory?)")]
        third = await waiting(rig)
        assert third not in {first, second}


async def test_it_does_not_start_before_the_first_life_answers(started: Start, tmp_path: Path) -> None:
    """A start is never slowed down by its own spare."""
    async with started(wait=False) as rig:
        await eventually(lambda: contexts(tmp_path))
        assert not rig.worker._standby.pid
        with anyio.fail_after(20):
            await rig.worker.ready()
        at_ready = len(contexts(tmp_path))
        await waiting(rig)
        assert at_ready == 1
        assert len(contexts(tmp_path)) == 2


async def test_a_death_while_it_is_being_started_waits_for_it(started: Start, tmp_path: Path) -> None:
    """Two starts of a context beside each other would both be slow: the one under way is the next life."""
    (tmp_path / "closed").touch()
    async with started() as rig:
        await eventually(lambda: len(contexts(tmp_path)) == 2)
        os.kill(rig.worker.pid, signal.SIGKILL)
        await eventually(lambda: rig.lost)
        (tmp_path / "closed").unlink()
        await eventually(lambda: len(rig.ready) == 2)
        assert str(rig.worker.pid) in contexts(tmp_path)
        assert len(contexts(tmp_path)) == 2


async def test_one_that_dies_waiting_is_replaced_and_is_no_loss(started: Start) -> None:
    """Nobody was served by it, so nobody has to hear of it."""
    async with started() as rig:
        first, second = rig.worker.pid, await waiting(rig)
        os.kill(second, signal.SIGKILL)
        await eventually(lambda: rig.worker._standby.pid not in {0, second})
        assert (rig.worker.pid, rig.lost, rig.ready) == (first, [], [first])
        assert state(second) in "XZ"


async def test_both_die_together_and_a_third_is_started(started: Start) -> None:
    """As with a driver that goes away; a corpse is not handed over."""
    async with started() as rig:
        pair = {rig.worker.pid, await waiting(rig)}
        for pid in pair:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: rig.worker.pid not in {0, *pair})
        await rig.worker.load(rig.model("a"))
        assert (await rig.worker.infer(Call("a@1", b"x"))).body == b"x"


async def test_a_device_without_room_for_a_second_context_still_has_its_worker(started: Start, tmp_path: Path) -> None:
    """The spare fails again and again; the worker serves, and is restarted as without one."""
    async with started() as rig:
        (tmp_path / "broken").touch()
        await eventually(lambda: len(contexts(tmp_path)) > 3)
        await rig.worker.load(rig.model("a"))
        assert not rig.lost
        (tmp_path / "broken").unlink()
        await kill(rig, 2)


async def test_stopping_ends_both(started: Start) -> None:
    """F74, I9: also one that is just being started."""
    for settled in (True, False):
        others = children(os.getpid())  # servers that the session's fixtures keep
        async with started() as rig:
            pids = {rig.worker.pid}
            if settled:
                pids.add(await waiting(rig))
            else:
                await eventually(lambda before=others: len(children(os.getpid()) - before) == 2)
                pids |= children(os.getpid()) - others
            with anyio.fail_after(20):  # an import of torch on a busy machine takes several seconds
                await rig.worker.stop()
            assert all(state(pid) == "X" for pid in pids)


async def test_ten_takeovers_leak_nothing(started: Start) -> None:
    """I9: descriptors, threads and children after ten are those after one."""

    def held() -> tuple[int, int, int]:
        own = os.getpid()
        return len(os.listdir(f"/proc/{own}/fd")), threading.active_count(), len(children(own))  # noqa: PTH208

    async with started() as rig:
        await waiting(rig)
        await kill(rig, 2)
        await waiting(rig)
        before = held()
        for life in range(3, 13):
            await kill(rig, life)
            await waiting(rig)
        await eventually(lambda: held() == before, within=3)


async def test_cancelling_the_host_takes_both_along(started: Start) -> None:
    """I9: the cancellation leaves the block when no process is left."""
    pids: list[int] = []

    async def host() -> None:
        async with started() as rig:
            pids.extend((rig.worker.pid, await waiting(rig)))
            await asyncio.Event().wait()

    task = asyncio.create_task(host())
    await eventually(lambda: len(pids) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(state(pid) == "X" for pid in pids)
