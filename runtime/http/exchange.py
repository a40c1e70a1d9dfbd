"""One request and the way to answer it: ASGI scope and channels, headers by name, identity, who asks.

Belongs here: turning an answer into ASGI messages. Never: a route, an error class, a decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runtime.http.identity import request_id_of, trace_of, traceparent_of, tracestate_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from runtime.http.auth import Key

JSON: Final = b"application/json"
CLOSE: Final = (b"connection", b"close")
_PLAIN: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_NONE: Final[dict[bytes, bytes]] = {}


class Exchange:
    """A request from its first header to its answer.

    `headers` is filled once the limits are checked, `key` once the caller is known (None where no keys are
    configured). `unread` is true while a body may still be on its way.
    """

    __slots__ = (
        "closing",
        "headers",
        "key",
        "method",
        "path",
        "receive",
        "request_id",
        "scope",
        "send",
        "started",
        "traceparent",
        "tracestate",
        "unread",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = _NONE
        self.key: Key | None = None
        self.request_id = ""
        self.traceparent = ""
        self.tracestate = ""
        self.started = False
        self.unread = True
        self.closing = False

    def __repr__(self) -> str:
        return f"<Exchange {self.method} {self.path!r} {self.request_id}>"

    def identify(self, headers: dict[bytes, bytes]) -> None:
        """Take the headers, and the identifiers among them that pass hygiene."""
        self.headers = headers
        self.request_id = request_id_of(headers.get(b"x-request-id"))
        if b"traceparent" in headers:
            self.traceparent = traceparent_of(headers[b"traceparent"])
            if self.traceparent:
                self.tracestate = tracestate_of(headers.get(b"tracestate"))

    @property
    def trace_id(self) -> str:
        """The trace this request belongs to, derived as the backend derives it."""
        if not self.request_id:
            self.request_id = request_id_of(None)
        return trace_of(self.request_id, self.traceparent)

    async def reply(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole answer; HEAD gets its headers only."""
        lines = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"foreload-trace-id", self.trace_id.encode("ascii")),
            (b"x-request-id", self.request_id.encode("ascii")),
            *_PLAIN,
            *headers,
        ]
        await self.start(status, lines, b"" if self.method == "HEAD" else body)

    async def start(self, status: int, lines: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send status, header list and body as they are, and `Connection: close` where the connection cannot go on.

        A client that waits for `100 Continue` with its body unsent leaves the connection in no usable state.
        """
        if self.closing or (self.unread and b"expect" in self.headers):
            lines.append(CLOSE)
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": lines})
        await self.send({"type": "http.response.body", "body": body})
