"""The doorbell packets of a ring: fixed little-endian layouts, checked to the byte on both sides.

Only numbers and the model's key travel here, never a body. Nothing is trusted: a packet that does not fit raises
`BrokenBell`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from runtime.workers.port import Timings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CALL, SKIP, ANSWER, ERROR, SEVERAL = 1, 2, 3, 4, 5
KEY_LIMIT = 1024
"""Bytes of a model key."""
REPLIES_PER_PACKET = 64

_CALL = struct.Struct("<BHIQq")  # kind, slot, generation, length, json_length or -1; the key follows
_REPLY = struct.Struct("<BHIQqQQQQI")  # the same, then queue, decode, infer, encode (ns), batch
_SEVERAL = bytes((SEVERAL,))
_SIZE = struct.Struct("<H")  # before each request of a packet that holds several
PACKET_LIMIT = max(_CALL.size + KEY_LIMIT, _REPLY.size * REPLIES_PER_PACKET)
"""Bytes of the largest packet; a receiver offers one more, so that a longer one shows."""


class BrokenBell(Exception):
    """A packet is not what the other side may send."""


class CallBell(NamedTuple):
    """A call waits in `slot`: `length` bytes of body, `json_length` as in `port.Call`."""

    slot: int
    generation: int
    length: int
    json_length: int | None
    key: str


class SkipBell(NamedTuple):
    """Nobody waits for this call any more: leave it out if it has not started."""

    slot: int
    generation: int


class ReplyBell(NamedTuple):
    """An answer (or an error, if `failed`) of `length` bytes lies in `slot`."""

    slot: int
    generation: int
    failed: bool
    length: int
    json_length: int | None
    timings: Timings


def _checked_json_length(json_length: int, length: int) -> int | None:
    if json_length == -1:
        return None
    if not 0 <= json_length <= length:
        msg = f"a JSON part of {json_length} bytes in a body of {length}"
        raise BrokenBell(msg)
    return json_length


def _check(slot: int, length: int, slots: int, slot_bytes: int) -> None:
    if slot >= slots or length > slot_bytes:
        msg = f"{length} bytes in slot {slot}; there are {slots} slots of {slot_bytes} bytes"
        raise BrokenBell(msg)


def pack_call(bell: CallBell) -> bytes:
    """Encode a call."""
    json_length = -1 if bell.json_length is None else bell.json_length
    return _CALL.pack(CALL, bell.slot, bell.generation, bell.length, json_length) + bell.key.encode()


def pack_skip(bell: SkipBell) -> bytes:
    """Encode a skip."""
    return _CALL.pack(SKIP, bell.slot, bell.generation, 0, -1)


def pack_several(requests: Sequence[bytes]) -> tuple[bytes, int]:
    """One packet of as many of the packed requests, from the first on, as fit into it; and how many those are."""
    parts = [_SEVERAL]
    size = len(_SEVERAL)
    for request in requests:
        size += _SIZE.size + len(request)
        if size > PACKET_LIMIT:
            break
        parts += (_SIZE.pack(len(request)), request)
    count = len(parts) // 2
    return (b"".join(parts), count) if count > 1 else (requests[0], 1)


def pack_reply(bell: ReplyBell) -> bytes:
    """Encode a reply; several may be joined into one packet."""
    json_length = -1 if bell.json_length is None else bell.json_length
    spent = bell.timings
    return _REPLY.pack(
        ERROR if bell.failed else ANSWER,
        bell.slot,
        bell.generation,
        bell.length,
        json_length,
        spent.queue,
        spent.decode,
        spent.infer,
        spent.encode,
        spent.batch,
    )


def unpack_requests(packet: bytes, slots: int, slot_bytes: int) -> Iterator[CallBell | SkipBell]:
    """Decode what a front sends: one request, or several. Raises `BrokenBell`."""
    if packet[:1] != _SEVERAL:
        yield unpack_request(packet, slots, slot_bytes)
        return
    at = len(_SEVERAL)
    while at < len(packet):
        start = at + _SIZE.size
        at = start + int.from_bytes(packet[at:start], "little")
        if at > len(packet):
            msg = "a request that is cut off"
            raise BrokenBell(msg)
        yield unpack_request(packet[start:at], slots, slot_bytes)


def unpack_request(packet: bytes, slots: int, slot_bytes: int) -> CallBell | SkipBell:
    """Decode one request. Raises `BrokenBell`."""
    if not _CALL.size <= len(packet) <= _CALL.size + KEY_LIMIT:
        msg = f"a request packet of {len(packet)} bytes"
        raise BrokenBell(msg)
    kind, slot, generation, length, json_length = _CALL.unpack_from(packet)
    _check(slot, length, slots, slot_bytes)
    if kind == SKIP:
        return SkipBell(slot, generation)
    if kind != CALL:
        msg = f"a request of kind {kind}"
        raise BrokenBell(msg)
    try:
        key = packet[_CALL.size :].decode()
    except UnicodeDecodeError:
        msg = "a model key that is not UTF-8"
        raise BrokenBell(msg) from None
    return CallBell(slot, generation, length, _checked_json_length(json_length, length), key)


def unpack_replies(packet: bytes, slots: int, slot_bytes: int) -> Iterator[ReplyBell]:
    """Decode what a worker sends. Raises `BrokenBell`."""
    if not packet or len(packet) % _REPLY.size:
        msg = f"a reply packet of {len(packet)} bytes"
        raise BrokenBell(msg)
    for kind, slot, generation, length, json_length, *spent in _REPLY.iter_unpack(packet):
        if kind not in {ANSWER, ERROR}:
            msg = f"a reply of kind {kind}"
            raise BrokenBell(msg)
        _check(slot, length, slots, slot_bytes)
        yield ReplyBell(
            slot, generation, kind == ERROR, length, _checked_json_length(json_length, length), Timings(*spent)
        )
