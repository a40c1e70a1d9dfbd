"""Measured bytes: what a model holds, what came back, and what stayed away.

Belongs here: readings. Never: estimates, decisions, anything that frees a model's weights.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Sequence

_STATUS = Path("/proc/self/status")
_KIB = 1024


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc: all arenas together."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_in_use() -> int:
    """Bytes that are allocated now and not freed, mapped blocks included; what libraries without a meter hold.

    Where the C library does not tell (before glibc 2.33, musl), what is not backed by files, which lags behind.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return _anonymous()
    libc.mallinfo2.restype = _Heap
    heap = libc.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def _anonymous() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * _KIB
    return 0


class Meter:
    """Measures what opening a model took, for libraries that do not say. Rough while other work goes on beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        """Take the reading that `grown` counts from."""
        self._before = self._read()

    def grown(self) -> int:
        """Bytes more than at the start, 0 at the least."""
        return max(0, self._read() - self._before)

    def _read(self) -> int:
        if self._device.type == "cpu":
            return heap_in_use()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors cover, each object counted once, so tied weights count once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def surviving(references: Sequence[tuple[weakref.ref[torch.Tensor], int]]) -> int:
    """Bytes of tensors, given as weak references with their sizes, that are still alive after cycles are collected."""
    if any(reference() is not None for reference, _ in references):
        gc.collect()
    return sum(size for reference, size in references if reference() is not None)


def _holders(tensor: torch.Tensor) -> int:
    """How many references the storage of a tensor has, views made in C++ included."""
    # The only reading of this that torch has; it is what its own CUDA-graph pools rely on.
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
    return 0 if count is None else count(tensor.untyped_storage()._cdata)  # noqa: SLF001


class Watch:
    """Remembers how often the storages of some tensors are held, and finds those that something else holds later."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = [_holders(tensor) for tensor in tensors]

    def leaked(self) -> int:
        """Bytes that are held more often than at the start.

        Garbage is collected only if there are any: reference cycles are the usual holder, and a full
        collection is far too dear for each eviction.
        """
        if not self._held():
            return 0
        gc.collect()
        return resident_bytes(self._held())

    def _held(self) -> list[torch.Tensor]:
        pairs = zip(self._tensors, self._before, strict=True)
        return [tensor for tensor, before in pairs if _holders(tensor) > before]
