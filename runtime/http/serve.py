"""uvicorn as the assembly uses it: uvloop, httptools with guards, no signals, no access log, no lifespan.

Belongs here: server options. Never: a signal, a drain's order; those are the assembly's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import uvicorn

from runtime.http.limits import Limits
from runtime.http.protocol import guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp


class Server(uvicorn.Server):
    """Runs in a task of the assembly. Set `should_exit` to stop it: it lets answers under way finish first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the assembly decides what the first and the second one mean."""
        yield

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each listening socket; empty until `started`."""
        if not self.started:
            return ()
        return tuple(sock.getsockname()[:2] for server in self.servers for sock in server.sockets)

    def __repr__(self) -> str:
        return f"<Server {self.addresses}>"


def make_server(
    app: ASGIApp, *, host: str, port: int, limits: Limits | None = None, graceful: float = 20.0, loop: str = "uvloop"
) -> Server:
    """Build a server; `await server.serve()` runs it, port 0 takes a free one.

    `graceful` is how many seconds answers under way may take after `should_exit`; then they are cancelled, and
    told so with a 503. `loop` only matters to `Server.run`, which starts a loop of its own.
    """
    limits = limits or Limits()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop=loop,
        http=guarded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive,
        timeout_graceful_shutdown=max(1, round(graceful)),
    )
    return Server(config)
