"""A model's slab over a restart: laid after the first answer, served by the next process, damaged and made anew."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from runtime.catalog.describe import write_manifest
from tests.e2e import shelf
from tests.e2e.live import answer, rows, serving

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 5_000
FP32, BF16 = 2 * 4 * WIDTH, 2 * 2 * WIDTH


def slabs(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "blobs").rglob("*.slab"))


def test_a_slab_is_laid_after_the_first_answer_and_serves_the_next_process(tmp_path: Path) -> None:
    """Equal answers from the file, from the slab, and after the slab was damaged; metrics and log tell of it."""
    shelf.put(tmp_path / "models", "a", width=WIDTH)
    body = rows(1, 2, 3, width=WIDTH)
    wanted = shelf.expected(np.array([[1, 2, 3, *[0] * (WIDTH - 3)]], np.float32), WIDTH)
    with serving(tmp_path) as live:
        assert np.array_equal(answer(live.infer("a", body)), wanted)
        live.until(lambda: 'foreload_slabs_total{outcome="laid"} 1.0' in live.get("/metrics").body.decode(), "a slab")
    (slab,) = slabs(tmp_path)
    with serving(tmp_path) as live:
        assert np.array_equal(answer(live.infer("a", body)), wanted)
        assert "foreload_host_populate_bytes_per_second" in live.get("/metrics").body.decode()
    assert slabs(tmp_path) == [slab]
    slab.chmod(0o644)
    with slab.open("r+b") as file:
        file.seek(slab.stat().st_size // 2)
        file.write(b"\xff\xff\xff\xff")
    with serving(tmp_path, policy={"backoff": {"first": "10ms", "limit": "20ms"}}) as live:
        assert live.infer("a", body).status == 503
        live.until(lambda: live.infer("a", body).status == 200, "the model comes back from its source")
        assert np.array_equal(answer(live.infer("a", body)), wanted)
        live.until(lambda: slabs(tmp_path), "a new slab")


def test_a_precision_is_a_resident_of_its_own(tmp_path: Path) -> None:
    """Two versions over one source: each with its own bytes on the device, and answers as precise as they are."""
    full = shelf.put(tmp_path / "models", "full", width=WIDTH)
    half = tmp_path / "models" / "half"
    half.mkdir()
    (half / shelf.WEIGHTS).write_bytes((full / shelf.WEIGHTS).read_bytes())
    write_manifest(half, {**shelf.settings("full", width=WIDTH), "version": "1-bf16", "dtype": "bf16"})
    x = np.array([[1, 2, 3, *[0] * (WIDTH - 3)]], np.float32)
    body = json.loads(rows(1, 2, 3, width=WIDTH))
    wanted = shelf.expected(x, WIDTH)
    with serving(tmp_path, disk__slabs=False) as live:
        exact = answer(live.post("/v2/models/full/versions/1/infer", json.dumps(body).encode()))
        short = answer(live.post("/v2/models/full/versions/1-bf16/infer", json.dumps(body).encode()))
        sizes = {row["model"]: row["bytes"] for row in live.device()["residents"]}
    assert np.array_equal(exact, wanted)
    assert not np.array_equal(short, wanted)
    assert np.allclose(short, wanted, rtol=2**-6, atol=2**-6)
    assert sizes == {"full@1": FP32, "full@1-bf16": BF16}
    assert len(slabs(tmp_path)) == 1
