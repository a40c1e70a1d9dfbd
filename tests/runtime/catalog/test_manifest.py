"""Promises of the manifest: every fault at once, with line and key; and what is accepted means one thing."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import ConfigError
from runtime.catalog.describe import describe, spell, write_manifest
from runtime.catalog.manifest import FILE_NAME, parse_manifest, relative_path
from runtime.config.yaml import read
from tests.runtime.catalog.directories import SETTINGS, model, weights

if TYPE_CHECKING:
    from pathlib import Path

ROW = {"path": "model.safetensors", "size": 1, "sha256": "0" * 64}
CONFIG = {"path": "config.json", "size": 2, "sha256": "1" * 64}
PICKLE = {"path": "model.pth", "size": 1, "sha256": "2" * 64}


def text(**changes: object) -> str:
    """A valid manifest with some keys replaced; None removes one."""
    tree = {**SETTINGS, "files": [ROW], **changes}
    return spell({key: value for key, value in tree.items() if value is not None})


WHOLE = f"""
name: minilm
version: "1"
builder: {{kind: transformers, config: config.json, class: BertModel}}
weights: model.safetensors
files:
  - {{path: model.safetensors, size: 90868376, sha256: "{"a" * 64}"}}
  - {{path: config.json, size: 612, sha256: "{"b" * 64}"}}
inputs:  [{{name: input_ids, datatype: INT64, shape: [-1, -1]}}]
outputs: [{{name: last_hidden_state, datatype: FP32, shape: [-1, -1, 384]}}]
batch: {{max_size: 8, delay: 5ms}}
footprint: {{device: 92MB, host: 90MiB}}
cast: true
reject_nonfinite: true
in_place: true
labels: {{task: embeddings, license: Apache-2.0}}
"""


def test_a_whole_manifest_is_read_with_units() -> None:
    """Every key arrives typed; sizes and durations as bytes and seconds."""
    found = parse_manifest(WHOLE)
    assert found.builder is not None
    assert (found.name, found.version, found.builder.architecture) == ("minilm", "1", "BertModel")
    assert (found.batch.max_size, found.batch.delay) == (8, 0.005)
    assert found.footprint is not None
    assert (found.footprint.device, found.footprint.host) == (92_000_000, 90 << 20)
    assert found.inputs[0].shape == (-1, -1)
    assert found.weights_row.size == 90868376
    assert not found.pickled
    assert found.labels == {"task": "embeddings", "license": "Apache-2.0"}


def test_a_short_manifest_has_safe_defaults() -> None:
    """No pickle, no cast, no batching, the file is copied."""
    found = parse_manifest(text())
    assert (found.allow_pickle, found.cast, found.in_place, found.batch.max_size) == (None, False, False, 1)
    assert found.weights_row.path == "model.safetensors"


def test_the_weights_are_the_safetensors_else_the_pickle() -> None:
    """Safetensors win over a .pth beside it; a .pth alone needs its permission."""
    assert not parse_manifest(text(files=[ROW, PICKLE])).pickled
    assert parse_manifest(text(files=[PICKLE], allow_pickle="weights_only")).pickled
    both = text(files=[ROW, PICKLE], weights="model.pth", allow_pickle="weights_only", state_dict="model")
    assert parse_manifest(both).weights_row.path == "model.pth"


ONNX = {"path": "model.onnx", "size": 1, "sha256": "3" * 64}
IR = [{"path": "model.xml", "size": 1, "sha256": "4" * 64}, {"path": "model.bin", "size": 1, "sha256": "5" * 64}]
PROGRAM = {"path": "model.pt2", "size": 1, "sha256": "6" * 64}
SCRIPT = {"path": "model.pt", "size": 1, "sha256": "7" * 64}


def test_engines_beside_eager_need_no_builder() -> None:
    """Their file holds the graph; each takes the suffixes of its own format, and a .pt is no pickle then."""
    for engine, files, more, path in (
        ("onnx", [ONNX], {}, "model.onnx"),
        ("openvino", [ONNX], {}, "model.onnx"),
        ("openvino", IR, {"graph": "model.xml"}, "model.bin"),
        ("export", [PROGRAM], {"trust": "code", "compile": True}, "model.pt2"),
        ("aot", [PROGRAM], {"trust": "code"}, "model.pt2"),
        ("torchscript", [SCRIPT, ROW], {"trust": "code"}, "model.pt"),
    ):
        found = parse_manifest(text(engine=engine, files=files, builder=None, **more))
        assert (found.engine, found.weights_row.path, found.pickled) == (engine, path, False)
    assert parse_manifest(text(compile=True)).compile


REFUSED = {
    "unknown engine": ({"engine": "tflite"}, "engine: is not one of the choices"),
    "eager without builder": ({"builder": None}, "builder: is missing"),
    "onnx with builder": ({"engine": "onnx", "files": [ONNX]}, "builder: belongs to engine: eager"),
    "onnx with cast": ({"engine": "onnx", "files": [ONNX], "builder": None, "cast": True}, "cast: belongs to"),
    "torchscript untrusted": ({"engine": "torchscript", "files": [SCRIPT], "builder": None}, "trust: is missing"),
    "export untrusted": ({"engine": "export", "files": [PROGRAM], "builder": None}, "trust: is missing"),
    "aot untrusted": ({"engine": "aot", "files": [PROGRAM], "builder": None}, "trust: is missing"),
    "trust for nothing": ({"trust": "code"}, "trust: has no meaning for engine: eager"),
    "trust in another word": ({"trust": "yes"}, "trust: is not one of the choices"),
    "onnx compiled": ({"engine": "onnx", "files": [ONNX], "builder": None, "compile": True}, "compile: belongs to"),
    "bin without graph": ({"engine": "openvino", "files": IR, "builder": None}, "graph: is missing"),
    "graph that is not listed": (
        {"engine": "openvino", "files": IR[1:], "builder": None, "graph": "model.xml"},
        "graph: is not among the files",
    ),
    "graph for onnx": ({"engine": "onnx", "files": [ONNX, *IR], "builder": None, "graph": "model.xml"}, "graph: bel"),
    "graph of another format": (
        {"engine": "openvino", "files": [*IR, CONFIG], "builder": None, "graph": "config.json"},
        "graph: has no known format",
    ),
    "weights of another engine": (
        {"engine": "onnx", "files": [ROW], "builder": None, "weights": "model.safetensors"},
        "weights: has no known format of engine: onnx",
    ),
    "no weights of that engine": ({"engine": "onnx", "files": [ROW], "builder": None}, "files: no files could be"),
    "name with a slash": ({"name": "a/b"}, "name: is not a model name"),
    "F19 name of dots": ({"name": ".."}, "name: is not a model name"),
    "F19 name with NUL": ({"name": "a\0"}, "name: is not a model name"),
    "F19 long name": ({"name": "a" * 129}, "name: is not a model name"),
    "F19 name in other letters": ({"name": "modèle"}, "name: is not a model name"),
    "name with a line feed": ({"name": "a\n"}, "name: is not a model name"),
    "version is a number": ({"version": 1}, "version: must be text"),
    "unknown key": ({"inptus": []}, "inptus: unknown key (did you mean inputs?)"),
    "missing key": ({"outputs": None}, "outputs: is missing"),
    "no files": ({"files": []}, "files: is empty"),
    "no inputs": ({"inputs": []}, "inputs: is empty"),
    "R40 no weights": ({"files": [CONFIG]}, "no files could be the weights"),
    "two weights": ({"files": [ROW, {**ROW, "path": "b.safetensors"}]}, "2 files could be the weights"),
    "weights not listed": ({"weights": "x.safetensors"}, "weights: is not among the files"),
    "weights of no format": ({"files": [CONFIG], "weights": "config.json"}, "weights: has no known format"),
    "S5 pickle without leave": ({"files": [PICKLE]}, "allow_pickle: model.pth is a pickle"),
    "S5 unsafe pickle": ({"files": [PICKLE], "allow_pickle": "full"}, "allow_pickle: is not one of the choices"),
    "pickle option without pickle": ({"rename": {"a": "b"}}, "rename: belongs to .pth weights"),
    "file twice": ({"files": [ROW, ROW]}, "files.1.path: is listed twice"),
    "manifest in itself": ({"files": [ROW, {**ROW, "path": FILE_NAME}]}, "is the manifest itself"),
    "F18 parent": ({"files": [ROW, {**CONFIG, "path": "../x"}]}, "files.1.path: is not a relative path"),
    "F18 absolute": ({"files": [ROW, {**CONFIG, "path": "/etc/passwd"}]}, "files.1.path: is not a relative path"),
    "S6 digest is a path": ({"files": [{**ROW, "sha256": "../../x"}]}, "files.0.sha256: is not a sha256"),
    "S6 digest in capitals": ({"files": [{**ROW, "sha256": "A" * 64}]}, "files.0.sha256: is not a sha256"),
    "negative size": ({"files": [{**ROW, "size": -1}]}, "files.0.size"),
    "size is true": ({"files": [{**ROW, "size": True}]}, "files.0.size: must be a whole number"),
    "unknown builder": ({"builder": {"kind": "onnx"}}, "builder.kind: is not one of the choices"),
    "transformers without config": ({"builder": {"kind": "transformers"}}, "builder.config: is missing"),
    "config not listed": ({"builder": {"kind": "transformers", "config": "c.json"}}, "config: is not among the files"),
    "class is code": (
        {"builder": {"kind": "transformers", "config": "config.json", "class": "a b"}, "files": [ROW, CONFIG]},
        "builder.class: is not a class name",
    ),
    "target is no function": ({"builder": {"kind": "python", "target": "os"}}, "builder.target: is not a function"),
    "target is a path": ({"builder": {"kind": "python", "target": "../x:f"}}, "builder.target: is not a function"),
    "unknown datatype": ({"inputs": [{"name": "x", "datatype": "FP8", "shape": []}]}, "inputs.0.datatype: is not a"),
    "input twice": ({"inputs": [SETTINGS["inputs"][0]] * 2}, "inputs.1.name: is there twice"),  # type: ignore[index]
    "shape of -2": ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-2]}]}, "inputs.0.shape.0"),
    "no batch": ({"batch": {"max_size": 0}}, "batch.max_size"),
    "endless batch": ({"batch": {"delay": "1h"}}, "batch.delay"),
    "no unit known": ({"footprint": {"device": "9XB", "host": 1}}, "footprint.device: unknown unit 'XB'"),
    "cast is text": ({"cast": "yes"}, "cast: must be true or false"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_manifest_is_refused_by_key(changes: dict[str, object], words: str) -> None:
    """F18, F19, S5, S6: each fault names its line and key."""
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text(**changes))
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{FILE_NAME}:")


def test_all_faults_are_told_at_once() -> None:
    """One look at the message is enough to mend the file."""
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text(name="a b", version="", inputs=[], nonsense=1))
    for key in ("name", "version", "inputs", "nonsense"):
        assert f": {key}: " in caught.value.message


def test_duplicate_keys_are_refused() -> None:
    """Two readers could see two different models."""
    with pytest.raises(ConfigError, match="twice"):
        parse_manifest(text() + 'name: "other"\n')


@given(st.text(max_size=40))
def test_an_accepted_path_never_leaves(path: str) -> None:
    """F18: whatever text is accepted as a path stays below the directory it is joined to."""
    try:
        accepted = relative_path(path)
    except ValueError:
        return
    assert not accepted.startswith("/")
    assert not {"", ".", ".."} & set(accepted.split("/"))
    assert "\0" not in accepted


def test_describing_lists_every_plain_file(tmp_path: Path) -> None:
    """Nested files are listed with size and hash; hidden ones and the manifest are not; links to files are."""
    model(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "vocab.txt").write_bytes(b"abc")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"x")
    (tmp_path / "link.txt").symlink_to("deep/vocab.txt")
    found = {row["path"]: (row["size"], row["sha256"]) for row in describe(tmp_path)}
    assert found.keys() == {"model.safetensors", "deep/vocab.txt", "link.txt"}
    assert found["deep/vocab.txt"] == found["link.txt"] == (3, hashlib.sha256(b"abc").hexdigest())
    assert [row["path"] for row in describe(tmp_path, ["link.txt"])] == ["link.txt"]
    with pytest.raises(ConfigError, match=r"'absent\.txt' is not in the directory"):
        describe(tmp_path, ["absent.txt"])


def test_a_written_manifest_reads_back_the_same(tmp_path: Path) -> None:
    """Awkward text survives; the file appears whole, and there is no temporary one beside it."""
    weights(tmp_path / "model.safetensors")
    labels = {"quote": '"\\', "line": "a\nb", "umlaut": "äß", "emoji": "😀", "colon": "a: b #c", "empty": ""}
    written = write_manifest(tmp_path, {**SETTINGS, "labels": labels})
    assert written.labels == labels
    assert parse_manifest((tmp_path / FILE_NAME).read_text("utf-8")) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, "model.safetensors"]


def test_bad_settings_write_nothing(tmp_path: Path) -> None:
    """An existing manifest stays when the new settings are wrong."""
    model(tmp_path)
    before = (tmp_path / FILE_NAME).read_bytes()
    for changes in ({"name": "../x"}, {"labels": {"a": object()}}, {"labels": {"a": float("nan")}}):
        with pytest.raises(ConfigError):
            write_manifest(tmp_path, {**SETTINGS, **changes})
    assert (tmp_path / FILE_NAME).read_bytes() == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["k", "l"]), JSON))
def test_spelled_trees_are_yaml(tree: dict[str, object]) -> None:
    """What `spell` writes, the configuration's own reader gives back unchanged."""
    assert read(spell(tree), "x").tree == tree
