"""A GPU: weights go up in chunks beside whatever is computing, from page-locked memory, in the order of first use.

Belongs here: the way of one model's bytes to the device. Never: modules, files, decisions. `empty_cache` only in
`relax`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.worker.extents import plan
from runtime.worker.landing import Landing
from runtime.worker.lanes import CudaLanes, Lanes
from runtime.worker.pinned import CHUNK, PinnedArena, Staged
from runtime.workers.device_loop import report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runtime.worker.landing import Mark


class Piece(NamedTuple):
    """`length` bytes of one tensor from `source` on, at `target` in the chunk."""

    tensor: int
    source: int
    target: int
    length: int


class Chunk(NamedTuple):
    """One copy: `length` bytes to `start` of the model's memory, gaps between tensors included."""

    start: int
    length: int
    pieces: list[Piece]


def chunks(sizes: Sequence[int], offsets: Sequence[int], limit: int = CHUNK) -> Iterator[Chunk]:
    """Cut tensors at their offsets into copies of at most `limit` bytes, in order."""
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


class Upload(NamedTuple):
    """Tensors on the device, and the copies that bring their values; None once those are complete."""

    tensors: list[torch.Tensor]
    landing: Landing | None


class AcceleratorDevice:
    """One device with memory of its own. Uploads are serialised: one load per direction is fastest for everybody."""

    def __init__(self, lanes: Lanes, pinned: int, *, unit: int | None = None) -> None:
        """Reserve `pinned` bytes of page-locked memory, besides two chunks. Raises `RuntimeError` for too many."""
        self._lanes = lanes
        self._staging = [lanes.page_locked(CHUNK) for _ in range(2)]
        memory = lanes.page_locked(pinned)
        self._arena = PinnedArena(memory) if unit is None else PinnedArena(memory, unit)
        self._lock = threading.Lock()
        self._forgotten: deque[str] = deque()

    def __repr__(self) -> str:
        return f"<AcceleratorDevice {self._lanes!r} {self._arena!r}>"

    def upload(self, key: str, tensors: Sequence[torch.Tensor], order: Sequence[int] = ()) -> Upload:
        """Copies on the device, in one allocation; from page-locked memory they are still under way when this returns.

        `key` names what never changes between two calls (a fingerprint); `order` is that of first use, by position,
        where it is known. Raises `torch.OutOfMemoryError`, with nothing kept.
        """
        order = tuple(order) or tuple(range(len(tensors)))
        flats = [tensors[at].detach().contiguous().view(-1).view(torch.uint8) for at in order]
        with self._lock:
            self._drop_forgotten()
            staged = self._arena.hold(key, flats, order)
            if staged is None:
                memory, offsets = self._through_staging(flats)
                landing = None
            else:
                order = staged.order
                memory, offsets, landing = self._from_arena(staged)
        places = dict(zip(order, offsets, strict=True))
        copies = [
            memory[places[at] : places[at] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for at, tensor in enumerate(tensors)
        ]
        if landing is None:
            return Upload(copies, None)
        return Upload(copies, landing.reordered(order))

    def forget(self, key: str) -> None:
        """Free what is page-locked for a key whose weights left the host; never waits for an upload under way."""
        self._forgotten.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_forgotten()
            finally:
                self._lock.release()

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            self._arena.let_go(self._forgotten.popleft())

    def _from_arena(self, staged: Staged) -> tuple[torch.Tensor, list[int], Landing]:
        memory = self._lanes.memory(staged.size)
        marks: list[Mark] = []
        try:
            for run in staged.runs:
                self._lanes.copy(memory[run.target : run.target + run.length], self._arena.source(run))
                marks.append(self._lanes.mark())
        except BaseException:
            if marks:  # the memory must not be freed under a copy that still runs
                marks[-1].synchronize()
            raise
        landing = Landing(marks, staged.last_run)
        staged.landings.append(landing)
        return memory, staged.offsets, landing

    def _through_staging(self, flats: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Gather tensors into one chunk while the other is on its way; complete when this returns."""
        offsets, total = plan([flat.numel() for flat in flats])
        memory = self._lanes.memory(total)
        marks: list[Mark | None] = [None, None]
        try:
            for turn, chunk in enumerate(chunks([flat.numel() for flat in flats], offsets)):
                staging = self._staging[turn % 2]
                if (mark := marks[turn % 2]) is not None:
                    mark.synchronize()
                for piece in chunk.pieces:
                    source = flats[piece.tensor][piece.source : piece.source + piece.length]
                    staging[piece.target : piece.target + piece.length].copy_(source)
                self._lanes.copy(memory[chunk.start : chunk.start + chunk.length], staging[: chunk.length])
                marks[turn % 2] = self._lanes.mark()
        finally:  # also when a copy raises: the memory must not be freed under one that still runs
            for mark in marks:
                if mark is not None:
                    mark.synchronize()
        return memory, offsets


class CudaDevice(AcceleratorDevice):
    """One GPU."""

    def __init__(self, device: torch.device, pinned: int = 0) -> None:
        """Raises `RuntimeError` where there is no such device; memory that cannot be locked is done without."""
        lanes = CudaLanes(device)
        try:
            super().__init__(lanes, pinned)
        except RuntimeError as error:
            if not pinned:
                raise
            report("page_locking_refused", error, device=str(device), bytes=pinned)
            super().__init__(lanes, 0)
        self._device = device

    def allocated(self) -> int:
        """Bytes of live tensors on the device, by the allocator's own count."""
        return torch.cuda.memory_allocated(self._device)

    def relax(self) -> None:
        """Give cached blocks back to the driver. Synchronises and makes the next load pay, so only when idle."""
        torch.cuda.empty_cache()
