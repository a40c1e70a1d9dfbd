"""The front door: limits, trusted host, identity, key, cross-site rule; then infer, then the Router.

Belongs here: the order of those checks and the one place where errors become answers. Never: what an endpoint does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.routing import Router

from actors.errors import Draining
from runtime.http.admin import Reading
from runtime.http.auth import Key, Keyring, refuse_cross_site
from runtime.http.body import Codings
from runtime.http.compare import Compare
from runtime.http.endpoint import EXCHANGE, Missing, SmallBodies
from runtime.http.errors import CLIENT_LEFT, refusal
from runtime.http.exchange import Exchange
from runtime.http.health import Health
from runtime.http.incident import Incident, Notify, to_log
from runtime.http.infer import Infer
from runtime.http.limits import Hosts, Limits, headers_of
from runtime.http.paths import infer_target
from runtime.http.repository import Repository
from runtime.http.watch import ClientLeft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from runtime.http.port import Backend

_OURS: Final = 500


class Front:
    """The ASGI application. Everything before the Router is plain calls, so that a hit pays for no layers."""

    __slots__ = ("_backend", "_hosts", "_infer", "_keyring", "_limits", "_notify", "router")

    def __init__(
        self, backend: Backend, limits: Limits, trusted_hosts: Sequence[str], keys: Sequence[Key], notify: Notify
    ) -> None:
        codings = Codings()
        self._backend = backend
        self._limits = limits
        self._hosts = Hosts(trusted_hosts)
        self._keyring = Keyring(keys)
        self._notify = notify
        self._infer = Infer(backend, limits, codings)
        routes = [
            *Health(backend, notify).routes(),
            *Reading(backend).routes(),
            *Repository(backend, SmallBodies(limits, codings)).routes(),
            *Compare(backend, limits, codings, notify).routes(),
        ]
        self.router = Router(routes, redirect_slashes=False, default=Missing())

    def __repr__(self) -> str:
        return f"<Front {self._hosts!r} {self._keyring!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientLeft:
            self._notify(Incident.of(CLIENT_LEFT, exchange))
        except asyncio.CancelledError:
            # The server gave up waiting for us; whoever waits on the other side still gets a word. That is an end like
            # any other: raising would make uvicorn log a traceback for each request that a stop abandons.
            if exchange.started:
                raise
            await self._refuse(exchange, Draining("the server is stopping"))
        except Exception as error:  # noqa: BLE001 - the last resort: nothing but an error object leaves here
            await self._refuse(exchange, error)

    async def _answer(self, exchange: Exchange) -> None:
        scope = exchange.scope
        exchange.identify(headers_of(scope, self._limits))
        self._hosts.check(exchange.headers, scope["http_version"])
        exchange.key = self._keyring.authenticate(exchange.headers)
        refuse_cross_site(exchange.method, exchange.headers)
        target = infer_target(exchange.path)
        if target is not None:
            await self._infer(exchange, *target)
            return
        exchange.closing = self._backend.draining
        scope[EXCHANGE] = exchange
        await self.router(scope, exchange.receive, exchange.send)

    async def _refuse(self, exchange: Exchange, error: BaseException) -> None:
        answer = refusal(error, exchange.trace_id)
        if answer.status == _OURS:
            self._notify(Incident.of(_OURS, exchange, error))
        if exchange.started:
            # Half an answer is out: only a closed connection tells the client so.
            raise error
        exchange.closing = self._backend.draining
        await exchange.reply(answer.status, answer.body, headers=answer.headers)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self.router(scope, receive, send)


def create_app(
    backend: Backend,
    limits: Limits | None = None,
    *,
    trusted_hosts: Sequence[str],
    keys: Sequence[Key] = (),
    notify: Notify = to_log,
) -> Front:
    """Build the ASGI application over a backend.

    `trusted_hosts` are names the server answers to (`*.example.com`, `*`); without `keys` nobody is asked for one,
    so bind a loopback address only. `notify` learns of internal errors and of clients that left.
    """
    return Front(backend, limits or Limits(), trusted_hosts, keys, notify)
