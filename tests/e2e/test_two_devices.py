"""Two devices on one machine: models spread over them, share the host's pages, and do not share a fate."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.e2e import shelf
from tests.e2e.live import serving
from tests.e2e.modules import ALLOW

if TYPE_CHECKING:
    from tests.e2e.live import Live

WIDTH = 1 << 20
ONES = np.ones((1, WIDTH), np.float32)
DEVICE = {"threads": 1, "allow": [ALLOW], "memory": "12MiB"}
TWO = [{"id": "cpu:0", **DEVICE}, {"id": "cpu:1", **DEVICE}]


def residents(live: Live) -> dict[str, set[str]]:
    """Names resident on each device."""
    return {
        device["id"]: {row["model"].partition("@")[0] for row in device["residents"] if row["state"] == "resident"}
        for device in live.state()["devices"]
    }


def pids(live: Live) -> dict[str, int]:
    """Worker processes by device."""
    return {name: worker["pid"] for name, worker in live.state()["workers"].items()}


def shared(pid: int, size: int) -> list[int]:
    """Resident bytes of file mappings that large in a process, and how much of them is its own."""
    found: list[int] = []
    rows: list[str] = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines()
    for at, row in enumerate(rows):
        if "blobs" in row:
            values = {
                line.split(":")[0]: int(line.split()[1]) * 1024 for line in rows[at + 1 : at + 24] if "kB" in line
            }
            if values["Rss"] >= size:
                found.append(values["Private_Dirty"])
    return found


def test_models_go_where_there_is_room_and_come_back_there(tmp_path: Path) -> None:
    """Each device holds one of these; four models on two devices evict each other and stay right."""
    for seed, name in enumerate("abcd"):
        shelf.put(tmp_path / "models", name, width=WIDTH, seed=seed)
    with serving(tmp_path, devices=TWO) as live:
        client = live.client()
        for round_ in range(3):
            for seed, name in enumerate("abcd"):
                found: Any = client.infer(name, {"x": ONES}, binary=True)
                assert np.array_equal(found.outputs["y"], shelf.expected(ONES, WIDTH, seed)), (round_, name)
        spread = residents(live)
        assert sorted(spread) == ["cpu:0", "cpu:1"]
        assert sorted(map(len, spread.values())) == [1, 1]


def test_a_worker_dies_alone(tmp_path: Path) -> None:
    """What is resident on the other device answers all the time."""
    for seed, name in enumerate("ab"):
        shelf.put(tmp_path / "models", name, width=WIDTH, seed=seed)
    with serving(tmp_path, devices=TWO) as live:
        for name in "ab":
            client = live.client()
            client.infer(name, {"x": ONES}, binary=True)
        where = {name: device for device, names in residents(live).items() for name in names}
        assert len(set(where.values())) == 2
        before = pids(live)
        for pid in before.values():
            assert shared(pid, 4 * WIDTH) == [0], "weights are the page cache's own pages"
        os.kill(before[where["a"]], signal.SIGKILL)
        for _ in range(20):
            assert live.status("/v2/models/b/ready") == 200
        found: Any = live.client().infer("b", {"x": ONES}, binary=True)
        assert np.array_equal(found.outputs["y"], shelf.expected(ONES, WIDTH, 1))
        live.until(lambda: residents(live)[where["a"]] == {"a"}, "the dead worker's model comes back")
        after = pids(live)
        assert after[where["b"]] == before[where["b"]]
        assert after[where["a"]] not in {0, before[where["a"]]}
        assert live.infer("nobody").status == 404
