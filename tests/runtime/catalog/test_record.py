"""Promises of records: the fingerprint follows what the model is, and no config smuggles code in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from actors.errors import CorruptWeights, FetchFailed, LoadFailed
from runtime.catalog.describe import write_manifest
from runtime.catalog.record import CONFIG_CAP, GRAPH_CAP, ModelRecord, load_spec, record_of
from runtime.workers.port import BatchSpec, BuilderSpec, TensorSpec
from tests.runtime.catalog.directories import SETTINGS, record, weights

if TYPE_CHECKING:
    from pathlib import Path


def transformers(directory: Path, config: str) -> ModelRecord:
    weights(directory / "model.safetensors")
    (directory / "config.json").write_text(config, "utf-8")
    builder = {"kind": "transformers", "config": "config.json", "class": "BertModel"}
    return record_of(directory, write_manifest(directory, {**SETTINGS, "builder": builder}))


def test_the_fingerprint_follows_weights_code_and_signature(tmp_path: Path) -> None:
    """Each of these changes it; name, version, labels, footprint and the order of files do not."""
    first = record(tmp_path / "0").fingerprint
    assert len(first) == 64
    changed = [
        record(tmp_path / "1", seed=1),
        record(tmp_path / "2", builder={"kind": "python", "target": "package.module:other"}),
        record(tmp_path / "3", builder={**SETTINGS["builder"], "arguments": {"a": 1}}),  # type: ignore[dict-item]
        record(tmp_path / "4", inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]),
        record(tmp_path / "5", cast=True),
        record(tmp_path / "6", batch={"max_size": 2}),
    ]
    same = [
        record(tmp_path / "7", name="other", version="2", labels={"a": "b"}),
        record(tmp_path / "8", footprint={"device": "1MB", "host": "1MB"}, weights="model.safetensors"),
    ]
    prints = [each.fingerprint for each in changed]
    assert len({first, *prints}) == len(changed) + 1
    assert {each.fingerprint for each in same} == {first}


def test_a_load_spec_holds_all_a_worker_needs(tmp_path: Path) -> None:
    """Config parsed, tensors and batching converted, the size is that of the file to map."""
    each = transformers(tmp_path / "m", '{"hidden_size": 8, "nested": {"a": [1]}}')
    spec = load_spec(each, each.weights)
    assert spec.builder == BuilderSpec("transformers", "BertModel", {"hidden_size": 8, "nested": {"a": [1]}})
    assert spec.inputs == (TensorSpec("x", "FP32", (-1, 3)),)
    assert spec.batch == BatchSpec()
    assert (spec.key, spec.fingerprint) == ("tiny@1", each.fingerprint)
    assert spec.weights_bytes == each.weights_bytes
    python = record(tmp_path / "p", builder={"kind": "python", "target": "a.b:c", "arguments": {"n": 1}})
    assert load_spec(python, python.weights).builder == BuilderSpec("python", "a.b:c", {"n": 1})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, "auto_map"),
        ({"text_config": {"deep": [{"auto_map": {"AutoModel": "x--y.Z"}}]}}, "auto_map"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"custom_pipelines": {"a": {}}}, "custom_pipelines"),
        ({"_attn_implementation": "kernels-community/flash-attn"}, "_attn_implementation"),
    ],
)
def test_a_config_that_asks_for_code_is_refused(tmp_path: Path, config: object, key: str) -> None:
    """S5: refused before any library sees it, however deep the key lies."""
    each = transformers(tmp_path, json.dumps(config))
    with pytest.raises(LoadFailed, match=key):
        load_spec(each, each.weights)


def test_harmless_values_of_those_keys_pass(tmp_path: Path) -> None:
    """What libraries write by default is no request for code."""
    config = {"trust_remote_code": False, "auto_map": None, "_attn_implementation": "sdpa"}
    each = transformers(tmp_path, json.dumps(config))
    assert load_spec(each, each.weights).builder.config == config


@pytest.mark.parametrize("config", ["[]", "{", "null", "nonsense", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, config: str) -> None:
    """Text, lists and nesting bombs give words."""
    each = transformers(tmp_path, config)
    with pytest.raises(LoadFailed, match=r"not (a )?JSON"):
        load_spec(each, each.weights)


def test_a_config_changed_after_admission_is_corrupt(tmp_path: Path) -> None:
    """S6: the hash is checked at each use; same size, other bytes."""
    each = transformers(tmp_path, '{"a": 1}')
    (tmp_path / "config.json").write_text('{"a": 2}', "utf-8")
    with pytest.raises(CorruptWeights, match="config is not the one of the manifest"):
        load_spec(each, each.weights)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FetchFailed, match="No such file"):
        load_spec(each, each.weights)


def test_a_config_over_the_cap_is_not_read(tmp_path: Path) -> None:
    """The cap is on the listed size, so nothing is read."""
    each = transformers(tmp_path, '{"a": "' + "x" * CONFIG_CAP + '"}')
    with pytest.raises(LoadFailed, match="over"):
        load_spec(each, each.weights)


def other_engine(directory: Path, engine: str, files: dict[str, bytes], **settings: object) -> ModelRecord:
    """A model directory of an engine that builds nothing."""
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    tree = {key: value for key, value in SETTINGS.items() if key != "builder"}
    return record_of(directory, write_manifest(directory, {**tree, "engine": engine, **settings}))


def test_settings_of_engines_count_and_their_defaults_do_not(tmp_path: Path) -> None:
    """A fingerprint from before there were engines still holds: what was measured and learned stays with it."""
    plain = record(tmp_path / "plain").fingerprint
    assert record(tmp_path / "said", engine="eager", compile=False).fingerprint == plain
    assert record(tmp_path / "compiled", compile=True).fingerprint != plain
    files = {"m.onnx": b"x"}
    prints = {other_engine(tmp_path / engine, engine, files).fingerprint for engine in ("onnx", "openvino")}
    assert len(prints) == 2


GRAPH = b'<net><layers><layer><data offset="0" size="4"/></layer></layers></net>'


def test_a_graph_travels_with_the_spec_and_is_verified(tmp_path: Path) -> None:
    """OpenVINO's graph is read as the manifest lists it, and checked against the weights before anybody opens it."""
    good = other_engine(tmp_path / "good", "openvino", {"m.bin": b"1234", "m.xml": GRAPH}, graph="m.xml")
    spec = load_spec(good, good.weights)
    assert (spec.engine, spec.graph, spec.builder, spec.trusted) == ("openvino", GRAPH, BuilderSpec(""), False)
    (good.directory / "m.xml").write_bytes(GRAPH.replace(b"0", b"1"))
    with pytest.raises(CorruptWeights, match="graph is not the one of the manifest"):
        load_spec(good, good.weights)
    short = other_engine(tmp_path / "short", "openvino", {"m.bin": b"123", "m.xml": GRAPH}, graph="m.xml")
    with pytest.raises(CorruptWeights, match="outside the 3 bytes"):
        load_spec(short, short.weights)
    large = other_engine(tmp_path / "large", "openvino", {"m.bin": b"1", "m.xml": bytes(GRAPH_CAP + 1)}, graph="m.xml")
    with pytest.raises(LoadFailed, match="graph is over"):
        load_spec(large, large.weights)
