"""Many first requests at once, models larger than the room for them: every event of a real run is checked."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from actors import events as e
from runtime.demo.weights import MODELS
from tests.e2e import shelf
from tests.e2e.inside import inside
from tests.e2e.live import rows, sleepy

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.e2e.inside import Inside

SMALL = ("mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet", "silero-vad", "crepe-tiny")


def zeros(name: str) -> bytes:
    """An infer body of zeros for a demo model."""
    model = next(each for each in MODELS if each.name == name)
    inputs = []
    for tensor, datatype, shape in model.inputs:
        extents = [1 if at == 0 else 32 if extent == -1 else extent for at, extent in enumerate(shape)]
        if name == "silero-vad" and tensor == "state":
            extents = [1, 2, 128]
        count = int(np.prod(extents))
        inputs.append({"name": tensor, "datatype": datatype, "shape": extents, "data": [0] * count})
    return json.dumps({"inputs": inputs}).encode()


async def infer(server: Inside, model: str, body: bytes) -> httpx.Response:
    """Send one inference."""
    return await server.http.post(f"/v2/models/{model}/infer", content=body)


@pytest.mark.real
@pytest.mark.slow
async def test_200_first_requests_for_a_cold_model_are_one_load(
    tmp_path: Path, demo_repository: Path, demo_cache: Path
) -> None:
    """T1, F49: 200 clients ask for MiniLM at once while nothing is resident: one load, 200 equal answers."""
    ids = [101, 7592, 2088, 102]
    tensors = [
        {"name": name, "datatype": "INT64", "shape": [1, 4], "data": data}
        for name, data in (("input_ids", ids), ("attention_mask", [1, 1, 1, 1]))
    ]
    body = json.dumps({"inputs": tensors}).encode()
    async with inside(
        tmp_path, repository=[str(demo_repository)], disk__path=str(demo_cache), devices__memory="120MB"
    ) as server:
        answers = await asyncio.gather(*(infer(server, "minilm", body) for _ in range(200)))
        assert [answer.status_code for answer in answers] == [200] * 200
        values = [np.array(answer.json()["outputs"][0]["data"], np.float32) for answer in answers]
        assert all(np.allclose(value, values[0], atol=1e-5) for value in values)
        (load,) = server.of(e.LoadStarted, device="cpu:0")
        assert (load.model, len(server.of(e.LoadFinished, device="cpu:0"))) == ("minilm@1", 1)
        granted = server.of(e.LeaseGranted, device="cpu:0")
        assert len(granted) == 200
        assert sum(each.result == "miss" for each in granted) == 1
        assert {each.result for each in granted} <= {"miss", "coalesced", "hit"}
        assert len(server.of(e.RequestFinished, outcome="ok")) == 200
        await server.until(lambda: server.cache().ledger.leases == 0, "leases given back")
        server.check()


@pytest.mark.real
async def test_load_calls_and_requests_at_once_are_one_load(
    tmp_path: Path, demo_repository: Path, demo_cache: Path
) -> None:
    """R5, R26, F49: load calls and infers for one model at one time: one load, everybody served."""
    async with inside(tmp_path, repository=[str(demo_repository)], disk__path=str(demo_cache)) as server:
        body = zeros("crepe-tiny")
        calls: list[Any] = [server.http.post("/v2/repository/models/crepe-tiny/load") for _ in range(10)]
        calls += [infer(server, "crepe-tiny", body) for _ in range(10)]
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200}
        assert all(answer.content == b"" for answer in answers[:10])
        assert len(server.of(e.LoadStarted, device="cpu:0")) == 1
        server.check()


@pytest.mark.real
@pytest.mark.slow
async def test_more_models_than_room_under_concurrency(tmp_path: Path, demo_repository: Path, demo_cache: Path) -> None:
    """R2, R24, I1, I3: 8 clients over 5 real models with room for about two: all answered, capacity and leases hold."""
    bodies = {name: zeros(name) for name in SMALL}
    async with inside(
        tmp_path, repository=[str(demo_repository)], disk__path=str(demo_cache), devices__memory="3MB"
    ) as server:

        async def client(seed: int) -> set[int]:
            pick = random.Random(seed)
            seen = set()
            for _ in range(25):
                name = pick.choice(SMALL)
                seen.add((await infer(server, name, bodies[name])).status_code)
            return seen

        assert await asyncio.gather(*(client(seed) for seed in range(8))) == [{200}] * 8
        assert len(server.of(e.RequestFinished, outcome="ok")) == 200
        evictions = server.of(e.EvictionStarted, device="cpu:0")
        assert len(evictions) > 10, "the room was too large for this to mean anything"
        assert not server.of(e.LoadFailed)
        await server.until(lambda: server.cache().ledger.leases == 0, "leases given back")
        server.check()


async def test_a_just_loaded_model_serves_the_request_that_loaded_it(tmp_path: Path) -> None:
    """U3, U23, R25: room for one model and two that alternate: each load serves its own request before it leaves."""
    for name in ("a", "b"):
        shelf.put(tmp_path / "models", name, width=1000, seed=ord(name))
    body = rows(1, width=1000)
    async with inside(tmp_path, devices__count=1) as server:
        turns = [name for _ in range(10) for name in ("a", "b")]
        answers = await asyncio.gather(*(infer(server, name, body) for name in turns))
        assert [answer.status_code for answer in answers] == [200] * 20
        loads = {each.load: each for each in server.of(e.LoadFinished, device="cpu:0")}
        used = {each.load for each in server.of(e.LeaseGranted, device="cpu:0") if each.load}
        assert set(loads) == used, "a load that served nobody"
        assert len(loads) <= 10, "same-model work is served together: at most n/2 swaps (F51)"
        server.check()


async def test_a_leased_model_outlives_the_wish_for_its_place(tmp_path: Path) -> None:
    """F45, I3: B needs A's place while A works: A finishes first, then B is served; nobody is refused."""
    for name in ("a", "b"):
        shelf.put(tmp_path / "models", name)
    async with inside(tmp_path, devices__count=1) as server:
        assert (await infer(server, "a", rows(1, 1, 1))).status_code == 200
        slow = asyncio.create_task(infer(server, "a", sleepy(1.5)))
        await server.until(lambda: server.cache().ledger.leases == 1, "the lease")
        other = asyncio.create_task(infer(server, "b", rows(1, 1, 1)))
        await server.until(lambda: server.cache().wishes.waiting == 1, "the wish")
        assert (await slow).status_code == 200
        assert (await other).status_code == 200
        (eviction,) = server.of(e.EvictionStarted, device="cpu:0", model="a@1")
        releases = server.of(e.LeaseReleased, device="cpu:0", model="a@1")
        assert len(releases) == 2
        assert eviction.at >= max(each.at for each in releases)
        server.check()


async def test_a_wait_for_a_leased_place_ends_in_503_with_a_time(tmp_path: Path) -> None:
    """F45: nothing may leave within the waiter's patience: 503, Retry-After, `no_evictable_space`; A is unharmed."""
    for name in ("a", "b"):
        shelf.put(tmp_path / "models", name)
    async with inside(tmp_path, devices__count=1, server__wait={"soft": "300ms"}) as server:
        assert (await infer(server, "a", rows(1, 1, 1))).status_code == 200
        slow = asyncio.create_task(infer(server, "a", sleepy(1.5)))
        await server.until(lambda: server.cache().ledger.leases == 1, "the lease")
        refused = await infer(server, "b", rows(1, 1, 1))
        assert (refused.status_code, refused.json()["code"]) == (503, "no_evictable_space")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await slow).status_code == 200
        server.check()


async def test_the_callers_own_deadline_is_504_and_the_servers_patience_503(tmp_path: Path) -> None:
    """P11: `timeout` passed while loading: 504; the server's soft limit: 503 and the load goes on; then a hit."""
    shelf.put(tmp_path / "models", "late", factory="late", seconds=1.2)
    timed = json.loads(rows(1, 1, 1)) | {"parameters": {"timeout": 200_000}}
    async with inside(tmp_path, server__wait={"soft": "500ms"}) as server:
        impatient, patient = await asyncio.gather(
            infer(server, "late", json.dumps(timed).encode()), infer(server, "late", rows(1, 1, 1))
        )
        assert (impatient.status_code, impatient.json()["code"]) == (504, "deadline_exceeded")
        assert (patient.status_code, patient.json()["code"]) == (503, "still_loading")
        await server.until(lambda: bool(server.of(e.LoadFinished, device="cpu:0")), "the load went on")
        again = await infer(server, "late", rows(1, 1, 1))
        assert again.status_code == 200
        assert "foreload-cold-start" not in again.headers
        assert len(server.of(e.LoadStarted, device="cpu:0")) == 1
        server.check()


async def test_two_cold_models_load_side_by_side(tmp_path: Path) -> None:
    """R1: room for both, 1 s each: both are ready after about one second, not two."""
    for name in ("a", "b"):
        shelf.put(tmp_path / "models", name, factory="late", seconds=1)
    async with inside(tmp_path) as server:
        await asyncio.gather(infer(server, "a", rows(1, 1, 1)), infer(server, "b", rows(1, 1, 1)))
        starts = server.of(e.LoadStarted, device="cpu:0")
        ends = server.of(e.LoadFinished, device="cpu:0")
        assert max(each.at for each in starts) < min(each.at for each in ends), "one waited for the other"


async def test_a_long_load_does_not_slow_a_resident_model(tmp_path: Path) -> None:
    """T4, R7, F53: while B loads for 2 s, A's requests are answered as before."""
    shelf.put(tmp_path / "models", "a")
    shelf.put(tmp_path / "models", "b", factory="late", seconds=2)
    async with inside(tmp_path) as server:
        body = rows(1, 1, 1)
        await infer(server, "a", body)
        loading = asyncio.create_task(infer(server, "b", body))
        await server.until(lambda: len(server.of(e.LoadStarted, device="cpu:0")) == 2, "the load")
        took = []
        while not loading.done():
            began = asyncio.get_running_loop().time()
            assert (await infer(server, "a", body)).status_code == 200
            took.append(asyncio.get_running_loop().time() - began)
        assert len(took) > 50
        assert float(np.quantile(took, 0.95)) < 0.1
