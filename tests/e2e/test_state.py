"""What the server says about itself while it works: state, metrics, statistics; the numbers add up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.e2e import shelf
from tests.e2e.live import rows, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.live import Live

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with room for two of three models after: 3 disk finds, 4 device hits, 2 host finds, 1 failure.

    Shared, for a start takes seconds; the tests only read.
    """
    tmp_path = tmp_path_factory.mktemp("state")
    for at, name in enumerate(("a", "b", "c")):
        shelf.put(tmp_path / "models", name, width=5_000, seed=at)
    shelf.put(tmp_path / "models", "broken", factory="absent", width=5_000)
    body = rows(1, width=5_000)
    with serving(tmp_path, devices__count=2) as live:
        for name in ("a", "a", "a", "b", "c", "a", "c", "b", "b"):
            assert live.infer(name, body).status == 200
        assert live.infer("broken", body).status == 503
        yield live


def samples(page: str, parse: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a metrics page by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(page)
        for sample in family.samples
    }


def total(found: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    """Sum of a metric over the labels that are not given."""
    return sum(
        value for (sample, has), value in found.items() if sample == name and labels.items() <= dict(has).items()
    )


def test_bytes_leases_and_residents_of_the_state_add_up(used: Live) -> None:
    """I1, I10: what is loading, resident and unloading is what is used; rows sum to it; free is the rest."""
    state = used.state()
    for tier in (*state["devices"], state["host"]):
        assert tier["used"] == tier["loading"] + tier["resident"] + tier["unloading"]
        assert tier["used"] == sum(row["bytes"] for row in tier["residents"])
        assert tier["free"] == tier["capacity"] - tier["headroom"] - tier["used"] - tier["foreign"]
        assert tier["used"] <= tier["capacity"]
        assert tier["waiting"] == 0
    (device,) = state["devices"]
    assert device["leases"] == 0
    assert [row["model"] for row in device["residents"]] == ["b@1"], "the other gave way to the load that failed"
    assert {row["model"] for row in state["host"]["residents"]} >= {"a@1", "b@1", "c@1"}
    for row in device["residents"]:
        assert row["bytes"] == 2 * 4 * 5_000
        assert row["uses"] >= 1
        assert row["age"] >= row["idle"] >= 0
    assert state["workers"]["cpu:0"]["pid"] in used.members()
    assert 0 < state["memory"]["available"] <= state["memory"]["limit"]
    assert all(actor["alive"] for actor in state["actors"].values())


def test_hit_rates_and_mean_access_time_follow_their_formula(used: Live) -> None:
    """h1 found on the device, h2 of the rest on the host; mean = h1 t1 + (1 - h1)(h2 t2 + (1 - h2) t3)."""
    for span in ("five_minutes", "hour", "lifetime"):
        access = used.state()["access"][span]
        assert (access["device"], access["host"], access["disk"], access["leases"]) == (4, 2, 3, 9)
        assert access["h1"] == pytest.approx(4 / 9)
        assert access["h2"] == pytest.approx(2 / 5)
        near, far = access["h1"], 1 - access["h1"]
        wanted = near * access["t1"] + far * (access["h2"] * access["t2"] + (1 - access["h2"]) * access["t3"])
        assert access["mean"] == pytest.approx(wanted)
        assert access["t1"] == 0 < access["t2"] < access["t3"]
        assert access["joined"] == access["host"] + access["disk"] + access["left"]


def test_metrics_parse_in_both_formats_and_agree_with_the_state(used: Live) -> None:
    """Both pages are valid, say the same, and count what was done above."""
    text = used.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    opened = used.get("/metrics", {"accept": OPENMETRICS})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    for found in (samples(text.body.decode(), parse_text), samples(opened.body.decode(), parse_openmetrics)):
        assert total(found, "foreload_requests_total", outcome="ok") == 9
        assert total(found, "foreload_requests_total", model="broken@1") == 1
        assert total(found, "foreload_cache_hits_total", tier="device") == 4
        assert total(found, "foreload_cache_hits_total", tier="host") == 2
        assert total(found, "foreload_cache_hits_total", tier="disk") == 3
        assert total(found, "foreload_evictions_total", device="cpu:0", reason="room") >= 3
        assert total(found, "foreload_load_failures_total", model="broken@1") >= 1
        device = used.device()
        assert total(found, "foreload_device_bytes", device="cpu:0", kind="capacity") in {0, device["capacity"]}
        assert total(found, "foreload_leases", model="a@1") == 0


def test_statistics_agree_with_the_metrics(used: Live) -> None:
    """The V2 statistics extension counts the same requests."""
    rows_by_name = {row["name"]: row for row in used.get("/v2/models/stats").json["model_stats"]}
    counts = {name: row["inference_stats"]["success"]["count"] for name, row in rows_by_name.items()}
    assert counts == {"a": 4, "b": 3, "c": 2, "broken": 0}
    assert rows_by_name["broken"]["inference_stats"]["fail"]["count"] == 1
    assert rows_by_name["b"]["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": 40_000}]


def test_a_cold_answer_says_where_the_time_went(tmp_path: Path) -> None:
    """Design section 8: a cold answer carries where the model was and the phases; a hit carries neither."""
    shelf.put(tmp_path / "models", "a")
    with serving(tmp_path) as live:
        cold = live.infer("a")
        assert cold.headers["foreload-cold-start"].startswith("disk;wait=")
        assert "load;dur=" in cold.headers["server-timing"]
        hit = live.infer("a")
        assert "foreload-cold-start" not in hit.headers
        live.post("/v2/repository/models/a/unload")
        live.until(lambda: not live.residents(), "unloaded")
        assert live.infer("a").headers["foreload-cold-start"].startswith("host;wait=")


def test_thread_isolation_serves_too(tmp_path: Path) -> None:
    """`isolation: thread`: one process, the same answers, the same state, the same clean end."""
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "b", seed=2)
    with serving(tmp_path, devices__isolation="thread", devices__count=1) as live:
        for _ in range(2):
            for name in ("a", "b"):
                assert live.infer(name).status == 200
        assert live.members() == [live.process.pid]
        assert live.state()["workers"].keys() == {"cpu:0"}
        assert live.worker == 0
        assert live.status("/v2/models/a/ready") == 200
        live.process.terminate()
        assert live.wait() == 0


def test_pinned_models_stay_and_idle_ones_leave(tmp_path: Path) -> None:
    """A pin holds against a wish for the place; `ttl_idle` gives an idle place back without anybody asking."""
    for name in ("pinned", "other", "third"):
        shelf.put(tmp_path / "models", name)
    policy = {"name": "lru_ttl", "ttl_idle": "300ms"}
    with serving(tmp_path, devices__count=2, policy=policy) as live:
        live.post("/v2/repository/models/pinned/load", b'{"parameters":{"pin":true}}')
        for name in ("other", "third", "other"):
            assert live.infer(name).status == 200
            assert "pinned" in live.residents()
        live.until(lambda: live.residents() == {"pinned"}, "idle ones left", 5)


def test_keys_are_asked_for_everywhere_but_not_shown(tmp_path: Path) -> None:
    """S2, S10: without a key 401, with too small a scope 403; neither key nor hash is in state, metrics or log."""
    from runtime.http.auth import new_token

    token, hashed = new_token()
    keys = [{"name": "shop", "hash": hashed, "scopes": ["infer:a*"]}]
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "b")
    with serving(tmp_path, ready=False, server__keys=keys) as live:
        headers = {"authorization": f"Bearer {token}"}
        live.until(lambda: live.get("/readyz", headers).status == 200, "ready")
        assert live.infer("a").status == 401
        assert live.infer("a", headers=headers).status == 200
        assert live.infer("b", headers=headers).status == 403
        assert live.get("/api/v1/state", headers).status == 403
        assert live.post("/v2/repository/models/a/load", headers=headers).status == 403
        assert token not in live.log.read_text()
        assert hashed.partition(":")[2] not in live.log.read_text()
