"""The shared-memory ring between front and worker: slots for bodies, a SOCK_SEQPACKET pair as doorbell.

Bodies never touch a pipe. Nothing here knows what a model is, and neither side trusts a length of the other.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec
from anyio import to_thread

from actors.errors import BadRequest, ForeloadError, TooLarge
from runtime.workers.bells import (
    KEY_LIMIT,
    PACKET_LIMIT,
    REPLIES_PER_PACKET,
    BrokenBell,
    CallBell,
    ReplyBell,
    SkipBell,
    pack_call,
    pack_reply,
    pack_several,
    pack_skip,
    unpack_replies,
    unpack_requests,
)
from runtime.workers.fault import pack, unpack
from runtime.workers.patience import settled
from runtime.workers.port import Answer, Call, Laid, Timings
from runtime.workers.slots import SlotMemory, length_of

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_BYTES = 1 << 20
"""What an idle slot keeps of each area; pages beyond it go back to the system."""
_PACKETS_PER_TURN = 32
_GENERATIONS = 1 << 32
_SHORT_MESSAGE = 512
"""Characters of an error's message that fit into the smallest slot in any script."""


class _Open:
    """A call under way. `left` is set when its caller was cancelled and waits for the slot only."""

    __slots__ = ("answer", "generation", "left")

    def __init__(self, generation: int, answer: asyncio.Future[Answer]) -> None:
        self.generation = generation
        self.answer = answer
        self.left: asyncio.Future[None] | None = None


class FrontRing:
    """The front's side; lives on one event loop. `on_broken` is told when the worker breaks the protocol.

    A slot belongs to its call until the worker answered it, whatever happens to the caller.
    """

    def __init__(self, *, slots: int, slot_bytes: int, on_broken: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_broken = on_broken
        self._memory = SlotMemory.create(slots, slot_bytes)
        self._bell, self.worker_bell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._bell.setblocking(False)
        self._open: dict[int, _Open] = {}
        # The last slot used is the next one taken: its pages are touched and in cache.
        self._free = list(reversed(range(slots)))
        self._waiters: deque[asyncio.Future[int]] = deque()
        self._unsent: deque[bytes] = deque()
        self._blocked = False
        self._reach = [0] * slots
        self._idle = [True] * slots
        self._generation = 0
        self._lost: ForeloadError | None = None
        self._loop.add_reader(self._bell.fileno(), self._on_bell)

    @property
    def memory_fd(self) -> int:
        """The memfd, for the worker to inherit."""
        return self._memory.fd

    @property
    def busy(self) -> int:
        """Slots whose call the worker has not answered."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return sum(not waiter.done() for waiter in self._waiters)

    def allocated(self) -> int:
        """Bytes of memory that the slots really take."""
        return self._memory.allocated()

    async def call(self, call: Call) -> Answer:
        """Send one call and wait for its answer.

        Raises what the worker answered, `TooLarge` or `BadRequest` before anything is sent, and the error given to
        `lose`. Cancelled, it asks the worker to leave the call out, and lets the cancellation through when the slot is
        back.
        """
        self._refuse_malformed(call)
        slot = self._free.pop() if self._free else await self._turn()
        opened = self._ring(slot, call)
        try:
            return await opened.answer
        except asyncio.CancelledError:
            if self._open.get(slot) is opened:
                opened.left = self._loop.create_future()
                self._send(pack_skip(SkipBell(slot, opened.generation)))
                await settled(opened.left)
            raise

    def _refuse_malformed(self, call: Call) -> None:
        if self._lost is not None:
            raise self._lost.again()
        size, limit = len(call.body), self._memory.slot_bytes
        if size > limit:
            msg = f"the body has {size} bytes, the limit is {limit}"
            raise TooLarge(msg, model=call.key, detail={"bytes": size, "limit": limit})
        if call.json_length is not None and not 0 <= call.json_length <= size:
            msg = f"the JSON part is said to have {call.json_length} bytes, the body has {size}"
            raise BadRequest(msg, model=call.key)
        if len(call.key.encode()) > KEY_LIMIT:
            msg = f"the model's name is longer than {KEY_LIMIT} bytes"
            raise BadRequest(msg)

    async def _turn(self) -> int:
        """Queue for a slot, first come first served."""
        waiter: asyncio.Future[int] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            slot = await waiter
        except asyncio.CancelledError:
            # Handed over and cancelled in the same turn of the loop: pass it on.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result())
            raise
        if self._lost is not None:
            raise self._lost.again()
        return slot

    def _ring(self, slot: int, call: Call) -> _Open:
        self._generation = (self._generation + 1) % _GENERATIONS
        opened = self._open[slot] = _Open(self._generation, self._loop.create_future())
        size = len(call.body)
        self._memory.put_input(slot, call.body, call.json_length)
        self._reach[slot] = max(self._reach[slot], size)
        self._idle[slot] = False
        self._send(pack_call(CallBell(slot, opened.generation, size, call.json_length, call.key)))
        return opened

    # -- doorbell ------------------------------------------------------------------------------------

    def _send(self, packet: bytes) -> None:
        if self._lost is not None:
            return
        self._unsent.append(packet)
        if len(self._unsent) > 1:
            return  # goes with the others
        if len(self._open) == 1:
            self._flush()  # an idle worker starts now
        else:
            # A worker at work loses nothing, and all calls of this turn take one system call together.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        while self._unsent and not self._blocked:
            packet, count = pack_several(self._unsent)
            try:
                self._bell.send(packet)
            except BlockingIOError:
                self._blocked = True
                self._loop.add_writer(self._bell.fileno(), self._on_writable)
            except OSError:
                self._unsent.clear()  # the worker is gone; whoever watches its exit calls `lose`
            else:
                for _ in range(count):
                    self._unsent.popleft()

    def _on_writable(self) -> None:
        self._blocked = False
        self._loop.remove_writer(self._bell.fileno())
        self._flush()

    def _on_bell(self) -> None:
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = self._bell.recv(PACKET_LIMIT + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._loop.remove_reader(self._bell.fileno())
                return
            try:
                for reply in unpack_replies(packet, self._memory.slots, self._memory.slot_bytes):
                    self._settle(reply)
            except (BrokenBell, msgspec.DecodeError) as error:
                self._loop.remove_reader(self._bell.fileno())
                self._on_broken(f"broke the ring's protocol: {error}")
                return
            if not self._open:
                return  # saves the system call that would only say "nothing more"

    def _settle(self, reply: ReplyBell) -> None:
        opened = self._open.get(reply.slot)
        if opened is None or opened.generation != reply.generation:
            return  # a late bell of an earlier call
        self._reach[reply.slot] = max(self._reach[reply.slot], reply.length)
        if not opened.answer.done():
            body = self._memory.output(reply.slot, reply.length)
            if reply.failed:
                opened.answer.set_exception(unpack(body))
            else:
                opened.answer.set_result(Answer(body, reply.json_length, reply.timings))
        del self._open[reply.slot]
        if opened.left is not None and not opened.left.done():
            opened.left.set_result(None)
        self._release(reply.slot)

    def _release(self, slot: int) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)

    # -- memory and end ------------------------------------------------------------------------------

    async def trim(self, every: float = 1.0) -> None:
        """Give the excess of slots that were idle for a whole round back, each `every` seconds, until cancelled."""
        with suppress(OSError):  # a kernel that can't punch leaves the pages where they are
            while True:
                await anyio.sleep(every)
                await self.trim_once()

    async def trim_once(self) -> None:
        """One round of `trim`: a large slot that is free and was not used since the last round is punched."""
        large = [slot for slot in self._free if self._reach[slot] > KEPT_BYTES and self._idle[slot]]
        for slot in range(self._memory.slots):
            self._idle[slot] = slot not in self._open
        for slot in large:
            if slot not in self._free:
                continue
            self._free.remove(slot)  # nobody may write into it meanwhile
            try:
                await to_thread.run_sync(self._memory.punch, slot, KEPT_BYTES)
                self._reach[slot] = 0
            finally:
                self._release(slot)

    def lose(self, error: ForeloadError) -> None:
        """The worker is gone: fail every call under way or waiting with `error`, and refuse new ones."""
        if self._lost is not None:
            return
        self._lost = error
        self._loop.remove_reader(self._bell.fileno())
        self._loop.remove_writer(self._bell.fileno())
        self._unsent.clear()
        for opened in self._open.values():
            if not opened.answer.done():
                opened.answer.set_exception(error.again())
            if opened.left is not None and not opened.left.done():
                opened.left.set_result(None)
        self._open.clear()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error.again())
        self._waiters.clear()
        self._bell.close()
        self.worker_bell.close()

    def close(self) -> None:
        """Give the memory back, after `lose`. Blocks for as long as freeing touched pages takes; not for the loop."""
        self._memory.close()

    def __repr__(self) -> str:
        state = "lost" if self._lost is not None else f"{self.busy} busy, {self.waiting} waiting"
        return f"<FrontRing {self._memory.slots} slots, {state}>"


class FrontGone(Exception):
    """The front closed its end."""


class RingCall(NamedTuple):
    """A call as the worker reads it; `body` is the slot itself, writable, valid until it is answered."""

    slot: int
    generation: int
    key: str
    json_length: int | None
    body: memoryview


class WorkerRing:
    """The worker's side. `wait` belongs to the device thread; answers may come from any thread."""

    def __init__(self, *, memory_fd: int, bell_fd: int, slots: int, slot_bytes: int) -> None:
        self._memory = SlotMemory(memory_fd, slots, slot_bytes)
        self._bell = socket.socket(fileno=bell_fd)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._answered: deque[bytes] = deque()
        self._sending = threading.Lock()

    def wait(self, timeout: float | None) -> list[RingCall | SkipBell]:
        """Return all bells there are, after at most `timeout` seconds (None: until there is one, or `wake`).

        Raises `FrontGone` at the end of the front, `BrokenBell` for a packet that may not be.
        """
        if timeout != 0:
            for descriptor, _ in self._poll.poll(None if timeout is None else timeout * 1000):
                if descriptor == self._wake:
                    os.eventfd_read(descriptor)
        bells: list[RingCall | SkipBell] = []
        while True:
            try:
                packet = self._bell.recv(PACKET_LIMIT + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return bells
            except ConnectionError:
                packet = b""
            if not packet:
                raise FrontGone
            for bell in unpack_requests(packet, self._memory.slots, self._memory.slot_bytes):
                if isinstance(bell, SkipBell):
                    bells.append(bell)
                else:
                    body = self._memory.input(bell.slot, bell.length, bell.json_length)
                    bells.append(RingCall(bell.slot, bell.generation, bell.key, bell.json_length, body))

    def wake(self) -> None:
        """End one `wait`, the one under way or the next, from another thread or a signal."""
        os.eventfd_write(self._wake, 1)

    def answer(self, slot: int, generation: int, answer: Answer | Laid) -> None:
        """Write an answer into its slot; `flush` rings. One that does not fit becomes the error `too_large`."""
        size, limit = length_of(answer.body), self._memory.slot_bytes
        if size > limit:
            msg = f"the answer has {size} bytes, the limit is {limit}"
            self.fail(slot, generation, TooLarge(msg, detail={"bytes": size, "limit": limit}))
            return
        self._memory.put_output(slot, answer.body)
        bell = ReplyBell(slot, generation, False, size, answer.json_length, answer.timings)
        self._answered.append(pack_reply(bell))

    def fail(self, slot: int, generation: int, error: ForeloadError) -> None:
        """Write an error into its slot; `flush` rings."""
        body = pack(error)
        if len(body) > self._memory.slot_bytes:
            body = pack(type(error)(error.message[:_SHORT_MESSAGE], retry_after=error.retry_after))
        self._memory.put_output(slot, body)
        self._answered.append(pack_reply(ReplyBell(slot, generation, True, len(body), None, Timings())))

    def flush(self) -> None:
        """Ring for everything answered since the last time, many in one packet. Raises `FrontGone`."""
        while self._answered:
            with self._sending:
                count = min(len(self._answered), REPLIES_PER_PACKET)
                packet = b"".join([self._answered.popleft() for _ in range(count)])
                if not packet:
                    return
                try:
                    self._bell.sendall(packet)
                except ConnectionError:
                    raise FrontGone from None

    def close(self) -> None:
        """Close the doorbell. The memory stays mapped while views of it exist; the process is about to end."""
        self._bell.close()
        os.close(self._wake)

    def __repr__(self) -> str:
        return f"<WorkerRing {self._memory!r}>"
