"""The demo's networks with their published weights: every tensor lands, and the numbers are the published ones.

Golden values of MTCNN and CREPE were recorded here after the outputs had been compared, bit for bit, with the
implementations in the same wheels.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from runtime.demo import architectures, signals, wheels
from runtime.demo.itinerary import SENTENCES, sentences
from runtime.demo.weights import MODELS
from tests.runtime.demo.conftest import BY_NAME, empty, state_dict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from tests.runtime.demo.conftest import Loader

pytestmark = pytest.mark.real

FACTORIES = [model.name for model in MODELS if model.builder["kind"] == "python"]


def wave(*shape: int) -> Tensor:
    """An input without symmetry, so that a transposed flatten shows."""
    x = np.linspace(-1, 1, int(np.prod(shape)))
    return torch.from_numpy(np.sin(37 * x + 5 * x**2).astype(np.float32).reshape(shape))


def run(module: Callable[..., Any], *inputs: Any) -> Any:
    """One forward without gradients, numpy in and torch out."""
    with torch.inference_mode():
        return module(*(torch.as_tensor(np.ascontiguousarray(given)) for given in inputs))


def example(name: str) -> list[np.ndarray]:
    """Inputs of the shapes the manifest declares, variable dimensions filled in."""
    fill = {"mtcnn-pnet": (2, 20, 31), "speaker": (2, 50)}.get(name, (2,))
    given = []
    for _, _, shape in BY_NAME[name].inputs:
        free = iter(fill)
        given.append(wave(*(next(free) if size == -1 else size for size in shape)).numpy())
    return given


@pytest.mark.parametrize("name", FACTORIES)
def test_real_weights_load_strictly_into_a_module_built_without_memory(bound: Loader, name: str) -> None:
    """Every published tensor has a place, and every place of the module is filled from the file."""
    module = bound(name)
    left = [key for key, tensor in module.state_dict(keep_vars=True).items() if tensor.is_meta]
    hidden = [key for key, tensor in module.named_buffers() if key not in module.state_dict()]
    assert (left, hidden) == ([], []), "what strict loading does not fill would be random or lost"
    assert not module.training


@pytest.mark.parametrize("name", FACTORIES)
def test_keys_under_a_wrong_prefix_are_refused(bound: Loader, demo_repository: Path, name: str) -> None:
    """R41: renaming the prefix of every key must not give a clean report and random weights."""
    moved = {f"model.{key}": tensor for key, tensor in state_dict(demo_repository, name).items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        bound(name, moved)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_missing_tensor_is_refused(bound: Loader, demo_repository: Path, name: str) -> None:
    """R41: one absent tensor is enough to refuse, however large the rest is."""
    tensors = state_dict(demo_repository, name)
    gone = sorted(tensors)[len(tensors) // 2]
    with pytest.raises(RuntimeError, match="Missing key"):
        bound(name, {key: tensor for key, tensor in tensors.items() if key != gone})


@pytest.mark.parametrize("name", FACTORIES)
def test_building_again_gives_the_same_bits(demo_repository: Path, name: str) -> None:
    """T14: nothing of an answer depends on how the module was initialised before its weights came."""
    answers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = empty(name).to_empty(device="cpu")
        for tensor in module.state_dict().values():
            tensor.fill_(seed)
        module.load_state_dict(state_dict(demo_repository, name), strict=True)
        answer = run(module, *example(name))
        answers.append(list(answer.values()) if isinstance(answer, dict) else [answer])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("name", FACTORIES)
def test_outputs_are_what_the_manifest_declares(bound: Loader, name: str) -> None:
    """Names, order, datatype and rank of the outputs agree with the manifest, as do all fixed dimensions."""
    answer = run(bound(name), *example(name))
    declared = BY_NAME[name].outputs
    got = list(answer.items()) if isinstance(answer, dict) else [(declared[0][0], answer)]
    assert [key for key, _ in got] == [key for key, _, _ in declared]
    for (_, tensor), (_, datatype, shape) in zip(got, declared, strict=True):
        assert datatype == "FP32"
        assert tensor.dtype == torch.float32
        assert [-1 if want == -1 else size for size, want in zip(tensor.shape, shape, strict=True)] == list(shape)


@pytest.mark.parametrize("capacity", ["full", "tiny"])
@pytest.mark.parametrize("hertz", [100.0, 440.0, 880.0])
def test_crepe_hears_the_pitch_of_a_tone(bound: Loader, capacity: str, hertz: float) -> None:
    """A pure tone is heard within a fifth of a semitone, 440 Hz within 5 Hz."""
    heard = signals.pitch(run(bound(f"crepe-{capacity}"), signals.frames(signals.sine(hertz, 0.2), 1024, 320)).numpy())
    assert heard == pytest.approx(np.full(7, hertz), rel=5 / 440)


@pytest.mark.parametrize(("capacity", "peak", "total"), [("full", 0.965761, 3.392020), ("tiny", 0.929633, 3.369814)])
def test_crepe_gives_the_recorded_activation(bound: Loader, capacity: str, peak: float, total: float) -> None:
    """The first frame of a 440 Hz tone peaks in bin 228, as high and as wide as recorded."""
    first = run(bound(f"crepe-{capacity}"), signals.frames(signals.sine(440, 0.2), 1024, 320))[0]
    assert int(first.argmax()) == 228
    assert float(first.max()) == pytest.approx(peak, abs=1e-4)
    assert float(first.sum()) == pytest.approx(total, abs=1e-3)


def test_crepe_answers_silence_with_numbers(bound: Loader) -> None:
    """A silent frame has no variance to divide by; its answer is finite all the same."""
    assert torch.isfinite(run(bound("crepe-tiny"), np.zeros((1, 1024), np.float32))).all()


def test_crepe_has_two_capacities() -> None:
    """A capacity without published weights is refused by name."""
    with pytest.raises(ValueError, match=r"full or tiny, not 'huge'"):
        architectures.crepe("huge")


def test_pnet_gives_the_recorded_map(bound: Loader) -> None:
    """Each position has two probabilities that sum to one, and the corners are as recorded."""
    answer = run(bound("mtcnn-pnet"), wave(1, 3, 30, 41))
    assert answer["probability"].shape == (1, 2, 10, 16)
    assert answer["probability"].sum(dim=1).numpy() == pytest.approx(1.0, abs=1e-5)
    assert answer["probability"].flatten()[-3:].tolist() == pytest.approx([0.003301, 0.002420, 0.001858], abs=1e-5)
    assert answer["box"].flatten()[:3].tolist() == pytest.approx([0.032245, 0.029919, 0.027736], abs=1e-4)


def test_rnet_gives_the_recorded_box(bound: Loader) -> None:
    """The dense layers see the pixels in the published order: boxes are as recorded."""
    answer = run(bound("mtcnn-rnet"), wave(2, 3, 24, 24))
    assert answer["probability"].sum(dim=1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert answer["box"][0].tolist() == pytest.approx([0.061413, -0.045992, 0.154882, 0.360410], abs=1e-4)
    assert answer["box"][1, 1:].tolist() == pytest.approx([-0.298822, 0.141351, 0.223153], abs=1e-4)


def test_onet_gives_the_recorded_landmarks(bound: Loader) -> None:
    """Three heads, probabilities that sum to one, landmarks as recorded."""
    answer = run(bound("mtcnn-onet"), wave(2, 3, 48, 48))
    assert [tuple(tensor.shape) for tensor in answer.values()] == [(2, 2), (2, 4), (2, 10)]
    assert answer["probability"].sum(dim=1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert answer["box"][0].tolist() == pytest.approx([-0.074046, -0.056380, 0.006312, 0.213820], abs=1e-4)
    assert answer["landmarks"][0, :3].tolist() == pytest.approx([0.280453, 0.497445, 0.279294], abs=1e-4)
    assert answer["landmarks"][1, -3:].tolist() == pytest.approx([0.567331, 0.815440, 0.754946], abs=1e-4)


# the same layers under the names that the TorchScript file gives them
_SILERO_NAMES = {
    "stft.forward_basis_buffer": "stft_conv.weight",
    "encoder.0.reparam_conv": "conv1",
    "encoder.1.reparam_conv": "conv2",
    "encoder.2.reparam_conv": "conv3",
    "encoder.3.reparam_conv": "conv4",
    "decoder.rnn": "lstm_cell",
    "decoder.decoder.2": "final_conv",
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # TorchScript is the published oracle here
def test_silero_computes_what_its_torchscript_does(bound: Loader) -> None:
    """Given the weights inside silero_vad.jit, ten chunks with state carried along agree to 1e-5.

    The file's own weights are taken, because the safetensors file beside it is of another training run.
    """
    with zipfile.ZipFile(wheels.fetch(wheels.SILERO, wheels.default_cache())) as wheel:
        file = io.BytesIO(wheel.read("silero_vad/data/silero_vad.jit"))
    script: Any = torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]  # torch has no types here
    tensors = {}
    for key, tensor in script._model.state_dict().items():
        old = next(old for old in _SILERO_NAMES if key.startswith(old))
        tensors[key.replace(old, _SILERO_NAMES[old])] = tensor
    module = bound("silero-vad", tensors)
    sounds = np.stack([signals.voiced(120, 0.4), signals.voiced(210, 0.4, seed=4)])
    context, state = np.zeros((2, 64), np.float32), torch.zeros(2, 2, 128)
    script.reset_states()
    for at in range(0, 5120, 512):
        chunk = sounds[:, at : at + 512]
        answer = run(module, np.concatenate([context, chunk], axis=1), state)
        expected = run(lambda x: script(x, 16000), chunk)
        assert answer["probability"].numpy() == pytest.approx(expected.numpy(), abs=1e-5)
        context, state = chunk[:, -64:], answer["next_state"]


def test_silero_tells_a_voice_from_silence(bound: Loader) -> None:
    """Eight chunks of a noisy vowel are speech with the recorded certainty; silence is not."""
    module = bound("silero-vad")
    sounds = np.pad(np.stack([np.zeros(4096, np.float32), signals.voiced(120, 0.256)]), ((0, 0), (64, 0)))
    state, heard = torch.zeros(2, 2, 128), []
    for at in range(0, 4096, 512):
        answer = run(module, sounds[:, at : at + 576], state)
        state = answer["next_state"]
        heard.append(answer["probability"][:, 0].tolist())
    silence, voice = zip(*heard, strict=True)
    assert max(silence) < 0.05
    assert min(voice) > 0.7


def test_silero_without_its_state_hears_something_else(bound: Loader) -> None:
    """The state that travels with the request is really used."""
    module, sound = bound("silero-vad"), signals.voiced(120, 0.2)[None, :576]
    fresh = run(module, sound, np.zeros((1, 2, 128), np.float32))
    again = run(module, sound, fresh["next_state"])
    assert abs(float(fresh["probability"]) - float(again["probability"])) > 1e-3


def test_speaker_embeddings_have_length_one_and_tell_voices_apart(bound: Loader) -> None:
    """Two utterances of one synthetic speaker are closer than one of another, and values are as recorded."""
    sounds = [
        signals.voiced(120, 1.6),
        signals.voiced(120, 1.6, seed=2),
        signals.voiced(210, 1.6, formants=(850, 1600, 2900), seed=3),
    ]
    answer = run(bound("speaker"), np.stack([signals.mel_spectra(sound)[:160] for sound in sounds]))
    assert answer.norm(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert signals.likeness(answer[0].numpy(), answer[1].numpy()) > 0.95
    assert signals.likeness(answer[0].numpy(), answer[2].numpy()) < 0.8


def test_minilm_loads_strictly_but_for_a_buffer_it_computes(demo_repository: Path) -> None:
    """Every weight of the file has a place in transformers' BertModel; `position_ids` is a buffer there, and equal."""
    module, tensors = minilm(demo_repository)
    positions = tensors.pop("embeddings.position_ids")
    module.load_state_dict(tensors, strict=True)
    assert torch.equal(module.get_buffer("embeddings.position_ids"), positions)


def test_minilm_finds_the_two_sentences_that_mean_the_same(demo_repository: Path) -> None:
    """Two sentences about a cat are close, the one about revenue is far from both."""
    module, tensors = minilm(demo_repository)
    del tensors["embeddings.position_ids"]
    module.load_state_dict(tensors, strict=True)
    visit = sentences(demo_repository / "minilm" / "tokenizer.json")
    with torch.inference_mode():
        hidden = module(**{name: torch.from_numpy(array) for name, array in visit.inputs.items()}).last_hidden_state
    cat, kitten, revenue = signals.pooled(hidden.numpy(), visit.inputs["attention_mask"])
    assert len(SENTENCES) == 3
    assert signals.likeness(cat, kitten) == pytest.approx(0.67, abs=0.01)
    assert max(signals.likeness(cat, revenue), signals.likeness(kitten, revenue)) < 0.1
    assert visit.words({"last_hidden_state": hidden.numpy()}).startswith("sentences 1 and 2 mean the same")


def minilm(repository: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build MiniLM from the wheel's own configuration, and read its tensors."""
    from transformers import BertConfig, BertModel

    config = json.loads((repository / "minilm" / "config.json").read_text())
    module: nn.Module = BertModel(BertConfig(**config))
    return module.eval(), state_dict(repository, "minilm")
