"""Keys, scopes and the cross-site rule, on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.routing import Route

from runtime.http.auth import Key, Scope, new_token
from tests.runtime.http.fake import FakeBackend, front, get, post, tensor

if TYPE_CHECKING:
    from runtime.http.app import Front

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


def ring(*scopes: str) -> tuple[Key, str]:
    token, hashed = new_token()
    return Key("tester", hashed, scopes), f"Bearer {token}"


def paths(app: Front) -> list[str]:
    """Every route of the app as a path that matches it, infer and unknown paths included."""
    listed = [route.path for route in app.router.routes if isinstance(route, Route)]
    assert len(listed) == len(app.router.routes)
    filled = [path.replace("{m}", "echo").replace("{v}", "1").replace("{repository}", "other") for path in listed]
    assert len(filled) > 20
    more = ["/v2/models/echo/infer", "/v2/models/echo/versions/1/infer", "/nowhere", "/"]
    return [path.replace("{rest:path}", "x/y") for path in filled] + more


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic abc", "bearer\twrong", "Bearer é"]
)
async def test_no_route_answers_without_a_valid_key(header: str | None):
    """S2: every route, every verb, 401; a forgotten one would fail here."""
    key, _ = ring("infer", "read", "admin")
    backend = FakeBackend()
    app = front(backend, keys=(key,))
    headers = {} if header is None else {"authorization": header}
    for path in paths(app):
        for verb in VERBS:
            reply = await get(app, path, method=verb, **headers)
            assert (reply.status, path, verb) == (401, path, verb)
            assert reply.headers["www-authenticate"] == "Bearer"
    assert backend.asked == []
    assert backend.orders == []


async def test_a_key_without_scopes_reaches_nothing_but_probes():
    """S2: deny by default; a valid key alone opens the probes, and 404, 405 and 501 tell it nothing."""
    key, bearer = ring()
    app = front(FakeBackend(), keys=(key,))
    opened = set()
    for path in paths(app):
        for verb in VERBS:
            reply = await get(app, path, method=verb, authorization=bearer)
            assert reply.status in {200, 403, 404, 405, 501}
            if reply.status == 200:
                opened.add(path)
    assert all(path.endswith(("/ready", "/live", "z", "/health")) for path in opened)


@pytest.mark.parametrize(
    ("scope", "reads", "loads", "infers"),
    [
        ("read", 200, 403, 403),
        ("admin", 200, 200, 403),
        ("infer", 403, 403, 200),
        ("infer:ec*", 403, 403, 200),
        ("infer:x", 403, 403, 403),
    ],
)
async def test_each_scope_opens_its_own_doors(scope: str, reads: int, loads: int, infers: int):
    """S2, S3: `admin` includes `read`, nothing includes `infer`, globs are by model name."""
    key, bearer = ring(scope)
    app = front(FakeBackend(), keys=(ring("admin", "infer")[0], key))
    assert (await get(app, "/v2/models/echo", authorization=bearer)).status == reads
    assert (await post(app, "/v2/repository/index", b"", authorization=bearer)).status == reads
    assert (await post(app, "/v2/repository/models/echo/load", b"", authorization=bearer)).status == loads
    assert (await post(app, "/v2/models/echo/infer", tensor(1), authorization=bearer)).status == infers


async def test_without_keys_nobody_is_asked():
    """S1: on a loopback address none are needed."""
    assert (await get(front(FakeBackend()), "/v2")).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://localhost:1"},
        {"origin": ""},
    ],
)
async def test_no_unsafe_verb_works_from_another_site(headers: dict[str, str]):
    """S3: a hostile page in an operator's browser changes nothing, whatever the verb and path."""
    backend = FakeBackend()
    app = front(backend)
    for path in paths(app):
        for verb in VERBS[2:]:
            assert (await get(app, path, method=verb, **headers)).status == 403
    assert backend.orders == []
    assert backend.asked == []
    assert (await get(app, "/livez", **headers)).status == 200


@pytest.mark.parametrize(
    "headers", [{"sec_fetch_site": "same-origin", "origin": "http://localhost"}, {"sec_fetch_site": "none"}]
)
async def test_our_own_pages_may_change_things(headers: dict[str, str]):
    """S3: same origin passes."""
    assert (await post(front(FakeBackend()), "/v2/repository/models/echo/load", b"", **headers)).status == 200


@pytest.mark.parametrize(
    ("hashed", "scopes"), [("md5:1", ()), ("sha256:" + "g" * 64, ()), ("plain", ()), ("sha256:" + "a" * 64, ("root",))]
)
def test_a_key_that_cannot_work_is_refused_at_the_start(hashed: str, scopes: tuple[str, ...]):
    """A typing mistake in a key must not become an open or a dead door."""
    with pytest.raises(ValueError, match="tester"):
        Key("tester", hashed, scopes)


def test_tokens_are_long_and_never_kept():
    """S2, S10: 256 random bits; neither the key nor its text form shows hash or token."""
    token, hashed = new_token()
    assert len(token) >= 43
    assert token != new_token()[0]
    shown = repr(Key("k", hashed, ("read",)))
    assert token not in shown
    assert hashed not in shown


def test_any_key_has_the_scope_of_probes():
    """`ANY` asks for a valid key and nothing else."""
    assert ring()[0].allows(Scope.ANY)
