"""The inference endpoint: bytes in, lengths and wishes read from headers, bytes out.

Belongs here: the hot path, a bare ASGI answer without Request or Response. Never: a tensor; the worker decodes.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from actors.errors import BadRequest, WrongVerb
from runtime.http.auth import Scope, authorise
from runtime.http.body import WORTH_DEFLATING, Codings, read_body
from runtime.http.exchange import JSON
from runtime.http.watch import while_present

if TYPE_CHECKING:
    from runtime.http.exchange import Exchange
    from runtime.http.limits import Limits
    from runtime.http.port import Backend, Served

BINARY: Final = b"application/octet-stream"
_HITS: Final = frozenset({"hit", "prefetch_hit"})
_DURATION: Final = re.compile(rb"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s|m|h)?")
_UNITS: Final = {b"us": 1e-6, b"ms": 1e-3, b"": 1.0, b"s": 1.0, b"m": 60.0, b"h": 3600.0}
_HIGHEST: Final = (1 << 32) - 1
_MILLI: Final = 1e-6
_WISHES: Final = (b'"timeout"', b'"priority"')
_wish: Final = re.compile(b"|".join(_WISHES))
_FEW: Final = 64
"""Quotes that are looked at one by one."""


class _Wishes(msgspec.Struct):
    timeout: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    priority: Annotated[int, msgspec.Meta(ge=0, le=_HIGHEST)] = 0


class _Asked(msgspec.Struct):
    parameters: _Wishes | None = None


_asked: Final = msgspec.json.Decoder(_Asked)


class Infer:
    """`POST /v2/models/{m}[/versions/{v}]/infer`."""

    __slots__ = ("_backend", "_codings", "_limits")

    def __init__(self, backend: Backend, limits: Limits, codings: Codings) -> None:
        self._backend = backend
        self._limits = limits
        self._codings = codings

    def __repr__(self) -> str:
        return f"<Infer {self._codings!r}>"

    async def __call__(self, exchange: Exchange, name: str, version: str | None) -> None:
        """Answer one inference. Raises `ForeloadError` before anything is sent, `ClientLeft`."""
        if exchange.method != "POST":
            raise WrongVerb("infer takes POST", detail={"allow": "POST"})
        authorise(exchange.key, Scope.INFER, name)
        headers = exchange.headers
        body = await read_body(exchange, self._limits.body, self._limits)
        if b"content-encoding" in headers:
            body = await self._codings.inflate(body, headers[b"content-encoding"], self._limits.body)
        json_length = json_length_of(headers.get(b"inference-header-content-length"), len(body))
        timeout, priority = wishes_of(headers, body, json_length)
        served = await while_present(
            exchange.receive,
            self._backend.infer(
                name,
                version,
                body,
                json_length,
                request_id=exchange.request_id,
                timeout=timeout,
                priority=priority,
                traceparent=exchange.traceparent,
                tracestate=exchange.tracestate,
            ),
        )
        await self._answer(exchange, served)

    async def _answer(self, exchange: Exchange, served: Served) -> None:
        answer = served.answer
        body = answer.body
        coding: bytes | None = None
        if b"accept-encoding" in exchange.headers and len(body) > WORTH_DEFLATING:
            body, coding = await self._codings.deflate(body, exchange.headers[b"accept-encoding"])
        lines = [
            (b"content-type", JSON if answer.json_length is None else BINARY),
            (b"content-length", b"%d" % len(body)),
            (b"foreload-trace-id", (served.trace_id or exchange.trace_id).encode("ascii")),
            (b"x-request-id", exchange.request_id.encode("ascii")),
        ]
        if answer.json_length is not None:
            lines.append((b"inference-header-content-length", b"%d" % answer.json_length))
        if coding is not None:
            lines += ((b"content-encoding", coding), (b"vary", b"accept-encoding"))
        if served.result not in _HITS:
            lines += _cold(served)
        exchange.closing = self._backend.draining
        await exchange.start(200, lines, body)


def _cold(served: Served) -> list[tuple[bytes, bytes]]:
    wait = served.waited * 1e3
    spent = served.answer.timings
    phases = (("queue", spent.queue), ("decode", spent.decode), ("infer", spent.infer), ("encode", spent.encode))
    timing = f"load;dur={wait:.3f}" + "".join(f", {phase};dur={time * _MILLI:.3f}" for phase, time in phases)
    return [
        (b"server-timing", timing.encode("ascii")),
        (b"foreload-cold-start", f"{served.found};wait={wait:.0f}".encode("ascii")),
    ]


def json_length_of(header: bytes | None, length: int) -> int | None:
    """Read `Inference-Header-Content-Length`; None without one. Raises `BadRequest` unless 0 <= n <= length."""
    if header is None:
        return None
    if not (header.isdigit() and len(header) <= len(str(length))):
        raise BadRequest(f"inference-header-content-length: must be a number from 0 to the body's {length} bytes")
    number = int(header)
    if number > length:
        raise BadRequest(f"inference-header-content-length: {number} is more than the body's {length} bytes")
    return number


def wishes_of(headers: dict[bytes, bytes], body: bytes, json_length: int | None) -> tuple[float | None, int]:
    """Find deadline (seconds) and priority in headers and request parameters.

    The tighter deadline wins; a priority in the body goes before the header's. The JSON is only parsed where one of
    the two words occurs in it. Raises `BadRequest` naming the field.
    """
    timeout = math.inf
    priority = 0
    if b"foreload-timeout" in headers:
        timeout = _seconds(headers[b"foreload-timeout"])
    if b"foreload-priority" in headers:
        priority = _priority(headers[b"foreload-priority"])
    end = len(body) if json_length is None else json_length
    if _wished(body, end):
        asked = _parameters(body if end == len(body) else body[:end])
        priority = asked.priority or priority
        if asked.timeout:
            timeout = min(timeout, asked.timeout / 1e6)
    return (None if timeout == math.inf else timeout), priority


def _wished(body: bytes, end: int) -> bool:
    """Whether one of the two words may occur in the first `end` bytes.

    Quotes are rare in a body of numbers, and from quote to quote `find` runs at the speed of memory, 50 times faster
    than any search for a word.
    """
    at = 0
    for _ in range(_FEW):
        at = body.find(b'"', at, end)
        if at < 0:
            return False
        if body.startswith(_WISHES, at):
            return True
        at += 1
    return _wish.search(body, at, end) is not None


def _parameters(text: bytes) -> _Wishes:
    try:
        return _asked.decode(text).parameters or _Wishes()
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"the JSON is malformed: {error}") from None


def _seconds(value: bytes) -> float:
    match = _DURATION.fullmatch(value.strip())
    seconds = float(match[1]) * _UNITS[match[2] or b""] if match else 0.0
    if seconds <= 0:
        raise BadRequest("foreload-timeout: must be a time above zero such as 2s or 500ms")
    return seconds


def _priority(value: bytes) -> int:
    if not (value.isdigit() and len(value) <= len(str(_HIGHEST)) and int(value) <= _HIGHEST):
        raise BadRequest(f"foreload-priority: must be a number from 0 to {_HIGHEST}")
    return int(value)
