"""The process that workers are forked from dies, or its workers do: told, mended, and nothing is built twice."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.e2e import shelf
from tests.e2e.live import answer, rows, serving, sleepy

if TYPE_CHECKING:
    from tests.e2e.live import Live


def parent(pid: int) -> int:
    """Whose child a process is."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def recovered(live: Live, *names: str) -> bool:
    """The worker is up and holds all these."""
    return live.device()["up"] and set(names) <= live.residents()


def test_a_zygotes_death_is_a_workers_death_with_another_name(tmp_path: Path) -> None:
    """F57: who is in flight hears why within a second, residents come back from a new zygote, no process is left."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        assert live.infer("a").status == 200
        worker = live.worker
        zygote = parent(worker)
        assert zygote != live.process.pid
        with ThreadPoolExecutor(4) as pool:
            flying = [pool.submit(live.infer, "a", sleepy(60)) for _ in range(4)]
            live.until(lambda: live.device()["leases"] == 4, "leases")
            os.kill(zygote, signal.SIGKILL)
            at = time.monotonic()
            for each in flying:
                said = each.result(5)
                assert (said.status, said.json["code"]) == (503, "worker_died")
                assert "its zygote ended: killed by SIGKILL" in said.json["error"]
            assert time.monotonic() - at < 1.0
        live.until(lambda: live.worker not in {0, worker} and recovered(live, "a"), "back", 40)
        assert live.infer("a").status == 200
        assert parent(live.worker) not in {zygote, live.process.pid}
        assert len(live.members()) == 3


def test_a_restarted_worker_builds_nothing(tmp_path: Path) -> None:
    """The factory would raise the second time: what is served again comes from the skeleton that was kept."""
    gate = tmp_path / "gate"
    gate.touch()
    shelf.put(tmp_path / "models", "a", factory="absent", gate=str(gate))
    with serving(tmp_path) as live:
        assert live.infer("a").status == 200
        gate.unlink()
        for _ in range(3):
            before = live.worker
            os.kill(before, signal.SIGKILL)
            live.until(lambda old=before: live.worker not in {0, old} and recovered(live, "a"), "back", 40)
            wanted = shelf.expected(np.array([[1, 2, 3]], np.float32))
            np.testing.assert_array_equal(answer(live.infer("a", rows(1, 2, 3))), wanted)
        assert parent(live.worker) != live.process.pid


def test_a_damaged_skeleton_is_built_again(tmp_path: Path) -> None:
    """Every kept file overwritten under the running server: the next life builds, and serves the same."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        assert live.infer("a").status == 200
        kept = [path for path in (tmp_path / "cache" / "skeletons").iterdir() if path.name != "key"]
        assert kept
        for path in kept:
            path.write_bytes(b"\x80\x04" + bytes(5000))
        before = live.worker
        os.kill(before, signal.SIGKILL)
        live.until(lambda: live.worker not in {0, before} and recovered(live, "a"), "back", 40)
        np.testing.assert_array_equal(
            answer(live.infer("a", rows(1, 2, 3))), shelf.expected(np.array([[1, 2, 3]], np.float32))
        )


def test_without_zygote_and_skeletons_all_is_as_it_was(tmp_path: Path) -> None:
    """`start: spawn`, `skeletons: false`: the front's own child, and an empty place in the cache."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, devices__start="spawn", disk__skeletons=False) as live:
        assert live.infer("a").status == 200
        before = live.worker
        assert parent(before) == live.process.pid
        assert len(live.members()) == 2
        os.kill(before, signal.SIGKILL)
        live.until(lambda: live.worker not in {0, before} and recovered(live, "a"), "back", 40)
        assert not (tmp_path / "cache" / "skeletons").exists()


def test_a_standby_is_the_next_worker(tmp_path: Path) -> None:
    """`start: standby` on a CPU: the process that waited is the one that answers."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, devices__start="standby") as live:
        assert live.infer("a").status == 200
        before = live.worker
        live.until(lambda: len(live.members()) == 3, "one stands by")
        waiting = set(live.members()) - {before, live.process.pid}
        os.kill(before, signal.SIGKILL)
        live.until(lambda: live.worker not in {0, before} and recovered(live, "a"), "back", 40)
        assert live.worker in waiting
        assert live.infer("a").status == 200
