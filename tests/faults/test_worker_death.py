"""The device worker dies under a running server (F57, R8): noticed at once, told to who waits, mended by itself."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from tests.e2e import shelf
from tests.e2e.live import answer, rows, serving, sleepy

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.live import Live


def kill(live: Live, number: signal.Signals = signal.SIGKILL) -> float:
    """Kill the worker; the moment it happened."""
    os.kill(live.worker, number)
    return time.monotonic()


def recovered(live: Live, *names: str) -> bool:
    """The worker is up and holds all these."""
    return live.device()["up"] and set(names) <= live.residents()


def test_in_flight_requests_hear_why_within_a_second(tmp_path: Path) -> None:
    """F57, R8: 503 with the cause for who is in flight, model-ready 503, then a restart with all residents."""
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "b", seed=2)
    with serving(tmp_path) as live:
        for name in ("a", "b"):
            assert live.infer(name).status == 200
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS):
            die_under_load(live, number)
        assert len(live.said("worker lost")) == 3


def die_under_load(live: Live, number: signal.Signals) -> None:
    """Kill the worker under four requests, and see all of it through until it works again."""
    before = live.worker
    with ThreadPoolExecutor(4) as pool:
        flying = [pool.submit(live.infer, "a", sleepy(60)) for _ in range(4)]
        live.until(lambda: live.device()["leases"] == 4, "leases")
        at = kill(live, number)
        live.until(lambda: live.status("/v2/models/a/ready") == 503, "model unready", 1.0)
        for each in flying:
            said = each.result(5)
            assert (said.status, said.json["code"]) == (503, "worker_died")
            assert number.name in said.json["error"]
            assert int(said.headers["retry-after"]) >= 1
            assert said.json["trace_id"]
        assert time.monotonic() - at < 1.0, "noticed by its exit, not by a timeout"
    ready = live.get("/v2/models/a/ready")
    assert ready.status == 503
    assert "worker" in ready.json["error"]
    assert live.status("/livez") == 200, "a dead worker is restarted; the front is alive"

    live.until(lambda: recovered(live, "a", "b"), "residents come back by themselves")
    assert live.worker not in {0, before}
    assert live.status("/v2/models/a/ready") == 200
    assert live.status("/readyz") == 200
    for name, seed in (("a", 0), ("b", 2)):
        wanted = shelf.expected(np.array([[1, 2, 3]], np.float32), seed=seed)
        np.testing.assert_array_equal(answer(live.infer(name, rows(1, 2, 3))), wanted)
    state = live.device()
    assert (state["leases"], state["waiting"], state["loading"]) == (0, 0, 0)
    assert live.said("worker lost")[-1]["pid"] == before


def test_waiters_of_a_load_hear_why_and_may_come_again(tmp_path: Path) -> None:
    """F57: the worker dies while a model loads: every waiter gets 503 and a time; later the same request succeeds."""
    shelf.put(tmp_path / "models", "late", factory="late", seconds=2)
    with serving(tmp_path) as live, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(live.infer, "late") for _ in range(4)]
        live.until(lambda: live.device()["waiting"] == 4 and live.device()["loading"] > 0, "loading")
        at = kill(live)
        for each in waiting:
            said = each.result(5)
            assert (said.status, said.json["code"]) == (503, "worker_died")
            assert "SIGKILL" in said.json["error"]
            assert "retry-after" in said.headers
        assert time.monotonic() - at < 1.0
        device = live.device()
        assert (device["used"], device["waiting"], device["leases"]) == (0, 0, 0), "the bytes are back at once"
        live.until(lambda: live.infer("late").status == 200, "served again", 30)


def test_requests_between_two_lives_are_refused_or_served_and_never_hang(tmp_path: Path) -> None:
    """F57: a client that just goes on sees 503 with Retry-After until it sees 200, and each answer comes soon."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        live.infer("a")
        kill(live)
        statuses: list[int] = []
        deadline = time.monotonic() + 20
        while not statuses or statuses[-1] != 200:
            said = live.infer("a")
            statuses.append(said.status)
            if said.status != 200:
                assert said.status == 503, said.body
                assert "retry-after" in said.headers
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_worker_that_dies_again_and_again_takes_nothing_along(tmp_path: Path) -> None:
    """I9: after three deaths the front has no more file descriptors, threads or children than after one."""
    shelf.put(tmp_path / "models", "a")

    def counts(live: Live) -> tuple[int, int]:
        front = f"/proc/{live.process.pid}"
        return len(os.listdir(f"{front}/fd")), len(live.members())  # noqa: PTH208  # numbers only

    with serving(tmp_path) as live:
        live.infer("a")
        seen = []
        for _ in range(3):
            kill(live)
            live.until(lambda: live.status("/readyz") == 503, "noticed")
            live.until(lambda: recovered(live, "a"), "back", 40)
            assert live.infer("a").status == 200
            time.sleep(0.2)
            seen.append(counts(live))
        assert seen[0][1] == seen[-1][1] == 3, "front, zygote and worker"
        assert seen[-1][0] <= seen[0][0] + 2, seen


def test_a_stopped_worker_makes_its_models_unready(tmp_path: Path) -> None:
    """Protocol section 6: resident counts as ready only while the worker answers; a frozen process does not."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        live.infer("a")
        worker = live.worker
        os.kill(worker, signal.SIGSTOP)
        try:
            live.until(lambda: live.status("/v2/models/a/ready") == 503, "unready", 8)
        finally:
            os.kill(worker, signal.SIGCONT)
        live.until(lambda: live.status("/v2/models/a/ready") == 200, "ready again", 8)
        assert live.infer("a").status == 200
