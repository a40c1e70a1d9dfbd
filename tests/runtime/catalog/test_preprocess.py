"""What a manifest may declare of inputs that come as files: every fault at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.errors import ConfigError
from runtime.catalog.describe import spell
from runtime.catalog.manifest import parse_manifest
from runtime.catalog.record import fingerprint_of, input_specs
from runtime.workers.pipelines import AudioPipeline, ImagePipeline
from runtime.workers.port import TensorSpec
from tests.runtime.catalog.directories import SETTINGS

ROW = {"path": "model.safetensors", "size": 1, "sha256": "0" * 64}
EXAMPLE = Path(__file__).parents[3] / "configs" / "manifests" / "preprocess.yaml"


def manifest(preprocess: object, shape: list[int], datatype: str = "FP32") -> str:
    """A manifest whose one input comes as a file."""
    row = {"name": "x", "datatype": datatype, "shape": shape, "preprocess": preprocess}
    return spell({**SETTINGS, "inputs": [row], "files": [ROW]})


def spec(preprocess: object, shape: list[int], datatype: str = "FP32") -> TensorSpec:
    """What a worker is told of that input."""
    (found,) = input_specs(parse_manifest(manifest(preprocess, shape, datatype)))
    return found


def test_an_image_is_declared_with_numbers_for_all_channels_or_each() -> None:
    """Short forms spread out; the datatype is the tensor's."""
    declared = {"kind": "image", "size": 256, "resize": "shortest", "crop": 224, "mean": 0.5, "std": [0.5, 0.25, 0.5]}
    found = spec(declared, [-1, 3, 224, 224])
    assert found.preprocess == ImagePipeline(
        "FP32", (256,), "shortest", crop=(224, 224), mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.5)
    )
    assert found.wire == TensorSpec("x", "BYTES", (-1,))
    gray = {"kind": "image", "size": [28, 20], "resize": "exact", "color": "gray", "mean": 0.1, "layout": "hwc"}
    assert spec(gray, [28, 20, 1], "BF16").preprocess == ImagePipeline(
        "BF16", (28, 20), "exact", color="gray", mean=(0.1,), layout="hwc"
    )


def test_a_sound_is_declared_by_its_rate_and_perhaps_its_windows() -> None:
    """Windows of one file may be the batch, or lie in it."""
    declared = {"kind": "audio", "rate": 16_000, "window": {"size": 576, "hop": 512, "lead": 64, "tail": "pad"}}
    pipeline = AudioPipeline("FP32", 16_000, window=576, hop=512, lead=64, tail="pad")
    assert spec(declared, [-1, 576]).preprocess == pipeline
    assert spec(declared, [-1, 576]).wire.shape == (1,)
    assert spec(declared, [-1, -1, 576]).wire.shape == (-1,)
    assert spec({"kind": "audio", "rate": 8_000, "mono": False, "length": 80}, [-1, -1, 80]).preprocess == (
        AudioPipeline("FP32", 8_000, mono=False, length=80)
    )
    assert spec({"kind": "audio", "rate": 8_000, "mono": False}, [-1, 2, -1]).wire.shape == (-1,)


ANY = [-1, 3, -1, -1]
WRONG: dict[str, tuple[object, list[int], str, list[str]]] = {
    "no kind": ({"size": 8}, ANY, "FP32", ["inputs.0.preprocess.kind: is missing"]),
    "another kind": ({"kind": "video"}, ANY, "FP32", ["preprocess.kind: is not one of the choices"]),
    "a typing mistake": ({"kind": "image", "sise": 8}, ANY, "FP32", ["sise: unknown key (did you mean size?)"]),
    "keys of the other kind": (
        {"kind": "image", "rate": 16_000, "window": {"size": 1, "hop": 1}},
        ANY,
        "FP32",
        ["rate: does not belong to kind: image", "window: does not belong to kind: image"],
    ),
    "and the other way": (
        {"kind": "audio", "rate": 16_000, "mean": 0.5},
        [-1, -1],
        "FP32",
        ["mean: does not belong to kind: audio"],
    ),
    "all at once": (
        {"kind": "image", "size": 0, "resize": "stretch", "std": "big", "upright": "yes"},
        ANY,
        "FP32",
        ["size", "resize: is not one", "std", "upright: must be true or false"],
    ),
    "a size without a way": ({"kind": "image", "size": 8}, ANY, "FP32", ["resize: is missing (size and resize"]),
    "a way without a size": ({"kind": "image", "resize": "exact"}, ANY, "FP32", ["size: is missing (size and resize"]),
    "two shortest sides": (
        {"kind": "image", "size": [8, 9], "resize": "shortest"},
        ANY,
        "FP32",
        ["size: is two numbers (resize: shortest takes one)"],
    ),
    "a crop of more than there is": (
        {"kind": "image", "size": 8, "resize": "shortest", "crop": [8, 9]},
        [-1, 3, 8, 9],
        "FP32",
        ["crop: is larger than size"],
    ),
    "nothing to divide by": (
        {"kind": "image", "std": [1.0, 0.0, 1.0], "mean": [0.5, 0.5]},
        ANY,
        "FP32",
        ["std: must be above zero", "mean: has 2 numbers"],
    ),
    "no number": ({"kind": "image", "mean": [1.0, float("1e9"), 1.0]}, ANY, "FP32", ["mean"]),
    "a huge side": ({"kind": "image", "size": 20_000, "resize": "exact"}, ANY, "FP32", ["size"]),
    "bytes that are normalised": (
        {"kind": "image", "mean": 0.5},
        ANY,
        "UINT8",
        ["inputs.0.datatype: is not what preprocess can give (it gives BF16, FP16, FP32)"],
    ),
    "numbers of words": ({"kind": "image"}, ANY, "BYTES", ["datatype: is not what preprocess can give"]),
    "sounds of bytes": ({"kind": "audio", "rate": 16_000}, [-1, -1], "UINT8", ["datatype: is not what preprocess"]),
    "another size than the tensor's": (
        {"kind": "image", "size": 8, "resize": "exact"},
        [-1, 3, 9, 9],
        "FP32",
        ["inputs.0.shape: does not fit preprocess, which gives [3, 8, 8] (write [-1, 3, 8, 8] or [3, 8, 8])"],
    ),
    "a size where there is none": ({"kind": "image"}, [-1, 3, 8, 8], "FP32", ["shape: does not fit preprocess"]),
    "channels last": (
        {"kind": "image", "size": 8, "resize": "exact", "layout": "hwc"},
        [-1, 3, 8, 8],
        "FP32",
        ["shape: does not fit preprocess, which gives [8, 8, 3]"],
    ),
    "no rate": ({"kind": "audio"}, [-1, -1], "FP32", ["rate: is missing"]),
    "windows of several channels": (
        {"kind": "audio", "rate": 16_000, "mono": False, "window": {"size": 4, "hop": 4}},
        [-1, 4],
        "FP32",
        ["window: needs mono: true"],
    ),
    "samples where any number may come": (
        {"kind": "audio", "rate": 16_000, "mono": False},
        [-1, 2, 80],
        "FP32",
        ["shape: does not fit preprocess, which gives [-1, -1]"],
    ),
    "a window without a hop": ({"kind": "audio", "rate": 16_000, "window": {"size": 4}}, [-1, 4], "FP32", ["hop"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_whatever_is_wrong_is_said_at_once_with_its_key(name: str) -> None:
    """One line each, in the words of someone who writes YAML."""
    preprocess, shape, datatype, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        parse_manifest(manifest(preprocess, shape, datatype))
    assert [word for word in words if word not in caught.value.message] == []
    assert caught.value.detail["faults"] >= len(words)


def test_outputs_are_never_made_from_files() -> None:
    """The key belongs to inputs."""
    row = {"name": "y", "datatype": "FP32", "shape": [-1], "preprocess": {"kind": "image"}}
    with pytest.raises(ConfigError, match=r"outputs\.0\.preprocess: unknown key"):
        parse_manifest(spell({**SETTINGS, "outputs": [row], "files": [ROW]}))


def test_steps_are_part_of_what_a_model_is() -> None:
    """Another declaration gives other answers, so it is another fingerprint; none leaves the fingerprint it had."""
    declared = {"kind": "image", "size": 8, "resize": "exact"}
    one = parse_manifest(manifest(declared, [-1, 3, 8, 8]))
    other = parse_manifest(manifest({**declared, "filter": "bicubic"}, [-1, 3, 8, 8]))
    none = parse_manifest(manifest(None, [-1, 3, 8, 8]))
    assert len({fingerprint_of(each) for each in (one, other, none)}) == 3
    plain = {"name": "x", "datatype": "FP32", "shape": [-1, 3, 8, 8]}
    same = parse_manifest(spell({**SETTINGS, "inputs": [plain], "files": [ROW]}))
    assert fingerprint_of(same) == fingerprint_of(none)


def test_the_example_is_a_manifest_that_serves_images() -> None:
    """What people copy must be right."""
    found = parse_manifest(EXAMPLE.read_text(encoding="utf-8"))
    (spec,) = input_specs(found)
    assert spec.wire.datatype == "BYTES"
