"""Five real architectures from 6 MB to 1.8 GB with random weights, in each format that the load bench reads.

Belongs here: making files. Never: measuring.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file

from runtime.tiers.index import read_index
from runtime.tiers.lay import laying, plan
from runtime.tiers.recipe import Recipe, recipe_from
from runtime.tiers.slab import read_slab
from runtime.tiers.variant import Variant
from runtime.worker.builders import factory_for
from runtime.worker.core import Core
from runtime.workers.port import BuilderSpec, LoadSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from runtime.tiers.slab import Slab

ALLOW = ("bench.",)
FINGERPRINT = "f" * 64


class Architecture(NamedTuple):
    """How to build one, what to trace it with, and how often to measure it."""

    name: str
    builder: Callable[[], BuilderSpec]
    inputs: tuple[TensorSpec, ...]
    output: str
    rounds: int
    hit: float
    """Times that a hit has to be cheaper than the classic way."""


def _yolo() -> BuilderSpec:
    return BuilderSpec("python", "bench.yolo:Yolo", {})


def _transformers(config: str, target: str, **settings: object) -> BuilderSpec:
    import transformers

    found = getattr(transformers, config)(**settings)
    return BuilderSpec("transformers", target, found.to_dict())


def _resnet() -> BuilderSpec:
    return _transformers("ResNetConfig", "ResNetForImageClassification", num_labels=1000)


def _detr() -> BuilderSpec:
    import transformers

    config: Any = transformers.ResNetConfig  # its keyword is not in its annotations
    backbone = config(out_features=["stage4"])
    return _transformers(
        "DetrConfig",
        "DetrForObjectDetection",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
    )


def _vit() -> BuilderSpec:
    return _transformers("ViTConfig", "ViTForImageClassification", num_labels=1000)


def _blip() -> BuilderSpec:
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    text = {"encoder_hidden_size": 1024, "num_attention_heads": 12}
    return _transformers(
        "BlipConfig", "BlipForConditionalGeneration", vision_config=vision, text_config=text, image_text_hidden_size=256
    )


def _plain_vit() -> BuilderSpec:
    return BuilderSpec("python", "bench.vit:ViT", {"width": 768, "depth": 12, "heads": 12})


def _image(size: int, name: str = "pixel_values") -> TensorSpec:
    return TensorSpec(name, "FP32", (1, 3, size, size))


ARCHITECTURES = (
    Architecture("yolo", _yolo, (_image(320, "x"),), "y", 15, 140),
    Architecture("resnet50", _resnet, (_image(224),), "logits", 7, 900),
    Architecture("detr", _detr, (_image(320),), "logits", 7, 900),
    Architecture("vit-b", _vit, (_image(224),), "logits", 7, 900),
    Architecture("blip", _blip, (_image(384), TensorSpec("input_ids", "INT64", (1, 8))), "logits", 3, 900),
)

PLAIN = Architecture("plain vit-b", _plain_vit, (_image(224, "x"),), "y", 7, 900)
"""Without transformers, so that a worker's own memory is that of torch."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One architecture with its weights as pickle, safetensors and slab."""

    architecture: Architecture
    factory: Callable[[], nn.Module]
    pickled: Path
    plain: Path
    path: Path
    slab: Slab
    spec: LoadSpec

    @property
    def label(self) -> str:
        """Name and megabytes."""
        return f"{self.architecture.name} {self.slab.header.length / 1e6:.0f} MB"


def prepared(architecture: Architecture, folder: Path) -> Subject:
    """Make the files, trace a forward, lay the slab, and read all of it once."""
    builder = architecture.builder()
    factory = factory_for(builder, ALLOW)
    module = factory().eval()
    pickled, plain, path = (folder / f"{architecture.name}.{kind}" for kind in ("pt", "safetensors", "slab"))
    torch.save(module.state_dict(), pickled)
    save_file(_untied(module), plain)
    del module
    spec = LoadSpec(
        key=f"{architecture.name}@1",
        fingerprint=architecture.name,
        weights=str(plain),
        weights_bytes=plain.stat().st_size,
        builder=builder,
        inputs=architecture.inputs,
        outputs=(TensorSpec(architecture.output, "FP32", (-1, -1)),),
    )
    recipe = recipe_from(Core("cpu:0", ALLOW, threads=1).load(spec, lambda: False).recipe)
    lay(plain, path, recipe)
    for each in (pickled, plain, path):
        warmed(each)
    return Subject(architecture, factory, pickled, plain, path, read_slab(path), _over(spec, path))


def lay(source: Path, target: Path, recipe: Recipe) -> None:
    """Lay a slab of a safetensors file."""
    layout = plan(read_index(source), recipe, Variant(), fingerprint=FINGERPRINT, source=FINGERPRINT)
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in laying(layout, reading, writing):
            pass
    finally:
        os.close(reading)
        os.close(writing)


def warmed(path: Path) -> None:
    """Bring a file into the page cache by one sequential read, so that folios are as large as they can be."""
    with path.open("rb", buffering=0) as file:
        while file.read(8 << 20):
            pass


def _over(spec: LoadSpec, path: Path) -> LoadSpec:
    import msgspec

    return msgspec.structs.replace(spec, weights=str(path), weights_bytes=path.stat().st_size, warm_up=False)


def _untied(module: nn.Module) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            found[name] = tensor.contiguous()
    return found
