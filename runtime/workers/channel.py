"""The control socket: length-prefixed MessagePack frames of the typed messages below, over a stream socketpair.

Loads, evictions and questions travel here; inference never does. Frames are limited, never unpickled.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from typing import TYPE_CHECKING, TypeAlias, cast

import msgspec

from actors.errors import Broken, ForeloadError
from runtime.workers.fault import Fault  # noqa: TC001 - msgspec reads the annotation
from runtime.workers.pipelines import Prepared, PreprocessLimits
from runtime.workers.port import LoadSpec, Note

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

FRAME_LIMIT = 16 << 20
"""Bytes of one message; a transformers configuration with its vocabulary tables can reach megabytes."""
SOON = 0.005
"""Seconds that an order without hurry waits for another one to go along with."""
_AT_ONCE = 64 << 10
"""Bytes taken from the socket at a time: an order or two in one system call."""
_LENGTH = struct.Struct("<I")


class BrokenFrame(Exception):
    """A frame is too long, or not a message."""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told at its start; travels as JSON on its command line, so no secrets.

    `skeletons` is the folder where skeletons outlive a worker; empty for none.
    """

    device: str
    core: str
    allow: tuple[str, ...] = ()
    threads: int = 1
    pinned: int = 0
    slots: int = 64
    slot_bytes: int = 64 << 20
    preprocess: PreprocessLimits = PreprocessLimits()
    skeletons: str = ""
    parent: int = 0
    memory_fd: int = -1
    bell_fd: int = -1
    control_fd: int = -1


# -- to the worker -----------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make a model callable. Answered by `LoadDone`, `LoadUndone` or `Failed`."""

    id: int
    spec: LoadSpec


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Undo the load whose request was `load`. Not answered itself; the load is."""

    load: int


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Let go of a model. Answered by `EvictDone` or `Failed`."""

    id: int
    key: str


class ReleaseHost(msgspec.Struct, frozen=True, tag=True):
    """Drop the mapping of weights. Not answered."""

    fingerprint: str


class Inventory(msgspec.Struct, frozen=True, tag=True):
    """Say what is held. Answered by `Listing` or `Failed`."""

    id: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Pong`."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the batch under way."""


Order: TypeAlias = Load | Cancel | Evict | ReleaseHost | Inventory | Ping | Stop

# -- to the front ------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """First words of a worker: its core stands and it takes orders."""

    pid: int


class LoadDone(msgspec.Struct, frozen=True, tag=True):
    """`resident` bytes measured; `steps` with seconds; `reused` if an existing skeleton was bound.

    `recipe` says how to lay the model's slab (`runtime.tiers.recipe`); empty where nothing new was learned.
    """

    id: int
    resident: int
    steps: tuple[tuple[str, float], ...] = ()
    reused: bool = False
    recipe: bytes = b""


class LoadUndone(msgspec.Struct, frozen=True, tag=True):
    """The load was cancelled, and nothing of it is left."""

    id: int


class EvictDone(msgspec.Struct, frozen=True, tag=True):
    """Bytes that came back, and those that stay away."""

    id: int
    returned: int
    leaked: int = 0


class HeldModel(msgspec.Struct, frozen=True):
    """One resident as the worker knows it."""

    key: str
    fingerprint: str
    resident: int
    in_flight: int = 0


class Listing(msgspec.Struct, frozen=True, tag=True):
    """All residents."""

    id: int
    held: tuple[HeldModel, ...]


class Pong(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, and what was shared of the work on inputs that come as files."""

    id: int
    prepared: Prepared = Prepared()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The order failed, and left nothing behind."""

    id: int
    fault: Fault


Answered: TypeAlias = LoadDone | LoadUndone | EvictDone | Listing | Pong
Reply: TypeAlias = Ready | Note | LoadDone | LoadUndone | EvictDone | Listing | Pong | Failed

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: Order | Reply) -> bytes:
    """Encode a message with its length. Raises `Broken` if it is too long or holds what MessagePack can't say."""
    try:
        body = msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        msg = f"a {type(message).__name__} message can't be encoded: {error}"
        raise Broken(msg) from error
    if len(body) > FRAME_LIMIT:
        msg = f"a {type(message).__name__} message has {len(body)} bytes, the limit is {FRAME_LIMIT}"
        raise Broken(msg, detail={"bytes": len(body), "limit": FRAME_LIMIT})
    return _LENGTH.pack(len(body)) + body


def _frame_in(received: bytearray) -> bytes | None:
    """Take the first whole message off what came; None if there is none yet. Raises `BrokenFrame`."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > FRAME_LIMIT:
        msg = f"a frame of {length} bytes, the limit is {FRAME_LIMIT}"
        raise BrokenFrame(msg)
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


# -- front side --------------------------------------------------------------------------------------


class FrontChannel(asyncio.Protocol):
    """The front's end: matches replies to requests by id. `on_broken` is told of a breach or an early end."""

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_broken = on_broken
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answered]] = {}
        self._lost: ForeloadError | None = None
        self._soon = b""
        self.ready: asyncio.Future[int] = self._loop.create_future()
        self.on_note: Callable[[Note], None] = _unheard

    @classmethod
    async def open(cls, sock: socket.socket, on_broken: Callable[[str], None]) -> FrontChannel:
        """Take over a connected socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_broken), sock=sock)
        return channel

    def next_id(self) -> int:
        """A name for the next request."""
        return next(self._ids)

    def ask(self, order: Load | Evict | Inventory | Ping) -> asyncio.Future[Answered]:
        """Send an order; the future is its answer, or the error it failed with. Raises `Broken` if it can't be sent."""
        raw = frame(order)
        future: asyncio.Future[Answered] = self._loop.create_future()
        # An answer that nobody waits for any more is not worth a complaint of the loop.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._lost is not None:
            future.set_exception(self._lost.again())
            return future
        self._pending[order.id] = future
        self._write(raw)
        return future

    def tell(self, order: Cancel | Stop) -> None:
        """Send an order that has no answer."""
        if self._lost is None:
            self._write(frame(order))

    def tell_soon(self, order: ReleaseHost) -> None:
        """Send an order that has no answer and no hurry: in one write with the next one, or after `SOON`.

        A write wakes the worker, which costs a loop that answers requests more than all else about a small order.
        """
        if self._lost is not None:
            return
        if not self._soon:
            self._loop.call_later(SOON, self._write, b"")
        self._soon += frame(order)

    def _write(self, raw: bytes) -> None:
        whole, self._soon = self._soon + raw, b""
        if whole and self._transport is not None and not self._transport.is_closing():
            self._transport.write(whole)

    def lose(self, error: ForeloadError) -> None:
        """The worker is gone: fail everything asked with `error`."""
        if self._lost is not None:
            return
        self._lost = error
        if self._transport is not None:
            self._transport.abort()
        if not self.ready.done():
            self.ready.cancel()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error.again())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - given by asyncio
        """See `asyncio.Protocol`."""
        if self._lost is None:
            self._on_broken("closed its control channel")

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        try:
            while (body := _frame_in(self._received)) is not None:
                self._take(_replies.decode(body))
        except (BrokenFrame, msgspec.DecodeError) as error:
            self._on_broken(f"broke the control protocol: {error}")
            if self._transport is not None:
                self._transport.pause_reading()

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Ready):
            if not self.ready.done():
                self.ready.set_result(reply.pid)
            return
        if isinstance(reply, Note):
            self.on_note(reply)
            return
        future = self._pending.pop(reply.id, None)
        if future is None or future.done():
            return
        if isinstance(reply, Failed):
            future.set_exception(reply.fault.rebuild())
        else:
            future.set_result(reply)

    def __repr__(self) -> str:
        return f"<FrontChannel {len(self._pending)} pending>"


def _unheard(_note: Note) -> None:
    """Nobody listens."""


# -- worker side -------------------------------------------------------------------------------------


class WorkerChannel:
    """The worker's end: one thread reads, any thread writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._writing = threading.Lock()
        self._received = bytearray()

    def read(self) -> Order | None:
        """Wait for the next order; None at the end of the front. Raises `BrokenFrame` or `msgspec.DecodeError`."""
        while (body := _frame_in(self._received)) is None:
            try:
                came = self._socket.recv(_AT_ONCE)
            except ConnectionError:
                return None
            if not came:
                return None
            self._received += came
        return _orders.decode(body)

    def write(self, reply: Reply) -> None:
        """Send a reply. At the end of the front it does nothing: the reader notices."""
        raw = frame(reply)
        with self._writing:
            try:
                self._socket.sendall(raw)
            except ConnectionError:
                return

    def __repr__(self) -> str:
        return f"<WorkerChannel fd {self._socket.fileno()}>"
