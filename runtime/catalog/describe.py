"""Writes manifests: lists a directory's files with size and sha256, and puts the manifest there last.

Belongs here: what makes a directory complete. Never: reading manifests (`manifest.py`), moving weights (`tiers`).
"""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING

from actors.errors import ConfigError
from runtime.catalog.manifest import FILE_NAME, Manifest, parse_manifest
from runtime.tiers.verify import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_MOST_FILES = 10_000


def describe(directory: Path, only: Sequence[str] | None = None) -> list[dict[str, object]]:
    """List the files of a model directory as manifest rows: path, size in bytes, sha256.

    Hidden files and the manifest itself are left out; `only` restricts the list to these relative paths, and one
    that is not there raises `ConfigError`. Symbolic links to files are followed, links to directories are not.
    """
    found = sorted(_walk(directory, ""))
    if only is not None:
        for missing in sorted(set(only) - set(found)):
            raise ConfigError(f"{FILE_NAME}: files: {missing!r} is not in the directory")
        found = [path for path in found if path in only]
    if len(found) > _MOST_FILES:
        raise ConfigError(f"{FILE_NAME}: files: more than {_MOST_FILES}; name the ones that matter")
    return [_row(directory, path) for path in found]


def write_manifest(directory: Path, settings: Mapping[str, object], only: Sequence[str] | None = None) -> Manifest:
    """Write `foreload.yaml` for the files that lie in `directory` and return it as it reads back.

    `settings` is the manifest's tree without `files`. The manifest appears atomically and last, so it also marks the
    directory as complete. Raises `ConfigError` with every fault; then nothing is written.
    """
    text = spell({**settings, "files": describe(directory, only)})
    manifest = parse_manifest(text)
    temporary = directory / f".{FILE_NAME}.{secrets.token_hex(8)}"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / FILE_NAME)
    finally:
        temporary.unlink(missing_ok=True)
    return manifest


def spell(tree: Mapping[str, object]) -> str:
    """Spell a tree as YAML: one key per line, one list item per line, JSON (which YAML 1.2 contains) within."""
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, list | tuple) and value:
            lines += [f"{key}:", *(f"  - {_json(item)}" for item in value)]
        else:
            lines.append(f"{key}: {_json(value)}")
    return "\n".join(lines) + "\n"


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FILE_NAME}: a setting cannot be written: {error}") from None


def _walk(directory: Path, prefix: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if entry.name.startswith(".") or path == FILE_NAME:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(directory / entry.name, f"{path}/")
            elif entry.is_file():
                yield path


def _row(directory: Path, path: str) -> dict[str, object]:
    size, digest = sha256_of(directory / path)
    return {"path": path, "size": size, "sha256": digest}
