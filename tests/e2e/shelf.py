"""Model directories for a test server, made of `modules.py` and a few numbers.

No server here; `width` decides how large a model is.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from runtime.catalog.describe import write_manifest
from tests.e2e.modules import ALLOW

if TYPE_CHECKING:
    from pathlib import Path

Floats: TypeAlias = NDArray[np.float32]

WEIGHTS = "model.safetensors"


def tensors(width: int = 3, seed: int = 0) -> dict[str, Floats]:
    """The two tensors of every network of `modules.py`."""
    random = np.random.default_rng(seed)
    return {
        "scale": random.normal(size=width).astype(np.float32),
        "shift": random.normal(size=width).astype(np.float32),
    }


def expected(x: Floats, width: int = 3, seed: int = 0) -> Floats:
    """What the network answers to `x` [N, width]."""
    held = tensors(width, seed)
    return x * held["scale"] + held["shift"]


def settings(name: str, *, factory: str = "affine", width: int = 3, **arguments: object) -> dict[str, object]:
    """Everything of a manifest but its files."""
    return {
        "name": name,
        "version": "1",
        "builder": {
            "kind": "python",
            "target": f"{ALLOW}:{factory}",
            "arguments": {"width": width, **arguments},
        },
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, width]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, width]}],
    }


def put(
    repository: Path, name: str, *, factory: str = "affine", width: int = 3, seed: int = 0, **arguments: object
) -> Path:
    """Make a complete model directory; it appears whole."""
    staging = repository / f".{name}"
    staging.mkdir(parents=True)
    save_file(tensors(width, seed), staging / WEIGHTS)
    write_manifest(staging, settings(name, factory=factory, width=width, **arguments))
    directory = repository / name
    if directory.exists():
        shutil.rmtree(directory)
    staging.rename(directory)
    return directory


def mend(directory: Path, *, width: int = 3, seed: int = 0, **changes: object) -> None:
    """Write good weights and a manifest that fits them over whatever is in a directory."""
    for file in directory.iterdir():
        file.unlink()
    save_file(tensors(width, seed), directory / WEIGHTS)
    write_manifest(directory, {**settings(directory.name, width=width), **changes})
