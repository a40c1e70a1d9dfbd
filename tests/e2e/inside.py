"""The same server inside the test's own loop, for tests that need every event: `assemble` behind real HTTP.

The device worker is a process as ever. No test here.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from actors.tier_cache import TierCache
from runtime.assembly import assemble
from runtime.config.load import load
from runtime.http.serve import make_server
from runtime.telemetry.fanout import EVENT_TYPES
from runtime.telemetry.replay import replay
from tests.e2e.live import HOST, config, write
from tests.simulation.invariants import prove

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from actors.events import Event
    from runtime.assembly import Assembly


@dataclass(slots=True)
class Inside:
    """A server in this loop. `events` are all since it was assembled, in order."""

    parts: Assembly
    port: int
    http: httpx.AsyncClient
    events: list[Event] = field(default_factory=list)

    async def until(self, true: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
        """Let the loop run until `true()` is."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not true():
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
            await asyncio.sleep(0.01)

    def of(self, kind: type[Any], **fields: object) -> list[Any]:
        """Events of one kind whose fields have these values."""
        return [
            event
            for event in self.events
            if type(event) is kind and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def cache(self) -> TierCache:
        """The first device's actor."""
        owner = self.parts.devices[0].owner
        assert isinstance(owner, TierCache)
        return owner

    def check(self, *, finished: bool = True) -> None:
        """Prove the invariants from the log (I1 to I4, I6), and that replaying it gives the actors' books (I10)."""
        caches = {ref.name: ref.owner for ref in (*self.parts.devices, self.parts.host)}
        capacity = {name: owner.ledger.capacity for name, owner in caches.items() if isinstance(owner, TierCache)}
        prove(self.events, capacity, finished=finished)
        books = replay(self.events)
        assert books.faults == ()
        for name, owner in caches.items():
            assert isinstance(owner, TierCache)
            owner.check()
            said = {row.key: row.size for row in owner.ledger.rows()}
            assert dict(books.resident.get((name, owner.tier), {})) == said, name


@asynccontextmanager
async def inside(folder: Path, **changes: Any) -> AsyncIterator[Inside]:
    """Assemble a server on `config(folder, **changes)`, wait until it is ready, and serve it on a free port."""
    settings = load(write(folder, config(folder, **changes)), {}, {})
    async with assemble(settings) as parts:
        found: list[Event] = []
        parts.views.emit.subscribe("test", dict.fromkeys(EVENT_TYPES, found.append))
        # With its protocol spelled out asyncio turns Nagle's algorithm off, as uvloop always does.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind((HOST, 0))
            listener.listen(1024)
            port = listener.getsockname()[1]
            server = make_server(parts.app, host=HOST, port=port, graceful=2.0)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60, limits=limits) as http:
                try:
                    server_inside = Inside(parts, port, http, found)
                    await server_inside.until(lambda: parts.backend.ready().ok, "ready", 60)
                    yield server_inside
                finally:
                    server.should_exit = True
                    await serving
