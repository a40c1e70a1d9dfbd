"""Inputs that come as files through every kind of device worker, with the real core and a module of its own."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec
import numpy as np
import orjson
import pytest
import torch

from actors.errors import BadTensor
from actors.residency.model import Footprint, Model
from runtime.worker.preprocess.image import image
from runtime.workers.local import ThreadWorker
from runtime.workers.pipelines import ImagePipeline, Prepared, PreprocessLimits
from runtime.workers.port import Call, TensorSpec
from runtime.workers.process import ProcessWorker
from tests.runtime.worker.modules import ALLOW, Normed, randomised, saved, spec_for
from tests.runtime.worker.preprocess.files import photo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from runtime.workers.port import LoadSpec

    Worker: TypeAlias = ProcessWorker | ThreadWorker
    Start: TypeAlias = Callable[..., AbstractAsyncContextManager[Any]]

STEPS = ImagePipeline("FP32", (6, 6), "exact", mean=(0.5,) * 3, std=(0.25,) * 3)
X = TensorSpec("x", "FP32", (-1, 3, 6, 6), STEPS)
Y = TensorSpec("y", "FP32", (-1, -1))


@pytest.fixture(params=[ProcessWorker, ThreadWorker], ids=["process", "thread"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """A worker with models `a` and `b` of the same weights and steps."""
    weights = saved(tmp_path / "m.safetensors", randomised(Normed))

    def resolve(model: Model) -> LoadSpec:
        spec = spec_for(weights, "Normed", key=model.key, fingerprint=model.fingerprint, inputs=(X,), outputs=(Y,))
        return msgspec.structs.replace(spec, warm_up=True)

    @asynccontextmanager
    async def started(**limits: Any) -> AsyncIterator[Worker]:
        worker: Worker = request.param(
            "cpu:0",
            resolve=resolve,
            on_ready=lambda _: None,
            on_lost=lambda *_: None,
            allow=ALLOW,
            preprocess=PreprocessLimits(**limits),
            slot_bytes=1 << 20,
        )
        with anyio.fail_after(60):
            async with worker:
                await worker.ready()
                for name in ("a", "b"):
                    await worker.load(Model(name, "1", "f", Footprint(1000, 1000)))
                yield worker

    return started


def call(key: str, *files: bytes) -> Call:
    """Files in the binary extension."""
    tail = b"".join(len(file).to_bytes(4, "little") + file for file in files)
    tensor = {"name": "x", "datatype": "BYTES", "shape": [len(files)], "parameters": {"binary_data_size": len(tail)}}
    head = orjson.dumps({"inputs": [tensor]})
    return Call(key, head + tail, len(head))


async def prepared(worker: Worker) -> Prepared:
    """What it says of shared work now."""
    if isinstance(worker, ProcessWorker):
        await worker.ping()
    return worker.prepared


async def test_files_become_what_the_models_steps_make_of_them_and_are_decoded_once(start: Start) -> None:
    """Two models, six calls, two files: to the bit what the module gives for the tensors, two decodings."""
    files = [photo(seed=1), photo(17, 31, "JPEG", seed=2)]
    async with start() as worker:
        asked = [call(key, file) for file in files for key in ("a@1", "b@1", "a@1")]
        answers = await asyncio.gather(*(worker.infer(one) for one in asked))
        assert await prepared(worker) == Prepared(hits=4, misses=2, bytes=2 * 3 * 36 * 4)
    batch = np.stack([image(file, STEPS, PreprocessLimits()) for file in files])
    module = randomised(Normed)
    for place, answer in enumerate(answers):
        with torch.inference_mode():
            expected = module(torch.from_numpy(batch[place // 3][None])).numpy()
        (row,) = orjson.loads(answer.body)["outputs"]
        assert np.array_equal(np.array(row["data"], np.float32).reshape(row["shape"]), expected)


async def test_a_worker_that_sleeps_is_woken_by_a_decoded_file(start: Start) -> None:
    """One call at a time: nothing but the decoding thread can end the device thread's wait."""
    async with start(cache=0, threads=1) as worker:
        for seed in range(20):
            with anyio.fail_after(10):
                await worker.infer(call("a@1", photo(seed=seed)))
        told = await prepared(worker)
        assert told == Prepared(hits=0, misses=20, bytes=0)


async def test_limits_reach_the_worker_and_hostile_files_leave_it_alone(start: Start) -> None:
    """Too many pixels for this worker's setting; 40 such calls beside good ones, and every one gets its own answer."""
    async with start(pixels=1_000) as worker:
        good, bad = call("a@1", photo(10, 10)), call("b@1", photo(40, 40))
        found = await asyncio.gather(*(worker.infer(one) for one in [good, bad] * 40), return_exceptions=True)
        assert all(not isinstance(outcome, BaseException) for outcome in found[::2])
        for outcome in found[1::2]:
            assert isinstance(outcome, BadTensor)
            assert outcome.message == "input 'x' has too many pixels: 1600, at most 1000 are allowed"
            assert outcome.model == "b@1"
        assert [held.in_flight for held in await worker.inventory()] == [0, 0]


async def test_a_cancelled_call_leaves_nothing_behind(start: Start) -> None:
    """Cancelled while its file waits to be decoded: the next call, in the same slot, gets its own answer."""
    async with start(threads=1) as worker:
        expected = (await worker.infer(call("a@1", photo(seed=99)))).body
        large = photo(700, 700, seed=5)
        for _ in range(5):
            tasks = [asyncio.create_task(worker.infer(call("a@1", large, photo(seed=place)))) for place in range(4)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in found)
            assert (await worker.infer(call("a@1", photo(seed=99)))).body == expected
        assert [held.in_flight for held in await worker.inventory()] == [0, 0]
