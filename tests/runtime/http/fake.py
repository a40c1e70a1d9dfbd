"""An in-memory backend that tells the truth about a few identity models, and ways to reach an app over it.

Belongs here: what several test files share. Never: an assertion.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.errors import BadRequest, BadTensor, UnknownModel
from runtime.http.app import Front, create_app
from runtime.http.limits import Limits
from runtime.http.port import IndexRow, Metadata, Served, Verdict
from runtime.http.serve import make_server
from runtime.workers.port import Answer, TensorSpec, Timings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runtime.http.serve import Server

TYPES = {"FP32": np.dtype("<f4"), "INT32": np.dtype("<i4")}
HOSTS = ("localhost", "127.0.0.1", "testserver")
KNOWN_LOAD = frozenset({"version", "tier", "priority", "pin", "fingerprint"})


@dataclass
class Asked:
    """What the backend was asked for, as it came."""

    name: str
    version: str | None
    body: bytes
    json_length: int | None
    request_id: str
    timeout: float | None
    priority: int
    traceparent: str
    tracestate: str


@dataclass
class FakeBackend:
    """Two identity models, `echo` (versions 1 and 2) and `cold`; set the fields to make it behave otherwise."""

    draining: bool = False
    raises: BaseException | None = None
    hold: asyncio.Event | None = None
    result: str = "hit"
    verdict: Verdict = field(default_factory=lambda: Verdict(ok=True))
    loaded: dict[str, str] = field(default_factory=lambda: {"echo": "READY", "cold": "UNAVAILABLE"})
    asked: list[Asked] = field(default_factory=list)
    orders: list[tuple[str, str, Mapping[str, object]]] = field(default_factory=list)
    strict: list[bool | None] = field(default_factory=list)
    cancelled: int = 0
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    loop: asyncio.AbstractEventLoop | None = None

    async def infer(self, name: str, version: str | None, body: bytes, json_length: int | None, **rest: Any) -> Served:
        """Give the inputs back, in the form that was asked for."""
        self.asked.append(Asked(name, version, body, json_length, **rest))
        await self._held()
        self._known(name, version)
        answer = _identity(name, version or "2", body, json_length)
        return Served(
            answer, name, version or "2", "disk" if self.result == "miss" else "device", self.result, 0.25, ""
        )

    async def _held(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.entered.set()
        self.reached.set()
        if self.raises is not None:
            raise self.raises
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    def _known(self, name: str, version: str | None) -> None:
        if name not in self.loaded or version not in {None, "1", "2"}:
            raise UnknownModel(f"no such model: {name}", model=name)

    def _sync(self) -> None:
        if self.raises is not None:
            raise self.raises

    def live(self) -> Verdict:
        self._sync()
        return self.verdict

    def ready(self) -> Verdict:
        self._sync()
        return self.verdict

    def model_ready(self, name: str, version: str | None, *, strict: bool | None) -> Verdict:
        self._sync()
        self._known(name, version)
        self.strict.append(strict)
        return self.verdict

    def server_metadata(self) -> Mapping[str, object]:
        self._sync()
        return {"name": "foreload", "version": "0", "extensions": ["binary_tensor_data", "model_repository"]}

    def metadata(self, name: str, version: str | None) -> Metadata:
        self._sync()
        self._known(name, version)
        spec = (TensorSpec("x", "FP32", (-1, 4)),)
        return Metadata(name, ("1", "2"), "pytorch_safetensors", spec, (TensorSpec("y", "FP32", (-1, 4)),))

    def index(self, *, ready: bool) -> list[IndexRow]:
        rows = [IndexRow(name, "1", state) for name, state in self.loaded.items()]
        return [row for row in rows if row.state == "READY" or not ready] + ([] if ready else [IndexRow("unseen")])

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        await self._held()
        self._known(name, None)
        if unknown := sorted(set(parameters) - KNOWN_LOAD):
            raise BadRequest(f"parameters.{unknown[0]}: no such load parameter")
        self.orders.append(("load", name, parameters))
        self.loaded[name] = "READY"

    async def unload(self, name: str, parameters: Mapping[str, object]) -> None:
        await self._held()
        self._known(name, None)
        self.orders.append(("unload", name, parameters))
        self.loaded[name] = "UNAVAILABLE"

    def statistics(self, name: str | None, version: str | None) -> Mapping[str, object]:
        self._sync()
        if name is not None:
            self._known(name, version)
        return {"model_stats": [{"name": known} for known in self.loaded if name in {None, known}]}

    def state(self) -> Mapping[str, object]:
        self._sync()
        return {"devices": {"cpu:0": {"used": np.int64(5)}}, "pins": frozenset({"echo"})}

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        self._sync()
        if "openmetrics" in accept:
            return b"# EOF\n", "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return b"up 1\n", "text/plain; version=0.0.4; charset=utf-8"


def _identity(name: str, version: str, body: bytes, json_length: int | None) -> Answer:
    end = len(body) if json_length is None else json_length
    try:
        asked = json.loads(body[:end])
    except (ValueError, RecursionError):
        raise BadRequest("the JSON is malformed", model=name) from None
    binary = bool(asked.get("parameters", {}).get("binary_data_output"))
    outputs: list[dict[str, object]] = []
    raw = b""
    for given in asked.get("inputs", []):
        if given["datatype"] not in TYPES:
            raise BadTensor(f"inputs.{given['name']}: no such datatype", model=name)
        size = given.get("parameters", {}).get("binary_data_size")
        dtype = TYPES[given["datatype"]]
        if size is None:
            array = np.array(given["data"], dtype).reshape(given["shape"])
        else:
            array = np.frombuffer(body[end : end + size], dtype).reshape(given["shape"])
            end += size
        output = {"name": "y", "datatype": given["datatype"], "shape": given["shape"]}
        if binary:
            outputs.append({**output, "parameters": {"binary_data_size": array.nbytes}})
            raw += array.tobytes()
        else:
            outputs.append({**output, "data": array.ravel().tolist()})
    head = json.dumps({"model_name": name, "model_version": version, "outputs": outputs}).encode()
    return Answer(head + raw, len(head) if binary else None, Timings(queue=1000, decode=2000, infer=3000, encode=4000))


def front(backend: FakeBackend, limits: Limits | None = None, **rest: Any) -> Front:
    """An app over a backend, trusting the names tests use."""
    return create_app(backend, limits, trusted_hosts=HOSTS, **rest)


def tensor(*values: float, **parameters: object) -> bytes:
    """A V2 request with one FP32 input, and request parameters."""
    given = {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": list(values)}
    content: dict[str, object] = {"inputs": [given]}
    if parameters:
        content["parameters"] = parameters
    return json.dumps(content).encode()


@dataclass
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """One request over ASGI without a server; `parts` arrive one by one, then the client waits or leaves."""

    app: Front
    parts: list[bytes]
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    stalls: bool = False
    sent: list[Any] = field(default_factory=list)
    read: int = 0

    async def receive(self) -> dict[str, object]:
        if self.read < len(self.parts):
            self.read += 1
            more = self.stalls or self.read < len(self.parts)
            return {"type": "http.request", "body": self.parts[self.read - 1], "more_body": more}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], query: bytes = b"") -> Reply | None:
        """The answer, or None if nothing was sent."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "query_string": query,
            "headers": headers,
        }
        await self.app(scope, self.receive, self.send)
        if not self.sent:
            return None
        start, *bodies = self.sent
        lines = {name.decode(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], lines, b"".join(body["body"] for body in bodies))


HOST = (b"host", b"localhost")


async def post(app: Front, path: str, body: bytes | list[bytes], **headers: str) -> Reply:
    """POST over ASGI; header names with underscores for dashes."""
    parts = [body] if isinstance(body, bytes) else body
    lines = [HOST, *((name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items())]
    reply = await Client(app, parts).ask("POST", path, lines)
    assert reply is not None
    return reply


async def get(app: Front, path: str, query: bytes = b"", method: str = "GET", **headers: str) -> Reply:
    """GET over ASGI."""
    lines = [HOST, *((name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items())]
    reply = await Client(app, [b""]).ask(method, path, lines, query)
    assert reply is not None
    return reply


@contextmanager
def served(backend: FakeBackend, limits: Limits | None = None, **rest: Any) -> Iterator[tuple[int, Server]]:
    """A real server on a free loopback port, in a thread of its own."""
    # The socket listens before the server runs, so that no test has to wait for it.
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    limits = limits or Limits()
    server = make_server(front(backend, limits, **rest), host="127.0.0.1", port=0, limits=limits, graceful=5)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="server")
    thread.start()
    try:
        yield sock.getsockname()[1], server
    finally:
        server.should_exit = True
        if backend.hold is not None and backend.loop is not None and not backend.loop.is_closed():
            backend.loop.call_soon_threadsafe(backend.hold.set)
        thread.join(15)
        assert not thread.is_alive()
        sock.close()


def connect(port: int) -> socket.socket:
    """A client's socket that gives up after ten seconds."""
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def read_reply(sock: socket.socket) -> Reply | None:
    """Read one answer off a socket and nothing behind it; None when the server closes without one."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = receive(sock, 1)
        if not part:
            return None
        head += part
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = b""
    while missing := int(headers.get("content-length", "0")) - len(body):
        part = receive(sock, missing)
        if not part:
            break
        body += part
    return Reply(int(first.split()[1]), headers, body)


def receive(sock: socket.socket, most: int = 1 << 16) -> bytes:
    """The next bytes; none at the end, however it comes."""
    try:
        return sock.recv(most)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def talk(port: int, request: bytes) -> Reply | None:
    """Send bytes as they are and read one answer; a server that stops reading is no error here."""
    with connect(port) as sock:
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(request)
        return read_reply(sock)


def request(path: str, body: bytes = b"", *lines: str, method: str = "POST") -> bytes:
    """An HTTP/1.1 request with Host and Content-Length."""
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body
