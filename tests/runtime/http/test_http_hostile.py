"""Hostile and broken HTTP against a real server, over raw sockets (F25-F34, F39, F43, F44)."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import sys
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from runtime.http.limits import Limits
from runtime.http.serve import make_server
from tests.runtime.http.fake import (
    FakeBackend,
    Reply,
    connect,
    front,
    read_reply,
    receive,
    request,
    served,
    talk,
    tensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime.http.incident import Incident

INFER = "/v2/models/echo/infer"
LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode()
SMALL = Limits(body=100_000, header_idle=0.2, body_idle=0.2, keep_alive=1)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """One server for all tests that leave nothing behind in it; that they do not is part of what they show."""
    with served(FakeBackend(), SMALL) as (number, _):
        yield number


def alive(port: int) -> bool:
    reply = talk(port, LIVE)
    return reply is not None and reply.status == 200


def refused(reply: Reply | None, *statuses: int) -> None:
    """An error object with one of these statuses."""
    assert reply is not None
    assert reply.status in statuses
    assert isinstance(reply.json()["error"], str)
    assert len(reply.json()["trace_id"]) == 32


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Peak of allocated bytes, the server's threads included."""
    tracemalloc.start()
    try:
        yield lambda: peaks[0]
    finally:
        peaks = [tracemalloc.get_traced_memory()[1]]
        tracemalloc.stop()


def chunked(*chunks: bytes) -> bytes:
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def test_bodies_over_the_limit_are_refused_and_cost_nothing(port: int):
    """F25: 413 by length and by chunks, a hundred times, and memory stays where it was."""
    refused(talk(port, request(INFER, bytes(100_001))), 413)
    with traced() as peak:
        for _ in range(50):
            refused(talk(port, request(INFER).replace(b"Length: 0", b"Length: 99999999999")), 413)
            refused(talk(port, chunked(*[bytes(30_000)] * 10)), 413)
    assert peak() < 4 << 20
    assert alive(port)


def test_a_refused_body_that_is_sent_anyway_leaves_the_connection_usable(port: int):
    """F25: a client that sends its whole body first still reads its 413, and may go on."""
    with connect(port) as sock:
        sock.sendall(request(INFER, bytes(150_000)) + LIVE)
        refused(read_reply(sock), 413)
        reply = read_reply(sock)
        assert reply is not None
        assert reply.status == 200


def test_a_million_tiny_chunks_end_at_the_cap():
    """F26: one-byte chunks are counted as the parser sees them; a second of CPU is not spent on them."""
    with served(FakeBackend()) as (port, _):
        text = chunked(*[b"1"] * 1_000_000)
        start = time.process_time()
        refused(talk(port, text), 413)
        assert time.process_time() - start < 2
        assert alive(port)


def test_a_compressed_bomb_is_refused(port: int):
    """F27: a hundred kilobytes at most come out of sixty, whatever is in there."""
    wire = request(INFER, gzip.compress(bytes(1 << 26)), "Content-Encoding: gzip")
    with traced() as peak:
        refused(talk(port, wire), 413)
    assert peak() < 4 << 20
    refused(talk(port, request(INFER, b"x", "Content-Encoding: zstd")), 415)


@pytest.mark.parametrize("value", ["-1", "x", "1000000", "", "1, 1"])
def test_a_header_length_that_cannot_be_is_refused(port: int, value: str):
    """F30."""
    refused(talk(port, request(INFER, tensor(1), f"Inference-Header-Content-Length: {value}")), 400)


@pytest.mark.parametrize("start", [b"", b"P", b"POST /v2", b"GET / HTTP/1.1\r\nHost: loc", b"\r\n"])
def test_silent_and_slow_headers_are_closed(port: int, start: bytes):
    """F32: a connection without a complete header ends after `header_idle`."""
    with connect(port) as sock:
        sock.sendall(start)
        began = time.monotonic()
        assert sock.recv(100) == b""
        assert 0.1 < time.monotonic() - began < 2


def test_dripping_does_not_buy_time(port: int):
    """F32: one header byte now and then is as good as silence."""
    with connect(port) as sock:
        sock.settimeout(0.05)
        sock.sendall(b"GET / HTTP/1.1\r\n")
        began = time.monotonic()
        ended = False
        while not ended and time.monotonic() - began < 2:
            try:
                sock.sendall(b"a")
                ended = sock.recv(100) == b""
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                ended = True
        assert ended


def test_dripping_after_an_answer_does_not_buy_time_either(port: int):
    """F32: line breaks between requests stop the keep-alive timer of the server beneath; ours still ends it."""
    with connect(port) as sock:
        sock.sendall(LIVE)
        assert read_reply(sock) is not None
        sock.sendall(b"\r\n")
        began = time.monotonic()
        assert sock.recv(100) == b""
        assert time.monotonic() - began < 2


def test_a_body_that_stands_still_gets_a_408(port: int):
    """F32: the client is told, and nothing waits for it for ever."""
    head = request(INFER, bytes(50))[:-30]
    refused(talk(port, head), 408)
    assert alive(port)


def test_healthy_requests_go_on_beside_slow_ones(port: int):
    """F32: two hundred slow clients hold nobody up, and all of them are gone in the end."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(port)) for _ in range(200)]
        for n, sock in enumerate(slow):
            sock.sendall((b"", b"GET /", request(INFER, bytes(50))[:-30])[n % 3])
        took = []
        for _ in range(20):
            began = time.monotonic()
            assert alive(port)
            took.append(time.monotonic() - began)
        assert sorted(took)[-3] < 0.2
        for sock in slow:
            while receive(sock):
                pass


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n", (431,)),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 50_000 + b"\r\n", (431,)),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 101 + b"\r\n", (431,)),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 33_000 + b"\r\n\r\n", (431,)),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (414,)),
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (414,)),
        (b"GET /livez?" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (414,)),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX" + b"a" * 3_000_000, (431, 400)),
    ],
)
def test_oversized_headers_and_urls_are_refused(port: int, text: bytes, statuses: tuple[int, ...]):
    """F33: 431 and 414 before they are all buffered; the client can read why."""
    refused(talk(port, text), *statuses)
    assert alive(port)


def test_a_body_that_breaks_off_into_rubbish_ends_its_request():
    """A chunk that cannot be parsed is 400, once, and the application behind it is released at the same moment."""
    incidents: list[Incident] = []
    noticed = threading.Event()

    def notify(incident: Incident) -> None:
        incidents.append(incident)
        noticed.set()

    with served(FakeBackend(), notify=notify) as (port, _), connect(port) as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        sock.sendall(b"rubbish\r\n")
        refused(read_reply(sock), 400)
        assert receive(sock) == b""
        assert noticed.wait(1)
    assert [incident.status for incident in incidents] == [499]


def test_an_answer_nobody_reads_is_dropped():
    """F41's cousin: a client that asks for megabytes and reads none of them does not keep them in memory."""
    given = {"name": "x", "datatype": "FP32", "shape": [4 << 20], "parameters": {"binary_data_size": 16 << 20}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    wire = request(INFER, head + bytes(16 << 20), f"Inference-Header-Content-Length: {len(head)}", "Connection: close")
    pause = threading.Event()
    with served(FakeBackend(), Limits(body_idle=0.2)) as (port, server), connect(port) as sock:
        sock.sendall(wire)
        deadline = time.monotonic() + 5
        while server.server_state.connections:
            assert time.monotonic() < deadline
            pause.wait(0.02)
        got = 0
        while part := receive(sock):
            got += len(part)
        assert got < 16 << 20


def test_endless_headers_cost_no_memory(port: int):
    """F33: forty megabytes of header, and the server keeps next to nothing of it."""
    with traced() as peak, connect(port) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
        part = b"a" * 65_536
        for _ in range(640):
            sock.sendall(part)
        refused(read_reply(sock), 431)
    assert peak() < 4 << 20


@pytest.mark.parametrize(
    "text",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"Content-Length: -5\r\n\r\nabcdef",
        POST + b"Content-Length: 5a\r\n\r\nabcdef",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nx\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"\0" * 100,
    ],
)
def test_ambiguous_and_broken_requests_are_refused(port: int, text: bytes):
    """F34: 400 with an error object, and the server lives."""
    refused(talk(port, text), 400)
    assert alive(port)


def test_an_absolute_target_is_judged_by_its_path_alone(port: int):
    """F34: what the URL says about host and scheme changes neither route nor authority."""
    reply = talk(port, b"GET http://evil.example/livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert reply is not None
    assert reply.status == 200
    refused(talk(port, b"GET http://localhost/livez HTTP/1.1\r\nHost: evil.example\r\n\r\n"), 400)


def test_no_file_is_opened_for_a_hostile_name(port: int):
    """F19: names that look like paths are refused without a look at the disk."""
    opened: list[object] = []
    watching = [True]

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in {"open", "os.listdir", "os.scandir"}:
            opened.append(arguments[0])

    names = [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "a/../b",
        "%00",
        "a%00",
        "%c3%a9",
        "e%cc%81",
        "m.%20",
        "x" * 4096,
    ]
    sys.addaudithook(audit)
    try:
        for name in [*names, "%252e%252e", "%", "%zz", "%ff", "~root", "C:%5cx"]:
            for path in (f"/v2/models/{name}/infer", f"/v2/repository/models/{name}/load"):
                refused(talk(port, request(path, b"")), 404, 400, 414)
    finally:
        watching.clear()
    assert opened == []


def test_every_url_with_every_verb_is_survived(port: int):
    """F44: odd verbs, fuzzed versions, upgrades: 4xx or 501, never a 5xx of ours, never the end."""
    urls = [
        "/",
        "*",
        "/v2",
        "/v2/models/echo/infer",
        "/v2/models/echo/versions/1e9/infer",
        "/metrics",
        "//",
        "/v2/models/%0a/ready",
    ]
    urls += [
        f"/v2/models/echo/versions/{version}/infer"
        for version in ("-1", "0x1", "1;2", "%00", "9" * 200, "1.2.3", "latest")
    ]
    verbs = [
        "GET",
        "POST",
        "PUT",
        "DELETE",
        "PATCH",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "PROPFIND",
        "M-SEARCH",
        "BREW",
        "get",
    ]
    for url in urls:
        for verb in verbs:
            reply = talk(port, request(url, b"", method=verb))
            assert reply is not None
            assert reply.status == 200 or 400 <= reply.status < 500 or reply.status == 501
    assert alive(port)


def test_an_upgrade_is_answered_as_a_plain_request(port: int):
    """F44: neither WebSocket nor h2c; the request is served as it stands."""
    for kind in ("websocket", "h2c"):
        lines = f"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: {kind}\r\nSec-WebSocket-Key: x\r\n"
        reply = talk(port, f"GET /livez HTTP/1.1\r\n{lines}\r\n".encode())
        assert reply is not None
        assert reply.status == 200


def test_requests_in_one_packet_are_answered_in_order(port: int):
    """Pipelining works, and a broken second request does not take the first one's answer."""
    with connect(port) as sock:
        sock.sendall(LIVE + request(INFER, tensor(1)) + LIVE)
        assert [(read_reply(sock) or Reply(0, {}, b"")).status for _ in range(3)] == [200, 200, 200]
        sock.sendall(LIVE + b"rubbish\r\n\r\n")
        assert (read_reply(sock) or Reply(0, {}, b"")).status == 200


def test_a_waiting_request_outlives_half_a_header_behind_it():
    """A slow second request must not cost the first one, which waits for its model, its answer."""
    backend = FakeBackend(hold=asyncio.Event())
    with served(backend, SMALL) as (port, _), connect(port) as sock:
        sock.sendall(request(INFER, tensor(1)) + b"GET /li")
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert backend.loop is not None
        assert backend.hold is not None
        backend.loop.call_soon_threadsafe(backend.hold.set)
        sock.settimeout(5)
        assert (read_reply(sock) or Reply(0, {}, b"")).status == 200


def test_a_client_that_hangs_up_is_noticed_within_a_second():
    """F35, F37: over a real socket the waiting call is cancelled."""
    backend = FakeBackend(hold=asyncio.Event())
    with served(backend) as (port, _):
        with connect(port) as sock:
            sock.sendall(request(INFER, tensor(1)))
            assert backend.reached.wait(5)
        deadline = time.monotonic() + 1
        while backend.cancelled == 0 and time.monotonic() < deadline:
            assert alive(port)
        assert backend.cancelled == 1


def test_connections_over_the_cap_are_told_so():
    """F39: one connection too many gets a 503 or 429 with Retry-After; the next one after that is served."""
    with served(FakeBackend(), Limits(connections=3)) as (port, _):
        with ExitStack() as stack:
            held = [stack.enter_context(connect(port)) for _ in range(3)]
            for sock in held:
                sock.sendall(LIVE)
                assert read_reply(sock) is not None
            reply = talk(port, b"")
            refused(reply, 429)
            assert reply is not None
            assert reply.headers["retry-after"] == "1"
        deadline = time.monotonic() + 2
        while not alive(port):
            assert time.monotonic() < deadline


def test_a_request_under_way_survives_the_stop():
    """F43: draining answers close their connection; a request accepted before the stop is answered after it."""
    backend = FakeBackend(hold=asyncio.Event(), draining=True)
    with served(backend) as (port, server), connect(port) as sock:
        with connect(port) as other:
            other.sendall(LIVE)
            reply = read_reply(other)
            assert reply is not None
            assert reply.headers["connection"] == "close"
            assert other.recv(1) == b""
        sock.sendall(request(INFER, tensor(1)))
        assert backend.reached.wait(5)
        server.should_exit = True
        sock.settimeout(0.4)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert backend.hold is not None
        backend.loop.call_soon_threadsafe(backend.hold.set)
        sock.settimeout(5)
        reply = read_reply(sock)
        assert reply is not None
        assert (reply.status, reply.headers["connection"]) == (200, "close")


async def test_requests_that_a_stop_abandons_are_told_so_and_cost_one_line(caplog: pytest.LogCaptureFixture):
    """F43: whoever still waits when the grace is over gets a 503, and the log only says how many they were."""
    backend = FakeBackend(hold=asyncio.Event())
    server = make_server(front(backend), host="127.0.0.1", port=0, graceful=1)
    sock = socket.create_server(("127.0.0.1", 0))
    task = asyncio.ensure_future(server.serve(sockets=[sock]))
    clients = [await asyncio.open_connection(*sock.getsockname()) for _ in range(3)]
    for _, writer in clients:
        writer.write(request(INFER, tensor(1)))
    while len(server.server_state.tasks) < 3:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    server.should_exit = True
    with caplog.at_level("WARNING"):
        await task
        for reader, writer in clients:
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            writer.close()
    assert [row.message for row in caplog.records] == ["Cancel 3 running task(s), timeout graceful shutdown exceeded"]


async def test_a_server_runs_in_its_owners_loop():
    """The assembly serves in a task of its own, learns the port, and stops it without a signal."""
    server = make_server(front(FakeBackend()), host="127.0.0.1", port=0)
    assert server.addresses == ()
    sock = socket.create_server(("127.0.0.1", 0))
    address = sock.getsockname()
    task = asyncio.ensure_future(server.serve(sockets=[sock]))
    reader, writer = await asyncio.open_connection(*address)
    writer.write(LIVE)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert server.addresses == (address,)
    writer.close()
    await writer.wait_closed()
    server.should_exit = True
    await task
