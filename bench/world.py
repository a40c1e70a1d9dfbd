"""Servers as the benches need them: a repository of small models, a process tree with its CPU and memory, an end.

Belongs here: starting, stopping and accounting. Never: load, rows.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.error import URLError

from safetensors.torch import save_file

from bench import models
from runtime.catalog.describe import write_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

_ROOT = Path(__file__).parent.parent
_TICK = os.sysconf("SC_CLK_TCK")
_START = 60.0


def write_model(
    folder: Path, name: str, module: nn.Module, shape: Sequence[int], *, batch: int = 1, **arguments: object
) -> None:
    """A model directory: `module`'s weights, and a manifest that names the factory of its type in `bench.models`."""
    place = folder / name
    place.mkdir(parents=True)
    save_file(module.state_dict(), place / "weights.safetensors")
    factory = type(module).__name__ if hasattr(models, type(module).__name__) else "mlp"
    write_manifest(
        place,
        {
            "name": name,
            "version": "1",
            "builder": {"kind": "python", "target": f"bench.models:{factory}", "arguments": arguments},
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, *shape]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, models.WIDTH]}],
            "batch": {"max_size": batch},
        },
    )


def configuration(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Write a configuration over `folder/models` and return its path; JSON is YAML."""
    device = {"id": "cpu:0", "memory": "1GB", "threads": 1, "allow": ["bench.models"], **settings.get("device", {})}
    tree = {
        "server": {"drain": {"delay": "0s"}},
        "devices": [device],
        "host": {"memory": "1GB", **settings.get("host", {})},
        "disk": {"path": str(folder / "cache"), "size": "10GB"},
        "repository": [str(folder / "models")],
        "warm": [{"model": name} for name in settings.get("warm", ())],
        "telemetry": {"log": {"level": "warning"}},
    }
    path = folder / "foreload.yaml"
    path.write_text(json.dumps(tree, indent=2))
    return path


class Server:
    """A server process and its descendants; a context manager. `address` answers 200 once it is up."""

    def __init__(self, name: str, port: int, command: Sequence[str], address: str) -> None:
        self.name = name
        self.port = port
        began = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        self._process = subprocess.Popen([sys.executable, *command], cwd=_ROOT, env=environment)
        try:
            self.listening_after = self._until("/", began)
            self.ready_after = self._until(address, began)
        except BaseException:
            self.close()
            raise

    @classmethod
    def base(cls, name: str, *words: str) -> Self:
        """The Starlette server of `bench.base`."""
        port = free_port()
        return cls(name, port, ["-c", "from bench.base import main; main()", str(port), *words], "/")

    @classmethod
    def foreload(cls, path: Path) -> Self:
        """The real server."""
        port = free_port()
        return cls("foreload", port, ["-m", "runtime.cli", "serve", str(path), "--port", str(port)], "/v2/health/ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it: SIGTERM, SIGKILL after ten seconds."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def text(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read(), "utf-8")

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        return json.loads(self.text(path))

    def _until(self, path: str, began: float) -> float:
        """Seconds since `began` until a GET of `path` is answered, and with 200 if it is not `/`."""
        while time.perf_counter() - began < _START:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=1):
                    return time.perf_counter() - began
            except URLError as error:
                if path == "/" and not isinstance(error.reason, OSError):
                    return time.perf_counter() - began
            except OSError:
                pass
            time.sleep(0.01)
        raise TimeoutError(f"{self.name} is not up after {_START:g} s")

    @property
    def pid(self) -> int:
        """Of the front."""
        return self._process.pid

    def tree(self) -> list[int]:
        """The front and its descendants."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := _stat(int(entry.name))):
                parents[int(entry.name)] = int(fields[1])
        found = [self.pid]
        for pid in found:  # grows while we look
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def cpu(self) -> dict[int, float]:
        """CPU seconds of each process of the tree so far, user and system."""
        spent: dict[int, float] = {}
        for pid in self.tree():
            if fields := _stat(pid):
                spent[pid] = (int(fields[11]) + int(fields[12])) / _TICK
        return spent


def spent_between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU seconds of a tree between two readings; a child born between them counts as a whole."""
    return sum(value - before.get(pid, 0.0) for pid, value in after.items())


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident and proportional set size of a process, MB (10**6 bytes)."""
    found = {
        line.split()[0]: int(line.split()[1]) * 1024 / 1e6
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith(("Rss:", "Pss:"))
    }
    return found["Rss:"], found["Pss:"]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _stat(pid: int) -> list[str]:
    """The fields after the command's name; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def http_request(model: str, body: bytes, json_length: int | None = None) -> bytes:
    """A whole POST of an inference, as it goes over the wire."""
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Type: application/{'json' if json_length is None else 'octet-stream'}",
        f"Content-Length: {len(body)}",
    ]
    if json_length is not None:
        lines.append(f"Inference-Header-Content-Length: {json_length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
