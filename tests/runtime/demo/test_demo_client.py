"""The tour's client against the server's own codec, over a real socket."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import numpy as np
import pytest

from runtime.demo.client import Client, Declined, timings
from runtime.demo.tour import found_on
from runtime.worker.codec import Codec
from runtime.workers.port import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPECS = (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("ids", "INT64", (-1,)))
INPUTS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3) / 7, "ids": np.array([-1, 2**40], np.int64)}


class Peer(BaseHTTPRequestHandler):
    """Answers with what `answer` makes of a body: status, headers, body."""

    answer: Callable[[bytes, str | None], tuple[int, dict[str, str], bytes]]

    def do_GET(self) -> None:
        self._send()

    def do_POST(self) -> None:
        self._send()

    def _send(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, headers, answer = type(self).answer(body, self.headers.get("inference-header-content-length"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def peer(answer: Callable[[bytes, str | None], tuple[int, dict[str, str], bytes]]) -> Iterator[Client]:
    """Run a server for one test and give a client of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("P", (Peer,), {"answer": staticmethod(answer)}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Client("127.0.0.1", server.server_port, timeout=5)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def echo(body: bytes, length: str | None) -> tuple[int, dict[str, str], bytes]:
    """Give the inputs back as outputs, read and written by the worker's codec."""
    codec = Codec("echo@1", SPECS, SPECS)
    request = codec.decode(body, None if length is None else int(length))
    answer, head = codec.encode(request, request.inputs)
    return 200, {} if head is None else {"Inference-Header-Content-Length": str(head)}, answer


@pytest.mark.parametrize("encoding", ["binary", "json"])
def test_tensors_travel_both_ways_unchanged(encoding: str) -> None:
    """What the client sends, the worker's codec reads, and back, in either encoding."""
    with peer(echo) as client:
        reply = client.infer("echo", INPUTS, binary=encoding == "binary")
    assert list(reply.outputs) == ["x", "ids"]
    for name, array in INPUTS.items():
        assert reply.outputs[name].dtype == array.dtype
        assert np.array_equal(reply.outputs[name], array)
    assert ("inference-header-content-length" in reply.headers) is (encoding == "binary")


def test_a_refusal_is_told_in_the_servers_words() -> None:
    """Status and sentence of an error reach the row."""
    body = json.dumps({"error": "no such model 'x'", "code": "unknown_model"}).encode()
    with peer(lambda *_: (404, {}, body)) as client, pytest.raises(Declined, match="404: no such model 'x'"):
        client.infer("x", INPUTS, binary=True)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"<html>"),
        ({}, b"{}"),
        ({}, b'{"outputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2]}]}'),
        ({}, b'{"outputs": [{"name": "x", "datatype": "FP99", "shape": [1], "data": [1]}]}'),
        ({"Inference-Header-Content-Length": "many"}, b"{}"),
        ({}, b'{"outputs": [7]}'),
    ],
)
def test_an_answer_that_is_not_v2_is_declined(headers: dict[str, str], body: bytes) -> None:
    """Whatever else listens on that port, the tour reports it instead of crashing."""
    with peer(lambda *_: (200, headers, body)) as client, pytest.raises(Declined, match="not a V2 response"):
        client.infer("x", INPUTS, binary=True)


def test_a_server_that_is_gone_is_told() -> None:
    """A refused connection is a row as well, and status 0 while polling."""
    with peer(echo) as client:
        pass
    with pytest.raises(Declined, match="no answer from the server"):
        client.infer("x", INPUTS, binary=True)
    assert client.status("/readyz") == 0


def test_the_tier_and_wait_are_read_from_the_headers() -> None:
    """A cold answer says where the model was and how long it took; a warm one says neither."""
    cold = {
        "foreload-cold-start": "host;wait=12",
        "server-timing": "load;dur=12.345, queue;dur=0.010, infer;desc=x;dur=3",
    }
    assert found_on(cold) == ("host", 12.345)
    assert found_on({}) == ("device", 0.0)
    assert timings(cold["server-timing"]) == {"load": 12.345, "queue": 0.01, "infer": 3.0}
    assert timings("cache, miss;desc=a") == {}
