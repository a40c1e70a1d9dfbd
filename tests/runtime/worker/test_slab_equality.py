"""A slab under a skeleton computes what plain PyTorch computes, to the bit: ties, computed buffers, casts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from actors.errors import LoadFailed
from runtime.tiers.recipe import BUFFERS_CAP, Recipe, recipe_from
from runtime.tiers.slab import read_slab, read_weights
from runtime.tiers.variant import Variant, cast
from runtime.worker.builders import converted, factory_for
from runtime.worker.core import Core
from runtime.worker.landing import FirstUse, Gates
from runtime.worker.mapping import Mapping
from runtime.worker.recipe import recipe_of
from runtime.worker.skeleton import Skeleton
from runtime.workers.port import BuilderSpec
from tests.runtime.tiers.test_slab import laid
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

transformers = pytest.importorskip("transformers")

Inputs = dict[str, torch.Tensor]


def detr() -> nn.Module:
    """An object detector: a convolutional backbone with frozen statistics under an encoder and a decoder."""
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=4,
        num_labels=3,
    )
    return transformers.DetrForObjectDetection(config)  # type: ignore[no-any-return]  # transformers has no types


def blip() -> nn.Module:
    """A captioner: its word embeddings are tied to its head, its position ids are in no file."""
    text = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "encoder_hidden_size": 16,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
        "patch_size": 16,
    }
    config = transformers.BlipConfig(
        text_config=text, vision_config=vision, projection_dim=16, image_text_hidden_size=16
    )
    return transformers.BlipForConditionalGeneration(config)  # type: ignore[no-any-return]  # as above


def of_ours(name: str) -> Callable[[], nn.Module]:
    factory: Callable[[], nn.Module] = getattr(modules, name)
    return factory


def image(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "detr": (detr, {"pixel_values": image(1, 3, 64, 64)}),
    "blip": (blip, {"pixel_values": image(1, 3, 32, 32), "input_ids": torch.tensor([[1, 7, 9, 2]])}),
    "tied": (of_ours("Tied"), {"ids": torch.tensor([[1, 2, 3]])}),
    "normed": (of_ours("Normed"), {"x": image(2, 3, 8, 8)}),
    "rotary": (of_ours("Rotary"), {"x": image(2, 4)}),
    "recurrent": (of_ours("Recurrent"), {"x": image(1, 3, 4)}),
    "listed": (of_ours("Listed"), {"x": image(2, 4)}),
    "attention": (of_ours("Attention"), {"x": image(1, 5, 8)}),
    "stubborn": (of_ours("Stubborn"), {"x": image(2, 4)}),
}


def outputs(module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Every tensor that a forward gives."""
    with torch.inference_mode():
        result = module(**inputs)
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for one in result.values() if isinstance(one, torch.Tensor)]


def twin(path: Path, factory: Callable[[], nn.Module], inputs: Inputs | None = None) -> tuple[Skeleton, Mapping]:
    """A skeleton bound to a file, having noted its first forward if there are inputs; the mapping has to outlive it."""
    mapping = Mapping(path, read_weights(path))
    skeleton = Skeleton(factory)
    bound = skeleton.bind(mapping.names, mapping.view, extras=mapping.extras)
    skeleton.activate(bound)
    if inputs is not None:
        seen = FirstUse()
        gates = Gates(skeleton.module, bound.tensors, seen)
        outputs(skeleton.module, inputs)
        gates.lift()
        skeleton.used_in(seen.order)
    return skeleton, mapping


@pytest.mark.parametrize("name", CASES)
def test_a_slab_under_a_skeleton_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    """Plain torch, the plain file, and the slab that its trace laid: equal outputs and equal state dicts."""
    factory, inputs = CASES[name]
    plain = randomised(factory)
    wanted = outputs(plain, inputs)
    assert all(torch.isfinite(one).all() for one in wanted)
    path = saved(tmp_path / "model.safetensors", plain)
    first, _mapping = twin(path, factory, inputs)
    before = outputs(first.module, inputs)
    recipe = recipe_from(recipe_of(first).spelled())
    slab = laid(path, recipe)
    second, _other = twin(slab, factory)
    for found in (before, outputs(second.module, inputs)):
        assert len(found) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    state, expected = second.module.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", CASES)
def test_a_slab_holds_all_that_a_state_dict_lacks(name: str, tmp_path: Path) -> None:
    """Every name of every tied weight, and every computed buffer with plain torch's values, at the bytes' own place."""
    factory, inputs = CASES[name]
    plain = randomised(factory)
    path = saved(tmp_path / "model.safetensors", plain)
    skeleton, _mapping = twin(path, factory, inputs)
    slab = laid(path, recipe_of(skeleton))
    mapping = Mapping(slab, read_weights(slab))
    assert mapping.names >= plain.state_dict().keys() - {
        key for key in plain.state_dict() if key.endswith("num_batches_tracked")
    }
    computed = {key: one for key, one in plain.named_buffers() if key not in plain.state_dict()}
    assert mapping.extras.buffers == computed.keys()
    for key, one in computed.items():
        assert torch.equal(mapping.view(key), one)
    assert all(mapping.holds(mapping.view(key)) for key in mapping.names if mapping.view(key).numel())


def test_blip_has_what_this_is_about(tmp_path: Path) -> None:
    """Else the equality above would prove nothing: two ties and one computed buffer are in its slab."""
    plain = randomised(blip)
    path = saved(tmp_path / "model.safetensors", plain)
    skeleton, _mapping = twin(path, blip)
    header = read_slab(laid(path, recipe_of(skeleton))).header
    assert len(header.aliases) == 2
    assert header.buffers == {"text_decoder.bert.embeddings.position_ids"}


def test_the_order_is_that_of_the_forward(tmp_path: Path) -> None:
    """A module called first lies first, whatever the file's order is."""
    plain = randomised(modules.Linear)
    state = plain.state_dict()
    path = tmp_path / "model.safetensors"
    save_file({name: state[name] for name in ("b.bias", "b.weight", "a.weight", "a.bias")}, path)
    skeleton, _mapping = twin(path, modules.Linear, {"x": image(1, 4)})
    header = read_slab(laid(path, recipe_of(skeleton))).header
    found = sorted(header.tensors, key=lambda name: header.tensors[name].offset)
    assert found == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_meta_buffers_come_from_the_slab(tmp_path: Path) -> None:
    """A skeleton that could compute nothing takes the slab's buffers; without one it has none to take."""
    plain = randomised(modules.Rotary)
    path = saved(tmp_path / "model.safetensors", plain)
    first, _mapping = twin(path, modules.Rotary)
    slab = laid(path, recipe_of(first))
    mapping = Mapping(slab, read_weights(slab))
    skeleton = Skeleton(modules.Rotary)
    for cell in skeleton.cells:
        if not cell.persistent:
            cell.like = cell.like.to("meta")
    skeleton.activate(skeleton.bind(mapping.names, mapping.view, extras=mapping.extras))
    x = image(2, 4)
    assert torch.equal(skeleton.module(x), plain(x))


def test_buffers_too_large_to_travel_stay_at_home(tmp_path: Path) -> None:
    """Then each worker computes them, as without a slab."""
    plain = modules.Counting()
    path = saved(tmp_path / "model.safetensors", plain)
    skeleton, _mapping = twin(path, modules.Counting)
    assert set(recipe_of(skeleton).buffers) == {"cache"}
    for cell in skeleton.cells:
        if not cell.persistent:
            cell.like = torch.zeros(BUFFERS_CAP + 1, dtype=torch.uint8)
    assert recipe_of(skeleton).buffers == {}


# -- through the core ----------------------------------------------------------------------------------


def test_the_core_learns_a_recipe_once(tmp_path: Path) -> None:
    """From the first forward over a plain file; over its slab, and when it is warm, there is nothing to learn."""
    plain = randomised(modules.Linear)
    path = saved(tmp_path / "model.safetensors", plain)
    core = Core("cpu:0", ALLOW)
    loaded = core.load(spec_for(path, "Linear"), lambda: False)
    recipe = recipe_from(loaded.recipe)
    assert recipe.order == ("a.weight", "a.bias", "b.weight", "b.bias")
    core.evict("m@1")
    assert core.load(spec_for(path, "Linear"), lambda: False).recipe == b""
    core.evict("m@1")
    core.release_host("f1")
    slab = laid(path, recipe)
    assert Core("cpu:0", ALLOW).load(spec_for(slab, "Linear"), lambda: False).recipe == b""
    assert core.load(spec_for(slab, "Linear"), lambda: False).resident == loaded.resident


def test_a_module_that_spoils_its_buffers_gives_no_recipe(tmp_path: Path) -> None:
    """A slab would keep what one forward left behind."""
    path = saved(tmp_path / "model.safetensors", modules.Counting())
    tame = spec_for(path, "Counting")
    wild = spec_for(path, "Counting", fingerprint="f2", key="n@1", config={"wide": True})
    core = Core("cpu:0", ALLOW)
    assert recipe_from(core.load(tame, lambda: False).recipe).buffers["cache"].content == bytes(200 * 200 * 4)
    assert core.load(wild, lambda: False).recipe == b""


def test_a_filter_that_takes_too_little_says_so(tmp_path: Path) -> None:
    """The error names the missing keys, and whose fault it is."""
    path = saved(tmp_path / "model.safetensors", randomised(modules.Linear))
    slab = laid(path, Recipe(), Variant(exclude=("b.*",)))
    with pytest.raises(LoadFailed, match=r"2 missing: b\.weight, b\.bias; the manifest's `tensors` leave out 2"):
        Core("cpu:0", ALLOW).load(spec_for(slab, "Linear"), lambda: False)


# -- precisions ----------------------------------------------------------------------------------------

WORDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("source", STORED)
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_casts_are_torchs_to_the_bit(source: str, target: str) -> None:
    """Ties to even, subnormals, infinities and what overflows; every pattern of 16 bits that is a number."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    noise = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled = torch.cat([noise, noise * 1e-6, noise * 1e6, noise * 1e-40, noise * 1e38, torch.tensor([0.0, -0.0])])
    halves = torch.cat([every.view(torch.float16).double(), every.view(torch.bfloat16).double()])
    # Between two neighbours of a short format, where rounding to even shows.
    values = torch.cat([scaled, halves, halves * (1 + 2.0**-9), halves * (1 + 2.0**-12)])
    tensor = values[~values.isnan()].to(STORED[source])
    raw = tensor.view(torch.uint8).numpy().tobytes()
    found = torch.frombuffer(bytearray(cast(raw, source, target)), dtype=STORED[target])
    wanted = tensor.to(STORED[target])
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_what_is_no_number_stays_none() -> None:
    """NaN becomes NaN, never infinity."""
    raw = np.full(4, np.nan, np.float32).tobytes()
    for target in ("F16", "BF16"):
        found = torch.frombuffer(bytearray(cast(raw, "F32", target)), dtype=STORED[target])
        assert found.isnan().all()


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("name", ["detr", "blip", "tied", "normed", "rotary", "attention"])
def test_a_variant_computes_what_torch_in_that_precision_computes(name: str, dtype: str, tmp_path: Path) -> None:
    """As `module.to(dtype)` over the same weights: cast on the way into the slab, or by torch, the bits are equal."""
    factory, inputs = CASES[name]
    plain = randomised(factory)
    for one in plain.parameters():
        one.mul_(0.2)  # sums of large positive weights overflow in fp16
    path = saved(tmp_path / "model.safetensors", plain)
    given = {key: one.to(WORDS[dtype]) if one.is_floating_point() else one for key, one in inputs.items()}
    wanted = outputs(plain.to(WORDS[dtype]), given)
    assert all(torch.isfinite(one).all() for one in wanted)
    slab = laid(path, Recipe(), Variant(dtype=dtype))
    skeleton, _mapping = twin(slab, lambda: converted(factory, dtype))
    # The wire brings fp32; the module takes what it needs.
    found = outputs(skeleton.module, inputs)
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_precision_is_part_of_the_builder() -> None:
    """And an unknown one is refused in words."""
    spec = BuilderSpec("python", "tests.runtime.worker.modules:Linear", {}, "bf16")
    assert factory_for(spec, ALLOW)().a.weight.dtype == torch.bfloat16
    with pytest.raises(LoadFailed, match="'fp8' is unknown"):
        factory_for(BuilderSpec("python", "tests.runtime.worker.modules:Linear", {}, "fp8"), ALLOW)()


def test_three_precisions_are_resident_beside_each_other(tmp_path: Path) -> None:
    """In one core, each with its own bytes and answers, all of one source."""
    path = saved(tmp_path / "model.safetensors", randomised(modules.Linear, width=64))
    core = Core("cpu:0", ALLOW)
    sizes = {}
    for word in WORDS:
        folder = tmp_path / word
        folder.mkdir()
        original = folder / "model.safetensors"
        original.write_bytes(path.read_bytes())
        slab = laid(original, Recipe(), Variant(dtype=word))
        spec = spec_for(slab, "Linear", key=f"m@1-{word}", fingerprint=word, config={"width": 64})
        builder = BuilderSpec("python", spec.builder.target, spec.builder.config, word)
        sizes[word] = core.load(msgspec.structs.replace(spec, builder=builder), lambda: False).resident
    assert sizes["fp32"] == 2 * sizes["fp16"] == 2 * sizes["bf16"]
    assert len(core.inventory()) == 3
