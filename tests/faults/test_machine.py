"""The machine runs out of something (F39, F79, F80): descriptors, a reader of the log, shared memory, a home."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e import shelf
from tests.e2e.live import HOST, SERVE, config, finish, launch, rows, serving, write

if TYPE_CHECKING:
    from tests.e2e.live import Live

SPARE = 12


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def limit(live: Live, count: int) -> None:
    """Let the server have so many descriptors from now on."""
    _, hard = resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(live.process.pid, resource.RLIMIT_NOFILE, (count, hard))


def test_without_descriptors_others_wait_and_who_is_connected_is_served(tmp_path: Path) -> None:
    """F39: no lost lease, no flood of log lines, and all is as before once connections close."""
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "b", seed=1)
    with serving(tmp_path) as live, ExitStack() as stack:
        assert live.infer("a").status == 200
        before = descriptors(live.process.pid)
        limit(live, before + SPARE)
        kept = stack.enter_context(socket.create_connection((HOST, live.port), 20))
        assert asked(kept) == 200
        crowd = [stack.enter_context(socket.create_connection((HOST, live.port), 20)) for _ in range(60)]
        lines = len(live.lines())
        assert asked(kept, "b") in {200, 503}, "a cold model cannot come now, or just could"
        for _ in range(20):
            assert asked(kept) == 200, f"who has a connection does not notice\n{live.tail()}"
            time.sleep(0.05)
        assert len(live.lines()) - lines <= 20, live.tail()
        for each in crowd:
            each.close()
        live.until(lambda: live.status("/v2/models/a/ready") == 200, "new connections are taken again")
        live.until(lambda: live.infer("b").status == 200, "a cold model comes again")
        assert live.infer("a").status == 200
        assert live.device()["leases"] == 0
        assert live.device()["loading"] == live.device()["unloading"] == 0
        live.until(lambda: descriptors(live.process.pid) <= before + 3, "no descriptor is lost")


def asked(connection: socket.socket, model: str = "a") -> int:
    """One inference on an open connection; the status."""
    body = rows(1, 1, 1)
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        piece = connection.recv(65536)
        assert piece, "the server closed a connection that it had taken"
        answer += piece
    head_, _, rest = answer.partition(b"\r\n\r\n")
    length = int(head_.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(rest) < length:
        rest += connection.recv(65536)
    return int(head_.split()[1])


def test_a_reader_of_the_log_that_leaves_changes_nothing(tmp_path: Path) -> None:
    """F79: `foreload serve | head -1` goes on serving; a full pipe that nobody reads does not stop the loop either."""
    shelf.put(tmp_path / "models", "a")
    for read in (True, False):
        file = write(tmp_path, config(tmp_path, telemetry__access_log=True))
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            assert process.stdout is not None
            port = 0
            for line in process.stdout:
                if b'"listening"' in line:
                    port = json.loads(line)["port"]
                    break
            if read:
                process.stdout.close()
            with socket.create_connection((HOST, port), 20) as connection:
                for _ in range(600):  # their access lines are more than a pipe holds
                    assert asked(connection) == 200
            assert process.poll() is None
        finally:
            process.terminate()
            code = process.wait(20)
            if process.stdout is not None:
                process.stdout.close()
        assert code == 0


def test_a_home_and_shared_memory_are_not_needed(tmp_path: Path) -> None:
    """F80: no HOME, an unwritable working directory and 64 KiB of /dev/shm; models are served all the same."""
    shelf.put(tmp_path / "models", "a")
    file = write(tmp_path, config(tmp_path))
    unshare = shutil.which("unshare")
    assert unshare is not None
    script = 'mount -t tmpfs -o size=64k none /dev/shm && cd / && exec env -u HOME "$@"'
    allowed = subprocess.run([unshare, "-rm", "true"], check=False, capture_output=True).returncode == 0
    if not allowed:
        pytest.skip("no mount namespaces here")
    live = launch(file, prefix=[unshare, "-rm", "sh", "-c", script, "sh"])
    try:
        live.wait_listening()
        live.wait_ready()
        assert live.infer("a").status == 200
    finally:
        finish(live)


def test_a_port_in_use_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    """F80: no traceback, the address in the message."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        file = write(tmp_path, config(tmp_path, server__port=port))
        live = launch(file)
        assert live.wait() == 3
        text = live.log.read_text(encoding="utf-8")
        assert str(port) in text
        assert "Traceback" not in text
