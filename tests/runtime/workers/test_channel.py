"""The control channel: framing in any pieces, limits, and who gets which answer."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import msgspec
import pytest

from actors.errors import Broken, CorruptWeights, WorkerDied
from runtime.workers import channel as wire
from runtime.workers.channel import FrontChannel, WorkerChannel
from runtime.workers.fault import Fault
from runtime.workers.port import BatchSpec, BuilderSpec, LoadSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SPEC = LoadSpec(
    key="m@1",
    fingerprint="f",
    weights="/w",
    weights_bytes=7,
    builder=BuilderSpec("transformers", "X", {"layers": 3, "names": ["a", None], "deep": {"x": 1.5, "y": True}}),
    inputs=(TensorSpec("x", "FP32", (-1, 3)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    batch=BatchSpec(8, 0.001),
)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[FrontChannel, socket.socket, list[str]]]:
    """A front's channel and the raw other end."""
    ours, theirs = socket.socketpair()
    broken: list[str] = []
    front = await FrontChannel.open(ours, broken.append)
    try:
        yield front, theirs, broken
    finally:
        front.lose(WorkerDied("end of test"))
        theirs.close()
        await asyncio.sleep(0)


def readable(sock: socket.socket) -> bool:
    """Whether something waits to be read."""
    return bool(select.select([sock], [], [], 0)[0])


async def turns_until(holds: object) -> None:
    """Let the loop run until `holds()`."""
    assert callable(holds)
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - a socket sets no event
            await asyncio.sleep(0)


async def test_answers_find_their_question_in_any_order_and_any_pieces() -> None:
    """Replies are matched by id, and a frame may come byte by byte."""
    async with connected() as (front, raw, _):
        first, second = (front.ask(wire.Evict(front.next_id(), key)) for key in ("a", "b"))
        replies = wire.frame(wire.EvictDone(2, 20)) + wire.frame(wire.Ready(42)) + wire.frame(wire.EvictDone(1, 10, 3))
        for byte in replies:
            raw.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert await first == wire.EvictDone(1, 10, 3)
        assert await second == wire.EvictDone(2, 20)
        assert await front.ready == 42


async def test_a_failure_is_raised_where_it_was_asked() -> None:
    """The fault becomes the exception again."""
    async with connected() as (front, raw, _):
        asked = front.ask(wire.Load(front.next_id(), SPEC))
        raw.send(wire.frame(wire.Failed(1, Fault.of(CorruptWeights("bad", model="m@1")))))
        with pytest.raises(CorruptWeights, match="bad"):
            await asked


async def test_answers_to_nothing_are_ignored() -> None:
    """Unknown ids, a second hello and a second answer change nothing."""
    async with connected() as (front, raw, broken):
        asked = front.ask(wire.Ping(front.next_id()))
        for reply in (wire.Pong(99), wire.Pong(1), wire.Pong(1), wire.Ready(1), wire.Ready(2)):
            raw.send(wire.frame(reply))
        assert await asked == wire.Pong(1)
        await turns_until(front.ready.done)
        assert (await front.ready, broken) == (1, [])


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<I", wire.FRAME_LIMIT + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 0),
        wire.frame(wire.Ping(1)),
        struct.pack("<I", 12) + msgspec.msgpack.encode({"type": "No"})[:12].ljust(12, b"\xc0"),
    ],
)
async def test_what_is_no_reply_breaks_the_channel(raw: bytes) -> None:
    """S7: too long, no MessagePack, empty, the wrong direction, an unknown type."""
    async with connected() as (front, theirs, broken):
        theirs.send(raw)
        await turns_until(lambda: broken)
        assert broken[0].startswith("broke the control protocol")
        front.lose(WorkerDied("killed for it"))


async def test_a_closed_channel_is_told_and_a_lost_one_fails_what_was_asked() -> None:
    """Everything pending, and everything asked later, gets the cause; nobody gets the same object."""
    async with connected() as (front, theirs, broken):
        asked = [front.ask(wire.Ping(front.next_id())) for _ in range(2)]
        theirs.close()
        await turns_until(lambda: broken)
        assert broken == ["closed its control channel"]
        front.lose(WorkerDied("gone"))
        asked.append(front.ask(wire.Ping(front.next_id())))
        front.tell(wire.Stop())
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in errors] == ["gone"] * 3
        assert len({id(error) for error in errors}) == 3
        assert front.ready.cancelled()


@pytest.mark.parametrize("value", [{1, 2}.__iter__(), 1 << 80])
def test_what_message_pack_can_not_say_is_refused(value: object) -> None:
    """A configuration with such a value is a named error, before anything is sent."""
    spec = msgspec.structs.replace(SPEC, builder=BuilderSpec("python", "x:y", {"odd": value}))
    with pytest.raises(Broken, match="a Load message can't be encoded"):
        wire.frame(wire.Load(1, spec))


async def test_an_order_without_hurry_goes_with_the_next_one_and_before_it() -> None:
    """One write, so one wake-up of the worker; alone it waits only a moment."""
    async with connected() as (front, theirs, _):
        theirs.setblocking(False)
        front.tell_soon(wire.ReleaseHost("f"))
        front.tell_soon(wire.ReleaseHost("g"))
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        front.ask(wire.Ping(7))
        orders = (wire.ReleaseHost("f"), wire.ReleaseHost("g"), wire.Ping(7))
        assert theirs.recv(1 << 16) == b"".join(map(wire.frame, orders))
        front.tell_soon(wire.ReleaseHost("h"))
        await turns_until(lambda: readable(theirs))
        assert theirs.recv(1 << 16) == wire.frame(wire.ReleaseHost("h"))


async def test_an_order_without_hurry_to_a_lost_worker_is_forgotten() -> None:
    """Also one that waited when it was lost."""
    async with connected() as (front, theirs, _):
        front.tell_soon(wire.ReleaseHost("f"))
        front.lose(WorkerDied("gone"))
        front.tell_soon(wire.ReleaseHost("g"))
        await asyncio.sleep(2 * wire.SOON)
        assert theirs.recv(1 << 16) == b""


def test_the_worker_takes_orders_that_came_together_one_by_one() -> None:
    """Several frames in one packet, and one in halves."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        orders: list[wire.Order] = [wire.ReleaseHost("f"), wire.Ping(1), wire.Evict(2, "m@1")]
        raw = b"".join(map(wire.frame, orders))
        ours.sendall(raw[:-3])
        worker = WorkerChannel(theirs)
        assert [worker.read(), worker.read()] == orders[:2]
        ours.sendall(raw[-3:])
        assert worker.read() == orders[2]


def test_the_worker_reads_what_the_front_says_and_knows_its_end() -> None:
    """Every order crosses unchanged, megabytes included; the end is None, even inside a frame."""
    ours, theirs = socket.socketpair()
    large = msgspec.structs.replace(SPEC, builder=BuilderSpec("python", "x:y", {"vocabulary": "x" * (8 << 20)}))
    orders: list[wire.Order] = [
        wire.Load(1, SPEC),
        wire.Load(2, large),
        wire.Cancel(1),
        wire.Evict(3, "m@1"),
        wire.ReleaseHost("f"),
        wire.Inventory(5),
        wire.Ping(6),
        wire.Stop(),
    ]

    def send() -> None:
        for order in orders:
            ours.sendall(wire.frame(order))
        ours.sendall(wire.frame(wire.Stop())[:-1])
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    worker = WorkerChannel(theirs)
    try:
        assert [worker.read() for _ in orders] == orders
        assert worker.read() is None
        worker.write(wire.Pong(1))  # to nobody
    finally:
        sender.join()
        theirs.close()


@pytest.mark.parametrize("raw", [struct.pack("<I", wire.FRAME_LIMIT + 1), wire.frame(wire.Ready(1))])
def test_the_worker_refuses_what_is_no_order(raw: bytes) -> None:
    """S7: the other direction is as strict."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw)
        with pytest.raises((wire.BrokenFrame, msgspec.DecodeError)):
            WorkerChannel(theirs).read()
