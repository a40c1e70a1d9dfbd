"""What only a process can do wrong: die, stall, fork, leak, inherit. Real processes, a core without torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import uvloop

from actors.errors import LoadFailed, NotReady, WorkerDied
from runtime.workers import spawn
from runtime.workers.port import Call
from runtime.workers.process import Backoff
from tests.runtime.workers import worker_kit
from tests.runtime.workers.worker_kit import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.runtime.workers.worker_kit import Rig

    Start = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(params=["spawn", "zygote"])
def process_worker(request: pytest.FixtureRequest) -> Start:
    """Started workers; how their processes come about makes no difference to any promise."""
    return partial(worker_kit.process_worker, start=request.param)


def gone(pid: int) -> bool:
    """True if no such process runs; a zombie that its init has not collected counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


async def restarted(rig: Rig, lives: int = 2) -> None:
    """Wait until the worker answers again."""
    await eventually(lambda: len(rig.ready) == lives and rig.worker.pid == rig.ready[-1])


async def facts(rig: Rig) -> dict[str, object]:
    """What the worker knows of itself."""
    await rig.worker.load(rig.model("facts"))
    answer: dict[str, object] = json.loads((await rig.worker.infer(Call("facts@1", b"!facts"))).body)
    return answer


async def test_sigkill_is_noticed_within_a_second_by_everybody_who_waits(process_worker: Start, tmp_path: Path) -> None:
    """F57, R8: load, call and queued call fail with the cause; `on_lost` hears it once; a new life answers."""
    async with process_worker() as rig:
        await rig.worker.load(rig.model("a"))
        call = asyncio.create_task(rig.worker.infer(Call("a@1", f"!gate {tmp_path / 'call'}".encode())))
        load = asyncio.create_task(rig.worker.load(rig.model("b", "gate", gate=tmp_path / "load")))
        await eventually(lambda: (tmp_path / "call.started").exists() and (tmp_path / "load.started").exists())
        first = rig.worker.pid
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        for outcome in await asyncio.gather(call, load, return_exceptions=True):
            assert isinstance(outcome, WorkerDied)
            assert "killed by SIGKILL (out of memory?)" in outcome.message
            assert outcome.retry_after is not None
        assert time.monotonic() - killed < 1
        assert not rig.worker.pid
        with pytest.raises(NotReady) as caught:
            await rig.worker.infer(Call("a@1", b"x"))
        assert caught.value.retry_after is not None
        await restarted(rig)
        assert rig.lost == [(first, "killed by SIGKILL (out of memory?)")]
        assert rig.ready[1] != first
        assert await rig.worker.inventory() == ()


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        (b"!signal 11", "killed by SIGSEGV"),
        (b"!signal 7", "killed by SIGBUS"),
        (b"!exit 0", "exit code 0"),
        (b"!exit 137", "exit code 137"),
        (b"!fatal", "exit code 70"),
        (b"!scribble", "broke the ring's protocol: a reply packet of 7 bytes"),
        (b"!babble", "broke the control protocol: a frame of 4294967295 bytes, the limit is 16777216"),
    ],
)
async def test_every_other_end_is_named_too(process_worker: Start, deed: bytes, cause: str) -> None:
    """F57, S7: signals, early exits and breaches of protocol end one life, with their names, and no more."""
    async with process_worker() as rig:
        await rig.worker.load(rig.model("a"))
        # A worker that only misbehaves may answer first; it is ended all the same.
        (outcome,) = await asyncio.gather(rig.worker.infer(Call("a@1", deed)), return_exceptions=True)
        await restarted(rig)
        if isinstance(outcome, Exception):
            assert isinstance(outcome, WorkerDied)
            assert cause in str(outcome)
        assert [words for _, words in rig.lost] == [cause]


async def test_a_truncated_mapping_is_told_as_sigbus(process_worker: Start, tmp_path: Path) -> None:
    """R37: not a time-out, and not the front's death."""
    async with process_worker() as rig:
        await rig.worker.load(rig.model("a"))
        started = time.monotonic()
        with pytest.raises(WorkerDied, match="SIGBUS"):
            await rig.worker.infer(Call("a@1", f"!truncate {tmp_path / 'weights'}".encode()))
        assert time.monotonic() - started < 1


async def test_a_stalled_load_ends_the_worker_and_says_so(process_worker: Start) -> None:
    """F56: no answer within the limit; a cancelled load that does not end is stalled as well."""
    async with process_worker(load_timeout=0.2) as rig:
        with pytest.raises(WorkerDied, match=r"stalled while loading a@1: no answer for 0\.2 s"):
            await rig.worker.load(rig.model("a", "hang"))
        await restarted(rig)
        task = asyncio.create_task(rig.worker.load(rig.model("b", "hang")))
        await asyncio.wait((task,), timeout=0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await restarted(rig, 3)
        assert [words.partition(":")[0] for _, words in rig.lost] == [
            "stalled while loading a@1",
            "stalled while loading b@1",
        ]


async def test_a_hanging_eviction_recycles_the_worker(process_worker: Start) -> None:
    """F60: the process, and its memory, go instead."""
    async with process_worker(load_timeout=0.2) as rig:
        model = rig.model("a", "echo", evict="hang")
        await rig.worker.load(model)
        with pytest.raises(WorkerDied, match="stalled while evicting a@1"):
            await rig.worker.evict(model.key)
        await restarted(rig)


async def test_a_call_has_no_time_limit_of_the_load(process_worker: Start, tmp_path: Path) -> None:
    """F56: the limit on loads never ends a long inference."""
    async with process_worker(load_timeout=0.05) as rig:
        await rig.worker.load(rig.model("a"))
        gate = tmp_path / "g"
        call = asyncio.create_task(rig.worker.infer(Call("a@1", f"!gate {gate}".encode())))
        await asyncio.wait((call,), timeout=0.3)
        assert not call.done()
        gate.touch()
        await call


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_a_grandchild_goes_with_the_worker(process_worker: Start, tmp_path: Path, end: str) -> None:
    """F75, R27: whatever a model's code forked is killed with the group, within three seconds."""
    async with process_worker() as rig:
        await rig.worker.load(rig.model("a", "fork", pid=tmp_path / "pid"))
        await eventually(lambda: (tmp_path / "pid").read_text(encoding="ascii").strip())
        grandchild = int((tmp_path / "pid").read_text(encoding="ascii"))
        assert not gone(grandchild)
        if end == "kill":
            os.kill(rig.worker.pid, signal.SIGKILL)
        else:
            await rig.worker.stop()
        await eventually(lambda: gone(grandchild), within=3)


@pytest.mark.parametrize("start", ["spawn", "zygote"])
@pytest.mark.parametrize("stuck", [False, True])
async def test_a_worker_dies_with_its_front(start: str, *, stuck: bool) -> None:
    """F74, I9: after kill -9 of the front no worker is left, not even one that runs no code of ours any more."""
    front = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-m", "tests.runtime.workers.lone_front", start], stdout=subprocess.PIPE
    )
    with front:
        assert front.stdout is not None
        _, worker = map(int, (await asyncio.to_thread(front.stdout.readline)).split())
        assert not gone(worker)
        if stuck:
            os.kill(worker, signal.SIGSTOP)
        front.kill()
        await eventually(lambda: gone(worker), within=3)


async def test_stopping_does_not_wait_for_a_stuck_call(process_worker: Start, tmp_path: Path) -> None:
    """F74: SIGTERM, the grace, SIGKILL; the call under way is told, and `on_lost` is not."""
    async with process_worker(stop_grace=0.1) as rig:
        await rig.worker.load(rig.model("a"))
        gate = tmp_path / "g"
        call = asyncio.create_task(rig.worker.infer(Call("a@1", f"!gate {gate}".encode())))
        await eventually(gate.with_suffix(".started").exists)
        pid = rig.worker.pid
        with anyio.fail_after(3):
            await rig.worker.stop()
        assert gone(pid)
        with pytest.raises(WorkerDied, match="stopped"):
            await call
        assert not rig.lost


async def test_an_idle_worker_ends_by_itself_on_sigterm(process_worker: Start) -> None:
    """F74: the grace is not used up; an end that nobody here asked for is a loss like any other."""
    async with process_worker(stop_grace=30.0) as rig:
        os.kill(rig.worker.pid, signal.SIGTERM)
        await restarted(rig)
        assert [words for _, words in rig.lost] == ["exit code 0"]
        with anyio.fail_after(5):
            await rig.worker.stop()


async def test_ctrl_c_is_the_fronts_business(process_worker: Start) -> None:
    """F74: SIGINT reaches a terminal's whole group; the worker goes on, and so does SIGPIPE."""
    async with process_worker() as rig:
        await rig.worker.load(rig.model("a"))
        os.kill(rig.worker.pid, signal.SIGINT)
        os.kill(rig.worker.pid, signal.SIGPIPE)
        assert (await rig.worker.infer(Call("a@1", b"still here"))).body == b"still here"


async def test_a_worker_that_can_not_start_is_tried_again_and_reported(process_worker: Start) -> None:
    """Each failed start is a loss with its exit; callers are told to come back."""
    async with process_worker(device="broken:0", wait=False) as rig:
        await eventually(lambda: len(rig.lost) >= 2)
        assert {words for _, words in rig.lost} == {"exit code 70 before it was ready"}
        assert not rig.ready
        with pytest.raises(NotReady, match="starting"):
            await rig.worker.inventory()
        rig.worker.release_host("f")  # nothing is mapped in no process
        await rig.worker.stop()
        with pytest.raises(NotReady, match="stopped"):
            await rig.worker.ready()


async def test_a_worker_that_never_answers_is_killed_after_the_start_limit(process_worker: Start) -> None:
    """The handshake has a limit of its own."""
    async with process_worker(device="slow:0", wait=False, start_timeout=0.1) as rig:
        await eventually(lambda: rig.lost)
        assert rig.lost[0][1] == "did not answer within 0.1 s of its start before it was ready"
        assert gone(rig.lost[0][0])


async def test_leaving_while_it_starts_leaves_nothing(process_worker: Start) -> None:
    """I9: cancelled in the middle of the handshake, no process stays."""
    async with process_worker(device="slow:0", wait=False, stop_grace=0.1) as rig:
        await eventually(lambda: rig.worker._life is not None)
        pid = rig.worker._life.pid
    assert gone(pid)


async def test_a_cancelled_host_takes_the_worker_with_it(process_worker: Start) -> None:
    """I9: the process is gone before the cancellation leaves the block."""
    pids: list[int] = []

    async def host() -> None:
        async with process_worker() as rig:
            pids.append(rig.worker.pid)
            await asyncio.Event().wait()

    task = asyncio.create_task(host())
    await eventually(lambda: pids)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pids[0])


async def test_twenty_restarts_leak_nothing(process_worker: Start) -> None:
    """I9: descriptors, threads, shared memory and children after 20 lives are those after one."""
    own = Path(f"/proc/{os.getpid()}")

    def held() -> tuple[int, int, int, int]:
        children = {child for task in (own / "task").iterdir() for child in (task / "children").read_text().split()}
        return (
            len(list((own / "fd").iterdir())),
            threading.active_count(),
            len(list(Path("/dev/shm").iterdir())),
            len(children),
        )

    async with process_worker(backoff=Backoff(0.001, 0.001)) as rig:
        os.kill(rig.worker.pid, signal.SIGKILL)
        await restarted(rig)
        before = held()
        for life in range(3, 23):
            os.kill(rig.worker.pid, signal.SIGKILL)
            await restarted(rig, life)
        await eventually(lambda: held() == before, within=3)
        assert len(rig.lost) == 21


async def test_the_environment_and_the_descriptors_are_only_what_a_worker_needs(
    process_worker: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S8: no secret of the front, and no open file of it, reaches a worker."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("FORELOAD_SERVER__KEYS", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with process_worker() as rig:
            found = await facts(rig)
            environment = json.loads((await rig.worker.infer(Call("facts@1", b"!env"))).body)
    assert "hunter2" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert str(tmp_path / "open") not in str(found["fds"])
    assert str(found["fds"]).count("memfd:foreload-ring") <= 2


async def test_a_spawned_worker_is_a_fresh_interpreter_in_its_own_session() -> None:
    """F76, F75: exec; own group and session; our arguments arrive; the package is the front's."""
    async with worker_kit.process_worker(allow=("a.b", "c"), threads=3) as rig:
        found = await facts(rig)
        argv = found["argv"]
        assert isinstance(argv, list)
        assert argv[:4] == [sys.executable, "-P", "-m", "runtime.worker.main"]
        assert found["ppid"] == os.getpid()
        assert found["pid"] == found["group"] == found["session"] == rig.worker.pid
        assert (found["allow"], found["threads"], found["device"]) == (["a.b", "c"], 3, "cpu:0")
        assert found["torch"] is False
        assert found["switch"] == pytest.approx(0.0001)
    assert spawn.START_METHOD == "exec"


async def test_a_specification_that_does_not_fit_is_refused_and_harms_nobody(process_worker: Start) -> None:
    """F-size: a configuration over 16 MiB is a failed load with numbers, not a dead worker."""
    async with process_worker() as rig:
        with pytest.raises(LoadFailed, match="limit is 16777216"):
            await rig.worker.load(rig.model("a", text="x" * (17 << 20)))
        large = rig.model("b", text="x" * (12 << 20))
        await rig.worker.load(large)
        await rig.worker.ping()
        assert [held.model for held in await rig.worker.inventory()] == [large]


async def test_an_endless_error_message_is_cut_to_fit_a_slot(process_worker: Start) -> None:
    """S7: an error longer than the slot still arrives as its class."""
    async with process_worker() as rig:
        await rig.worker.load(rig.model("a"))
        with pytest.raises(Exception, match=r"^x{512}$") as caught:
            await rig.worker.infer(Call("a@1", b"!longwinded"))
        assert caught.value.code == "bad_tensor"


async def test_a_storm_of_cancellations_and_a_kill_leaves_no_slot_and_no_resident_behind(process_worker: Start) -> None:
    """I9: 200 calls, every third cancelled, a kill in the middle; afterwards every slot is free again."""
    async with process_worker(slots=8) as rig:
        model = rig.model("a")
        await rig.worker.load(model)
        for kill in (False, True):
            tasks = [asyncio.create_task(rig.worker.infer(Call("a@1", b"%d" % n))) for n in range(200)]
            for turn, task in enumerate(tasks):
                if turn % 3 == 0:
                    task.cancel()
                if turn % 40 == 0:
                    await asyncio.sleep(0)
            if kill:
                os.kill(rig.worker.pid, signal.SIGKILL)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(
                isinstance(outcome, asyncio.CancelledError | WorkerDied) or outcome.body == b"%d" % n
                for n, outcome in enumerate(outcomes)
            )
            if not kill:
                ring = rig.worker._life.ring
                assert (ring.busy, ring.waiting, len(ring._free)) == (0, 0, 8)
        await restarted(rig)


def test_all_of_it_works_on_uvloop(process_worker: Start) -> None:
    """The front runs on uvloop: ring, control channel and exit watch are the same there."""

    async def story() -> list[str]:
        async with process_worker() as rig:
            await rig.worker.load(rig.model("a", text="x" * (1 << 20)))
            bodies = [b"%d " % n * 5000 for n in range(100)]
            answers = await asyncio.gather(*(rig.worker.infer(Call("a@1", body)) for body in bodies))
            assert [answer.body for answer in answers] == bodies
            os.kill(rig.worker.pid, signal.SIGKILL)
            await restarted(rig)
            return [words for _, words in rig.lost]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(story()) == ["killed by SIGKILL (out of memory?)"]


def test_pauses_double_up_to_a_limit_and_a_healthy_life_needs_none() -> None:
    """0.1 s doubling to 10 s; after 60 s of health the next life begins at once."""
    backoff, pause, pauses = Backoff(), 0.0, []
    for _ in range(9):
        pause = backoff.after(pause, lived=1.0)
        pauses.append(pause)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.after(10.0, lived=60.0) == 0
    assert backoff.after(0.0, lived=1.0) == 0.1


def test_exits_are_said_in_words() -> None:
    """Known signals by name, unknown ones by number."""
    assert spawn.words(1) == "exit code 1"
    assert spawn.words(-6) == "killed by SIGABRT"
    assert spawn.words(-63) == "killed by signal 63"


def test_the_environment_is_an_allow_list() -> None:
    """S8: what is not listed is dropped, whatever it is called."""
    names = {"PATH": "1", "LC_ALL": "1", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "0", "PGPASSWORD": "0", "CUDA_HOME": "1"}
    kept = spawn.filtered(names)
    assert set(kept) == {"PATH", "LC_ALL", "HF_HUB_OFFLINE", "CUDA_HOME", "PYTHONPATH"}
