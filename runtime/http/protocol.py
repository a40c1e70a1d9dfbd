"""uvicorn's httptools protocol with the guards it lacks: header size and time, chunks, connections (F25-F33, F39).

Belongs here: what must be refused before an ASGI scope exists. Never: a route, a body's meaning.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actors.errors import BadRequest, Busy, ForeloadError, HeadersTooLarge, TooLarge, UriTooLong
from runtime.http.errors import refusal
from runtime.http.identity import request_id_of
from runtime.http.joined import JoinedTransport
from runtime.http.limits import Limits

if TYPE_CHECKING:
    import asyncio

    from uvicorn.config import Config
    from uvicorn.server import ServerState

_LINGER: Final = 2.0
"""Seconds a refused client has to stop sending and read why, before a reset would take the answer from it."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    httptools buffers a header section of any size and uvicorn waits for it for ever, so both are bounded here: the
    bytes that came since the last complete request, and the time since no request is being served.
    """

    limits: ClassVar[Limits] = Limits()

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""
        self._heading = True
        self._pending = 0
        self._chunks = 0
        self._verdict: ForeloadError | None = None
        self._refused = False
        self._quiet: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, unless there are too many; a silent one is closed after `header_idle`."""
        super().connection_made(cast("asyncio.Transport", JoinedTransport(transport, self.loop)))
        if len(self.connections) > self.limits.connections:
            self._refuse(Busy("too many connections", detail={"limit": self.limits.connections}))
            self.transport.close()
            return
        self._arm(self.limits.header_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._disarm()
        if self._flush is not None:
            self._flush.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then see whether what is still incomplete has grown or waited too much."""
        self._pending += len(data)
        if self.transport.is_closing() or self._refused:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # Nothing is upgraded here; the request is answered as it stands.
        except httptools.HttpParserError:
            self._broken(self._verdict or BadRequest("the request is not valid HTTP/1.1"))
            return
        if self.cycle is not None and not self.cycle.response_complete and not self._heading:
            return
        self._unserved()

    def _unserved(self) -> None:
        """Bytes came while no request is being served: part of a header, or a body whose answer is already out.

        Such a body is parsed and dropped for `header_idle` seconds, because closing at once would reset the
        connection and take the answer (a 413, most often) from a client that is still sending.
        """
        if self._heading:
            if len(self.url) > self.limits.url:
                self._broken(UriTooLong(f"the URL is longer than {self.limits.url} bytes"))
                return
            if self._pending > self.limits.headers + self.limits.url:
                self._broken(HeadersTooLarge(f"the headers exceed {self.limits.headers} bytes"))
                return
        if self._quiet is None:
            self._arm(self.limits.header_idle)

    # Parser callbacks

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._heading = True
        self._pending = 0
        self._chunks = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request can be served from here on."""
        self._heading = False
        self._pending = 0
        self._disarm()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Count chunks where they are chunks; ASGI sees them joined."""
        self._chunks += 1
        if self._chunks > self.limits.chunks:
            self._verdict = TooLarge(f"the body comes in more than {self.limits.chunks} chunks")
            raise self._verdict

    def on_response_complete(self) -> None:
        """An answer is handed to the transport; a client that does not read it must not keep it in memory."""
        super().on_response_complete()
        if self._flush is None and self.transport.get_write_buffer_size() > 0:
            self._watch_flush()

    # Closing

    def _watch_flush(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._flush = self.loop.call_later(self.limits.body_idle, self._flushed)

    def _flushed(self) -> None:
        self._flush = None
        left = self.transport.get_write_buffer_size()
        if left >= self._unread > 0:
            # Closing would wait for the client to read, which is what it does not do.
            self.transport.abort()
        elif left > 0:
            self._watch_flush()

    def _arm(self, seconds: float) -> None:
        self._quiet = self.loop.call_later(seconds, self._too_quiet)

    def _disarm(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _too_quiet(self) -> None:
        self._quiet = None
        if self._serving() and not self._refused:
            # Half a header may follow a request that still waits for its model; that one must not suffer for it.
            self._arm(self.limits.header_idle)
        elif not self.transport.is_closing():
            self.transport.close()

    def _serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _broken(self, error: ForeloadError) -> None:
        """Answer what cannot be parsed any further, unless that answer would be taken for another request's."""
        cycle = self.cycle
        if self._serving() and not cycle.more_body:
            # A complete request is being served and rubbish follows it: the answer first, then the end.
            cycle.keep_alive = False
            self.flow.pause_reading()
        elif self._serving() and cycle.response_started:
            self.transport.close()
        else:
            self._refuse(error)
            self._let_go()

    def _refuse(self, error: ForeloadError) -> None:
        answer = refusal(error, request_id_of(None))
        lines = [
            b"HTTP/1.1 %d %s" % (answer.status, HTTPStatus(answer.status).phrase.encode("ascii")),
            b"content-type: application/json",
            b"content-length: %d" % len(answer.body),
            b"connection: close",
            *(name + b": " + value for name, value in answer.headers),
        ]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + answer.body)

    def _let_go(self) -> None:
        """Drop what still comes, so that the client can read its refusal; an application that waits is told."""
        self._refused = True
        self._disarm()
        self._arm(_LINGER)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._serving():
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def guarded(limits: Limits) -> type[GuardedProtocol]:
    """The protocol with these limits; uvicorn wants a class."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})
