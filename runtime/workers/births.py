"""What front and zygote say to each other: one SOCK_SEQPACKET packet per message, descriptors beside it (SCM_RIGHTS).

Typed MessagePack, limited, never pickle. Both sides use it; nothing here forks or waits.
"""

from __future__ import annotations

import os
import socket
from array import array
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from runtime.workers.channel import WorkerSetup  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Sequence

    M = TypeVar("M")

LIMIT = 128 << 10
"""Bytes of one packet; below what a socket buffer takes by default."""
FORK_FDS = 3
"""Ring memory, bell and control socket of a worker."""
_FD = array("i").itemsize


class BrokenPacket(Exception):
    """A packet is too long, not a message, or comes with other descriptors than it should."""


class ZygoteSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote is told at its start, as JSON on its command line: the core's module and what else to import."""

    core: str
    parent: int
    orders_fd: int
    kinds: tuple[str, ...] = ()


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Make a worker of a copy of yourself; three descriptors come along. Answered by `Forked` or `NotForked`."""

    id: int
    setup: WorkerSetup


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Import what a first build imports, and `transformers` models of these types. Not answered, unless by `Unfit`."""

    kinds: tuple[str, ...]


class Bury(msgspec.Struct, frozen=True, tag=True):
    """Collect a worker that ended; its number is free from then on."""

    pid: int


class Standing(msgspec.Struct, frozen=True, tag=True):
    """All is imported, and nothing but one thread runs."""


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """No copy may be made of this process (any more); those that exist are not concerned."""

    reason: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A worker started; its pidfd comes along."""

    id: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The system refused."""

    id: int
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker ended with `code` (negative: by that signal). Its number stays its own until `Bury`."""

    pid: int
    code: int


Order: TypeAlias = Fork | Prepare | Bury
Report: TypeAlias = Standing | Unfit | Forked | NotForked | Ended

orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def send(sock: socket.socket, message: Order | Report, fds: Sequence[int] = ()) -> None:
    """Send one message. Raises `OSError`, also for one over the limit."""
    packet = msgspec.msgpack.encode(message)
    if len(packet) > LIMIT:
        msg = f"a {type(message).__name__} message has {len(packet)} bytes, the limit is {LIMIT}"
        raise OSError(msg)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> tuple[M, list[int]] | None:
    """The next message and its descriptors, which are the caller's; None at the other side's end.

    A `Forked` comes without its descriptor if this process has none free. Raises `BrokenPacket` (descriptors are closed
    then), and `OSError` such as `BlockingIOError`.
    """
    try:
        # Not by `socket.recv_fds`: it drops the flag, and every process that a worker starts would inherit them.
        packet, ancillary, flags, _ = sock.recvmsg(LIMIT, socket.CMSG_SPACE(FORK_FDS * _FD), socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    fds = _descriptors(ancillary)
    if not packet and not fds:
        return None
    try:
        return _checked(packet, fds, flags, decoder), fds
    except (BrokenPacket, msgspec.DecodeError) as error:
        for fd in fds:
            os.close(fd)
        raise BrokenPacket(str(error)) from error


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array("i")
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(raw[: len(raw) - len(raw) % _FD])
    return found.tolist()


def _checked(packet: bytes, fds: Sequence[int], flags: int, decoder: msgspec.msgpack.Decoder[M]) -> M:
    if flags & socket.MSG_TRUNC:
        msg = "a packet that is cut off"
        raise BrokenPacket(msg)
    message = decoder.decode(packet)
    if isinstance(message, Forked) and not fds and flags & socket.MSG_CTRUNC:
        return message  # the receiver had no descriptor free, and must still know whom to end
    wanted = FORK_FDS if isinstance(message, Fork) else int(isinstance(message, Forked))
    if len(fds) != wanted:
        msg = f"a {type(message).__name__} message with {len(fds)} descriptors"
        raise BrokenPacket(msg)
    return message
