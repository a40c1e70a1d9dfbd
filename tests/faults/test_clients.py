"""Clients that leave, that ask for what is not there, and that send nonsense, against a running server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest

from tests.e2e import shelf
from tests.e2e.live import HOST, rows, serving, sleepy
from tests.e2e.memory import pss, slope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.live import Live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server for the module, for a start takes seconds; each test has a model of its own."""
    folder = tmp_path_factory.mktemp("clients")
    for at, name in enumerate(("steady", "busy", "flooded")):
        shelf.put(folder / "models", name, seed=at)
    for at, name in enumerate(("left", "shared", "crowd")):
        shelf.put(folder / "models", name, seed=10 + at, factory="late", seconds=2)
    with serving(folder) as running:
        running.infer("steady")
        yield running


def begin(live: Live, model: str, body: bytes) -> socket.socket:
    """Send a whole request and do not wait for its answer."""
    connection = socket.create_connection((HOST, live.port))
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def idle(live: Live) -> bool:
    """No lease and nobody waiting on the device."""
    device = live.device()
    return (device["leases"], device["waiting"]) == (0, 0)


def test_a_client_that_leaves_while_its_model_loads_gives_its_place_up(live: Live) -> None:
    """F35: within a second nobody waits; nobody else wanted the load, so it is given up and its bytes are back."""
    leaving = begin(live, "left", rows(1, 1, 1))
    live.until(lambda: live.device()["waiting"] == 1, "waiting")
    leaving.close()
    live.until(lambda: idle(live), "gone within a second", 1.0)
    live.until(lambda: live.device()["loading"] == 0 and "left" not in live.residents(), "bytes back", 5)
    assert not [line for line in live.said("load failed") if line["model"] == "left@1"], "it did not fail"
    assert live.infer("left").status == 200, "and it can be asked for again at once"


def test_a_client_that_leaves_a_shared_load_takes_nobody_along(live: Live) -> None:
    """F35: two wait, one leaves: the load goes on for the other, and is one load."""
    leaving = begin(live, "shared", rows(1, 1, 1))
    staying = begin(live, "shared", rows(1, 1, 1))
    live.until(lambda: live.device()["waiting"] == 2, "waiting")
    leaving.close()
    live.until(lambda: live.device()["waiting"] == 1, "one left", 1.0)
    staying.settimeout(20)
    assert staying.recv(64).startswith(b"HTTP/1.1 200")
    staying.close()
    live.until(lambda: idle(live), "idle")
    loads = [line for line in live.said("loaded") if (line["model"], line["device"]) == ("shared@1", "cpu:0")]
    assert len(loads) == 1


def test_a_crowd_that_leaves_together_leaves_nothing(live: Live) -> None:
    """F36: 100 waiters give up at once and others come for the same model right after: one live load, all served."""
    crowd = [begin(live, "crowd", rows(1, 1, 1)) for _ in range(100)]
    live.until(lambda: live.device()["waiting"] == 100, "waiting", 10)
    for each in crowd:
        each.close()
    again = [begin(live, "crowd", rows(1, 1, 1)) for _ in range(5)]
    for each in again:
        each.settimeout(20)
        assert each.recv(64).startswith(b"HTTP/1.1 200")
        each.close()
    live.until(lambda: idle(live), "idle")
    assert len(live.members()) == 3


def test_a_client_that_leaves_during_inference_gives_its_lease_back(live: Live) -> None:
    """F37: a forward can't be stopped, and keeps its model in place until it ends; then nothing is left of the request.

    Those queued behind it that leave too never run: three of two seconds each would take six.
    """
    assert live.infer("busy").status == 200
    leaving = [begin(live, "busy", sleepy(2)) for _ in range(3)]
    live.until(lambda: live.device()["leases"] == 3, "the leases")
    for each in leaving:
        each.close()
    live.until(lambda: idle(live), "leases given back", 3.5)
    assert live.infer("busy").status == 200


def test_the_callers_deadline_is_kept_during_a_forward_too(live: Live) -> None:
    """Protocol section 5: 504 when the caller's own deadline passes, not when the forward is done with."""
    assert live.infer("busy").status == 200
    timed = json.loads(sleepy(2)) | {"parameters": {"timeout": 300_000}}
    said = live.infer("busy", json.dumps(timed).encode())
    assert (said.status, said.json["code"]) == (504, "deadline_exceeded")
    assert said.seconds < 1.5


def test_a_client_that_left_is_not_a_failure_in_the_log(live: Live) -> None:
    """Leaving is the caller's affair (499): no warning that something of ours failed."""
    leaving = begin(live, "steady", sleepy(1))
    live.until(lambda: live.device()["leases"] == 1, "the lease")
    leaving.close()
    live.until(lambda: idle(live), "gone")
    assert not [line for line in live.said("request failed") if line["outcome"] == "cancelled"]


def test_a_flood_of_unknown_names_leaves_metrics_and_memory_flat(live: Live) -> None:
    """F40: 5,000 names that nobody has: 404 each, no label, no series, no memory, and known models are served."""

    def series() -> int:
        page = live.get("/metrics").body.decode()
        assert "flood-" not in page
        return sum(not line.startswith("#") for line in page.splitlines())

    def flood(start: int, count: int) -> None:
        connection = HTTPConnection(HOST, live.port, timeout=20)
        body = rows(1, 1, 1)
        for at in range(start, start + count):
            connection.request("POST", f"/v2/models/flood-{at}/infer", body)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 404, content
            assert json.loads(content)["code"] == "unknown_model"
        connection.close()

    flood(0, 1_000)
    series()
    lines = series()
    sizes = []
    for start in range(1_000, 5_000, 500):
        flood(start, 500)
        sizes.append((start, pss(live.process.pid)))
    assert series() == lines
    assert slope(sizes) < 0.2, f"kilobytes per unknown name: {sizes}"
    assert "flood-" not in json.dumps(live.state())
    assert live.infer("flooded").status == 200


def test_nonsense_of_every_kind_is_4xx_and_the_server_lives(live: Live) -> None:
    """F25-F34, F44: raw sockets with rubbish, broken framing, odd verbs: 4xx or closed; then it still serves."""
    requests = [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v2/models/steady/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v2/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2/models/%00/ready HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"DELETE /v2/models/steady HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PATCH /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2/" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
        b"POST /v2/models/steady/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    ]
    for request in requests:
        with socket.create_connection((HOST, live.port), timeout=10) as connection:
            connection.sendall(request)
            connection.settimeout(10)
            try:
                answer = connection.recv(4_096)
            except ConnectionResetError:
                answer = b""
            assert not answer or answer.split(b" ")[1][:1] == b"4", (request[:60], answer[:80])
    for body in (b"{", b"[" * 100_000, b'{"inputs": 3}', b'{"inputs":[{"name":"x","shape":[1,3],"data":[NaN,1,1]}]}'):
        said = live.infer("steady", body)
        assert said.status == 400, (body[:40], said.body)
        assert said.json["trace_id"]
    assert live.infer("steady").status == 200
    assert live.process.poll() is None
    assert not [line for line in live.lines() if isinstance(line, dict) and line.get("level") == "error"]


async def test_many_slow_connections_do_not_starve_a_good_client(live: Live) -> None:
    """F32: 200 connections that send a line and stop: a healthy client is answered meanwhile."""

    async def stall() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(HOST, live.port)
        writer.write(b"POST /v2/models/steady/infer HTTP/1.1\r\n")
        await writer.drain()
        return writer

    stalled = await asyncio.gather(*(stall() for _ in range(200)))
    began = time.monotonic()
    for _ in range(20):
        assert (await asyncio.to_thread(live.infer, "steady")).status == 200
    assert time.monotonic() - began < 5
    for writer in stalled:
        writer.close()
