"""Live, ready, model-ready: computed on each call, never cached, never an exception (protocol, section 6).

Belongs here: a verdict's form. Never: what makes a server ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from actors.errors import BadRequest, ForeloadError, NotReady
from runtime.http.auth import Scope
from runtime.http.endpoint import dumped, model_of, route
from runtime.http.incident import Incident, Notify
from runtime.http.port import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.routing import Route

    from runtime.http.exchange import Exchange
    from runtime.http.port import Backend

_STRICT: Final = {"true": True, "1": True, "false": False, "0": False}


class Health:
    """The probes. They need any valid key, no scope."""

    __slots__ = ("_backend", "_notify")

    def __init__(self, backend: Backend, notify: Notify) -> None:
        self._backend = backend
        self._notify = notify

    def __repr__(self) -> str:
        return "<Health>"

    def routes(self) -> list[Route]:
        """Paths of the protocol and of Kubernetes; `/healthz` and `/health` mean live."""
        live = (Scope.ANY, self.live)
        ready = (Scope.ANY, self.ready)
        of_model = (Scope.ANY, self.model_ready)
        return [
            *(route(path, GET=live) for path in ("/v2/health/live", "/livez", "/healthz", "/health")),
            *(route(path, GET=ready) for path in ("/v2/health/ready", "/readyz")),
            route("/v2/models/{m}/ready", GET=of_model),
            route("/v2/models/{m}/versions/{v}/ready", GET=of_model),
        ]

    async def live(self, exchange: Exchange) -> None:
        """200 with `{"live": true}` or 503."""
        verdict = self._asked(exchange, self._backend.live)
        await _say(exchange, verdict, {"live": True}, "the server is not live", None)

    async def ready(self, exchange: Exchange) -> None:
        """200 with `{"ready": true}` or 503."""
        verdict = self._asked(exchange, self._backend.ready)
        await _say(exchange, verdict, {"ready": True}, "the server is not ready", None)

    async def model_ready(self, exchange: Exchange) -> None:
        """200 with name, state and tier, 503 with the reason, or 404."""
        name, version = model_of(exchange)
        strict = _strict(exchange)
        verdict = self._asked(exchange, lambda: self._backend.model_ready(name, version, strict=strict))
        await _say(exchange, verdict, {"name": name, "ready": True}, "the model is not ready", name)

    def _asked(self, exchange: Exchange, ask: Callable[[], Verdict]) -> Verdict:
        try:
            return ask()
        except ForeloadError:
            raise
        except Exception as error:  # noqa: BLE001 - a probe that fails is a no, whatever failed in it
            self._notify(Incident.of(503, exchange, error))
            return Verdict(ok=False, reason="the probe itself failed")


async def _say(exchange: Exchange, verdict: Verdict, yes: dict[str, object], no: str, model: str | None) -> None:
    extra = verdict.extra or {}
    if verdict.ok:
        await exchange.reply(200, dumped({**extra, **yes}))
        return
    numbers = {key: value for key, value in extra.items() if isinstance(value, int | float | str)}
    raise NotReady(verdict.reason or no, model=model, detail=numbers, retry_after=verdict.retry_after)


def _strict(exchange: Exchange) -> bool | None:
    try:
        values = parse_qs(exchange.scope["query_string"].decode("ascii"), keep_blank_values=True).get("strict")
    except ValueError:
        raise BadRequest("the query string is malformed") from None
    if values is None:
        return None
    if len(values) != 1 or values[0] not in _STRICT:
        raise BadRequest("strict: must be true or false")
    return _STRICT[values[0]]
