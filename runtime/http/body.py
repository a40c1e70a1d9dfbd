"""Bodies on their way in and out: size before reading, chunks, pace, content codings.

Belongs here: bytes. Never: what the bytes mean.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Final

from anyio import CapacityLimiter, to_thread

from actors.errors import BadRequest, TooLarge, TooSlow, UnsupportedEncoding
from runtime.http.watch import ClientLeft, Interrupt

if TYPE_CHECKING:
    from runtime.http.exchange import Exchange
    from runtime.http.limits import Limits

_FRAMING: Final = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
_INLINE_WIRE: Final = 16 << 10
_INLINE_PLAIN: Final = 256 << 10
WORTH_DEFLATING: Final = 1 << 10
"""Answers up to this many bytes go out as they are."""
_FASTEST: Final = 1


async def read_body(exchange: Exchange, limit: int, limits: Limits) -> bytes:
    """Read a body of at most `limit` bytes as it is on the wire.

    Raises `TooLarge` by the declared length before anything is read, or as soon as a chunked body passes a limit;
    `TooSlow` when nothing comes for `body_idle` seconds; `ClientLeft`.
    """
    declared = exchange.headers.get(b"content-length")
    if declared is not None:
        if not declared.isdigit():
            raise BadRequest("content-length: not a number")
        if int(declared[:19]) > limit:
            raise _too_large(limit)
    slow = Interrupt()
    try:
        body = await _gathered(exchange, limit, limits, slow)
    except asyncio.CancelledError:
        if slow.mine():
            raise TooSlow(f"no part of the body came for {limits.body_idle:g} s") from None
        raise
    exchange.unread = False
    return body


async def _gathered(exchange: Exchange, limit: int, limits: Limits, slow: Interrupt) -> bytes:
    later = asyncio.get_running_loop().call_later
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        timer = later(limits.body_idle, slow)
        try:
            message = await exchange.receive()
        finally:
            timer.cancel()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if len(parts) > limits.chunks:
            raise TooLarge(f"the body comes in more than {limits.chunks} chunks", detail={"limit": limits.chunks})
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body exceeds {limit} bytes", detail={"limit": limit})


class Codings:
    """Content codings, worked in threads of their own so that a large body never stalls the loop."""

    __slots__ = ("_threads",)

    def __init__(self, threads: int = 2) -> None:
        self._threads = CapacityLimiter(threads)

    def __repr__(self) -> str:
        return f"<Codings {self._threads.borrowed_tokens}/{self._threads.total_tokens} threads>"

    async def inflate(self, body: bytes, coding: bytes, limit: int) -> bytes:
        """Undo one content coding, stopping at `limit` bytes.

        Raises `UnsupportedEncoding`, `TooLarge`, or `BadRequest` for bytes that are not what the coding says.
        """
        name = coding.strip().lower()
        if name in {b"", b"identity"}:
            return body
        if name not in _FRAMING:
            raise UnsupportedEncoding("content-encoding: only gzip and deflate are understood")
        framing = _FRAMING[name]
        if len(body) <= _INLINE_WIRE:
            plain = _inflated(body, framing, min(limit, _INLINE_PLAIN))
            if plain is not None:
                return plain
        plain = await to_thread.run_sync(_inflated, body, framing, limit, limiter=self._threads)
        if plain is None:
            raise TooLarge(f"the decompressed body exceeds {limit} bytes", detail={"limit": limit})
        return plain

    async def deflate(self, body: bytes, accept: bytes) -> tuple[bytes, bytes | None]:
        """Compress an answer as `Accept-Encoding` asks; the coding is None where it stays as it is."""
        coding = preferred(accept)
        if coding is None:
            return body, None
        small = await to_thread.run_sync(_deflated, body, _FRAMING[coding], limiter=self._threads)
        return (small, coding) if len(small) < len(body) else (body, None)


def preferred(accept: bytes) -> bytes | None:
    """Choose between gzip and deflate by the weights of an `Accept-Encoding`; gzip where they are equal."""
    best: bytes | None = None
    weight = 0.0
    for item in accept.lower().split(b","):
        name, _, parameters = item.partition(b";")
        name = name.strip()
        quality = _quality(parameters)
        if name in {b"gzip", b"deflate"} and (quality > weight or (quality == weight > 0 and name == b"gzip")):
            best, weight = name, quality
    return best


def _quality(parameters: bytes) -> float:
    key, _, value = parameters.strip().partition(b"=")
    if key.strip() != b"q":
        return 1.0
    try:
        quality = float(value)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0


def _inflated(body: bytes, framing: int, limit: int) -> bytes | None:
    """Return the plain bytes, or None where they would exceed `limit`."""
    machine = zlib.decompressobj(framing)
    try:
        plain = machine.decompress(body, limit + 1)
    except zlib.error:
        raise BadRequest("the body is not what its content-encoding says") from None
    if len(plain) > limit:
        return None
    if not machine.eof:
        raise BadRequest("the compressed body is truncated")
    if machine.unused_data:
        raise BadRequest("bytes follow the end of the compressed body")
    return plain


def _deflated(body: bytes, framing: int) -> bytes:
    machine = zlib.compressobj(_FASTEST, zlib.DEFLATED, framing)
    return machine.compress(body) + machine.flush()
