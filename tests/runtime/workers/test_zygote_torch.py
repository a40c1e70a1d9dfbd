"""Zygote and kept skeletons with the real core: torch and transformers can be forked, and a copy computes the same."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from actors.residency.model import Footprint, Model
from runtime.worker.builders import factory_for
from runtime.workers.port import BuilderSpec, Call, LoadSpec, TensorSpec
from runtime.workers.process import DEFAULT_CORE, Backoff, ProcessWorker
from runtime.workers.zygotes import Zygotes
from tests.runtime.workers.worker_kit import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "bert@1"
MODEL = Model("bert", "1", "f", Footprint(1000, 1000))
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
BODY = json.dumps(
    {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 4], "data": [2, 7, 9, 3]}]}
).encode()


@pytest.fixture
def spec(tmp_path: Path) -> LoadSpec:
    """A small BERT with random weights."""
    builder = BuilderSpec("transformers", "BertModel", CONFIG)
    weights = {name: torch.rand_like(tensor) for name, tensor in factory_for(builder, ())().state_dict().items()
               if tensor.is_floating_point()}  # fmt: skip
    save_file(weights, tmp_path / "w.safetensors")
    return LoadSpec(
        key=KEY,
        fingerprint="f",
        weights=str(tmp_path / "w.safetensors"),
        weights_bytes=(tmp_path / "w.safetensors").stat().st_size,
        builder=builder,
        inputs=(TensorSpec("input_ids", "INT64", (-1, -1)),),
        outputs=(TensorSpec("last_hidden_state", "FP32", (-1, -1, 32)),),
    )


def threads(pid: int) -> Iterator[str]:
    """Names of a process' threads."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield (task / "comm").read_text(encoding="ascii").strip()


def imported(pid: int, library: str) -> bool:
    """Whether a compiled part of a library is mapped by a process."""
    return library in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")


@pytest.mark.slow
async def test_torch_and_transformers_can_be_forked_and_copies_answer_the_same(tmp_path: Path, spec: LoadSpec) -> None:
    """Imports leave one thread; the second life builds nothing, imports nothing, and its answer is the same text."""
    notes: list[str] = []
    ready: list[int] = []
    steps: list[set[str]] = []
    answers: list[bytes] = []
    async with Zygotes(DEFAULT_CORE, notify=notes.append, insist=True) as starter:
        worker = ProcessWorker(
            "cpu:0",
            resolve=lambda _: spec,
            on_ready=ready.append,
            on_lost=lambda *_: None,
            slot_bytes=1 << 20,
            backoff=Backoff(0.01, 0.01),
            starter=starter,
            skeletons=str(tmp_path / "skeletons"),
        )
        async with worker:
            for life in range(1, 4):
                await eventually(lambda life=life: len(ready) == life and worker.pid == ready[-1], within=120)
                steps.append({name for name, _ in (await worker.load(MODEL)).steps})
                answers.append((await worker.infer(Call(KEY, BODY))).body)
                if life == 1:
                    zygote = starter._current
                    assert zygote is not None
                    assert zygote.prepared
                os.kill(worker.pid, signal.SIGKILL)
            assert list(threads(starter.pid)) == ["zygote"]
            assert imported(starter.pid, "libtorch")
    assert notes == []
    assert {"skeleton", "warm_up"} <= steps[0]
    for later in steps[1:]:
        assert "restore" in later
        assert later.isdisjoint({"skeleton", "warm_up"})
    outputs = [json.loads(answer)["outputs"] for answer in answers]
    assert outputs[0] == outputs[1] == outputs[2]
    assert any(value for value in outputs[0][0]["data"])
