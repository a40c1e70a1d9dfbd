"""What the ring saves: packets for calls of one turn, copies of tensors and answers, pages of the heap."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import TooLarge, WorkerDied
from runtime.workers import bells
from runtime.workers.bells import BrokenBell, CallBell, SkipBell
from runtime.workers.heap import THRESHOLDS
from runtime.workers.port import Call, Laid, Timings
from runtime.workers.ring import FrontRing, RingCall, WorkerRing
from runtime.workers.slots import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = [
    bells.pack_call(CallBell(0, 1, 4, None, "m@1")),
    bells.pack_skip(SkipBell(1, 2)),
    bells.pack_call(CallBell(1, 3, 8, 8, "other@12")),
]


@contextmanager
def ring(slots: int, slot_bytes: int = 8192) -> Iterator[tuple[FrontRing, WorkerRing]]:
    """A connected ring."""
    front = FrontRing(slots=slots, slot_bytes=slot_bytes, on_broken=pytest.fail)
    bell = front.worker_bell.dup()
    worker = WorkerRing(memory_fd=os.dup(front.memory_fd), bell_fd=bell.detach(), slots=slots, slot_bytes=slot_bytes)
    try:
        yield front, worker
    finally:
        front.lose(WorkerDied("end of test"))
        front.close()
        worker.close()
        worker._memory.close()


def waiting(sock: socket.socket) -> list[bytes]:
    """Packets that lie in a doorbell."""
    found = []
    while True:
        try:
            found.append(sock.recv(1 << 16, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return found


async def test_calls_of_one_turn_share_a_packet_behind_the_first() -> None:
    """An idle worker is told at once; whatever else is asked in that turn comes in one packet, in order."""
    with ring(8) as (front, _):
        tasks = [asyncio.create_task(front.call(Call(f"m{n}", b"x"))) for n in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first, others = waiting(front.worker_bell)
        found = [bell for packet in (first, others) for bell in bells.unpack_requests(packet, 8, 8192)]
        assert [bell.key for bell in found if isinstance(bell, CallBell)] == ["m0", "m1", "m2", "m3", "m4"]
        for task in tasks:
            task.cancel()
        front.lose(WorkerDied("x"))
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_skip_never_overtakes_its_call() -> None:
    """Cancelled in the turn in which it was asked: the worker hears of the call first."""
    with ring(8) as (front, _):
        tasks = [asyncio.create_task(front.call(Call(f"m{n}", b"x"))) for n in range(3)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found = [bell for raw in waiting(front.worker_bell) for bell in bells.unpack_requests(raw, 8, 8192)]
        slots = [bell.slot for bell in found]
        assert isinstance(found[-1], SkipBell)
        assert slots.count(found[-1].slot) == 2
        front.lose(WorkerDied("x"))
        await asyncio.gather(*tasks, return_exceptions=True)


def test_several_requests_travel_together_and_apart() -> None:
    """What was packed comes back in order; one alone is sent as it is, and a full packet leaves the rest."""
    packet, count = bells.pack_several(REQUESTS)
    assert count == 3
    assert list(bells.unpack_requests(packet, 2, 8192)) == [bells.unpack_request(raw, 2, 8192) for raw in REQUESTS]
    assert bells.pack_several(REQUESTS[:1]) == (REQUESTS[0], 1)
    large = [bells.pack_call(CallBell(0, n, 1, None, "k" * bells.KEY_LIMIT)) for n in range(9)]
    packet, count = bells.pack_several(large)
    assert 1 < count < 9
    assert len(packet) <= bells.PACKET_LIMIT
    assert len(list(bells.unpack_requests(packet, 2, 8192))) == count


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_packet_that_is_cut_off_is_refused(cut: int) -> None:
    """S7: no length inside a packet is trusted, and a packet of several holds no other such packet."""
    packet, _ = bells.pack_several(REQUESTS)
    with pytest.raises(BrokenBell):
        list(bells.unpack_requests(packet[:-cut], 2, 8192))
    nested = packet[:1] + len(packet).to_bytes(2, "little") + packet
    with pytest.raises(BrokenBell):
        list(bells.unpack_requests(nested, 2, 8192))


@given(st.binary(max_size=200))
def test_random_packets_of_several_are_refused_or_in_range(rest: bytes) -> None:
    """S7: whatever decodes points into the ring."""
    try:
        found = list(bells.unpack_requests(bytes((bells.SEVERAL,)) + rest, 2, 8192))
    except BrokenBell:
        return
    assert all(bell.slot < 2 for bell in found)


@pytest.mark.parametrize("json_length", [None, 0, 1, 63, 64, 173, 8192])
async def test_tensor_bytes_lie_aligned_behind_any_header(json_length: int | None) -> None:
    """Whatever the JSON part's length, the bytes behind it can be read in place; a full slot still fits."""
    body = bytes(range(256)) * 32
    with ring(1, 16384 if json_length != 8192 else 8192) as (front, worker):
        task = asyncio.create_task(front.call(Call("m", body, json_length)))
        await asyncio.sleep(0)
        (call,) = worker.wait(1)
        assert isinstance(call, RingCall)
        assert bytes(call.body) == body
        tail = np.frombuffer(call.body, np.uint8)[json_length or 0 :]
        assert tail.ctypes.data % ALIGNMENT == 0 or not len(tail)
        del tail
        call.body.release()
        worker.answer(call.slot, call.generation, Laid((b"head", memoryview(b"tail"), b""), 4, Timings()))
        worker.flush()
        answer = await task
        assert (answer.body, answer.json_length) == (b"headtail", 4)


async def test_a_laid_answer_that_does_not_fit_becomes_an_error() -> None:
    """The limit counts all parts together."""
    with ring(1, 4096) as (front, worker):
        task = asyncio.create_task(front.call(Call("m", b"x")))
        await asyncio.sleep(0)
        (call,) = worker.wait(1)
        assert isinstance(call, RingCall)
        call.body.release()
        worker.answer(call.slot, call.generation, Laid((b"h" * 4000, b"t" * 97), 4000, Timings()))
        worker.flush()
        with pytest.raises(TooLarge, match="4097"):
            await task


SETTLE = """
import gc
from runtime.workers.heap import keep_pages, spare_collections
print(keep_pages())
spare_collections()
print(gc.get_freeze_count() > 1000, gc.get_threshold())
"""


def test_a_process_can_be_told_to_keep_pages_and_to_collect_rarely() -> None:
    """In a process of its own, since both settings are for good; glibc takes the first one."""
    out = subprocess.run([sys.executable, "-c", SETTLE], capture_output=True, text=True, check=True).stdout.split("\n")
    assert out[0] == str(platform.libc_ver()[0] == "glibc")
    assert out[1] == f"True {THRESHOLDS}"
    assert gc.isenabled()
