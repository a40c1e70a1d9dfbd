"""Stopping a real server: the order of `faults.md` section 4, and nothing left behind (F74, F43, F80)."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e import shelf
from tests.e2e.live import HOST, ask, config, finish, gone, launch, rows, serving, sleepy, write

if TYPE_CHECKING:
    from tests.e2e.live import Live


def shared_memory() -> set[str]:
    """Names of shared memory segments of this machine."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def leases(live: Live) -> int:
    """Leases on the first device."""
    count: int = live.device()["leases"]
    return count


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_server_with_code_0_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """F74: SIGTERM and SIGINT both stop it in seconds: exit code 0, no process, no shared memory segment left."""
    before = shared_memory()
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        assert live.infer("a").status == 200
        began = time.monotonic()
        live.signal(number)
        assert live.wait() == 0
        assert time.monotonic() - began < 10
        gone(live)
        assert live.said("drain started")[0]["reason"] == number.name
        assert live.said("drain finished")[0]["abandoned"] == 0
    assert not {name for name in shared_memory() - before if not name.startswith("sem.")}


def test_sighup_does_not_kill(tmp_path: Path) -> None:
    """F74: a closed terminal is no order to stop; requests go on being served."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        for _ in range(3):
            live.signal(signal.SIGHUP)
            assert live.infer("a").status == 200
        assert live.status("/readyz") == 200
        assert not live.said("drain started")


def test_what_is_in_flight_is_answered_before_the_end(tmp_path: Path) -> None:
    """F74, section 4 step 4: a request under its lease when SIGTERM comes gets its answer; the exit waits for it."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live, ThreadPoolExecutor(1) as pool:
        live.infer("a")
        slow = pool.submit(live.infer, "a", sleepy(1.5))
        live.until(lambda: leases(live) == 1, "the lease")
        live.signal(signal.SIGTERM)
        said = slow.result(20)
        assert said.status == 200
        assert said.json["outputs"][0]["shape"] == [1, 3]
        assert said.headers["connection"] == "close"
        assert live.wait() == 0
        assert live.said("drain finished")[0]["abandoned"] == 0


def test_during_the_delay_it_serves_on_and_says_close(tmp_path: Path) -> None:
    """F43, P15: ready is 503 at once; for `drain.delay` new requests are answered with `Connection: close`."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, server__drain={"delay": "2s", "timeout": "5s"}) as live:
        kept = HTTPConnection(HOST, live.port, timeout=10)
        kept.request("GET", "/livez")
        assert kept.getresponse().read() == b'{"live":true}'
        live.signal(signal.SIGTERM)
        live.until(lambda: live.status("/readyz") == 503, "unready")
        ready = live.get("/readyz")
        assert (ready.status, ready.json["code"]) == (503, "not_ready")
        assert "retry-after" in ready.headers
        assert live.get("/v2/models/a/ready").status == 503
        for _ in range(3):
            said = live.infer("a")
            assert (said.status, said.headers["connection"]) == (200, "close")
        kept.request("POST", "/v2/models/a/infer", rows(1, 1, 1))
        reused = kept.getresponse()
        reused.read()
        assert (reused.status, reused.headers["connection"]) == (200, "close"), "an idle connection may be used again"
        kept.close()
        assert live.status("/livez") == 200
        assert live.wait() == 0


def test_after_the_delay_new_work_is_refused_while_old_work_ends(tmp_path: Path) -> None:
    """Section 4 step 1: past the delay new work gets 503 with Retry-After; what runs goes on to its answer."""
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "b")
    with serving(tmp_path) as live, ThreadPoolExecutor(1) as pool:
        live.infer("a")
        slow = pool.submit(live.infer, "a", sleepy(2.5))
        live.until(lambda: leases(live) == 1, "the lease")
        live.signal(signal.SIGTERM)
        live.until(lambda: live.device()["draining"], "draining")
        for name in ("a", "b"):
            said = live.infer(name)
            assert (said.status, said.json["code"]) == (503, "draining")
            assert int(said.headers["retry-after"]) > 0
            assert said.headers["connection"] == "close"
        load = live.post("/v2/repository/models/b/load")
        assert (load.status, load.json["code"]) == (503, "draining")
        assert slow.result(20).status == 200
        assert live.wait() == 0


def test_a_stop_during_a_load_answers_its_waiter(tmp_path: Path) -> None:
    """F74: SIGTERM while a model loads: who waits for it gets an answer, and the server ends in time."""
    shelf.put(tmp_path / "models", "late", factory="late", seconds=1.5)
    with serving(tmp_path) as live, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(live.infer, "late")
        live.until(lambda: live.device()["loading"] > 0, "loading")
        live.signal(signal.SIGTERM)
        said = waiting.result(20)
        assert said.status == 200, "a waiter is work in flight; its load ends within drain.timeout"
        assert live.wait() == 0


def test_a_load_that_outlasts_the_drain_is_given_up(tmp_path: Path) -> None:
    """F74: past `drain.timeout` nothing is waited for any more: the waiter hears 503, and the end comes at once."""
    shelf.put(tmp_path / "models", "late", factory="late", seconds=60)
    with serving(tmp_path, server__drain={"delay": "0s", "timeout": "1s"}) as live, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(live.infer, "late")
        live.until(lambda: live.device()["loading"] > 0, "loading")
        began = time.monotonic()
        live.signal(signal.SIGTERM)
        said = waiting.result(20)
        assert said.status == 503
        assert said.json["code"] in {"draining", "worker_died", "actor_stopped", "not_ready"}
        assert live.wait() == 0
        assert time.monotonic() - began < 12


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_ends_it_now(tmp_path: Path, second: signal.Signals) -> None:
    """F74: whoever signals twice does not wait for leases; still no orphan, and the client hears something."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, server__drain={"delay": "20s", "timeout": "20s"}) as live, ThreadPoolExecutor(1) as pool:
        live.infer("a")
        slow = pool.submit(live.infer, "a", sleepy(60))
        live.until(lambda: leases(live) == 1, "the lease")
        live.signal(signal.SIGTERM)
        live.until(lambda: live.said("drain started"), "the drain")
        began = time.monotonic()
        live.signal(second)
        assert slow.result(20).status == 503
        assert live.wait() == 0
        assert time.monotonic() - began < 6
        gone(live)


def test_a_client_in_a_loop_loses_no_request_to_a_stop(tmp_path: Path) -> None:
    """F43: a client that keeps its connection sees answers and `Connection: close`, never a reset of a request."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, server__drain={"delay": "1s", "timeout": "5s"}) as live:
        live.infer("a")
        seen: list[tuple[int, bool]] = []

        def loop() -> None:
            connection = HTTPConnection(HOST, live.port, timeout=10)
            while True:
                try:
                    connection.request("POST", "/v2/models/a/infer", rows(1, 1, 1))
                except ConnectionRefusedError:
                    return
                answer = connection.getresponse()
                answer.read()
                seen.append((answer.status, answer.headers.get("connection") == "close"))
                if answer.status == 503:
                    return

        client = threading.Thread(target=loop)
        client.start()
        live.until(lambda: len(seen) > 20, "requests")
        live.signal(signal.SIGTERM)
        client.join(20)
        assert not client.is_alive()
        assert {status for status, _ in seen} <= {200, 503}
        assert sum(closed for _, closed in seen) > 3
        assert live.wait() == 0


def test_a_stop_before_the_worker_is_up(tmp_path: Path) -> None:
    """F74: SIGTERM in the first moment, while the worker still imports torch, ends everything too."""
    with serving(tmp_path, ready=False) as live:
        live.signal(signal.SIGTERM)
        assert live.wait() == 0
        gone(live)


def test_sigkill_of_the_front_leaves_no_worker(tmp_path: Path) -> None:
    """I9: even a front that had no chance to say goodbye takes its workers along."""
    shelf.put(tmp_path / "models", "a")
    live = launch(write(tmp_path, config(tmp_path)))
    try:
        live.wait_listening()
        live.wait_ready()
        assert live.infer("a").status == 200
        live.signal(signal.SIGKILL)
        assert live.wait() == -signal.SIGKILL
        gone(live, 3)
    finally:
        finish(live)


def test_a_port_in_use_is_one_line_and_code_3(tmp_path: Path) -> None:
    """F80: the cause in one line on standard error, exit code 3, no traceback, nothing left."""
    with socket.create_server((HOST, 0)) as taken:
        settings = config(tmp_path, server__port=taken.getsockname()[1])
        live = launch(write(tmp_path, settings))
        try:
            assert live.wait() == 3
            said = [line for line in live.lines() if line]
            assert len(said) == 1, said
            assert said[0].startswith("foreload: cannot start: ")
            assert "in use" in said[0]
        finally:
            finish(live)


def test_a_cache_that_cannot_be_written_is_one_line_and_code_3(tmp_path: Path) -> None:
    """F80: a file where the cache folder should be (which stops root too): one line, exit code 3."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    live = launch(write(tmp_path, config(tmp_path, disk__path=str(blocked / "cache"))))
    try:
        assert live.wait() == 3
        said = [line for line in live.lines() if isinstance(line, str) and line]
        assert len(said) == 1, live.tail()
        assert said[0].startswith("foreload: cannot start: ")
    finally:
        finish(live)


def test_a_read_only_cache_folder_is_one_line_and_code_3(tmp_path: Path) -> None:
    """F80: without the right to write (as another user than root) the same."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    live = launch(write(tmp_path, config(tmp_path)))
    try:
        assert live.wait() == 3
        assert live.tail().count("cannot start") == 1
    finally:
        finish(live)


def test_a_port_is_free_again_after_the_stop(tmp_path: Path) -> None:
    """A restart on the same port works at once."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        port = live.port
        assert live.infer("a").status == 200
    with serving(tmp_path, server__port=port) as live:
        assert live.port == port
        assert ask(port, "POST", "/v2/models/a/infer", rows(1, 1, 1)).status == 200
