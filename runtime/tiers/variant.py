"""What of a weights file a model takes, and in which precision: filters of names, and casts without torch.

Belongs here: choosing and converting, as pure functions of bytes. Never: files.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from actors.errors import LoadFailed
from runtime.tiers.index import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from runtime.tiers.index import Entry, WeightIndex

Array: TypeAlias = "NDArray[Any]"

DTYPES: Final[Mapping[str, str]] = MappingProxyType({"fp32": "F32", "fp16": "F16", "bf16": "BF16"})
"""The manifest's words for precisions, and safetensors'."""

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_STORED: Final[Mapping[str, str]] = MappingProxyType({"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"})
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve a weights file: name patterns (none includes all), and a precision for what is floating."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dtype: str = ""

    @property
    def plain(self) -> bool:
        """Whether the file serves as it is."""
        return not (self.include or self.exclude or self.dtype)

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The names that stay, in their order. Raises `LoadFailed` when a pattern means nothing."""
        known = list(names)
        for key, patterns in (("include", self.include), ("exclude", self.exclude)):
            idle = [each for each in patterns if not any(fnmatchcase(name, each) for name in known)]
            if idle:
                shown = ", ".join(ascii(each) for each in idle[:_SHOWN])
                raise LoadFailed(f"tensors.{key}: no tensor of the weights is called {shown}")
        kept = [
            name for name in known if (not self.include or _any(name, self.include)) and not _any(name, self.exclude)
        ]
        if not kept:
            raise LoadFailed("tensors: nothing is left of the weights")
        return kept

    def dtype_of(self, stored: str) -> str:
        """The dtype that a stored one becomes."""
        return DTYPES[self.dtype] if self.dtype and stored in _FLOATS else stored

    def size_of(self, entry: Entry) -> int:
        """Bytes that a tensor takes afterwards."""
        return entry.size // ITEM_BYTES[entry.dtype] * ITEM_BYTES[self.dtype_of(entry.dtype)]

    def total(self, index: WeightIndex) -> int:
        """Bytes of all that stays, tied tensors counted once. Raises `LoadFailed` as `chosen` does."""
        kept = {index.aliases.get(name, name): index.entries[name] for name in self.chosen(index.entries)}
        return sum(self.size_of(entry) for entry in kept.values())


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def cast(raw: bytes | memoryview, source: str, target: str) -> memoryview:
    """Convert floating values from one dtype to another, to the bit as torch does: by way of fp32, nearest even."""
    if source == target:
        return memoryview(raw)
    values = np.frombuffer(raw, _STORED[source])
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinity, as in torch
        single = _widened(values) if source == "BF16" else values.astype(np.float32)
        result: Array = {"F32": _same, "F16": _half, "BF16": _narrowed, "F64": _double}[target](single)
    return np.ascontiguousarray(result).view(np.uint8).data


def _same(values: Array) -> Array:
    return values


def _half(values: Array) -> Array:
    return values.astype(np.float16)


def _double(values: Array) -> Array:
    return values.astype(np.float64)


def _widened(values: Array) -> Array:
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrowed(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
