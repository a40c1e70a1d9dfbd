"""Manifests that name sources: what they may say, what is admitted without weights, and what identity means then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from actors.errors import ConfigError
from runtime.catalog.describe import spell, write_manifest
from runtime.catalog.manifest import parse_manifest
from runtime.catalog.record import fingerprint_of, record_of
from runtime.catalog.repository import Repository, State
from runtime.tiers.remote import refusals
from runtime.tiers.sources import ObjectPlace, Permits
from tests.runtime.catalog.directories import SETTINGS, model, weights

if TYPE_CHECKING:
    from pathlib import Path

ROW = {"path": "model.safetensors", "size": 264, "sha256": "0" * 64}
CONFIG = {"path": "config.json", "size": 2, "sha256": "1" * 64}
STORE = Permits(stores=(ObjectPlace("s3://models"),))


def text(**changes: Any) -> str:
    return spell({**SETTINGS, "files": [ROW], **changes})


def remote(root: Path, name: str = "m", **changes: Any) -> Path:
    """A directory with nothing but a manifest."""
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "foreload.yaml").write_text(text(name=name, **changes))
    return directory


def test_a_models_source_is_where_its_files_lie_and_a_files_own_wins() -> None:
    """Paths are added to the model's address; a row may name its whole address itself."""
    own = {**ROW, "source": "https://models.example.org/other/weights.safetensors"}
    found = parse_manifest(text(source="s3://models/team/", files=[own, CONFIG]))
    assert found.sources == {
        "model.safetensors": "https://models.example.org/other/weights.safetensors",
        "config.json": "s3://models/team/config.json",
    }
    assert parse_manifest(text(files=[own, CONFIG])).sources == {"model.safetensors": own["source"]}
    assert parse_manifest(text()).sources == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "ftp://host/a"}, "source: has no known scheme"),
        ({"source": "s3://key:s3cret@bucket/a"}, "source: holds a user or password"),
        ({"source": "https://host/a?sig=s3cret"}, "source: holds a query"),
        ({"source": "hf://org/name@main"}, "source: names no commit"),
        ({"source": 5}, "source: must be text"),
        ({"files": [{**ROW, "source": "s3://"}]}, "files.0.source: has no bucket"),
        ({"files": [{**ROW, "source": "s3://a/b", "sha256": None}]}, "files.0.sha256"),
        ({"source": "s3://models", "in_place": True}, "in_place: belongs to weights in the directory"),
    ],
)
def test_a_wrong_source_is_refused_with_its_key(changes: dict[str, Any], says: str) -> None:
    """With line and key, and without what could be a secret. A sha256 is never optional."""
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text(**changes))
    assert says in caught.value.message
    assert "s3cret" not in caught.value.message


def test_a_builders_configuration_may_come_from_elsewhere() -> None:
    """What a load reads: the configuration and the weights, and no other file."""
    builder = {"kind": "transformers", "config": "config.json"}
    extra = {"path": "README.md", "size": 1, "sha256": "2" * 64}
    found = parse_manifest(text(builder=builder, files=[ROW, CONFIG, extra], source="s3://models"))
    assert [row.path for row in found.needed] == ["config.json", "model.safetensors"]


def test_where_files_come_from_is_no_part_of_identity(tmp_path: Path) -> None:
    """The same bytes from another place are the same model: no reload, no second copy."""
    local = model(tmp_path / "m")
    moved = local.model_copy(update={"source": "s3://models/m"})
    row = local.files[0].model_copy(update={"source": "https://host/model.safetensors"})
    third = local.model_copy(update={"files": (row,)})
    assert fingerprint_of(local) == fingerprint_of(moved) == fingerprint_of(third)


def test_a_model_is_admitted_without_its_weights(tmp_path: Path) -> None:
    """Complete is what has a manifest and every file that has no source."""
    remote(tmp_path, "all", source="s3://models/all")
    half = remote(tmp_path, "half", files=[{**ROW, "source": "s3://models/w"}, CONFIG])
    repository = Repository((tmp_path,), refusal=refusals(STORE))
    states = {change.label: (change.state, change.reason) for change in repository.refresh()}
    assert states["all@1"] == (State.ADMITTED, "")
    assert states["half@1"] == (State.PENDING, "incomplete: config.json is missing")
    (half / "config.json").write_text("{}")
    assert [change.state for change in repository.refresh()] == [State.ADMITTED]
    assert repository.find("all").weights_bytes == 264
    assert repository.refresh() == ()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("s3://other/m", "s3://other is not among remote.stores"),
        ("https://models.example.org/m", "the host models.example.org is not among remote.hosts"),
        ("https://169.254.169.254/m", "the host 169.254.169.254 is not among remote.hosts"),
        ("http://models.example.org/m", "remote.allow_http"),
        ("file:///etc", "remote.folders"),
        (f"hf://org/name@{'0' * 40}", "remote.hub is not configured"),
    ],
)
def test_a_source_that_is_not_allowed_is_refused_with_the_setting(tmp_path: Path, source: str, says: str) -> None:
    """F21, S4: seen in the index with the file and the setting that would allow it; others are served."""
    remote(tmp_path, "bad", source=source)
    remote(tmp_path, "good", source="s3://models/good")
    repository = Repository((tmp_path,), refusal=refusals(STORE))
    states = {change.label: change for change in repository.refresh()}
    assert states["bad@1"].state is State.REJECTED
    assert states["bad@1"].reason.startswith("model.safetensors: its source is not allowed")
    assert says in states["bad@1"].reason
    assert repository.names() == ("good",)


def test_describing_a_local_copy_keeps_the_source(tmp_path: Path) -> None:
    """The way to publish: describe a folder, upload it, and leave the weights out of the folder that is served."""
    from runtime.commands.manifest import update

    directory = tmp_path / "m"
    weights(directory / "model.safetensors")
    write_manifest(directory, {**SETTINGS, "source": "s3://models/m"})
    weights(directory / "model.safetensors", seed=1)
    update(directory)
    manifest = parse_manifest((directory / "foreload.yaml").read_text())
    assert manifest.source == "s3://models/m"
    (directory / "model.safetensors").unlink()
    assert record_of(directory, manifest).manifest.source_of(manifest.weights_row) == "s3://models/m/model.safetensors"
