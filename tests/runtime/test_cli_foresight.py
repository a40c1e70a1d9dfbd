"""`foreload forecast explain` and `foreload backtest`: what they say of known traffic, and of what they can't use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from forecasting.store import STORE, Store
from runtime.cli import DECLINED, OK, SETUP, main
from tests.forecasting.fleets import END, counted, daily, noise

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

NOW = "2025-10-13T00:00Z"
CONFIG = """
devices: [{id: "cpu:0", memory: 1GiB}]
disk: {path: cache}
repository: [models]
preload:
  defaults: {timezone: UTC}
  peaks:
    - {name: breakfast, models: ["daily-1@1"], when: {days: daily, at: "07:00"}, duration: 1h}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose server has counted 24 models for 10 days."""
    root = tmp_path_factory.mktemp("server")
    (root / "models").mkdir()
    (root / "config.yaml").write_text(CONFIG)
    store, _ = Store.open(root / "cache" / STORE)
    with store:
        store.checkpoint(counted(daily(24, 10)).snapshot())
    return root


def explained(folder: Path, model: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    code = main(["forecast", "explain", model, "--config", str(folder / "config.yaml"), "--at", NOW, *more])
    assert code == OK
    return capsys.readouterr().out


def log(path: Path, fleet: dict[str, NDArray[np.int64]]) -> Path:
    """A CSV log of these requests."""
    lines = ["ts,model"]
    length = len(next(iter(fleet.values())))
    for key, minutes in fleet.items():
        for minute in np.flatnonzero(minutes).tolist():
            lines += [f"{60 * (END - length + minute) + 1},{key}"] * int(minutes[minute])
    path.write_text("\n".join(lines) + "\n")
    return path


# -- explain -----------------------------------------------------------------------------------------


def test_explain_says_when_a_model_is_wanted_and_why(folder: Path, capsys: pytest.CaptureFixture[str]):
    """24 hours of expected requests, the gate's verdict, the weights, and the scheduled peak."""
    said: dict[str, Any] = json.loads(explained(folder, "daily-1", capsys, "--json"))
    assert said["model"] == "daily-1@1"
    assert said["allowed"]
    assert said["history_days"] == pytest.approx(10, abs=1)
    expected = np.array([each["expected"] for each in said["curve"]])
    assert len(expected) == 96
    truth = daily(24, 10)["daily-1@1"][-1440:].reshape(96, 15).sum(axis=1)
    assert np.corrcoef(expected, truth)[0, 1] > 0.7
    assert all(each["low"] <= each["high"] for each in said["curve"])
    assert said["peaks"] == [{"start": "2025-10-13T07:00+00:00", "end": "2025-10-13T08:00+00:00", "cause": "breakfast"}]
    chances = [each["blend"] for each in said["chances"].values()]
    assert chances == sorted(chances)
    assert sum(said["mix"].values()) == pytest.approx(1, abs=0.1)


def test_explain_speaks_to_people(folder: Path, capsys: pytest.CaptureFixture[str]):
    """One line a fact, and a bar an hour."""
    said = explained(folder, "daily-2@1", capsys)
    for words in ("confidence", "next use", "chance within 1h", "blend:", "may be loaded ahead", "#####"):
        assert words in said


def test_explain_draws(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A PNG that is one."""
    explained(folder, "daily-1", capsys, "--plot", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_explain_leaves_the_counts_alone(folder: Path, capsys: pytest.CaptureFixture[str]):
    """A running server holds the file: it is read from a copy, byte for byte the same after."""
    path = folder / "cache" / STORE
    before = path.read_bytes()
    holder, _ = Store.open(path)
    with holder:
        explained(folder, "daily-3", capsys, "--json")
    assert path.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == [STORE]


def test_a_model_that_was_never_counted_is_declined(folder: Path, capsys: pytest.CaptureFixture[str]):
    """With its name, and how many are known."""
    code = main(["forecast", "explain", "nobody", "--config", str(folder / "config.yaml"), "--at", NOW])
    assert code == DECLINED
    assert "no request for 'nobody' was counted; 24 models are known" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"SQLite format 3\0 and then nothing", b"\0" * 5000])
def test_counts_that_cannot_be_read_are_declined(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
):
    """No file, an empty one, a damaged one: said in a sentence, and the file stays where it is."""
    (tmp_path / "models").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "config.yaml").write_text(CONFIG)
    if content is not None:
        (tmp_path / "cache" / STORE).write_bytes(content)
    assert main(["forecast", "explain", "m", "--config", str(tmp_path / "config.yaml")]) == DECLINED
    assert "count" in capsys.readouterr().err
    assert content is None or [each.name for each in (tmp_path / "cache").iterdir()] == [STORE]


def test_a_wrong_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As everywhere."""
    (tmp_path / "config.yaml").write_text("devices: 3\n")
    assert main(["forecast", "explain", "m", "--config", str(tmp_path / "config.yaml")]) == SETUP
    assert "devices" in capsys.readouterr().err


# -- backtest ----------------------------------------------------------------------------------------


def test_backtest_opens_the_gate_for_a_daily_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Skill per horizon, calibration, and what the gate would decide, from nothing but a log."""
    path = log(tmp_path / "requests.csv", daily(6, 9))
    assert main(["backtest", str(path), "--json", "--plot", str(tmp_path / "out.png")]) == OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["gate"] == "open"
    assert found["skilled"] >= 5
    assert found["requests"] == sum(int(each.sum()) for each in daily(6, 9).values())
    assert found["relative_mae"]["up to 1h"] < 1.1
    assert found["blend_10m"]["brier"] < found["blend_10m"]["climatology"]
    assert [each["requests"] for each in found["by_model"]] == sorted(
        (each["requests"] for each in found["by_model"]), reverse=True
    )
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


def test_backtest_keeps_the_gate_shut_on_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """And says so to people."""
    assert main(["backtest", str(log(tmp_path / "requests.csv", noise(25, 8, seed=5)))]) == OK
    said = capsys.readouterr().out
    assert "the gate is shut" in said
    assert "and 5 models more" in said


def test_backtest_of_an_hour_says_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Too little for any judgement is no error, and the plot says so too."""
    path = log(tmp_path / "requests.csv", {"m": np.ones(60, np.int64)})
    assert main(["backtest", str(path), "--plot", str(tmp_path / "out.png"), "--tz", "Asia/Shanghai"]) == OK
    assert "60 requests for 1 models" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"), [("", "no request was found"), ("hello\nworld\n", "no request was found in 2 lines")]
)
def test_a_log_without_requests_is_refused(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]):
    """With the first line that was not understood."""
    (tmp_path / "log").write_text(text)
    assert main(["backtest", str(tmp_path / "log")]) == SETUP
    assert says in capsys.readouterr().err


def test_a_log_that_is_not_there_and_an_unknown_zone_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In one sentence each."""
    assert main(["backtest", str(tmp_path / "nowhere")]) == SETUP
    assert "cannot read the log 'nowhere'" in capsys.readouterr().err
    path = log(tmp_path / "requests.csv", {"m": np.ones(60, np.int64)})
    assert main(["backtest", str(path), "--tz", "Asia/Shangai"]) == SETUP
    assert "Asia/Shanghai" in capsys.readouterr().err
    assert main(["backtest", str(path), "--plot", str(tmp_path / "no" / "out.png")]) == SETUP
    assert "--plot" in capsys.readouterr().err
