"""Model directories for tests: small real weights with a real manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from runtime.catalog.describe import write_manifest
from runtime.catalog.manifest import Manifest, parse_manifest
from runtime.catalog.record import ModelRecord, record_of

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS: dict[str, object] = {
    "name": "tiny",
    "version": "1",
    "builder": {"kind": "python", "target": "package.module:factory"},
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
}


def weights(path: Path, seed: int = 0, count: int = 64) -> Path:
    """Write `count` random FP32 values as one tensor `w`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.random.default_rng(seed).normal(size=count).astype(np.float32)}, path)
    return path


def model(directory: Path, seed: int = 0, count: int = 64, **settings: object) -> Manifest:
    """Make a complete model directory; `settings` override the manifest's."""
    weights(directory / "model.safetensors", seed, count)
    return write_manifest(directory, {**SETTINGS, **settings})


def record(directory: Path, seed: int = 0, count: int = 64, **settings: object) -> ModelRecord:
    """Make a complete model directory and its record."""
    return record_of(directory, model(directory, seed, count, **settings))


def pickled(directory: Path, content: bytes, **settings: object) -> ModelRecord:
    """Make a model directory whose weights are these bytes, called a .pth."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.pth").write_bytes(content)
    manifest = write_manifest(directory, {**SETTINGS, "allow_pickle": "weights_only", **settings})
    return record_of(directory, manifest)


__all__ = ["SETTINGS", "model", "parse_manifest", "pickled", "record", "weights"]
