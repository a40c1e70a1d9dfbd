"""Limits, Host, names and identifiers: what is decided from the ASGI scope alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import BadRequest, HeadersTooLarge, NotFound, UnknownModel, UriTooLong
from runtime.http.identity import request_id_of, trace_of, traceparent_of, tracestate_of
from runtime.http.limits import Hosts, Limits, headers_of
from runtime.http.paths import checked_version, infer_target

LIMITS = Limits(headers=100, header_count=5, url=50)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def scope(*headers: tuple[bytes, bytes], path: str = "/v2", query: bytes = b"") -> dict[str, object]:
    return {"headers": list(headers), "path": path, "raw_path": path.encode(), "query_string": query}


def test_a_request_at_each_limit_passes():
    """Limits are inclusive: the last allowed byte is allowed."""
    headers = headers_of(scope((b"a", b"b" * 99), path="/" * 40, query=b"q" * 10), LIMITS)
    assert headers == {b"a": b"b" * 99}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (scope(path="/" * 51), UriTooLong),
        (scope(query=b"q" * 49), UriTooLong),
        (scope((b"a", b"b" * 100)), HeadersTooLarge),
        (scope(*((b"%d" % n, b"") for n in range(6))), HeadersTooLarge),
        (scope(*((b"same", b"") for _ in range(6))), HeadersTooLarge),
        (scope(*((b"same", b"x" * 30) for _ in range(4))), HeadersTooLarge),
        (scope((b"transfer-encoding", b"gzip, chunked")), BadRequest),
    ],
)
def test_one_more_is_refused(bad: dict[str, object], error: type[Exception]):
    """F33: URL, header bytes and header count have a limit each."""
    with pytest.raises(error):
        headers_of(bad, LIMITS)


@pytest.mark.parametrize("name", ["host", "content-length", "authorization", "inference-header-content-length"])
def test_a_header_that_two_readers_could_read_differently_is_refused(name: str):
    """F34: a repeated singleton is 400 and the message names it."""
    line = (name.encode(), b"1")
    with pytest.raises(BadRequest, match=name):
        headers_of(scope(line, line), LIMITS)


def test_lists_sent_in_several_lines_are_joined():
    """RFC 9110: `accept-encoding` in two lines means the same as in one."""
    found = headers_of(scope((b"accept-encoding", b"gzip"), (b"accept-encoding", b"deflate")), LIMITS)
    assert found[b"accept-encoding"] == b"gzip, deflate"


@pytest.mark.parametrize("field", ["body", "headers", "header_count", "url", "chunks", "body_idle", "connections"])
def test_a_limit_that_would_refuse_everything_is_not_accepted(field: str):
    """A limit of zero is a mistake, and the message names it."""
    with pytest.raises(ValueError, match=f"limits.{field}"):
        Limits(**{field: 0})


@pytest.mark.parametrize(
    "value", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:80", "a.example.com", "x.y.example.com"]
)
def test_trusted_hosts_pass(value: str):
    """Names match exactly or by `*.` suffix, in any case, with or without a port; twice in a row as well."""
    hosts = Hosts(("localhost", "127.0.0.1", "[::1]", "*.example.com"))
    for _ in range(2):
        hosts.check({b"host": value.encode()}, "1.1")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "evil.com",
        "example.com",
        "notexample.com",
        "localhost@evil.com",
        "a b",
        "localhost:",
        "localhost:99999999",
        "[::1",
        "é",
    ],
)
def test_other_hosts_are_refused(value: str):
    """S1, F34: a malformed or foreign Host is 400, which ends DNS rebinding."""
    with pytest.raises(BadRequest, match="host"):
        Hosts(("localhost", "*.example.com")).check({b"host": value.encode("latin-1")}, "1.1")


def test_a_missing_host_is_only_allowed_where_http_allows_it():
    """F34: HTTP/1.1 needs Host; a health check by HTTP/1.0 may come without."""
    hosts = Hosts(("*",))
    hosts.check({}, "1.0")
    with pytest.raises(BadRequest, match="missing"):
        hosts.check({}, "1.1")


def test_trusting_nobody_refuses_everybody():
    """An empty list is not a wildcard."""
    with pytest.raises(BadRequest):
        Hosts(()).check({b"host": b"localhost"}, "1.1")


@pytest.mark.parametrize("pattern", ["a*", "*a.com", "*.*.com", "a.*"])
def test_a_pattern_that_means_nothing_is_refused_at_the_start(pattern: str):
    """Wildcards stand for whole leading labels only."""
    with pytest.raises(ValueError, match="trusted host"):
        Hosts((pattern,))


def test_many_different_hosts_leave_nothing_behind():
    """F40: what is remembered about hosts is bounded."""
    hosts = Hosts(("*",))
    for n in range(1000):
        hosts.check({b"host": b"h%d" % n}, "1.1")
    assert len(hosts._known) <= 64


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v2/models/m/infer", ("m", None)),
        ("/v2/models/M.n-o_1/infer", ("M.n-o_1", None)),
        ("/v2/models/m/versions/1/infer", ("m", "1")),
        ("/v2/models/m/versions/1.2-rc/infer", ("m", "1.2-rc")),
        ("/v2/models/infer/infer", ("infer", None)),
        ("/v2/models/infer", None),
        ("/v2/models/m", None),
        ("/v2/health/live", None),
        ("/v3/models/m/infer", None),
    ],
)
def test_infer_paths_are_told_from_others(path: str, target: object):
    """A prefix and a suffix find the hot path; a model may be called `infer`."""
    assert infer_target(path) == target


@pytest.mark.parametrize(
    "name",
    [
        "..",
        " .. ",
        "a/../b",
        "../..",
        "%2e%2e",
        "a\0b",
        "a" * 129,
        "\u00e9",
        "e\u0301",
        ".hidden",
        "-x",
        "_x",
        "a b",
        "a\n",
        "m//x",
        "x" * 4096,
        "m/versions/",
        "m/versions/1/2",
        "m/version/1",
        "CON ",
        "a\\b",
        "m:1",
        "m@1",
        "{m}",
        "\ud800",
    ],
)
def test_no_other_name_reaches_the_backend(name: str):
    """F19: a name that is not one never gets past the pattern; it is a plain 404."""
    with pytest.raises((UnknownModel, NotFound)):
        infer_target(f"/v2/models/{name}/infer")


@given(st.text(max_size=40))
def test_whatever_the_name_there_is_an_answer(name: str):
    """F19, F44: any text between prefix and suffix is a target that fits the pattern, or a 404."""
    try:
        target = infer_target(f"/v2/models/{name}/infer")
    except (UnknownModel, NotFound):
        return
    if target is not None:
        assert target[0].isascii()
        assert "/" not in target[0]


def test_versions_follow_the_same_pattern():
    """F44: a fuzzed version is a 404, no version is the server's choice."""
    assert checked_version(None) is None
    with pytest.raises(UnknownModel):
        checked_version("1;drop")


@pytest.mark.parametrize("given_id", [None, b"", b"a b", b"x" * 129, b"\xff", b"a\r\nset-cookie: x"])
def test_a_request_id_without_hygiene_is_replaced(given_id: bytes | None):
    """At most 128 visible ASCII characters; anything else gets a fresh id in the form of a trace id."""
    fresh = request_id_of(given_id)
    assert len(fresh) == 32
    assert fresh == trace_of(fresh, "")
    assert fresh != request_id_of(given_id)


def test_a_decent_request_id_is_kept():
    """The caller's own id goes through, and its trace id is the same each time."""
    assert request_id_of(b"job-7/a") == "job-7/a"
    assert trace_of("job-7/a", "") == trace_of("job-7/a", "")
    assert len(trace_of("job-7/a", "")) == 32


def test_the_callers_trace_wins():
    """W3C trace context: the trace id of `traceparent` is the one in answers and errors."""
    assert traceparent_of(PARENT.encode()) == PARENT
    assert trace_of("anything", PARENT) == TRACE
    assert tracestate_of(b"vendor=1,other=2") == "vendor=1,other=2"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"00-xyz",
        PARENT.upper().encode(),
        f"ff{PARENT[2:]}".encode(),
        f"{PARENT}, {PARENT}".encode(),
        b"\xff" * 55,
        f"00-{'0' * 32}-00f067aa0ba902b7-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
    ],
)
def test_a_malformed_traceparent_is_no_traceparent(value: bytes | None):
    """The standard asks to ignore it rather than to fail."""
    assert traceparent_of(value) == ""


@pytest.mark.parametrize("value", [None, b"", b"x" * 513, b"\x00", b"\xe9"])
def test_a_malformed_tracestate_is_dropped(value: bytes | None):
    """It is only passed on, so only hygiene counts."""
    assert tracestate_of(value) == ""
