"""One path: which verbs it knows, and which scope each of them needs.

Belongs here: the order 401 (before routing), 405, 403. Never: what an endpoint does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import msgspec
import orjson
from starlette.routing import Route

from actors.errors import BadRequest, NotFound, Unsupported, WrongVerb
from runtime.http.auth import Scope, authorise
from runtime.http.body import Codings, read_body
from runtime.http.paths import checked_name, checked_version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from runtime.http.exchange import Exchange
    from runtime.http.limits import Limits

    Answer: TypeAlias = Callable[[Exchange], Awaitable[None]]

EXCHANGE: Final = "foreload.exchange"
"""Where the front door leaves the `Exchange` in the ASGI scope."""

S = TypeVar("S")


class Endpoint:
    """What a path answers to each verb; HEAD follows GET. No verb without the scope it needs."""

    __slots__ = ("_verbs",)

    def __init__(self, **verbs: tuple[Scope, Answer]) -> None:
        self._verbs: Mapping[str, tuple[Scope, Answer]] = verbs

    def __repr__(self) -> str:
        return f"<Endpoint {self.allow}>"

    @property
    def allow(self) -> str:
        """The verbs, as the `Allow` header lists them."""
        return ", ".join(sorted({*self._verbs, "HEAD"} if "GET" in self._verbs else self._verbs))

    async def __call__(self, scope: AsgiScope, _receive: Receive, _send: Send) -> None:
        """Answer, or raise the `ForeloadError` that the front door puts into words."""
        exchange: Exchange = scope[EXCHANGE]
        verb = "GET" if exchange.method == "HEAD" else exchange.method
        if verb not in self._verbs:
            raise WrongVerb(f"this path takes {self.allow}", detail={"allow": self.allow})
        needed, answer = self._verbs[verb]
        authorise(exchange.key, needed)
        await answer(exchange)


class Missing:
    """Any path that is not listed. An object, because Starlette would wrap a function in Request and Response."""

    __slots__ = ()

    async def __call__(self, _scope: AsgiScope, _receive: Receive, _send: Send) -> None:
        """Raise `NotFound`."""
        raise NotFound("no such path")


class Absent:
    """Extensions of the protocol this server does not offer, any verb."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"<Absent {self._what}>"

    async def __call__(self, _scope: AsgiScope, _receive: Receive, _send: Send) -> None:
        """Raise `Unsupported`."""
        raise Unsupported(f"this server does not offer {self._what}")


def route(path: str, **verbs: tuple[Scope, Answer]) -> Route:
    """Tie a path to its verbs."""
    return Route(path, endpoint=Endpoint(**verbs))


def model_of(exchange: Exchange) -> tuple[str, str | None]:
    """Name and version of a path with `{m}` and perhaps `{v}`. Raises `UnknownModel`."""
    values = exchange.scope["path_params"]
    return checked_name(values["m"]), checked_version(values.get("v"))


def dumped(value: object) -> bytes:
    """JSON of what a backend gives: mappings, sequences, structs, dataclasses, numpy scalars."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if hasattr(value, "items"):
        return dict(value.items())
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    raise TypeError(type(value).__name__)


class SmallBodies:
    """Reads the little JSON objects of the repository calls."""

    __slots__ = ("_codings", "_limits")

    def __init__(self, limits: Limits, codings: Codings) -> None:
        self._limits = limits
        self._codings = codings

    def __repr__(self) -> str:
        return f"<SmallBodies up to {self._limits.small_body} B>"

    async def read(self, exchange: Exchange, shape: type[S]) -> S:
        """Decode a body into `shape`; an empty one counts as `{}`. Raises `BadRequest` naming the field."""
        body = await read_body(exchange, self._limits.small_body, self._limits)
        coding = exchange.headers.get(b"content-encoding")
        if coding is not None:
            body = await self._codings.inflate(body, coding, self._limits.small_body)
        try:
            found = msgspec.json.decode(body if body.strip() else b"{}", type=shape)
            if body.strip():
                json.loads(body, object_pairs_hook=_once)
        except RecursionError:
            raise BadRequest("the JSON is nested too deeply") from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadRequest(f"the JSON is malformed: {error}") from None
        return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Two readers of a repeated key could disagree about what was asked for.
        msg = "a key occurs twice"
        raise ValueError(msg)
    return found
