"""The fitting worker against real processes: a good one, and every bad one. Of those, the caller hears `Broken`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from actors.errors import Broken
from forecasting.fit import fit
from runtime.fitting.parcel import Garbled, packed, read_arrays, unpacked
from runtime.fitting.worker import FittingWorker
from tests.forecasting.fleets import END, counted, daily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forecasting.snapshot import Snapshot

HOSTILE = "tests.runtime.fitting.hostile"


def snapshot(days: int = 2) -> Snapshot:
    """Three models; one was forgotten, so that indices and models differ."""
    counts = counted(daily(4, days))
    counts.forget(counts.keys[1])
    counts.mask(60.0 * END - 7200, 60.0 * END - 3600, [counts.keys[0]])
    return counts.snapshot()


@pytest.fixture
def hostile() -> Iterator[None]:
    """The environment in which processes are told how to misbehave."""
    yield
    os.environ.pop("PYTHONHOSTILE", None)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def started(worker: FittingWorker) -> int:
    """Wait for the process; its number."""
    while not worker.pid:  # noqa: ASYNC110 - the worker tells nobody
        await asyncio.sleep(0.01)
    return worker.pid


async def test_a_round_in_a_process_equals_one_here():
    """The same counts give the same fit."""
    worker, taken = FittingWorker(top=3), snapshot()
    found = await worker.fit(taken)
    here = fit(taken, now=taken.at, deadline=60.0, top=3)
    assert found.keys == here.keys
    assert found.complete
    for name, array in here.served().to_arrays().items():
        if name != "said":  # it holds CPU seconds
            # Week sums have eight bits of precision on the way.
            assert np.allclose(found.to_arrays()[name], array, rtol=0.01, atol=1e-3, equal_nan=True), name
    assert worker.pid == 0


def test_a_parcel_keeps_what_a_fit_looks_at():
    """Sums, histories with their gaps and masks, rates and births come out as they went in."""
    taken = snapshot()
    other = unpacked(dict(packed(taken)))
    assert other.keys == taken.keys
    for bucket in (300, 900):
        one, two = taken.history(bucket), other.history(bucket)
        assert np.array_equal(one.counts, two.counts)
        assert np.array_equal(one.known, two.known)
        assert not one.known.all()
    for one, two in zip(taken.sums(), other.sums(), strict=True):
        assert np.allclose(one, two, rtol=5e-3, atol=1e-6)
    assert np.array_equal(taken.rates(), other.rates())
    assert other.born.tolist() == taken.born.tolist()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "exit code 3"),
        ("late exit", "exit code 4"),
        ("segfault", "SIGSEGV"),
        ("memory", "exit code 1"),
        ("garbage", "cannot be read"),
        ("pickle", "cannot be read"),
        ("compressed", "not as it was written"),
        ("huge", "said more than"),
        ("other counts", "other counts"),
        ("profile=nan", "profile"),
        ("profile=-1", "profile"),
        ("season=1e9", "season"),
        ("weights=inf", "weights"),
        ("confidence=77", "confidence"),
    ],
)
async def test_a_bad_worker_is_broken_and_costs_nothing_else(hostile: None, how: str, says: str):
    """F71, F72: dead, garbled, absurd or endless: the error says which, and all is cleaned up."""
    os.environ["PYTHONHOSTILE"] = how
    worker = FittingWorker(module=HOSTILE, memory=2 << 30)
    before = descriptors()
    with pytest.raises(Broken, match=says):
        await worker.fit(snapshot())
    assert worker.pid == 0
    assert descriptors() == before


@pytest.mark.parametrize("how", ["hang", "trickle", "child"])
async def test_a_slow_worker_is_killed_at_its_wall_deadline(hostile: None, how: str):
    """Silent, a byte at a time, or ended with a child that keeps the pipe: over in time, with all its children."""
    os.environ["PYTHONHOSTILE"] = how
    worker = FittingWorker(module=HOSTILE, budget=0.5, grace=1.0)
    with pytest.raises(Broken, match=r"took longer than 1\.5 s"):
        await worker.fit(snapshot())
    assert worker.pid == 0


async def test_after_a_bad_round_comes_a_good_one(hostile: None):
    """Each round has a process of its own, so nothing is carried over."""
    os.environ["PYTHONHOSTILE"] = "exit"
    with pytest.raises(Broken):
        await FittingWorker(module=HOSTILE).fit(snapshot())
    worker, before = FittingWorker(top=0), descriptors()
    assert (await worker.fit(snapshot())).complete
    assert descriptors() == before


async def test_a_module_that_is_not_there_is_broken():
    """An installation without its fitter serves all the same."""
    with pytest.raises(Broken, match="exit code 1"):
        await FittingWorker(module="runtime.fitting.nowhere").fit(snapshot())


async def test_cancelling_ends_the_process_first(hostile: None):
    """F57: a server that stops leaves no fitting process behind."""
    os.environ["PYTHONHOSTILE"] = "hang"
    worker = FittingWorker(module=HOSTILE)
    task = asyncio.create_task(worker.fit(snapshot()))
    pid = await started(worker)
    assert str(pid) in repr(worker)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)
    assert repr(worker) == "<FittingWorker idle>"


async def test_rounds_take_turns(hostile: None):
    """Two at once would take two cores from serving: the second one waits, and may be cancelled while it does."""
    os.environ["PYTHONHOSTILE"] = "hang"
    worker = FittingWorker(module=HOSTILE)
    first = asyncio.create_task(worker.fit(snapshot()))
    pid = await started(worker)
    second = asyncio.create_task(worker.fit(snapshot()))
    await asyncio.sleep(0.05)
    assert worker.pid == pid
    for task in (second, first):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert not alive(pid)


def test_a_killed_server_leaves_no_fitting_process():
    """F57: SIGKILL of the parent, in the middle of a round."""
    environment = os.environ | {"PYTHONHOSTILE": "hang", "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.fitting.parent"], stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait()
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(pid)


async def test_the_process_is_nice_and_sees_no_secrets(hostile: None, monkeypatch: pytest.MonkeyPatch):
    """Priority 10, one BLAS thread, an environment without keys, a process group of its own."""
    monkeypatch.setenv("FORELOAD_KEY", "secret")
    os.environ["PYTHONHOSTILE"] = "hang"
    worker = FittingWorker(module=HOSTILE)
    task = asyncio.create_task(worker.fit(snapshot()))
    pid = await started(worker)
    until = time.monotonic() + 20
    while os.getpriority(os.PRIO_PROCESS, pid) != 10 and time.monotonic() < until:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.02)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()  # noqa: ASYNC240 - not on a disk
    assert os.getpgid(pid) == pid
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", ["budget", "grace", "memory"])
def test_impossible_limits_are_refused(how: str):
    """A worker that can't ever finish is a mistake of whoever made it."""
    with pytest.raises(ValueError, match="impossible limits"):
        FittingWorker(**{how: 0})


def test_bytes_that_are_no_archive_are_garbled():
    """Empty, random, cut short."""
    for content in (b"", b"PK", os.urandom(100)):
        with pytest.raises(Garbled):
            read_arrays(content)
