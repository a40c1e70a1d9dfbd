"""Brings the manifest of a model folder up to date. What a manifest may say is `catalog/manifest.py`'s to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.catalog.describe import write_manifest
from runtime.catalog.manifest import FILE_NAME
from runtime.config.yaml import read_file

if TYPE_CHECKING:
    from pathlib import Path


def update(directory: Path, *, every: bool = False) -> tuple[Path, list[dict[str, Any]]]:
    """Write sizes and hashes anew, of the files listed before, or of `every` file (also where none was listed).

    Gives the manifest's path and its file rows. Raises `ConfigError` with every fault, and `OSError`; then the old
    manifest stays.
    """
    path = directory / FILE_NAME
    settings = read_file(path).tree
    listed = settings.pop("files", None)
    only = None if every or not isinstance(listed, list) else [name for row in listed if (name := _name(row))]
    manifest = write_manifest(directory, settings, only or None)
    return path, [row.model_dump() for row in manifest.files]


def _name(row: object) -> str:
    """A row's path; a bare name stands for a row that has no size yet."""
    return str(row.get("path") or "") if isinstance(row, dict) else str(row)
