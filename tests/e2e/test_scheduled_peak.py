"""Scheduled peaks against the wall clock: what was declared is resident before its start (goal 8 of `forecasting/`)."""

from __future__ import annotations

import math
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest

from runtime.commands.peaks import lint
from tests.e2e import shelf
from tests.e2e.live import ROOT, answer, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.live import Live, Settings

LEAD = 2.0
TICK = 1.0
ON_TIME = 0.5
"""Seconds after an instant at which its result is looked for."""


def soon(seconds: float) -> float:
    """A whole second of the wall clock so far ahead, in epoch seconds; configuration knows no fractions."""
    return math.ceil(time.time() + seconds)


def peak(start: float, *models: str, mode: str = "act") -> Settings:
    """Settings with one window of a minute at an instant in epoch seconds."""
    once = datetime.fromtimestamp(start, UTC).isoformat()
    entry = {"name": "soon", "models": list(models), "when": {"once": once}, "duration": "1m", "lead": f"{LEAD}s"}
    return {
        "preload": {"defaults": {"mode": mode}, "peaks": [entry]},
        "forecast": {"tick": f"{TICK}s", "learned": False, "keep": False},
    }


def sleep_until(instant: float) -> None:
    """Wait for a time of the wall clock, in epoch seconds."""
    time.sleep(max(instant - time.time(), 0.0))


def residents_at(live: Live, instant: float) -> set[str]:
    """What is resident at an instant of the wall clock, and proof that the answer is not from later."""
    sleep_until(instant)
    found = live.residents()
    assert time.time() < instant + LEAD, "this machine is too slow to tell before from after"
    return found


@pytest.mark.slow
def test_a_declared_peak_is_resident_at_start_minus_lead_and_its_first_request_is_a_hit(tmp_path: Path) -> None:
    """Each model of the window is loaded by `lead` before the start, and not as early as possible.

    A slow one is started sooner by what its loads were seen to take.
    """
    shelf.put(tmp_path / "models", "quick", seed=1)
    shelf.put(tmp_path / "models", "slow", factory="late", seconds=1.0, seed=2)
    shelf.put(tmp_path / "models", "other", seed=3)
    start = soon(12)
    with serving(tmp_path, **peak(start, "quick", "slow")) as live:
        for _ in ("from disk", "from the host"):
            assert live.infer("slow").status == 200
            assert live.post("/v2/repository/models/slow/unload").status == 200
            live.until(lambda: not live.residents(), "unloaded")
        assert time.time() < start - LEAD - 2, "this machine is too slow for this test"
        assert residents_at(live, start - LEAD - 1) == set()
        assert residents_at(live, start - LEAD + ON_TIME) == {"quick", "slow"}
        sleep_until(start)
        x = np.ones((1, 3), dtype=np.float32)
        for name, seed in (("quick", 1), ("slow", 2)):
            said = live.infer(name)
            np.testing.assert_allclose(answer(said), shelf.expected(x, seed=seed), rtol=1e-6)
            assert "foreload-cold-start" not in said.headers
        windows = live.state()["foresight"]["windows"]
        assert {each["model"] for each in windows} == {"quick@1", "slow@1"}
        assert {(each["start"], each["ready_by"], each["trouble"]) for each in windows} == {(start, start - LEAD, "")}
        assert "foreload-cold-start" in live.infer("other").headers, "nobody declared that one"


def test_the_readmes_example_passes_the_lint(tmp_path: Path) -> None:
    """What is copied from the README is accepted, and every entry names a model and fires again."""
    blocks = re.findall(r"^```yml\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (example,) = (block for block in blocks if re.search(r"^preload:", block, re.MULTILINE))
    shelf.put(tmp_path / "models", "sentences")
    file = tmp_path / "foreload.yaml"
    file.write_text(example, encoding="utf-8")
    remarks = lint(file, {}, datetime(2026, 12, 1, tzinfo=UTC).timestamp())
    assert {row["level"] for row in remarks} == {"note"}, remarks


@pytest.mark.slow
def test_a_plan_that_only_observes_loads_nothing_and_says_so(tmp_path: Path) -> None:
    """`mode: observe`: at the start nothing is resident, the first request is cold, the state shows what was due."""
    shelf.put(tmp_path / "models", "quick")
    start = soon(8)
    with serving(tmp_path, **peak(start, "quick", mode="observe")) as live:
        assert residents_at(live, start - LEAD + ON_TIME) == set()
        state = live.state()["foresight"]
        assert (state["mode"], [each["due"] for each in state["windows"]]) == ("observe", [True])
        sleep_until(start)
        assert "foreload-cold-start" in live.infer("quick").headers
