"""Several models on one input: `POST /api/v1/compare`, a V2 inference request with a list of models in it.

Belongs here: reading that list, one inference per model side by side, one answer of all. Never: a tensor; each worker
decodes the body as it came, and what their models declare alike is decoded once there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import anyio
import msgspec
import orjson
from anyio import to_thread

from actors.errors import BadRequest, ForeloadError, TooLarge
from runtime.http.auth import Scope, authorise, authorise_some
from runtime.http.body import WORTH_DEFLATING, Codings, read_body
from runtime.http.endpoint import route
from runtime.http.errors import refusal
from runtime.http.exchange import JSON
from runtime.http.incident import Incident
from runtime.http.infer import BINARY, json_length_of, wishes_of
from runtime.http.paths import checked_name, checked_version
from runtime.http.watch import while_present

if TYPE_CHECKING:
    from starlette.routing import Route

    from runtime.http.exchange import Exchange
    from runtime.http.incident import Notify
    from runtime.http.limits import Limits
    from runtime.http.port import Backend, Served

_OURS: Final = 500
_INLINE: Final = 64 << 10
"""Bytes of JSON that are looked through on the loop; longer ones on a thread."""
_LONGEST: Final = 256


class _Listed(msgspec.Struct):
    models: Annotated[list[Annotated[str, msgspec.Meta(max_length=_LONGEST)]], msgspec.Meta(min_length=1)]


_listed: Final = msgspec.json.Decoder(_Listed)


class _Row(NamedTuple):
    """One model's part of the answer: its members in front of the V2 answer or error, that one, and what follows."""

    head: dict[str, object]
    key: bytes
    json: bytes
    tail: bytes = b""


class Compare:
    """Each model under its own lease; none waits for another, and the caller's deadline holds for each."""

    __slots__ = ("_backend", "_codings", "_limits", "_notify")

    def __init__(self, backend: Backend, limits: Limits, codings: Codings, notify: Notify) -> None:
        self._backend = backend
        self._limits = limits
        self._codings = codings
        self._notify = notify

    def __repr__(self) -> str:
        return f"<Compare up to {self._limits.compared} models>"

    def routes(self) -> list[Route]:
        """One path. Which models a key must cover stands in the body, so `compare` asks for the scope itself."""
        return [route("/api/v1/compare", POST=(Scope.ANY, self.compare))]

    async def compare(self, exchange: Exchange) -> None:
        """Answer 200 with a row per model, in the order of the request; each row has a status of its own.

        Raises `ForeloadError` for what is wrong with the request as such, `ClientLeft`.
        """
        authorise_some(exchange.key, Scope.INFER)
        headers = exchange.headers
        body = await read_body(exchange, self._limits.body, self._limits)
        if b"content-encoding" in headers:
            body = await self._codings.inflate(body, headers[b"content-encoding"], self._limits.body)
        json_length = json_length_of(headers.get(b"inference-header-content-length"), len(body))
        text = body if json_length is None else body[:json_length]
        models = _models_of(text) if len(text) <= _INLINE else await to_thread.run_sync(_models_of, text)
        if len(models) > self._limits.compared:
            raise BadRequest(f"models: {len(models)}, at most {self._limits.compared} are allowed")
        for name, _ in models.values():
            authorise(exchange.key, Scope.INFER, name)
        rows = await while_present(exchange.receive, self._all(exchange, models, body, json_length))
        await self._answer(exchange, rows)

    async def _all(
        self, exchange: Exchange, models: dict[str, tuple[str, str | None]], body: bytes, json_length: int | None
    ) -> list[_Row]:
        """Ask every model at once. Cancelled, every one of them gives its place up."""
        rows: dict[str, _Row] = {}
        timeout, priority = wishes_of(exchange.headers, body, json_length)
        left = self._limits.body

        async def ask(label: str, name: str, version: str | None) -> None:
            nonlocal left
            try:
                served = await self._backend.infer(
                    name,
                    version,
                    body,
                    json_length,
                    request_id=exchange.request_id,
                    timeout=timeout,
                    priority=priority,
                    traceparent=exchange.traceparent,
                    tracestate=exchange.tracestate,
                )
            except Exception as error:  # noqa: BLE001 - one model's failure is its row's, whatever it is
                rows[label] = self._refused(exchange, label, error)
                return
            left -= len(served.answer.body)
            if left < 0:
                large = TooLarge(f"the answers together exceed {self._limits.body} bytes", model=name)
                rows[label] = self._refused(exchange, label, large)
            else:
                rows[label] = _answered(label, served)

        async with anyio.create_task_group() as asking:
            for label, (name, version) in models.items():
                asking.start_soon(ask, label, name, version)
        return [rows[label] for label in models]

    def _refused(self, exchange: Exchange, label: str, error: Exception) -> _Row:
        refused = refusal(error, exchange.trace_id)
        if refused.status == _OURS:
            self._notify(Incident.of(_OURS, exchange, error))
        head: dict[str, object] = {"model": label, "status": refused.status}
        if isinstance(error, ForeloadError) and error.retry_after is not None:
            head["retry_after"] = error.retry_after
        return _Row(head, b"error", refused.body)

    async def _answer(self, exchange: Exchange, rows: list[_Row]) -> None:
        """JSON, or with binary tensors in it the V2 form of that: their bytes follow, row by row."""
        spelled = [orjson.dumps(row.head)[:-1] + b',"' + row.key + b'":' + row.json + b"}" for row in rows]
        head = b'{"answers":[' + b",".join(spelled) + b"]}"
        body = b"".join((head, *(row.tail for row in rows)))
        lines = []
        if len(body) > len(head):
            lines.append((b"inference-header-content-length", b"%d" % len(head)))
        content_type = JSON if len(body) == len(head) else BINARY
        if b"accept-encoding" in exchange.headers and len(body) > WORTH_DEFLATING:
            body, coding = await self._codings.deflate(body, exchange.headers[b"accept-encoding"])
            if coding is not None:
                lines += [(b"content-encoding", coding), (b"vary", b"accept-encoding")]
        exchange.closing = self._backend.draining
        await exchange.reply(200, body, content_type, lines)


def _answered(label: str, served: Served) -> _Row:
    answer = served.answer
    end = len(answer.body) if answer.json_length is None else answer.json_length
    head = {"model": label, "status": 200, "found": served.found, "waited_ms": round(served.waited * 1e3, 3)}
    return _Row(head, b"answer", answer.body[:end], answer.body[end:])


def _models_of(text: bytes) -> dict[str, tuple[str, str | None]]:
    """Names and versions by what the request calls them. Raises `BadRequest`."""
    try:
        listed = _listed.decode(text).models
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"the JSON is no comparison: {error}") from None
    if len(set(listed)) != len(listed):
        raise BadRequest("models: one is listed twice")
    found = {}
    for label in listed:
        name, at, version = label.partition("@")
        found[label] = checked_name(name), checked_version(version if at else None)
    return found
