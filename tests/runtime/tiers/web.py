"""A web server for tests that does what it is told: by default right, with one switch wrong. No test here."""

from __future__ import annotations

import hashlib
import http.server
import re
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(slots=True)
class Exchange:
    """One request, and the means to answer it. `start` and `end` are the range asked for, all of it if none was."""

    handler: http.server.BaseHTTPRequestHandler
    path: str
    start: int
    end: int
    ranged: bool
    number: int
    headers: dict[str, str]

    def status(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        """Answer with anything."""
        self.handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def part(self, content: bytes, *, sent: int | None = None, tag: str = "") -> None:
        """Answer as asked, out of `content`; only `sent` bytes of it if that is said, and then hang up."""
        body = content[self.start : self.end] if self.ranged else content
        tag = tag or etag(content)
        self.handler.send_response(206 if self.ranged else 200)
        self.handler.send_header("Content-Length", str(len(body)))
        self.handler.send_header("ETag", tag)
        self.handler.send_header("Last-Modified", "Mon, 30 Nov 2026 04:00:00 GMT")
        if self.ranged:
            self.handler.send_header("Content-Range", f"bytes {self.start}-{self.start + len(body) - 1}/{len(content)}")
        self.handler.end_headers()
        self.handler.wfile.write(body if sent is None else body[:sent])
        if sent is not None and sent < len(body):
            self.handler.wfile.flush()
            self.handler.close_connection = True
            self.handler.connection.shutdown(socket.SHUT_RDWR)


def etag(content: bytes) -> str:
    """A strong tag of a content."""
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


@dataclass(slots=True)
class Web:
    """`files` by path; `behave` answers a request itself and returns True, or leaves it to the server."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    behave: Callable[[Exchange], bool] = lambda _: False
    asked: list[Exchange] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Every range that was asked for."""
        return [(each.start, each.end) for each in self.asked if each.ranged]

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = unquote(handler.path.partition("?")[0])  # some stores write a slash as %2F
        found = _RANGE.fullmatch(handler.headers.get("Range", ""))
        content = self.files.get(path, b"")
        start = int(found[1]) if found else 0
        end = min(int(found[2]) + 1, len(content)) if found and found[2] else len(content)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        exchange = Exchange(handler, path, start, end, found is not None, len(self.asked), headers)
        self.asked.append(exchange)
        if self.behave(exchange):
            return
        if path not in self.files:
            exchange.status(404)
        elif headers.get("if-match", etag(content)) != etag(content):
            exchange.status(412)
        else:
            exchange.part(content)


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Run one on a free port of this machine."""
    web = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            with suppress(OSError):
                web.answer(self)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that left is no fault
    web.port = server.server_address[1]
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.done.set()
        server.shutdown()
        server.server_close()
        thread.join()
