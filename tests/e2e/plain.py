"""The demo's models in plain PyTorch, outside any server: what every answer has to equal.

Inputs are the tour's; no HTTP here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runtime.demo.itinerary import itinerary
from tests.runtime.demo.conftest import BY_NAME, empty, state_dict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    Arrays = Mapping[str, NDArray[Any]]

MODELS = tuple(BY_NAME)
SMALL = ("mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet", "silero-vad", "crepe-tiny")


@dataclass(frozen=True, slots=True)
class Known:
    """One model's request, and what plain PyTorch answers to it."""

    name: str
    inputs: Arrays
    outputs: Arrays


def module_of(repository: Path, name: str) -> nn.Module:
    """Build a model and give it its published weights, without a line of the worker's code."""
    if BY_NAME[name].builder["kind"] == "python":
        module = empty(name)
        module.load_state_dict(state_dict(repository, name), strict=True, assign=True)
        return module.eval()
    from transformers import BertConfig, BertModel

    built: nn.Module = BertModel(BertConfig(**json.loads((repository / name / "config.json").read_text())))
    report = built.load_state_dict(state_dict(repository, name), strict=False)
    assert report.missing_keys == []
    assert report.unexpected_keys == ["embeddings.position_ids"], "a constant that the library no longer stores"
    return built.eval()


@cache
def known(repository: Path) -> Mapping[str, Known]:
    """Every model with one request of the tour and its answer; computed once, on one thread."""
    torch.set_num_threads(1)
    found: dict[str, Known] = {}
    for visit in itinerary(repository / "minilm" / "tokenizer.json"):
        if visit.model in found:
            continue
        with torch.inference_mode():
            answer: Any = module_of(repository, visit.model)(
                **{k: torch.from_numpy(v) for k, v in visit.inputs.items()}
            )
        names = [name for name, _, _ in BY_NAME[visit.model].outputs]
        outputs = {name: answer[name] for name in names} if isinstance(answer, dict) else {names[0]: answer}
        found[visit.model] = Known(
            visit.model, visit.inputs, {name: tensor.numpy().copy() for name, tensor in outputs.items()}
        )
    return found


def same(outputs: Arrays, wanted: Arrays, *, within: float = 1e-6) -> None:
    """Assert that an answer is the wanted one, to the bit or at least `within`."""
    assert outputs.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(outputs[name], array, rtol=within, atol=within, err_msg=name)
