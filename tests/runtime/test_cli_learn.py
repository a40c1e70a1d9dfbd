"""`foreload forecast learn`: a new installation starts with knowledge."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

from forecasting.counts import Counts
from forecasting.store import Store
from runtime.catalog.describe import write_manifest
from runtime.cli import main

if TYPE_CHECKING:
    from pathlib import Path

DAY = 86_400.0


def server(folder: Path) -> Path:
    """A configuration with one model, `tiny`, in two versions."""
    for version in ("1", "2"):
        directory = folder / "models" / f"tiny-{version}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        tensor = {"datatype": "FP32", "shape": [-1, 2]}
        write_manifest(
            directory,
            {
                "name": "tiny",
                "version": version,
                "builder": {"kind": "python", "target": "some.module:factory"},
                "inputs": [{"name": "x", **tensor}],
                "outputs": [{"name": "y", **tensor}],
            },
        )
    file = folder / "foreload.yaml"
    with file.open("w") as out:
        YAML(typ="safe").dump({"repository": ["models"], "disk": {"path": "cache"}, "warm": []}, out)
    return file


def log_of(folder: Path, name: str, *, days: int = 3) -> Path:
    """A hundred requests a day, as CSV."""
    now = time.time()
    rows = [f"{now - day * DAY - 600 * step:.0f},{name}" for day in range(1, days + 1) for step in range(100)]
    path = folder / f"{name}.csv"
    path.write_text("ts,model\n" + "\n".join(rows) + "\n")
    return path


def counted(folder: Path) -> tuple[str, ...]:
    """Keys in the file of counts."""
    store, _ = Store.open(folder / "cache" / "forecast.sqlite")
    with store:
        saved, _ = store.load()
        assert saved is not None
        return Counts.restore(saved, time.time(), 0.0)[0].keys


def test_a_log_becomes_a_past_of_the_models_that_are_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name means its highest version; what nobody serves is named and left out."""
    file = server(tmp_path)
    logs = [str(log_of(tmp_path, name)) for name in ("tiny", "gone")]
    assert main(["forecast", "learn", *logs, "--config", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["models"], said["requests"], said["unknown"]) == (1, 300, ["gone"])
    assert counted(tmp_path) == ("tiny@2",)


def test_learning_again_counts_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file knows where its past begins."""
    file, log = server(tmp_path), str(log_of(tmp_path, "tiny@1"))
    for _ in range(2):
        assert main(["forecast", "learn", log, "--config", str(file)]) == 0
    assert "300 requests of 1 models" in capsys.readouterr().out
    store, _ = Store.open(tmp_path / "cache" / "forecast.sqlite")
    with store:
        saved, _ = store.load()
        assert saved is not None
        sums, _ = Counts.restore(saved, time.time(), 0.0)[0].snapshot().sums()
        assert float(sums.sum()) == pytest.approx(300, rel=0.2)


def test_a_running_server_keeps_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two writers would lose each other's counts: refused, and said how to go on."""
    file, log = server(tmp_path), str(log_of(tmp_path, "tiny"))
    store, _ = Store.open(tmp_path / "cache" / "forecast.sqlite")
    with store:
        assert main(["forecast", "learn", log, "--config", str(file)]) == 1
    assert "stop the server first" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\0" * 4_096, b"ts,model\nnever,tiny\n"])
def test_a_log_that_says_nothing_teaches_nothing(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty, binary or wrong: no model, no crash, and the bad lines are counted."""
    file, log = server(tmp_path), tmp_path / "odd.log"
    log.write_bytes(content)
    assert main(["forecast", "learn", str(log), "--config", str(file)]) in {0, 2}
    capsys.readouterr()
    assert main(["forecast", "learn", str(tmp_path / "missing.log"), "--config", str(file)]) in {0, 2}
