"""The ring with both its sides in one process: lengths, generations, waiting, memory. No worker is started."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import BadRequest, BadTensor, Broken, ForeloadError, TooLarge, WorkerDied, by_code
from runtime.workers import bells
from runtime.workers.bells import BrokenBell, CallBell, ReplyBell, SkipBell
from runtime.workers.fault import pack, unpack
from runtime.workers.patience import settled
from runtime.workers.port import Answer, Call, Timings
from runtime.workers.ring import KEPT_BYTES, FrontGone, FrontRing, RingCall, WorkerRing
from runtime.workers.slots import SlotMemory

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


@dataclass
class Pair:
    """Both sides of a ring; the worker's bell as a raw socket too, to misbehave with."""

    front: FrontRing
    worker: WorkerRing
    raw: socket.socket
    broken: list[str]


@contextmanager
def ring(slots: int = 2, slot_bytes: int = 8192) -> Iterator[Pair]:
    """A connected ring."""
    broken: list[str] = []
    front = FrontRing(slots=slots, slot_bytes=slot_bytes, on_broken=broken.append)
    bell, raw = front.worker_bell.dup(), front.worker_bell.dup()
    worker = WorkerRing(memory_fd=os.dup(front.memory_fd), bell_fd=bell.detach(), slots=slots, slot_bytes=slot_bytes)
    front.worker_bell.close()
    try:
        yield Pair(front, worker, raw, broken)
    finally:
        front.lose(WorkerDied("end of test"))
        front.close()
        worker.close()
        worker._memory.close()
        raw.close()


async def calls(pair: Pair, count: int) -> list[RingCall]:
    """Wait for the worker's side to have `count` calls."""
    found: list[RingCall] = []
    with anyio.fail_after(5):
        while len(found) < count:
            found += [bell for bell in pair.worker.wait(0) if isinstance(bell, RingCall)]
            await asyncio.sleep(0)
    return found


def serve(pair: Pair, count: int) -> None:
    """Answer `count` calls; blocks like a device thread."""
    while count:
        for bell in pair.worker.wait(None):
            assert isinstance(bell, RingCall)
            echo(pair, bell)
            count -= 1


def echo(pair: Pair, call: RingCall) -> None:
    """Answer a call with its own body."""
    body = bytes(call.body)
    call.body.release()
    pair.worker.answer(call.slot, call.generation, Answer(body, call.json_length, Timings()))
    pair.worker.flush()


async def test_slots_are_given_in_the_order_of_asking() -> None:
    """With one slot, callers are served first come, first served."""
    with ring(slots=1) as pair:
        tasks = [asyncio.create_task(pair.front.call(Call("m", b"%d" % n))) for n in range(5)]
        seen = []
        for _ in tasks:
            (call,) = await calls(pair, 1)
            seen.append(bytes(call.body))
            echo(pair, call)
        assert seen == [b"0", b"1", b"2", b"3", b"4"]
        assert [answer.body for answer in await asyncio.gather(*tasks)] == seen


async def test_a_waiter_that_leaves_leaks_no_slot() -> None:
    """Cancelled while queueing, or in the turn in which it was handed the slot: the next one gets it."""
    with ring(slots=1) as pair:
        first = asyncio.create_task(pair.front.call(Call("m", b"first")))
        (call,) = await calls(pair, 1)
        queued = [asyncio.create_task(pair.front.call(Call("m", b"%d" % n))) for n in range(3)]
        await asyncio.sleep(0)
        queued[0].cancel()
        echo(pair, call)
        await first  # in this turn the slot was handed to queued[1]
        queued[1].cancel()
        (call,) = await calls(pair, 1)
        if bytes(call.body) == b"1":
            echo(pair, call)
            (call,) = await calls(pair, 1)
        assert bytes(call.body) == b"2"
        echo(pair, call)
        await queued[2]
        assert (pair.front.busy, pair.front.waiting, len(pair.front._free)) == (0, 0, 1)


async def test_handed_over_and_cancelled_in_the_same_turn_passes_the_slot_on() -> None:
    """The narrowest race: the slot is in the waiter's future when its task is cancelled."""
    with ring(slots=1) as pair:
        first = asyncio.create_task(pair.front.call(Call("m", b"first")))
        (call,) = await calls(pair, 1)
        queued = asyncio.create_task(pair.front.call(Call("m", b"queued")))
        await asyncio.sleep(0)
        echo(pair, call)
        pair.front._on_bell()  # hands the slot over, now
        queued.cancel()
        await first
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert pair.front._free == [0]


async def test_a_slot_is_never_reused_before_the_worker_gave_it_back() -> None:
    """A cancelled caller waits for its slot; a skip is rung; the next caller queues meanwhile."""
    with ring(slots=1) as pair:
        leaving = asyncio.create_task(pair.front.call(Call("m", b"old")))
        (call,) = await calls(pair, 1)
        leaving.cancel()
        following = asyncio.create_task(pair.front.call(Call("m", b"new")))
        await asyncio.sleep(0)
        assert pair.worker.wait(1) == [SkipBell(0, call.generation)]
        assert bytes(call.body) == b"old"
        assert not leaving.done()
        echo(pair, call)
        with pytest.raises(asyncio.CancelledError):
            await leaving
        (call,) = await calls(pair, 1)
        echo(pair, call)
        assert (await following).body == b"new"


async def test_a_late_bell_answers_nobody_elses_call() -> None:
    """A reply of an earlier generation is ignored, whatever it says."""
    with ring(slots=1) as pair:
        first = asyncio.create_task(pair.front.call(Call("m", b"1")))
        (old,) = await calls(pair, 1)
        echo(pair, old)
        await first
        second = asyncio.create_task(pair.front.call(Call("m", b"2")))
        (new,) = await calls(pair, 1)
        pair.worker.answer(old.slot, old.generation, Answer(b"late", None, Timings()))
        pair.worker.flush()
        await asyncio.wait((second,), timeout=0.02)
        assert not second.done()
        echo(pair, new)
        assert (await second).body == b"2"
        assert not pair.broken


GOOD = ReplyBell(0, 1, False, 4, None, Timings())


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        bells.pack_reply(GOOD)[:-1],
        bells.pack_reply(GOOD) + b"x",
        bells.pack_reply(GOOD._replace(slot=2)),
        bells.pack_reply(GOOD._replace(length=8193)),
        bells.pack_reply(GOOD._replace(length=1 << 63)),
        bells.pack_reply(GOOD._replace(json_length=5)),
        bells.pack_reply(GOOD._replace(json_length=-7)),
        bells.pack_reply(GOOD._replace(failed=True)),
        b"\x01" + bells.pack_reply(GOOD)[1:],
        bytes(bells.PACKET_LIMIT + 1),
    ],
)
async def test_a_worker_that_lies_is_told_on_and_no_byte_outside_its_slot_is_read(packet: bytes) -> None:
    """S7: lengths, slots, kinds and errors from the worker are checked; the call stays open until the worker ends."""
    with ring() as pair:
        task = asyncio.create_task(pair.front.call(Call("m", b"body")))
        await calls(pair, 1)
        pair.raw.send(packet)
        with anyio.fail_after(5):
            while not pair.broken:  # noqa: ASYNC110 - a socket sets no event
                await asyncio.sleep(0)
        assert pair.broken[0].startswith("broke the ring's protocol")
        pair.front.lose(WorkerDied("killed for it"))
        with pytest.raises(WorkerDied, match="killed for it"):
            await task


REQUEST = CallBell(0, 1, 4, None, "m@1")


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        bells.pack_call(REQUEST._replace(slot=2)),
        bells.pack_call(REQUEST._replace(length=8193)),
        bells.pack_call(REQUEST._replace(json_length=5)),
        bells.pack_call(REQUEST._replace(json_length=-2)),
        bells.pack_call(REQUEST._replace(key="x" * 1025)),
        bells.pack_call(REQUEST)[:-3] + b"\xff\xfe\xfd",
        b"\x09" + bells.pack_call(REQUEST)[1:],
    ],
)
async def test_the_worker_trusts_no_length_of_the_front_either(packet: bytes) -> None:
    """S7: both sides check."""
    with ring() as pair:
        pair.front._bell.send(packet)
        with pytest.raises(BrokenBell):
            pair.worker.wait(1)


@settings(deadline=None)
@given(st.binary(max_size=256))
def test_random_packets_are_refused_or_in_range(packet: bytes) -> None:
    """S7: whatever decodes points into the ring."""
    for unpack_packet in (
        lambda raw: [bells.unpack_request(raw, 2, 8192)],
        lambda raw: list(bells.unpack_replies(raw, 2, 8192)),
    ):
        try:
            found = unpack_packet(packet)
        except BrokenBell:
            continue
        for bell in found:
            assert bell.slot < 2
            if not isinstance(bell, SkipBell):
                assert 0 <= (bell.json_length or 0) <= bell.length <= 8192


async def test_a_call_that_can_not_be_sent_is_refused_by_name_and_takes_no_slot() -> None:
    """Length, JSON length and name are checked before a slot is taken."""
    with ring() as pair:
        for call, kind in (
            (Call("m", b"x" * 8193), TooLarge),
            (Call("m", b"x", 2), BadRequest),
            (Call("m", b"x", -1), BadRequest),
            (Call("m" * 1025, b"x"), BadRequest),
        ):
            with pytest.raises(kind):
                await pair.front.call(call)
        assert len(pair.front._free) == 2


async def test_a_full_doorbell_never_blocks_the_loop() -> None:
    """Thousands of calls that the worker does not read yet are buffered, then all answered."""
    with ring(slots=3000, slot_bytes=4096) as pair:
        tasks = [asyncio.create_task(pair.front.call(Call("m" * 1000, b"%d" % n))) for n in range(3000)]
        await asyncio.sleep(0)
        assert pair.front._unsent
        worker = asyncio.create_task(asyncio.to_thread(serve, pair, 3000))
        assert [answer.body for answer in await asyncio.gather(*tasks)] == [b"%d" % n for n in range(3000)]
        await worker
        assert not pair.front._unsent


async def test_many_answers_come_in_few_packets() -> None:
    """Answers of one batch are delivered in one wake-up of the loop."""
    with ring(slots=64) as pair:
        tasks = [asyncio.create_task(pair.front.call(Call("m", b"%d" % n))) for n in range(64)]
        for call in await calls(pair, 64):
            pair.worker.answer(call.slot, call.generation, Answer(bytes(call.body), None, Timings()))
            call.body.release()
        pair.worker.flush()
        pair.front._on_bell()
        assert pair.front.busy == 0
        await asyncio.gather(*tasks)


async def test_large_idle_slots_give_their_memory_back() -> None:
    """Beyond 1 MiB per area an idle slot keeps nothing; one that is in use, or was just used, is left alone."""
    with ring(slots=2, slot_bytes=16 << 20) as pair:
        task = asyncio.create_task(pair.front.call(Call("m", b"x" * (16 << 20))))
        (call,) = await calls(pair, 1)
        await pair.front.trim_once()
        await pair.front.trim_once()
        assert pair.front.allocated() >= 16 << 20
        echo(pair, call)
        assert len((await task).body) == 16 << 20
        assert pair.front.allocated() >= 32 << 20
        await pair.front.trim_once()
        assert pair.front.allocated() >= 32 << 20
        await pair.front.trim_once()
        assert pair.front.allocated() <= 2 * KEPT_BYTES
        assert len(pair.front._free) == 2


async def test_untouched_slots_cost_no_memory() -> None:
    """64 slots of twice 64 MiB are 8 GiB of addresses and nothing else."""
    with ring(slots=64, slot_bytes=64 << 20) as pair:
        assert pair.front.allocated() == 0


async def test_losing_the_worker_fails_everybody_with_an_error_of_their_own() -> None:
    """Running, queueing and later calls fail; no two share an exception object."""
    with ring(slots=1) as pair:
        tasks = [asyncio.create_task(pair.front.call(Call("m", b"x"))) for _ in range(3)]
        leaving = tasks[0]
        await calls(pair, 1)
        leaving.cancel()
        await asyncio.sleep(0)
        pair.front.lose(WorkerDied("gone"))
        pair.front.lose(WorkerDied("twice"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert [str(outcome) for outcome in outcomes[1:]] == ["gone", "gone"]
        assert outcomes[1] is not outcomes[2]
        with pytest.raises(WorkerDied, match="gone"):
            await pair.front.call(Call("m", b"x"))


async def test_the_end_of_the_front_ends_the_worker() -> None:
    """A closed doorbell raises on the worker's side, reading and writing."""
    with ring() as pair:
        pair.front.lose(WorkerDied("x"))
        pair.raw.close()
        with pytest.raises(FrontGone):
            pair.worker.wait(None)
        pair.worker.fail(0, 0, BadTensor("x"))
        with pytest.raises(FrontGone):
            pair.worker.flush()


async def test_a_wake_ends_one_endless_wait() -> None:
    """How a signal or another thread ends the device thread's sleep; the next sleep is as deep as before."""
    with ring() as pair:
        for _ in range(2):
            pair.worker.wake()
            pair.worker.wake()
            assert pair.worker.wait(None) == []
            with pytest.raises(BlockingIOError):
                os.eventfd_read(pair.worker._wake)


def test_neither_side_can_resize_the_memory() -> None:
    """S7: shrinking it would kill the other side with SIGBUS, so the file is sealed."""
    memory = SlotMemory.create(2, 4096)
    try:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(memory.fd)
        with pytest.raises(ValueError, match="the ring's memory has 16384 bytes"):
            SlotMemory(memory.fd, 3, 4096)
    finally:
        memory.close()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (65536, 4096), (1, 4095)])
def test_sizes_out_of_range_are_refused(slots: int, slot_bytes: int) -> None:
    """A slot number fits its field, and an error fits a slot."""
    with pytest.raises(ValueError, match=f"not {slots} of {slot_bytes}"):
        SlotMemory.create(slots, slot_bytes)


def test_every_error_of_the_tree_survives_the_crossing() -> None:
    """Class, message, model, detail and retry_after; an unknown word becomes `Broken`."""

    def kinds(root: type[ForeloadError]) -> list[type[ForeloadError]]:
        return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]

    for kind in kinds(ForeloadError):
        error = kind("why", model="m@1", detail={"a": 1, "b": 0.5, "c": "x", "d": True}, retry_after=2.0)
        back = unpack(pack(error))
        assert type(back) is by_code(kind.code)
        assert (back.message, back.model, back.detail, back.retry_after) == ("why", "m@1", error.detail, 2.0)
    stranger = pack(BadTensor("x")).replace(b"bad_tensor", b"bad_future")
    assert type(unpack(stranger)) is Broken


async def test_patience_outlasts_cancellations_and_has_a_limit() -> None:
    """`settled` absorbs every cancellation until the future is done, or its time is over."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(settled(future))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    future.set_result(None)
    assert await task is True
    assert await settled(asyncio.get_running_loop().create_future(), timeout=0.0) is False


def test_the_layout_has_no_padding() -> None:
    """Both sides may be different builds of Python: little-endian, packed."""
    assert len(bells.pack_skip(SkipBell(0, 0))) == struct.calcsize("<BHIQq") == 23
    assert len(bells.pack_reply(GOOD)) == 23 + 36
