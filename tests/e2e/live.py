"""A real server as a process of its own, asked over HTTP; whatever ends the block, nothing of it is left running.

Waits poll with a deadline. No test here, no knowledge of models.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.demo.client import Client
from tests.e2e.modules import ALLOW, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
START_SECONDS = 60.0
STOP_SECONDS = 20.0
MARK = "PYTHONFORELOADTEST"
"""A variable whose name the workers' filter lets through: who carries its value belongs to one test's server."""

SERVE = "import sys; from runtime.cli import main; sys.exit(main())"
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """One answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


def ask(
    port: int,
    verb: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Said:
    """Send one request on a connection of its own. Raises `OSError` or `HTTPException`."""
    connection = HTTPConnection(HOST, port, timeout=timeout)
    try:
        began = time.monotonic()
        connection.request(verb, path, body, dict(headers or {}))
        response = connection.getresponse()
        content = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Said(response.status, found, content, time.monotonic() - began)
    finally:
        connection.close()


def rows(*values: float, width: int = 3) -> bytes:
    """Spell an infer body with one row `x`, padded with zeros to `width`."""
    row = [*values, *([0.0] * (width - len(values)))]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, width], "data": row}
    return json.dumps({"inputs": [tensor]}).encode()


def sleepy(seconds: float) -> bytes:
    """Spell an infer body whose forward takes so long."""
    return rows(SLOW, seconds)


def config(folder: Path, **changes: Any) -> Settings:
    """Settings of a server for tests: a free port, no delay when it stops, one compute thread, `folder/models`.

    `changes` replace whole settings; one with dots in its name (`server__drain`) replaces that inner one.
    """
    settings: Settings = {
        "server": {"host": HOST, "port": 0, "drain": {"delay": "0s", "timeout": "5s"}},
        "devices": [{"id": "cpu:0", "memory": "64MiB", "threads": 1, "allow": [ALLOW, "runtime.demo.architectures"]}],
        "host": {"memory": "400MiB", "pressure": {"high": 0.999, "low": 0.998}},
        "disk": {"path": str(folder / "cache"), "size": "1GiB"},
        "repository": [str(folder / "models")],
        "warm": [],
        "telemetry": {"log": {"level": "debug", "format": "json"}},
    }
    for name, value in changes.items():
        inner: Any = settings
        *path, last = name.split("__")
        for step in path:
            inner = inner[0] if isinstance(inner, list) else inner
            inner = inner.setdefault(step, {})
        inner = inner[0] if isinstance(inner, list) else inner
        inner[last] = value
    return settings


def write(folder: Path, settings: Settings) -> Path:
    """Write a configuration file; JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models").mkdir(exist_ok=True)
    file = folder / "foreload.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


@dataclass(slots=True)
class Live:
    """A server that runs. `log` is the file of its output."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str
    port: int = 0
    started: float = field(default_factory=time.monotonic)

    # -- asking --------------------------------------------------------------------------------------

    def get(self, path: str, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> Said:
        """GET."""
        return ask(self.port, "GET", path, None, headers, timeout)

    def post(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, timeout: float = 60.0
    ) -> Said:
        """POST."""
        return ask(self.port, "POST", path, body, headers, timeout)

    def infer(self, model: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Said:
        """Run one inference; a row of ones by default."""
        return self.post(f"/v2/models/{model}/infer", body or rows(1, 1, 1), headers)

    def client(self) -> Client:
        """The demo's client for this server."""
        return Client(HOST, self.port, timeout=60)

    def status(self, path: str) -> int:
        """The status of a GET, 0 if nobody answers."""
        try:
            return self.get(path).status
        except (OSError, HTTPException):
            return 0

    def state(self) -> Any:
        """`/api/v1/state`."""
        return self.get("/api/v1/state").json

    def device(self) -> Any:
        """The first device of the state."""
        return self.state()["devices"][0]

    def residents(self) -> set[str]:
        """Names of what is resident on the first device."""
        return {row["model"].partition("@")[0] for row in self.device()["residents"] if row["state"] == "resident"}

    def index(self) -> dict[str, Any]:
        """The repository index by name."""
        return {row["name"]: row for row in self.post("/v2/repository/index").json}

    @property
    def worker(self) -> int:
        """The first device worker's process id; 0 while it is down."""
        pid: int = self.state()["workers"]["cpu:0"]["pid"]
        return pid

    def lines(self) -> list[Any]:
        """The log so far; a line that is no JSON comes as text."""
        found: list[Any] = []
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append(line)
        return found

    def said(self, event: str) -> list[Any]:
        """Log lines of one kind."""
        return [line for line in self.lines() if isinstance(line, dict) and line.get("event") == event]

    # -- waiting -------------------------------------------------------------------------------------

    def until(self, true: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
        """Poll until `true()` is, and return what it gave; the log is in the failure."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.tail()}"
            assert self.process.poll() is None, f"the server ended ({self.process.returncode}): {what}\n{self.tail()}"
            time.sleep(0.02)
        return found

    def wait_listening(self) -> None:
        """Wait for the line that says the port."""
        line = self.until(lambda: self.said("listening"), "listening", START_SECONDS)[0]
        self.port = line["port"]

    def wait_ready(self) -> None:
        """Wait until `/readyz` says so."""
        self.until(lambda: self.status("/readyz") == 200, "ready", START_SECONDS)

    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])

    # -- ending --------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server alone, not to its workers."""
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the end and give the exit code."""
        return self.process.wait(seconds)

    def members(self) -> list[int]:
        """Every process that carries this server's mark, itself included."""
        return carriers(self.mark)


def carriers(mark: str) -> list[int]:
    """Processes whose environment holds the mark; zombies have none."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def launch(file: Path, *, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> Live:
    """Start `foreload serve FILE`, by the command `prefix` if there is one, and do not wait; `finish` ends it."""
    mark = secrets.token_hex(8)
    log = file.with_suffix(".log")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORELOAD_", "OTEL_"))}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", SERVE, "serve", str(file)],
            cwd=file.parent,
            env={**kept, "PYTHONPATH": str(ROOT), MARK: mark, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Live(process, log, mark)


def finish(live: Live) -> None:
    """End a server by force if it does not go by itself, and prove that nothing of it is left."""
    try:
        if live.process.poll() is None:
            live.signal(signal.SIGTERM)
            try:
                live.wait()
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the server did not stop within {STOP_SECONDS} s\n{live.tail()}") from None
        gone(live)
    finally:
        for pid in live.members():
            os.kill(pid, signal.SIGKILL)
        if live.process.poll() is None:
            live.process.kill()
            live.process.wait()


def gone(live: Live, seconds: float = 3.0) -> None:
    """Assert that no process of this server is left."""
    deadline = time.monotonic() + seconds
    while left := live.members():
        assert time.monotonic() < deadline, f"left behind: {left}\n{live.tail()}"
        time.sleep(0.02)


@contextmanager
def serving(
    folder: Path, *, ready: bool = True, environment: Mapping[str, str] | None = None, **changes: Any
) -> Iterator[Live]:
    """Run a server on `config(folder, **changes)`; with `ready`, wait until it is."""
    live = launch(write(folder, config(folder, **changes)), environment=environment)
    try:
        live.wait_listening()
        if ready:
            live.wait_ready()
        yield live
    finally:
        finish(live)


def answer(said: Said) -> NDArray[np.float32]:
    """The output `y` of a JSON answer."""
    assert said.status == 200, said.body
    output = said.json["outputs"][0]
    return np.array(output["data"], dtype=np.float32).reshape(output["shape"])
