"""Ready, and the models that should be resident at start (R13, R14, R17, R18, R34; protocol section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e import shelf
from tests.e2e.live import Said, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.live import Live


def watched(live: Live) -> list[Said]:
    """Poll `/readyz` until it says 200, and give every answer."""
    seen: list[Said] = []

    def ready() -> bool:
        seen.append(live.get("/readyz"))
        return seen[-1].status == 200

    live.until(ready, "ready", 40)
    return seen


def refusals(seen: list[Said]) -> list[str]:
    """The reasons given before; every one a 503 in the form of an error (R17)."""
    for said in seen[:-1]:
        assert said.status == 503, said.body
        assert said.headers["content-type"] == "application/json"
        assert said.json["code"] == "not_ready"
        assert said.json["trace_id"]
    return [said.json["error"] for said in seen[:-1]]


def test_ready_waits_for_required_entries_and_the_first_request_is_a_hit(tmp_path: Path) -> None:
    """R17, R18: while the list loads, 503 JSON that names what is missing, never 500; then 200, and no cold start."""
    shelf.put(tmp_path / "models", "first")
    shelf.put(tmp_path / "models", "slow", factory="late", seconds=1.5)
    warm = [{"model": "first"}, {"model": "slow", "required": True}]
    with serving(tmp_path, ready=False, warm=warm) as live:
        seen = watched(live)
        reasons = refusals(seen)
        assert any("slow" in reason for reason in reasons), set(reasons)
        assert live.residents() == {"first", "slow"}
        for name in ("first", "slow"):
            said = live.infer(name)
            assert said.status == 200
            assert "foreload-cold-start" not in said.headers
        assert live.state()["access"]["lifetime"]["device"] == 2


def test_a_broken_optional_entry_keeps_nobody_unready(tmp_path: Path) -> None:
    """R14: one that cannot be loaded, one that is not there, one good: ready, and the good one is resident."""
    shelf.put(tmp_path / "models", "good")
    path = shelf.put(tmp_path / "models", "broken", seed=2)
    (path / shelf.WEIGHTS).write_bytes(bytes((path / shelf.WEIGHTS).stat().st_size))
    warm = [
        {"model": "broken", "required": False},
        {"model": "nowhere", "required": False},
        {"model": "good", "required": True},
    ]
    with serving(tmp_path, ready=False, warm=warm) as live:
        watched(live)
        assert live.residents() == {"good"}
        row = live.until(lambda: (found := live.index()["broken"]).get("reason") and found, "the reason")
        assert row["state"] == "UNAVAILABLE"
        assert "corrupt_weights" in row["reason"]
        told = {line["model"].partition("@")[0]: line["cause"] for line in live.said("warm model not ready")}
        assert told.keys() == {"broken", "nowhere"}
        assert "unknown_model" in told["nowhere"]


def test_a_broken_required_entry_keeps_the_server_unready_until_it_is_mended(tmp_path: Path) -> None:
    """R13, R34: not ready, with the reason; others are served all the same; mended, it turns ready late."""
    shelf.put(tmp_path / "models", "good")
    path = shelf.put(tmp_path / "models", "broken", seed=2)
    (path / shelf.WEIGHTS).write_bytes(bytes((path / shelf.WEIGHTS).stat().st_size))
    with serving(tmp_path, ready=False, warm=["broken", "good"]) as live:
        live.until(lambda: "good" in live.residents(), "the entry behind it", 30)
        live.until(lambda: live.said("warm model not ready"), "tried")
        said = live.get("/readyz")
        assert said.status == 503
        assert "broken" in said.json["error"]
        assert "corrupt_weights" in said.json["error"]
        assert live.infer("good").status == 200
        assert live.status("/livez") == 200
        shelf.mend(path, seed=3)
        live.wait_ready()
        assert live.residents() == {"good", "broken"}


def test_without_a_warm_list_it_never_is_ready(tmp_path: Path) -> None:
    """Protocol section 6: nobody said what should be warm, so ready is no, with that reason; serving works (P16)."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path, ready=False, warm=None) as live:
        live.until(lambda: live.device()["up"], "the worker")
        assert live.infer("a").status == 200
        said = live.get("/v2/health/ready")
        assert said.status == 503
        assert "warm" in said.json["error"]
        assert live.post("/v2/repository/models/a/load").status == 200


def test_a_model_copied_in_later_satisfies_its_warm_entry(tmp_path: Path) -> None:
    """F15, R13: the list names a model that is not there yet; unready with its name, then it comes, then ready."""
    with serving(tmp_path, ready=False, warm=["later"]) as live:
        live.until(lambda: "later" in live.get("/readyz").json.get("error", ""), "named")
        shelf.put(tmp_path / "models", "later")
        live.wait_ready()
        assert live.residents() == {"later"}


def test_ready_of_a_model_in_both_modes(tmp_path: Path) -> None:
    """P1: cold counts as ready by default and not in strict mode; loading joins by default; 404 for what is unknown."""
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "late", factory="late", seconds=1.5)
    with serving(tmp_path, server__model_ready="resident") as live:
        assert live.status("/v2/models/a/ready") == 503
        cold = live.get("/v2/models/a/ready?strict=false")
        assert (cold.status, cold.json["state"], cold.json["ready"]) == (200, "UNAVAILABLE", True)
        assert live.infer("a").status == 200
        warm = live.get("/v2/models/a/ready")
        assert (warm.status, warm.json["state"], warm.json["tier"]) == (200, "READY", "device")
        assert live.status("/v2/models/nobody/ready") == 404
        live.post("/v2/repository/models/a/unload")
        live.until(lambda: live.status("/v2/models/a/ready") == 503, "unloaded is not ready in strict mode")
        assert live.get("/v2/models/a/ready?strict=0").json["tier"] == "host"
