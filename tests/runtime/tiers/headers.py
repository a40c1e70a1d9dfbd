"""Hand-made safetensors files for tests: any header text, any length field, any data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def blob(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Spell a file. `header` is dumped as JSON unless it is bytes; `length` overrides the length field."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    """One header entry; any field may be nonsense."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def valid(extra: str = "") -> bytes:
    """A small consistent file of three tensors; `extra` is put into the metadata."""
    header = {
        "__metadata__": {"format": "pt", "extra": extra},
        "a": tensor("F32", [2, 2], [0, 16]),
        "empty": tensor("F16", [0, 3], [16, 16]),
        "b": tensor("I8", [3], [16, 19]),
    }
    return blob(header, bytes(range(19)))
