"""What the server says about itself: metadata, statistics, state, metrics, and the extensions it lacks.

Belongs here: reading endpoints. Never: anything that changes a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from runtime.http.auth import Scope
from runtime.http.endpoint import Absent, dumped, model_of, route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.http.exchange import Exchange
    from runtime.http.port import Backend
    from runtime.workers.port import TensorSpec


class Reading:
    """Endpoints that need scope `read`."""

    __slots__ = ("_backend",)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __repr__(self) -> str:
        return "<Reading>"

    def routes(self) -> list[Route]:
        """Paths in order: `/v2/models/stats` goes before a model of that name, as in Triton."""
        model, version = "/v2/models/{m}", "/v2/models/{m}/versions/{v}"
        statistics = (Scope.READ, self.statistics)
        return [
            route("/v2", GET=(Scope.READ, self.server)),
            route("/v2/models/stats", GET=(Scope.READ, self.all_statistics)),
            *(route(path, GET=(Scope.READ, self.metadata)) for path in (model, version)),
            *(route(f"{path}/stats", GET=statistics) for path in (model, version)),
            *(
                Route(f"{path}/config", endpoint=Absent("the model configuration extension"))
                for path in (model, version)
            ),
            route("/api/v1/state", GET=(Scope.READ, self.state)),
            route("/metrics", GET=(Scope.READ, self.metrics)),
            *_absent(),
        ]

    async def server(self, exchange: Exchange) -> None:
        """Name, version, extensions."""
        await exchange.reply(200, dumped(self._backend.server_metadata()))

    async def metadata(self, exchange: Exchange) -> None:
        """What a model takes and gives."""
        found = self._backend.metadata(*model_of(exchange))
        content: dict[str, object] = {"name": found.name}
        if found.versions:
            content["versions"] = list(found.versions)
        content["platform"] = found.platform
        content["inputs"] = _tensors(found.inputs)
        content["outputs"] = _tensors(found.outputs)
        await exchange.reply(200, dumped(content))

    async def all_statistics(self, exchange: Exchange) -> None:
        """Statistics of every model."""
        await exchange.reply(200, dumped(self._backend.statistics(None, None)))

    async def statistics(self, exchange: Exchange) -> None:
        """Statistics of one model."""
        await exchange.reply(200, dumped(self._backend.statistics(*model_of(exchange))))

    async def state(self, exchange: Exchange) -> None:
        """Residency, capacity, leases, hit rates."""
        await exchange.reply(200, dumped(self._backend.state()))

    async def metrics(self, exchange: Exchange) -> None:
        """Prometheus or OpenMetrics text, as `Accept` asks."""
        text, content_type = await self._backend.metrics(exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.reply(200, text, content_type.encode("latin-1"))


def _tensors(specs: Sequence[TensorSpec]) -> list[dict[str, object]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]


def _absent() -> list[Route]:
    """Paths that tritonclient can call and that answer 501."""
    memory, tracing, logging = Absent("shared memory"), Absent("trace settings"), Absent("log settings")
    return [
        Route("/v2/systemsharedmemory/{rest:path}", endpoint=memory),
        Route("/v2/cudasharedmemory/{rest:path}", endpoint=memory),
        Route("/v2/trace/setting", endpoint=tracing),
        Route("/v2/models/{m}/trace/setting", endpoint=tracing),
        Route("/v2/logging", endpoint=logging),
    ]
