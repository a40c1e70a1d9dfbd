"""The demo's models through the worker's own building, binding and running, against plain torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.demo.itinerary import itinerary
from runtime.demo.weights import MODELS
from runtime.worker.builders import factory_for
from runtime.worker.engine import Engine
from runtime.worker.skeleton import Skeleton
from runtime.workers.port import BuilderSpec, TensorSpec
from tests.runtime.demo.conftest import BY_NAME, state_dict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.runtime.demo.conftest import Loader

pytestmark = pytest.mark.real

ALLOW = ("runtime.demo.architectures",)


def spec_of(repository: Path, name: str) -> BuilderSpec:
    """A worker's builder spec from the demo's manifest."""
    builder: Mapping[str, Any] = BY_NAME[name].builder
    if builder["kind"] == "python":
        return BuilderSpec("python", builder["target"], dict(builder.get("arguments", {})))
    config = json.loads((repository / name / builder["config"]).read_text())
    return BuilderSpec("transformers", builder["class"], config)


def engine_of(repository: Path, name: str) -> tuple[Engine, Skeleton]:
    """A worker's engine with the real weights in place."""
    model, tensors = BY_NAME[name], state_dict(repository, name)
    skeleton = Skeleton(factory_for(spec_of(repository, name), ALLOW))
    skeleton.activate(skeleton.bind(tensors.keys(), tensors.__getitem__))
    inputs, outputs = (
        tuple(TensorSpec(tensor, datatype, tuple(shape)) for tensor, datatype, shape in rows)
        for rows in (model.inputs, model.outputs)
    )
    return Engine(skeleton.module, inputs, outputs, torch.device("cpu")), skeleton


@pytest.mark.parametrize("name", [model.name for model in MODELS])
def test_a_worker_answers_every_visit_of_the_tour(demo_repository: Path, bound: Loader, name: str) -> None:
    """Each model warms up, answers the tour's requests, and does so to the bit like plain torch (R41, T14)."""
    engine, skeleton = engine_of(demo_repository, name)
    engine.warm_up()
    plain = skeleton.module if BY_NAME[name].builder["kind"] == "transformers" else bound(name)
    asked = 0
    for visit in itinerary(demo_repository / "minilm" / "tokenizer.json"):
        if visit.model != name:
            continue
        asked += 1
        inputs = {key: torch.from_numpy(array) for key, array in visit.inputs.items()}
        answer = engine.run(inputs)
        if plain is not skeleton.module:
            with torch.inference_mode():
                expected = plain(**inputs)
            expected = expected if isinstance(expected, dict) else {BY_NAME[name].outputs[0][0]: expected}
            assert all(torch.equal(answer[key], expected[key]) for key in expected)
        assert visit.words({key: tensor.numpy() for key, tensor in answer.items()})
    assert asked >= 2


@pytest.mark.parametrize("name", [model.name for model in MODELS])
def test_a_model_survives_eviction_and_return(demo_repository: Path, name: str) -> None:
    """T14: unbinding a model and binding it again leaves its answers as they were, to the bit."""
    engine, skeleton = engine_of(demo_repository, name)
    visit = next(one for one in itinerary(demo_repository / "minilm" / "tokenizer.json") if one.model == name)
    inputs = {key: torch.from_numpy(array) for key, array in visit.inputs.items()}
    before = engine.run(inputs)
    skeleton.evict()
    with pytest.raises((RuntimeError, NotImplementedError)):
        engine.run(inputs)["nothing"].sum().item()
    tensors = state_dict(demo_repository, name)
    skeleton.activate(skeleton.bind(tensors.keys(), tensors.__getitem__))
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.run(inputs).items())
