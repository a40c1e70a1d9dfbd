"""The `transformers` builder: architectures by config alone, and never anybody's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from actors.errors import LoadFailed
from runtime.worker.builders import factory_for, sets_default_dtype
from runtime.worker.skeleton import Skeleton
from runtime.workers.port import BuilderSpec
from tests.runtime.worker.modules import randomised

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

transformers = pytest.importorskip("transformers")

BERT: dict[str, object] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 30,
    "max_position_embeddings": 12,
}
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 30,
    "tie_word_embeddings": True,
}
VIT: dict[str, object] = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
}
IDS = torch.tensor([[1, 5, 7, 2]])
PIXELS = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def built(config: dict[str, object], target: str = "") -> Callable[[], nn.Module]:
    """The factory of a config."""
    return factory_for(BuilderSpec("transformers", target, config), ())


@pytest.mark.parametrize(
    ("config", "target", "inputs"),
    [
        (BERT, "", {"input_ids": IDS}),
        (BERT, "BertForSequenceClassification", {"input_ids": IDS}),
        (LLAMA, "LlamaForCausalLM", {"input_ids": IDS}),
        ({**LLAMA, "dtype": "bfloat16"}, "LlamaForCausalLM", {"input_ids": IDS}),
        (VIT, "", {"pixel_values": PIXELS}),
    ],
    ids=["bert", "bert head", "llama tied rotary", "llama bf16", "vit auto"],
)
def test_a_skeleton_computes_what_plain_transformers_computes(
    config: dict[str, object], target: str, inputs: dict[str, torch.Tensor]
) -> None:
    """Position ids, rotary frequencies and tied heads are bit-equal to a model that was really built (U22)."""
    factory = built(config, target)
    plain = randomised(factory)
    state = plain.state_dict()
    dropped = {"lm_head.weight"} if target.startswith("Llama") else set()
    skeleton = Skeleton(factory)
    bound = skeleton.bind(state.keys() - dropped, lambda name: state[name].clone())
    with torch.inference_mode():
        wanted = plain(**inputs)
        for _ in range(2):
            skeleton.activate(bound)
            found = skeleton.module(**inputs)
            skeleton.evict()
            for name, tensor in wanted.items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_config_with_code_of_its_own_is_refused() -> None:
    """`auto_map` at any depth: never run, not even looked for."""
    for config in ({**BERT, "auto_map": {"AutoModel": "x--y"}}, {**BERT, "inner": [{"auto_map": {}}]}):
        with pytest.raises(LoadFailed, match="auto_map"):
            built(config)


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        ({}, "", "model_type 'None' is unknown"),
        ({"model_type": "no-such-thing"}, "", "'no-such-thing' is unknown"),
        ({"model_type": 7}, "", "'7' is unknown"),
        (BERT, "os", "'os' is unknown"),
        (BERT, "BertConfig", "'BertConfig' is unknown"),
        (BERT, "__class__", "'__class__' is unknown"),
        ({**BERT, "hidden_size": "wide"}, "", "is not one of 'bert'"),
    ],
)
def test_what_is_not_an_architecture_is_refused(config: dict[str, object], target: str, words: str) -> None:
    """Only model classes of the installed library can be named."""
    with pytest.raises(LoadFailed, match=words):
        built(config, target)


def test_an_unknown_kind_is_refused() -> None:
    """Two kinds, no more."""
    with pytest.raises(LoadFailed, match="'pickle' is unknown"):
        factory_for(BuilderSpec("pickle"), ())


def test_builds_that_flip_the_default_dtype_are_known() -> None:
    """They must not run beside a forward."""
    assert sets_default_dtype(BuilderSpec("transformers", "", {"dtype": "bfloat16"}))
    assert sets_default_dtype(BuilderSpec("transformers", "", {"torch_dtype": "float16"}))
    assert not sets_default_dtype(BuilderSpec("transformers", "", {"dtype": "float32"}))
    assert not sets_default_dtype(BuilderSpec("python", "m:f", {"dtype": "float16"}))
