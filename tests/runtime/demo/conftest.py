"""Real models, bound the way a worker does it: built without memory, then given every tensor strictly."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
from safetensors.torch import load_file

from runtime.demo.weights import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

BY_NAME = {model.name: model for model in MODELS}


class Loader(Protocol):
    """Gives a demo model with its weights."""

    def __call__(self, name: str, weights: dict[str, Tensor] | None = None) -> nn.Module: ...


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests share two cores with whatever else runs there."""
    torch.set_num_threads(1)


def state_dict(repository: Path, name: str) -> dict[str, Tensor]:
    """Read the published tensors of a model as its manifest says."""
    model = BY_NAME[name]
    file = repository / name / model.parts[0].path
    if file.suffix == ".safetensors":
        return load_file(file)
    found: Any = torch.load(file, map_location="cpu", weights_only=True)
    for step in str(model.extra.get("state_dict", "")).split("."):
        found = found[step] if step else found
    return dict(found)


def empty(name: str) -> nn.Module:
    """Build a `python` model by its manifest, without memory."""
    builder = BY_NAME[name].builder
    module, _, factory = str(builder["target"]).partition(":")
    arguments: Any = builder.get("arguments", {})
    with torch.device("meta"):
        built: nn.Module = getattr(importlib.import_module(module), factory)(**arguments)
    return built


@pytest.fixture(scope="session")
def bound(demo_repository: Path) -> Loader:
    """A loader of demo models that have a factory of ours; each is read once."""
    read = cache(lambda name: state_dict(demo_repository, name))

    def load(name: str, weights: dict[str, Tensor] | None = None) -> nn.Module:
        module = empty(name)
        module.load_state_dict(read(name) if weights is None else weights, strict=True, assign=True)
        return module

    return load
