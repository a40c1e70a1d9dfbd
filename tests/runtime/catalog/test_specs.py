"""The host tier with specs: one per resident, made off the loop, gone with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.errors import FetchFailed, LoadFailed, NotReady
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import Footprint, Model, ModelKey, Tier
from runtime.catalog.describe import write_manifest
from runtime.catalog.repository import Repository
from runtime.catalog.specs import SpecifiedHost
from runtime.workers.port import ArtefactSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runtime.catalog.record import ModelRecord

MANIFEST = {
    "name": "tiny",
    "version": "1",
    "builder": {"kind": "python", "target": "some.module:factory"},
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}


class Shelf:
    """A host tier that only remembers where weights lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: set[ModelKey] = set()

    async def load(self, model: Model) -> LoadReport:
        """See `Residence.load`."""
        self.held.add(model.key)
        return LoadReport(8, Tier.DISK)

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        self.held.discard(key)
        return EvictReport(8)

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        return ()

    def path_of(self, _model: Model) -> Path:
        """Where it lies."""
        return self.path

    def files_of(self, _model: Model) -> dict[str, Path]:
        """Everything lies in the directory."""
        return {}


async def at_once(work: Callable[..., object], *args: object) -> object:
    """An `Offload` that is a direct call."""
    return work(*args)


def shelf_of(folder: Path) -> tuple[Shelf, ModelRecord, Model]:
    """A described model directory, its record and its value."""
    directory = folder / "tiny"
    directory.mkdir()
    save_file({"weight": np.zeros((2, 2), np.float32)}, directory / "model.safetensors")
    write_manifest(directory, MANIFEST)
    repository = Repository((folder,))
    repository.refresh()
    record = repository.find("tiny")
    model = Model("tiny", "1", record.fingerprint, Footprint(16, 16))
    return Shelf(directory / "model.safetensors"), record, model


async def test_a_resident_has_a_spec_with_the_servers_limits(tmp_path: Path) -> None:
    """What the worker needs is there when the weights are, and says how deep a body may nest."""
    shelf, record, model = shelf_of(tmp_path)
    host = SpecifiedHost(shelf, lambda _: record, at_once, json_depth=7)  # type: ignore[arg-type]
    with pytest.raises(NotReady):
        host.resolve(model)
    await host.load(model)
    spec = host.resolve(model)
    assert (spec.key, spec.json_depth, spec.weights) == ("tiny@1", 7, str(shelf.path))
    await host.evict(model.key)
    with pytest.raises(NotReady):
        host.resolve(model)


async def test_weights_whose_spec_cannot_be_made_leave_again(tmp_path: Path) -> None:
    """Nothing stays on the host that no worker could use."""
    shelf, record, model = shelf_of(tmp_path)
    shelf.path = tmp_path / "gone"
    host = SpecifiedHost(shelf, lambda _: record, at_once, json_depth=64)  # type: ignore[arg-type]
    with pytest.raises(FetchFailed):
        await host.load(model)
    assert not shelf.held


async def test_a_spec_of_other_weights_is_not_handed_out(tmp_path: Path) -> None:
    """A new fingerprint under the same key has to come through a load of its own."""
    shelf, record, model = shelf_of(tmp_path)
    host = SpecifiedHost(shelf, lambda _: record, at_once, json_depth=64)  # type: ignore[arg-type]
    await host.load(model)
    newer = Model("tiny", "1", "another", model.footprint)
    with pytest.raises(NotReady):
        host.resolve(newer)


async def test_a_model_that_comes_back_needs_no_file_read(tmp_path: Path) -> None:
    """Its spec is remembered by fingerprint and place; other weights are spelled anew."""
    shelf, record, model = shelf_of(tmp_path)
    asked: list[str] = []

    async def noted(work: Callable[..., object], *args: object) -> object:
        asked.append(work.__name__)
        return work(*args)

    host = SpecifiedHost(shelf, lambda _: record, noted, json_depth=64)  # type: ignore[arg-type]
    await host.load(model)
    first = host.resolve(model)
    for _ in range(3):
        await host.evict(model.key)
        with pytest.raises(NotReady):
            host.resolve(model)
        await host.load(model)
        assert host.resolve(model) is first
    assert asked == ["load_spec"]
    await host.load(Model("tiny", "1", "another", model.footprint))
    assert asked == ["load_spec"] * 2


def scripted(folder: Path) -> tuple[Shelf, ModelRecord, Model]:
    """A model whose file can run code, and whose manifest says so."""
    directory = folder / "tiny"
    directory.mkdir()
    (directory / "model.pt").write_bytes(b"x")
    about = {key: value for key, value in MANIFEST.items() if key != "builder"}
    write_manifest(directory, {**about, "engine": "torchscript", "trust": "code"})
    repository = Repository((folder,))
    repository.refresh()
    record = repository.find("tiny")
    return Shelf(directory / "model.pt"), record, Model("tiny", "1", record.fingerprint, Footprint(1, 1))


@pytest.mark.parametrize("trust", [(), ("other",), ("tiny@2",)])
async def test_a_file_that_can_run_code_needs_the_operators_word_too(tmp_path: Path, trust: tuple[str, ...]) -> None:
    """F13: the manifest alone does not do; nothing is brought to the host before."""
    shelf, record, model = scripted(tmp_path)
    host = SpecifiedHost(shelf, lambda _: record, at_once, json_depth=64, trust=trust)  # type: ignore[arg-type]
    with pytest.raises(LoadFailed, match="`trust` does not allow"):
        await host.load(model)
    assert not shelf.held


@pytest.mark.parametrize("trust", [("tiny",), ("a", "tiny@1")])
async def test_both_words_make_it_trusted(tmp_path: Path, trust: tuple[str, ...]) -> None:
    """By name or by version; a model that needs no trust is never marked as having it."""
    shelf, record, model = scripted(tmp_path)
    place = ArtefactSpec("folder", 5)
    host = SpecifiedHost(shelf, lambda _: record, at_once, json_depth=64, trust=trust, artefacts=place)  # type: ignore[arg-type]
    await host.load(model)
    assert host.resolve(model).trusted
    assert host.resolve(model).artefacts == place
    (tmp_path / "plain").mkdir()
    shelf, record, model = shelf_of(tmp_path / "plain")
    host = SpecifiedHost(shelf, lambda _: record, at_once, json_depth=64, trust=trust)  # type: ignore[arg-type]
    await host.load(model)
    assert not host.resolve(model).trusted
