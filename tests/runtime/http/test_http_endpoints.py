"""Everything but infer, over ASGI with httpx: bodies, statuses, verbs."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from actors.errors import LoadFailed, NeverFits
from runtime.http.endpoint import dumped
from runtime.http.limits import Limits
from runtime.http.port import Verdict
from runtime.workers.port import Timings
from tests.runtime.http.fake import FakeBackend, front, get, post

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from runtime.http.incident import Incident

LOAD = "/v2/repository/models/cold/load"
UNLOAD = "/v2/repository/models/echo/unload"


@asynccontextmanager
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(front(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", {"live": True}),
        ("/livez", {"live": True}),
        ("/healthz", {"live": True}),
        ("/health", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/readyz", {"ready": True}),
        ("/v2/models/echo/ready", {"name": "echo", "ready": True, "state": "resident", "tier": "host"}),
        ("/v2/models/echo/versions/1/ready", {"name": "echo", "ready": True, "state": "resident", "tier": "host"}),
    ],
)
async def test_a_healthy_probe_answers_200_with_the_protocols_body(path: str, body: dict[str, object]):
    """Protocol, section 1: 200 with the OIP body, uncached; a model's verdict adds state and tier."""
    extra = {"state": "resident", "tier": "host"} if "models" in path else None
    async with client(FakeBackend(verdict=Verdict(ok=True, extra=extra))) as http:
        reply = await http.get(path)
        assert (reply.status_code, reply.json()) == (200, body)
        assert reply.headers["cache-control"] == "no-store"
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == reply.headers["content-length"]


@pytest.mark.parametrize("path", ["/v2/health/live", "/livez", "/readyz", "/v2/health/ready", "/v2/models/echo/ready"])
async def test_an_unhealthy_probe_answers_503_with_the_reason(path: str):
    """P10: 503 and an error object, with Retry-After and the numbers."""
    verdict = Verdict(ok=False, reason="still loading", retry_after=4.5, extra={"state": "loading", "steps": [1]})
    async with client(FakeBackend(verdict=verdict)) as http:
        reply = await http.get(path)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    body = reply.json()
    assert (body["error"], body["code"], body["detail"]) == ("still loading", "not_ready", {"state": "loading"})


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v2/models/echo/ready"])
async def test_a_probe_that_breaks_is_a_no(path: str):
    """Protocol, section 6: probes never throw; the log learns why."""
    incidents: list[Incident] = []
    bug = ZeroDivisionError("secret")
    reply = await get(front(FakeBackend(raises=bug), notify=incidents.append), path)
    assert reply.status == 503
    assert b"secret" not in reply.body
    assert [incident.cause for incident in incidents] == [bug]


@pytest.mark.parametrize(
    ("query", "strict"), [(b"", None), (b"strict=true", True), (b"strict=1", True), (b"strict=false", False)]
)
async def test_strict_is_a_question_for_one_call(query: bytes, *, strict: bool | None):
    """Protocol, section 6: the query parameter overrides the server's setting."""
    backend = FakeBackend()
    assert (await get(front(backend), "/v2/models/echo/ready", query)).status == 200
    assert backend.strict == [strict]


@pytest.mark.parametrize(
    "query", [b"strict=", b"strict=yes", b"strict=true&strict=false", b"strict=%ff", b"strict=\xff"]
)
async def test_a_strict_that_is_neither_is_refused(query: bytes):
    """400 naming the parameter, never a guess."""
    assert (await get(front(FakeBackend()), "/v2/models/echo/ready", query)).status == 400


async def test_metadata_has_the_protocols_form():
    """Protocol, section 2: names, versions, platform and tensors; the key is spelled `extensions`."""
    async with client(FakeBackend()) as http:
        assert (await http.get("/v2")).json()["extensions"] == ["binary_tensor_data", "model_repository"]
        body = (await http.get("/v2/models/echo")).json()
        assert body == (await http.get("/v2/models/echo/versions/2")).json()
    tensor = {"datatype": "FP32", "shape": [-1, 4]}
    assert body == {
        "name": "echo",
        "versions": ["1", "2"],
        "platform": "pytorch_safetensors",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
    }


@pytest.mark.parametrize("path", ["", "/versions/1", "/ready", "/stats", "/versions/1/stats"])
async def test_an_unknown_model_is_404_everywhere(path: str):
    """P5: one rule for metadata, ready and stats."""
    async with client(FakeBackend()) as http:
        reply = await http.get(f"/v2/models/none{path}")
        assert (reply.status_code, reply.json()["code"], reply.json()["model"]) == (404, "unknown_model", "none")
        assert (await http.get("/v2/models/echo/versions/9")).status_code == 404


@pytest.mark.parametrize("name", ["none", "..", "a\0b", "x" * 4096])
@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_an_unknown_model_cannot_be_loaded(verb: str, name: str):
    """P5, F19: 404 where Triton says 500 or 200."""
    backend = FakeBackend()
    assert (await post(front(backend), f"/v2/repository/models/{name}/{verb}", b"")).status == 404
    assert backend.orders == []


@pytest.mark.parametrize("body", [b"", b"{}", b" \n", b'{"ready":false}'])
async def test_the_index_lists_every_version(body: bytes):
    """Protocol, section 7: an empty body is accepted; a model never loaded appears with its name only."""
    reply = await post(front(FakeBackend()), "/v2/repository/index", body)
    assert reply.json() == [
        {"name": "echo", "version": "1", "state": "READY"},
        {"name": "cold", "version": "1", "state": "UNAVAILABLE"},
        {"name": "unseen"},
    ]


async def test_the_index_can_be_limited_to_ready_models():
    """Protocol, section 7."""
    reply = await post(front(FakeBackend()), "/v2/repository/index", b'{"ready":true}')
    assert [row["name"] for row in reply.json()] == ["echo"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"ready":1}',
        b'{"ready":"true"}',
        b'{"ready":null}',
        b"[]",
        b"true",
        b"{",
        b"{}{}",
        b'{"redy":true}',
        b'{"ready":true,"ready":false}',
        b'{"ready":NaN}',
        b'{"ready":' + b"[" * 100_000,
        b'{"\xed\xa0\x80":1}',
        b"\xff",
    ],
)
async def test_a_malformed_index_body_is_refused(body: bytes):
    """F28: 400 whatever is wrong with it."""
    reply = await post(front(FakeBackend()), "/v2/repository/index", body)
    assert (reply.status, reply.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    ("path", "body", "order"),
    [
        (LOAD, b"", ("load", "cold", {})),
        (LOAD, b"{}", ("load", "cold", {})),
        (
            LOAD,
            b'{"parameters":{"version":"2","pin":true,"priority":3}}',
            ("load", "cold", {"version": "2", "pin": True, "priority": 3}),
        ),
        (UNLOAD, b"", ("unload", "echo", {})),
        (UNLOAD, b'{"parameters":{"unload_dependents":false}}', ("unload", "echo", {"unload_dependents": False})),
    ],
)
async def test_load_and_unload_answer_with_an_empty_body(path: str, body: bytes, order: object):
    """Protocol, section 7: 200, nothing in it, parameters passed on as they are."""
    backend = FakeBackend()
    reply = await post(front(backend), path, body)
    assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", "0")
    assert backend.orders == [order]


@pytest.mark.parametrize(
    "body",
    [
        b'{"parameters":[]}',
        b'{"parameters":{"pin":[1]}}',
        b'{"parameters":{"pin":{"a":1}}}',
        b'{"parameters":{"pin":null}}',
        b'{"parameters":{"pin":1e999}}',
        b'{"parameters":{"bogus":1}}',
        b'{"params":{}}',
        b'{"parameters":{"pin":true,"pin":false}}',
        b'{"parameters":{"priority":' + b"9" * 5000 + b"}}",
        b'{"parameters":{"version":"\\ud800"}}',
        b'{"parameters":' + b'{"a":' * 100_000,
    ],
)
async def test_a_malformed_load_is_refused(body: bytes):
    """P12, F28: nested, unknown, repeated or oversized parameters are the caller's mistake."""
    backend = FakeBackend()
    reply = await post(front(backend), LOAD, body)
    assert (reply.status, backend.orders) == (400, [])


async def test_a_repository_body_has_a_limit_of_its_own():
    """S9: an order is small; the tensor limit does not apply to it."""
    reply = await post(front(FakeBackend(), Limits(small_body=10)), LOAD, b"{" + b" " * 20 + b"}")
    assert reply.status == 413


@pytest.mark.parametrize(
    ("error", "status"), [(LoadFailed("no", model="cold"), 503), (NeverFits("big", detail={"need": 9}), 507)]
)
async def test_a_load_that_cannot_be_says_why(error: Exception, status: int):
    """Protocol, section 5."""
    assert (await post(front(FakeBackend(raises=error)), LOAD, b"")).status == status


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/other/index",
        "/v2/repository/other/models/echo/load",
        "/v2/models/echo/config",
        "/v2/models/echo/versions/1/config",
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/cudasharedmemory/unregister",
        "/v2/trace/setting",
        "/v2/models/echo/trace/setting",
        "/v2/logging",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_extensions_we_lack_are_501(path: str, method: str):
    """Protocol, section 1: not 404, so that a client can tell missing from mistyped."""
    reply = await get(front(FakeBackend()), path, method=method)
    assert (reply.status, reply.json()["code"]) == (501, "unsupported")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/v2/",
        "/v1/models",
        "/v2/models",
        "/v2/models/",
        "/v2/models/echo/",
        "/v2/models/echo/x",
        "/v2/repository/models/echo",
        "/v2/models/../../etc/passwd",
        "/v2/models/a\0b",
        "/v2/models/..",
        "/v2/models/a\nb/ready",
        "/v2/models/é",
        "/V2",
        "//v2",
        "/v2/repository/models/echo/delete",
        "/v2/models/" + "x" * 4096,
        "/v2/models/\udcff",
    ],
)
async def test_any_other_path_is_404(path: str):
    """F19, F44: unknown paths and names that cannot be are 404 with an error object."""
    reply = await get(front(FakeBackend()), path)
    assert reply.status == 404
    assert isinstance(reply.json()["error"], str)


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/v2", "GET, HEAD"), ("/v2/health/live", "GET, HEAD"), ("/v2/repository/index", "POST"), (LOAD, "POST")],
)
@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "BREW", "PATCH"])
async def test_a_wrong_verb_is_405_with_the_right_ones(path: str, allow: str, method: str):
    """Protocol, section 5: 405 with `Allow` and an error object."""
    reply = await get(front(FakeBackend()), path, method=method)
    assert (reply.status, reply.headers["allow"], reply.json()["code"]) == (405, allow, "method_not_allowed")


async def test_statistics_and_state_are_passed_on():
    """What a backend reports reaches the client, numpy numbers and sets included."""
    async with client(FakeBackend()) as http:
        assert len((await http.get("/v2/models/stats")).json()["model_stats"]) == 2
        assert (await http.get("/v2/models/echo/stats")).json() == {"model_stats": [{"name": "echo"}]}
        assert (await http.get("/api/v1/state")).json() == {"devices": {"cpu:0": {"used": 5}}, "pins": ["echo"]}


def test_structs_are_dumped_and_strangers_are_not():
    """What is no JSON raises, and so becomes a 500 that is logged, not half an answer."""
    assert json.loads(dumped({"t": Timings(queue=1)}))["t"]["queue"] == 1
    with pytest.raises(TypeError):
        dumped({"x": object()})


async def test_metrics_come_in_the_format_that_was_asked_for():
    """Content negotiation between Prometheus text and OpenMetrics."""
    app = front(FakeBackend())
    assert (await get(app, "/metrics")).headers["content-type"].startswith("text/plain")
    asked = await get(app, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert asked.headers["content-type"].startswith("application/openmetrics-text")


async def test_a_websocket_is_turned_away():
    """Nothing here speaks it."""
    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    await front(FakeBackend())({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1000}]
