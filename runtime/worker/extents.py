"""Addresses in one fixed piece of memory: who has which extents, what is free, and how fragmented that is.

Belongs here: arithmetic. Never: memory itself, tensors, who should leave. Nothing here is safe for several threads.

Best fit by address-ordered free runs that merge at once (Knuth, TAOCP vol. 1, 2.5, algorithm B with method "best
fit"). A model may be laid over several extents, because a copy engine does not mind; a tensor may not.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT: Final = 2 << 20
"""Bytes that extents are a multiple of: a huge page, and what CUDA maps at a time."""
ALIGN: Final = 256
"""Where tensors may begin: what vectorised kernels, and the GPU's own allocator, like."""


class NoRoom(Exception):  # a fact, named like the rest of the tree
    """What is free does not hold it. `free` bytes in all, `largest` in one piece."""

    def __init__(self, wanted: int, free: int, largest: int) -> None:
        super().__init__(f"{wanted} bytes wanted, {free} free, {largest} of them in one piece")
        self.wanted, self.free, self.largest = wanted, free, largest


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """`size` bytes from `start` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies, in the order given, and the extents that hold them, by address."""

    offsets: tuple[int, ...]
    extents: tuple[Extent, ...]


class Extents:
    """The books of `total` bytes; a rest that is no whole unit is left unused."""

    def __init__(self, total: int, unit: int = UNIT) -> None:
        self._unit = unit
        self.total = total // unit * unit
        self._free = [Extent(0, self.total)] if self.total else []

    def __repr__(self) -> str:
        return f"<Extents {self.free} of {self.total} B free in {len(self._free)} runs>"

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return sum(run.size for run in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free run."""
        return max((run.size for run in self._free), default=0)

    @property
    def fragmentation(self) -> float:
        """`1 - largest / free`: 0 when all that is free is one run, or nothing is."""
        free = self.free
        return 1 - self.largest / free if free else 0.0

    def lay(self, sizes: Sequence[int], before: Layout | None = None) -> Layout:
        """Take extents for tensors of so many bytes, each tensor whole in one of them. Raises `NoRoom`.

        The place that the same sizes had `before`, if all of it is free; else the smallest run that holds everything;
        else over several runs, the largest first, so that few are touched.
        """
        if before is not None and self._is_free(before.extents):
            for extent in before.extents:
                self._take(extent)
            return before
        whole = self._rounded(plan(sizes)[1])
        fitting = [run for run in self._free if run.size >= whole]
        if not whole:
            return Layout((0,) * len(sizes), ())
        if fitting:
            run = min(fitting, key=lambda run: (run.size, run.start))
            taken = Extent(run.start, whole)
            self._take(taken)
            return Layout(tuple(plan(sizes, taken.start)[0]), (taken,))
        return self._spread(sizes)

    def give(self, layout: Layout) -> None:
        """Take a layout's extents back. Raises `ValueError` for what is free already."""
        for extent in layout.extents:
            at = bisect_left(self._free, extent)
            before = self._free[at - 1] if at else None
            after = self._free[at] if at < len(self._free) else None
            if (
                (before is not None and before.end > extent.start)
                or (after is not None and extent.end > after.start)
                or extent.end > self.total
            ):
                raise ValueError(f"bytes {extent.start} to {extent.end} are free already, or never were here")
            merged = extent
            if after is not None and after.start == extent.end:
                merged = Extent(merged.start, merged.size + after.size)
                del self._free[at]
            if before is not None and before.end == extent.start:
                merged = Extent(before.start, before.size + merged.size)
                del self._free[at - 1]
            insort(self._free, merged)

    def _spread(self, sizes: Sequence[int]) -> Layout:
        offsets = [0] * len(sizes)
        extents: list[Extent] = []
        index = 0
        for run in sorted(self._free, key=lambda run: (-run.size, run.start)):
            at = run.start
            while index < len(sizes) and at + sizes[index] <= run.end:
                offsets[index] = at
                at += aligned(sizes[index])
                index += 1
            if used := self._rounded(min(at, run.end) - run.start):
                extents.append(Extent(run.start, used))
            if index == len(sizes):
                break
        if index < len(sizes):
            raise NoRoom(plan(sizes)[1], self.free, self.largest)
        extents.sort()
        for extent in extents:
            self._take(extent)
        return Layout(tuple(offsets), tuple(extents))

    def _is_free(self, extents: Sequence[Extent]) -> bool:
        return all(any(run.start <= one.start and one.end <= run.end for run in self._free) for one in extents)

    def _take(self, extent: Extent) -> None:
        at = next(i for i, run in enumerate(self._free) if run.start <= extent.start and extent.end <= run.end)
        run = self._free.pop(at)
        for rest in (Extent(run.start, extent.start - run.start), Extent(extent.end, run.end - extent.end)):
            if rest.size:
                insort(self._free, rest)

    def _rounded(self, size: int) -> int:
        return -(-size // self._unit) * self._unit


def plan(sizes: Sequence[int], start: int = 0) -> tuple[list[int], int]:
    """Aligned offsets of tensors laid one after another from `start` on, and the bytes of the whole."""
    ends = list(itertools.accumulate((aligned(size) for size in sizes), initial=start))
    return ends[:-1], ends[-1] - start


def aligned(size: int) -> int:
    """Bytes that a tensor of so many takes up before the next one."""
    return -(-size // ALIGN) * ALIGN
