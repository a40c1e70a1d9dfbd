"""The model repository extension: index, load, unload (protocol, section 7).

Belongs here: bodies and paths. Never: which parameter means what; that is the backend's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec
from starlette.routing import Route

from runtime.http.auth import Scope
from runtime.http.endpoint import Absent, Missing, SmallBodies, dumped, model_of, route
from runtime.http.watch import while_present

if TYPE_CHECKING:
    from runtime.http.exchange import Exchange
    from runtime.http.port import Backend, IndexRow

_Parameter: TypeAlias = str | int | float | bool


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    ready: bool = False


class _Order(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, _Parameter] = {}


class Repository:
    """Index needs `read`, load and unload need `admin`. Load and unload answer 200 with an empty body."""

    __slots__ = ("_backend", "_bodies")

    def __init__(self, backend: Backend, bodies: SmallBodies) -> None:
        self._backend = backend
        self._bodies = bodies

    def __repr__(self) -> str:
        return "<Repository>"

    def routes(self) -> list[Route]:
        """Paths without a repository name; with one they are 501, as in Triton."""
        return [
            route("/v2/repository/index", POST=(Scope.READ, self.index)),
            route("/v2/repository/models/{m}/load", POST=(Scope.ADMIN, self.load)),
            route("/v2/repository/models/{m}/unload", POST=(Scope.ADMIN, self.unload)),
            Route("/v2/repository/models/{rest:path}", endpoint=Missing()),
            Route("/v2/repository/{repository}/{rest:path}", endpoint=Absent("named repositories")),
        ]

    async def index(self, exchange: Exchange) -> None:
        """Every model version, or the ready ones."""
        asked = await self._bodies.read(exchange, _Index)
        await exchange.reply(200, dumped([_row(row) for row in self._backend.index(ready=asked.ready)]))

    async def load(self, exchange: Exchange) -> None:
        """Answer once the model can infer; a client that leaves gives its wait up."""
        name, _ = model_of(exchange)
        order = await self._bodies.read(exchange, _Order)
        await while_present(exchange.receive, self._backend.load(name, order.parameters))
        await exchange.reply(200, b"")

    async def unload(self, exchange: Exchange) -> None:
        """Answer at once; in-flight requests finish behind it."""
        name, _ = model_of(exchange)
        order = await self._bodies.read(exchange, _Order)
        await while_present(exchange.receive, self._backend.unload(name, order.parameters))
        await exchange.reply(200, b"")


def _row(row: IndexRow) -> dict[str, str]:
    fields = {"name": row.name, "version": row.version, "state": row.state, "reason": row.reason}
    return {key: value for key, value in fields.items() if value or key == "name"}
