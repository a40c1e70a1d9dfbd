"""One admitted model version as a value, and what a worker is told of it.

Belongs here: identity (fingerprint) and the `LoadSpec`. Never: scanning directories (`repository.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from actors.errors import CorruptWeights, FetchFailed, ForeloadError, LoadFailed
from actors.residency.model import ModelKey, key_of
from runtime.catalog.manifest import Manifest
from runtime.tiers.formats import check_graph
from runtime.tiers.index import read_index
from runtime.tiers.variant import Variant
from runtime.tiers.verify import open_regular, unreadable
from runtime.workers.port import BatchSpec, BuilderSpec, LoadSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


CONFIG_CAP: Final = 4 << 20
"""Largest config.json, in bytes."""

GRAPH_CAP: Final = 8 << 20
"""Largest graph of an OpenVINO model, in bytes: it travels in one message."""

_LATER_KEYS = ("engine", "trust", "graph", "compile", "dtype", "tensors")
"""Left out of a fingerprint at their defaults, so that fingerprints from before they existed still hold."""

_CODE_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines", "custom_generate"})


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A complete model directory.

    `weights_bytes` is the size of its weights file, or of what the manifest takes of it; `fingerprint` is hex.
    """

    name: str
    version: str
    directory: Path
    manifest: Manifest
    fingerprint: str
    weights_bytes: int
    elsewhere: bool = False
    """Its weights are not in the directory; kept here, because the hit path's neighbours ask often."""

    @property
    def key(self) -> ModelKey:
        """`name@version`."""
        return key_of(self.name, self.version)

    @property
    def variant(self) -> Variant:
        """What of the weights is served, and in which precision."""
        return _variant(self.manifest)

    @property
    def weights(self) -> Path:
        """The weights file as it lies in the directory; not to be mapped unless `in_place`."""
        return self.directory / self.manifest.weights_row.path

    def __repr__(self) -> str:
        return f"<ModelRecord {self.key} {self.fingerprint[:8]} {self.weights_bytes} B>"


def record_of(directory: Path, manifest: Manifest) -> ModelRecord:
    """Make the record of a directory whose files were found complete."""
    return ModelRecord(
        name=manifest.name,
        version=manifest.version,
        directory=directory,
        manifest=manifest,
        fingerprint=fingerprint_of(manifest),
        weights_bytes=_weights_bytes(directory, manifest),
        elsewhere=manifest.source_of(manifest.weights_row) is not None,
    )


def _variant(manifest: Manifest) -> Variant:
    return Variant(manifest.tensors.include, manifest.tensors.exclude, manifest.dtype or "")


def _weights_bytes(directory: Path, manifest: Manifest) -> int:
    """A first footprint, until one is measured."""
    row, variant = manifest.weights_row, _variant(manifest)
    if variant.plain or manifest.pickled:
        return row.size
    try:
        return variant.total(read_index(directory / row.path))
    except ForeloadError:  # whatever is wrong with it is for the admission to say
        return row.size


def fingerprint_of(manifest: Manifest) -> str:
    """Hash whatever changes what the model answers: files, how they are read and built, signature, batching.

    Name, version, footprint, labels and where the files come from are not part of it. blake3, 64 hex digits.
    """
    apart = {"name", "version", "footprint", "labels", "source"}
    tree = manifest.model_dump(mode="json", by_alias=True, exclude=apart)
    for row in tree["inputs"]:
        if row["preprocess"] is None:  # or models without any would have changed when the key came
            del row["preprocess"]
    tree["files"] = sorted((row.path, row.sha256) for row in manifest.files)
    tree["weights"] = manifest.weights_row.path
    # Left out where they say nothing, so that what was measured of a model before they existed still counts.
    for key in _LATER_KEYS:
        if not tree[key] or tree[key] == Manifest.model_fields[key].default:
            del tree[key]
    return blake3(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")).hexdigest()


def load_spec(record: ModelRecord, weights_path: Path, fetched: Mapping[str, Path] | None = None) -> LoadSpec:
    """Spell all that a worker needs; `weights_path` is the verified blob. Blocking: reads the builder's config.

    `fetched` says where files lie that came from elsewhere.

    Raises `FetchFailed`, `CorruptWeights` (the config is not the manifest's) or `LoadFailed` (it asks for code).
    """
    manifest = record.manifest
    try:
        size = os.stat(weights_path).st_size  # noqa: PTH116 -- an instance of Path costs more here than the call
    except OSError as error:
        raise unreadable(error) from None
    return LoadSpec(
        key=record.key,
        fingerprint=record.fingerprint,
        weights=str(weights_path),
        weights_bytes=size,
        builder=_builder(record, fetched or {}),
        inputs=input_specs(manifest),
        outputs=tuple(TensorSpec(row.name, row.datatype, row.shape) for row in manifest.outputs),
        batch=BatchSpec(max_size=manifest.batch.max_size, delay=manifest.batch.delay),
        cast=manifest.cast,
        reject_nonfinite=manifest.reject_nonfinite,
        engine=manifest.engine,
        graph=_graph(record, fetched or {}),
        compile=manifest.compile,
    )


def input_specs(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """What the model takes, and how inputs that come as files become it."""
    return tuple(
        TensorSpec(
            row.name,
            row.datatype,
            row.shape,
            None if row.preprocess is None else row.preprocess.pipeline(row.datatype),
        )
        for row in manifest.inputs
    )


def _builder(record: ModelRecord, fetched: Mapping[str, Path]) -> BuilderSpec:
    builder = record.manifest.builder
    dtype = record.manifest.dtype or ""
    if builder is None:
        return BuilderSpec("")
    if builder.kind == "python":
        return BuilderSpec("python", builder.target, builder.arguments, dtype)
    path = builder.config or ""
    config = _read_config(record, path, fetched.get(path, record.directory / path))
    for key in _code_keys(config):
        raise LoadFailed(
            f"the model's config asks for code from elsewhere ({key}), which is never run", model=record.name
        )
    return BuilderSpec("transformers", builder.architecture, config, dtype)


def _read_config(record: ModelRecord, path: str, lies: Path) -> dict[str, object]:
    raw = _listed(record, path, lies, "the builder's config", CONFIG_CAP)
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        raise LoadFailed("the builder's config is not JSON", model=record.name) from None
    if not isinstance(config, dict):
        raise LoadFailed("the builder's config is not a JSON object", model=record.name)
    return config


def _graph(record: ModelRecord, fetched: Mapping[str, Path]) -> bytes:
    """The graph beside an OpenVINO model's weights, verified and checked against their size."""
    path = record.manifest.graph
    if path is None:
        return b""
    raw = _listed(record, path, fetched.get(path, record.directory / path), "the graph", GRAPH_CAP)
    try:
        check_graph(raw, record.weights_bytes)
    except CorruptWeights as error:
        error.model = record.name
        raise
    return raw


def _listed(record: ModelRecord, path: str, lies: Path, what: str, cap: int) -> bytes:
    """Read a small listed file whole, from where it lies, and verify it."""
    row = record.manifest.row(path)
    if row.size > cap:
        raise LoadFailed(f"{what} is over {cap} bytes", model=record.name)
    raw = _read(lies, row.size, what)
    if len(raw) != row.size or hashlib.sha256(raw).hexdigest() != row.sha256:
        raise CorruptWeights(f"{what} is not the one of the manifest", model=record.name)
    return raw


def _read(path: Path, size: int, what: str) -> bytes:
    try:
        descriptor = open_regular(path)
    except FetchFailed as error:
        raise FetchFailed(f"{what}: {error.message}") from None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(size + 1)


def _code_keys(tree: object) -> Iterator[str]:
    """Find keys that make a library fetch or import code of the repository, however deep.

    An attention or experts implementation with a slash is a repository of kernels, which is code as well.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            remote = key.endswith("_implementation") and isinstance(value, str) and "/" in value
            if remote or (key in _CODE_KEYS and value):
                yield key
            yield from _code_keys(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _code_keys(value)
