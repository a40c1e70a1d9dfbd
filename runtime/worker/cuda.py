"""A CUDA device: weights go up through one pinned staging buffer, in chunks, beside whatever is computing.

Belongs here: device memory of weights. Never: modules, files, decisions. `empty_cache` only in `relax`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK = 16 << 20
"""Bytes per copy: PCIe runs at full speed from about 8 MiB on, and two chunks are all the pinned memory there is."""

_ALIGN = 256
"""What vectorised kernels and the allocator itself like."""


def plan(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets of tensors laid one after another, and the bytes of the whole."""
    offsets: list[int] = []
    at = 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return offsets, at


class Piece(NamedTuple):
    """`length` bytes of one tensor from `source` on, at `target` in the chunk."""

    tensor: int
    source: int
    target: int
    length: int


class Chunk(NamedTuple):
    """One copy: `length` bytes to `start` of the arena, gaps between tensors included."""

    start: int
    length: int
    pieces: list[Piece]


def chunks(sizes: Sequence[int], offsets: Sequence[int], limit: int = CHUNK) -> Iterator[Chunk]:
    """Cut tensors at their arena offsets into copies of at most `limit` bytes, in order."""
    start, length, pieces = 0, 0, list[Piece]()
    for tensor, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        source = 0
        while source < size:
            if pieces and offset + source - start >= limit:
                yield Chunk(start, length, pieces)
                pieces = []
            if not pieces:
                start = offset + source
            target = offset + source - start
            part = min(limit - target, size - source)
            pieces.append(Piece(tensor, source, target, part))
            length = target + part
            source += part
    if pieces:
        yield Chunk(start, length, pieces)


class CudaDevice:
    """One GPU. Uploads are serialised: one demand load per PCIe direction is fastest for everybody."""

    def __init__(self, device: torch.device) -> None:
        """Reserve staging memory and a copy stream. Raises `RuntimeError` where there is no such device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types it no further
        self._staging = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._staging]  # type: ignore[no-untyped-call]  # as above
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CudaDevice {self._device}>"

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the device, complete when this returns. One allocation holds all of them.

        Raises `torch.OutOfMemoryError`, with nothing kept.
        """
        flats = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        offsets, total = plan([flat.numel() for flat in flats])
        with self._lock, torch.cuda.device(self._device):
            arena = torch.empty(total, dtype=torch.uint8, device=self._device)
            # The memory may have been freed by a kernel that still runs; the copies must come after it.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                self._copy(arena, flats, offsets)
            finally:  # also when a copy raises: the arena must not be freed under one that still runs
                self._stream.synchronize()
        return [
            arena[offset : offset + flat.numel()].view(tensor.dtype).view(tensor.shape)
            for tensor, flat, offset in zip(tensors, flats, offsets, strict=True)
        ]

    def _copy(self, arena: torch.Tensor, flats: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """Gather tensors into one chunk while the other is on its way."""
        for turn, chunk in enumerate(chunks([flat.numel() for flat in flats], offsets)):
            staging, copied = self._staging[turn % 2], self._copied[turn % 2]
            copied.synchronize()
            for piece in chunk.pieces:
                source = flats[piece.tensor][piece.source : piece.source + piece.length]
                staging[piece.target : piece.target + piece.length].copy_(source)
            with torch.cuda.stream(self._stream):
                target = arena[chunk.start : chunk.start + chunk.length]
                target.copy_(staging[: chunk.length], non_blocking=True)
                copied.record(self._stream)

    def allocated(self) -> int:
        """Bytes of live tensors on the device, by the allocator's own count."""
        return torch.cuda.memory_allocated(self._device)

    def relax(self) -> None:
        """Give cached blocks back to the driver. Synchronises and makes the next load pay, so only when idle."""
        torch.cuda.empty_cache()
