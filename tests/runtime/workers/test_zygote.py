"""What only a zygote can do wrong: be a bad parent, die, become unfit to fork, leak what it knows into its copies."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import threading
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from runtime.workers import births, zygote
from runtime.workers.births import BrokenPacket, Bury, Fork, Forked, Prepare, Standing
from runtime.workers.channel import WorkerSetup
from runtime.workers.port import BuilderSpec, Call
from runtime.workers.process import Backoff, ProcessWorker
from runtime.workers.start import NotStarted
from tests.runtime.workers.worker_kit import FAKE, Rig, eventually, process_worker, zygotes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from runtime.workers.zygotes import Zygotes

CORES = "tests.runtime.workers.zygote_cores"


def state(pid: int) -> str:
    """The letter of `ps`; X for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def children(pid: int) -> set[int]:
    """Direct children, zombies included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended while we looked
            found.update(int(child) for child in (task / "children").read_text().split())
    return found


def descriptors(pid: int) -> list[str]:
    """What a process holds open, in words."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them, if the process is this one
            found.append(str(entry.readlink()))
    return sorted(found)


def shown(pid: int) -> tuple[str, str, str]:
    """What a process calls itself, and its limits on core files."""
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
    soft, hard = next(line for line in limits.splitlines() if "core file" in line).split()[4:6]
    return Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip(), soft, hard


async def lives(rig: Rig, count: int) -> None:
    """Wait until the `count`th life answers."""
    await eventually(lambda: len(rig.ready) == count and rig.worker.pid == rig.ready[-1])


async def facts(rig: Rig) -> dict[str, Any]:
    """What the worker knows of itself."""
    await rig.worker.load(rig.model("facts"))
    answer: dict[str, Any] = json.loads((await rig.worker.infer(Call("facts@1", b"!facts"))).body)
    return answer


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Zygotes, Rig, Rig]]:
    """Two devices with one zygote."""
    shared = Rig()
    async with (
        zygotes(shared) as starter,
        process_worker(starter=starter) as one,
        process_worker(device="cpu:1", starter=starter) as two,
    ):
        yield starter, one, two


# -- parenthood ----------------------------------------------------------------------------------------


async def test_a_copy_has_a_session_of_its_own_and_nothing_of_its_parent() -> None:
    """F75, S8: own group, our arguments, no descriptor of the zygote or of a sibling, a terminal's signals ignored."""
    shared = Rig()
    async with (
        zygotes(shared) as starter,
        process_worker(starter=starter),
        process_worker(starter=starter, allow=("a.b", "c"), threads=3, device="cpu:1") as rig,
    ):
        found = await facts(rig)
        assert found["pid"] == found["group"] == found["session"] == rig.worker.pid
        assert found["ppid"] == starter.pid
        assert (found["allow"], found["threads"], found["device"]) == (["a.b", "c"], 3, "cpu:1")
        assert found["torch"] is False
        assert found["switch"] == pytest.approx(0.0001)
        kinds = [name.partition(":")[0] for name in found["fds"]]
        assert kinds.count("socket") == 2, "bell and control; not the zygote's order socket, nor the sibling's"
        assert not [name for name in found["fds"] if "pidfd" in name]
        assert shown(rig.worker.pid) == ("worker cpu:1", "0", "0")


async def test_a_spawned_and_a_forked_worker_hold_the_same_descriptors() -> None:
    """S8: what exec would have closed is not open in a copy either."""
    held = []
    for start in ("spawn", "zygote"):
        async with process_worker(start=start) as rig:
            found = await facts(rig)
            held.append(sorted(name.partition(":[")[0] for name in found["fds"]))
    assert held[0] == held[1]


async def test_copies_do_not_share_their_random_numbers() -> None:
    """Two workers of one parent must not draw the same samples."""
    drawn = []
    async with process_worker(start="zygote", core=f"{CORES}:Drawing") as rig:
        for life in (1, 2):
            await rig.worker.load(rig.model("a"))
            drawn.append((await rig.worker.infer(Call("a@1", b"draw"))).body)
            os.kill(rig.worker.pid, signal.SIGKILL)
            await lives(rig, life + 1)
    assert drawn[0] != drawn[1]
    assert len(json.loads(drawn[0])) == 2


async def test_a_workers_death_takes_neither_its_zygote_nor_its_sibling() -> None:
    """F57: one dies by every kind of death; parent and sibling stay, and no zombie does."""
    async with pair() as (starter, one, two):
        parent, sibling = starter.pid, two.worker.pid
        for count, number in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT), 2):
            os.kill(one.worker.pid, number)
            await lives(one, count)
            assert number.name in one.lost[-1][1]
        assert (starter.pid, two.worker.pid, two.lost) == (parent, sibling, [])
        assert children(parent) == {one.worker.pid, two.worker.pid}


async def test_two_devices_restart_at_once() -> None:
    """One zygote serves both, several times, and mixes nothing up."""
    async with pair() as (starter, one, two):
        rigs = [one, two]
        for count in range(2, 7):
            for rig in rigs:
                os.kill(rig.worker.pid, signal.SIGKILL)
            for rig in rigs:
                await lives(rig, count)
        for rig in rigs:
            assert (await facts(rig))["device"] == rig.worker.device
            assert {words for _, words in rig.lost} == {"killed by SIGKILL (out of memory?)"}
        assert children(starter.pid) == {rig.worker.pid for rig in rigs}


# -- the zygote's own death ----------------------------------------------------------------------------


async def test_a_zygotes_death_is_told_and_workers_come_from_a_new_one() -> None:
    """The kernel ends its workers with it; each loss names the cause within a second; both are back."""
    async with pair() as (starter, one, two):
        rigs = [one, two]
        old = [rig.worker.pid for rig in rigs]
        parent = starter.pid
        killed = time.monotonic()
        os.kill(parent, signal.SIGKILL)
        await eventually(lambda: all(rig.lost for rig in rigs))
        assert time.monotonic() - killed < 1
        for rig, pid in zip(rigs, old, strict=True):
            assert rig.lost == [(pid, "its zygote ended: killed by SIGKILL (out of memory?)")]
            await lives(rig, 2)
        assert starter.pid not in {0, parent}
        assert all(state(pid) in "XZ" for pid in [*old, parent])


async def test_signals_for_everybody_do_not_end_a_zygote() -> None:
    """F74: Ctrl-C, and a service manager's SIGTERM for a whole group of processes; the front decides."""
    async with process_worker(start="zygote") as rig:
        parent = int((await facts(rig))["ppid"])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            os.kill(parent, number)
        os.kill(rig.worker.pid, signal.SIGKILL)
        await lives(rig, 2)
        assert (await facts(rig))["ppid"] == parent


async def test_a_worker_that_is_killed_under_a_frozen_zygote_is_noticed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel tells that it ended, its parent can't tell how; the next one comes from another zygote."""
    monkeypatch.setattr(zygote, "_FORKED_SOON_SUSPECT", 0.2)
    async with process_worker(start="zygote") as rig:
        parent = int((await facts(rig))["ppid"])
        os.kill(parent, signal.SIGSTOP)
        killed = time.monotonic()
        os.kill(rig.worker.pid, signal.SIGKILL)
        await eventually(lambda: rig.lost)
        assert time.monotonic() - killed < 1
        assert rig.lost[0][1] == "for a reason that its zygote does not tell"
        await lives(rig, 2)
        assert rig.lost[1:] == [(0, "could not be started: its zygote made no copy within 0.2 s")]
        assert (await facts(rig))["ppid"] != parent
        await eventually(lambda: state(parent) in "XZ")
        assert rig.notes == ["a zygote is given up: it did not answer"]


async def test_a_zygote_that_was_only_slow_goes_on() -> None:
    """What it says too late is ignored, and buries nobody twice: same parent, same sibling, next life."""
    async with pair() as (starter, one, two):
        parent, sibling = starter.pid, two.worker.pid
        for count in range(2, 6):
            os.kill(parent, signal.SIGSTOP)
            os.kill(one.worker.pid, signal.SIGKILL)
            await eventually(lambda count=count: len(one.lost) == count - 1)
            os.kill(parent, signal.SIGCONT)
            await lives(one, count)
        assert (starter.pid, two.worker.pid, two.lost) == (parent, sibling, [])
        assert {words for _, words in one.lost} == {"for a reason that its zygote does not tell"}
        await eventually(lambda: children(parent) == {one.worker.pid, sibling})


async def test_a_worker_that_dies_while_its_zygote_imports_is_told_at_once() -> None:
    """A model that kills its worker right after its first load: the cause does not wait for imports."""
    async with process_worker(start="zygote", core=f"{CORES}:Drawing") as rig:
        starter: Zygotes = rig.worker._starter
        starter.expect(BuilderSpec("transformers", "", {"model_type": "waits"}))
        parent, killed = starter.pid, time.monotonic()
        os.kill(rig.worker.pid, signal.SIGSEGV)
        await eventually(lambda: rig.lost)
        assert time.monotonic() - killed < 1
        assert rig.lost[0][1] == "killed by SIGSEGV"
        await lives(rig, 2)
        assert (starter.pid, rig.notes) == (parent, [])
        await rig.worker.load(rig.model("a"))
        assert json.loads((await rig.worker.infer(Call("a@1", b"rehearsed"))).body) == [parent]


async def test_leaving_ends_the_zygote() -> None:
    """I9: nothing of it is left when the starter's block ends, with a worker that was never asked for or without."""
    rig = Rig()
    async with zygotes(rig) as starter:
        async with process_worker(starter=starter):
            pid = starter.pid
        assert state(pid) not in "XZ"
    assert state(pid) == "X"
    assert starter.pid == 0


async def test_a_start_that_is_cancelled_leaves_no_copy() -> None:
    """I9: cancelled at the moment of the fork, the copy is ended and collected."""
    rig = Rig()
    async with zygotes(rig) as starter, process_worker(starter=starter):
        for turns in range(12):
            worker = ProcessWorker(
                "cpu:1", resolve=rig.resolve, on_ready=rig.ready.append, on_lost=lambda *_: None,
                core=FAKE, starter=starter, stop_grace=0.1,
            )  # fmt: skip
            async with worker:
                for _ in range(turns):
                    await asyncio.sleep(0)
        await eventually(lambda: len(children(starter.pid)) == 1)


# -- what makes a fork impossible ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("core", "why"),
    [
        ("Threaded", "2 threads run in it"),
        ("Cuda", "CUDA was initialised in it"),
        ("missing_module", "ModuleNotFoundError while importing"),
    ],
)
async def test_a_process_that_must_not_be_forked_is_not(core: str, why: str) -> None:
    """A thread or a CUDA context that exists at a fork is broken in the copy: nobody is forked, and it says why."""
    module = f"{CORES}_{core.lower()}"
    async with process_worker(start="zygote", core=f"{module}:FakeCore", wait=False) as rig:
        await eventually(lambda: len(rig.lost) >= 2)
        assert {pid for pid, _ in rig.lost} == {0}
        assert why in rig.lost[0][1]
        assert rig.notes == [f"no zygote is possible here: {why}"]


async def test_without_a_zygote_the_worker_is_spawned_and_the_reason_told_once() -> None:
    """`auto`: a thread in the zygote costs speed, never service."""
    shared = Rig()
    async with (
        zygotes(shared, f"{CORES}_threaded:FakeCore", insist=False) as starter,
        process_worker(starter=starter, core=f"{CORES}_threaded:FakeCore") as rig,
    ):
        assert (await facts(rig))["ppid"] == os.getpid()
        os.kill(rig.worker.pid, signal.SIGKILL)
        await lives(rig, 2)
        assert rig.lost[0][1] == "killed by SIGKILL (out of memory?)"
        assert len(shared.notes) == 1


async def test_a_zygote_that_is_killed_before_it_stands_costs_one_spawn() -> None:
    """`auto`: this life is spawned, the next one is forked again."""
    shared = Rig()
    async with (
        zygotes(shared, f"{CORES}_slow:FakeCore", insist=False) as starter,
        process_worker(starter=starter, core=FAKE, wait=False) as rig,
    ):
        await eventually(lambda: starter.pid)
        os.kill(starter.pid, signal.SIGKILL)
        await lives(rig, 1)
        assert (await facts(rig))["ppid"] == os.getpid()
        assert shared.notes == ["a worker of cpu:0 is spawned: its zygote ended: killed by SIGKILL (out of memory?)"]


async def test_an_import_that_starts_a_thread_retires_the_zygote_and_spares_its_workers() -> None:
    """Unfit to fork from then on; the next zygote leaves such imports to the workers."""
    shared = Rig()
    async with (
        zygotes(shared, f"{CORES}:Drawing") as starter,
        process_worker(starter=starter, core=f"{CORES}:Drawing") as rig,
    ):
        parent, worker = starter.pid, rig.worker.pid
        starter.expect(BuilderSpec("transformers", "", {"model_type": "starts-a-thread"}))
        await eventually(lambda: shared.notes)
        assert shared.notes == ["a zygote is given up: 2 threads run in it"]
        assert rig.worker.pid == worker
        assert state(parent) not in "XZ", "it stays as long as its worker"
        os.kill(worker, signal.SIGKILL)
        await lives(rig, 2)
        assert starter.pid != parent
        await eventually(lambda: state(parent) in "XZ")
        starter.expect(BuilderSpec("transformers", "", {"model_type": "starts-a-thread-too"}))
        os.kill(rig.worker.pid, signal.SIGKILL)
        await lives(rig, 3)
        assert len(shared.notes) == 1


@pytest.mark.parametrize("kind", ["../x", "", "a" * 65, 3, None, "a b"])
async def test_only_names_of_model_types_reach_a_zygote(kind: object) -> None:
    """S7: a config is a stranger's; what it calls its type is imported by nobody unless it looks like one."""
    shared = Rig()
    async with zygotes(shared) as starter:
        starter.expect(BuilderSpec("transformers", "", {"model_type": kind}))
        starter.expect(BuilderSpec("python", "os:system", {"model_type": "bert"}))
        assert starter._kinds == []


async def test_a_zygote_rehearses_after_the_first_load_and_only_once() -> None:
    """Beside a load it would slow somebody down; the workers after that find the imports done."""
    async with process_worker(start="zygote", core=f"{CORES}:Drawing") as rig:
        for name in ("a", "b"):
            await rig.worker.load(rig.model(name))
        assert json.loads((await rig.worker.infer(Call("a@1", b"rehearsed"))).body) == []
        os.kill(rig.worker.pid, signal.SIGKILL)
        await lives(rig, 2)
        await rig.worker.load(rig.model("a"))
        assert json.loads((await rig.worker.infer(Call("a@1", b"rehearsed"))).body) == [rig.worker._starter.pid]


# -- what it costs -------------------------------------------------------------------------------------


async def test_fifty_restarts_leak_nothing_anywhere() -> None:
    """I9: after 50 kills, front and zygote hold what they held after the first, and no more memory than a little."""
    own = os.getpid()

    def held(source: int) -> tuple[object, ...]:
        return (
            len(descriptors(own)),
            threading.active_count(),
            len(list(Path("/dev/shm").iterdir())),
            len(children(own)),
            len(children(source)),
            descriptors(source),
        )

    def private(pid: int) -> int:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))

    async with process_worker(start="zygote", backoff=Backoff(0.001, 0.001)) as rig:
        os.kill(rig.worker.pid, signal.SIGKILL)
        await lives(rig, 2)
        source = int((await facts(rig))["ppid"])
        before, parent, worker = held(source), private(source), private(rig.worker.pid)
        for life in range(3, 53):
            os.kill(rig.worker.pid, signal.SIGKILL)
            await lives(rig, life)
        await eventually(lambda: held(source) == before, within=3)
        await facts(rig)
        assert private(source) < parent + 1024
        assert private(rig.worker.pid) < worker + 1024
        assert len(rig.lost) == 51


# -- the packets ---------------------------------------------------------------------------------------


def fork_order() -> Fork:
    return Fork(1, WorkerSetup(device="cpu:0", core=FAKE))


def test_packets_travel_with_their_descriptors() -> None:
    """Each message arrives as itself; descriptors are copies that no exec inherits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        births.send(ours, fork_order(), (0, 1, 2))
        births.send(ours, Prepare(("bert",)))
        order, fds = births.receive(theirs, births.orders) or (None, [])
        assert order == fork_order()
        assert len(fds) == 3
        for fd in fds:
            assert not os.get_inheritable(fd)
            os.close(fd)
        assert births.receive(theirs, births.orders) == (Prepare(("bert",)), [])
        ours.close()
        assert births.receive(theirs, births.orders) is None


@pytest.mark.parametrize("packet", [b"\x00", b"garbage", b"\xff" * 100, b"\x82\xa4type\xa3Odd\xa2id\x01"])
def test_what_is_no_message_is_refused_with_its_descriptors_closed(packet: bytes) -> None:
    """S7: neither side believes the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(descriptors(os.getpid()))
        socket.send_fds(ours, [packet], [0, 1])
        with pytest.raises(BrokenPacket):
            births.receive(theirs, births.orders)
        assert len(descriptors(os.getpid())) == before


@pytest.mark.parametrize(
    ("message", "fds"), [(fork_order(), ()), (fork_order(), (0,)), (Bury(1), (0,)), (Prepare(()), (0, 1, 2))]
)
def test_a_message_with_other_descriptors_than_its_own_is_refused(message: births.Order, fds: tuple[int, ...]) -> None:
    """A worker without its sockets, or a leak of strangers'."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(descriptors(os.getpid()))
        births.send(ours, message, fds)
        with pytest.raises(BrokenPacket, match="descriptors"):
            births.receive(theirs, births.orders)
        assert len(descriptors(os.getpid())) == before


def test_a_setup_that_does_not_fit_a_packet_is_refused_by_its_sender() -> None:
    """F-size: an error with numbers, not a dead zygote."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    huge = WorkerSetup(device="cpu:0", core=FAKE, allow=("x" * 200_000,))
    with ours, theirs, pytest.raises(OSError, match="the limit is 131072"):
        births.send(ours, Fork(1, huge))


async def test_a_front_without_a_free_descriptor_loses_one_start_and_nobody_else() -> None:
    """A copy whose pidfd can't be received is ended and collected; its siblings live on, the next start works."""
    async with pair() as (starter, one, two):
        current = starter._current
        assert current is not None
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        loop = asyncio.get_running_loop()
        future = current._pending[999] = loop.create_future()
        with open(os.devnull) as first, open(os.devnull) as second, open(os.devnull) as third:  # noqa: ASYNC230, PTH123
            fds = (first.fileno(), second.fileno(), third.fileno())
            current._send(Fork(999, WorkerSetup(device="slow:0", core=FAKE)), fds)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free(), limits[1]))
            with pytest.raises(NotStarted, match="no descriptor is free"):
                await asyncio.wait_for(future, 10)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            current._pending.pop(999)
        await eventually(lambda: children(starter.pid) == {one.worker.pid, two.worker.pid})
        assert (one.lost, two.lost) == ([], [])
        os.kill(one.worker.pid, signal.SIGKILL)
        await lives(one, 2)


def first_free() -> int:
    """The number that the next descriptor would get."""
    fd = os.dup(0)
    os.close(fd)
    return fd


async def test_a_zygote_that_breaks_the_protocol_is_replaced() -> None:
    """S7: garbage on the order socket ends it, its workers are restarted from another."""
    async with process_worker(start="zygote") as rig:
        starter: Zygotes = rig.worker._starter
        current = starter._current
        assert current is not None
        with anyio.fail_after(5):
            current._socket.send(b"garbage")
            await lives(rig, 2)
        assert "its zygote ended: exit code 70" in rig.lost[0][1]


def test_reports_of_a_wrong_kind_are_no_orders() -> None:
    """The two directions have types of their own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        births.send(ours, Standing())
        with pytest.raises(BrokenPacket):
            births.receive(theirs, births.orders)
        births.send(ours, Forked(1, 2), (0,))
        report, fds = births.receive(theirs, births.reports) or (None, [])
        assert report == Forked(1, 2)
        os.close(fds[0])
