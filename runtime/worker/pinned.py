"""Page-locked host memory, reserved once: weights that were up before go up again without being copied on the host.

Belongs here: who has which extents of it, and who leaves. Never: the device, streams, modules.

Locking pages costs about as much as copying them, so nothing is locked on the way of a load; a model is a list of
extents, copied into them once. Least recently used models leave first, never one that is still being copied from.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.worker.extents import UNIT, Extents, Layout, NoRoom, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from runtime.worker.landing import Landing

CHUNK = 16 << 20
"""Bytes per copy: PCIe runs at full speed from about 8 MiB on."""
PLACES = 256
"""Models that left whose addresses are remembered."""


@dataclass(frozen=True, slots=True)
class Run:
    """`length` bytes at `start` of the arena that go to `target` of the model's memory on the device."""

    start: int
    target: int
    length: int


@dataclass(slots=True)
class Staged:
    """One model in page-locked memory, and how its bytes lie on the device.

    `order` is how the tensors given were numbered by whoever gave them. `offsets` of the tensors in `size` bytes of
    device memory; `runs` to copy, in order, of at most `CHUNK` bytes; `last_run` of each tensor.
    """

    order: tuple[int, ...]
    layout: Layout
    offsets: list[int]
    size: int
    runs: list[Run]
    last_run: list[int]
    landings: list[Landing] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether a copy from here is under way."""
        self.landings = [landing for landing in self.landings if not landing.landed]
        return bool(self.landings)


class PinnedArena:
    """`memory` cut into extents. From one thread at a time."""

    def __init__(self, memory: torch.Tensor, unit: int = UNIT) -> None:
        self._memory = memory
        self._books = Extents(memory.numel(), unit)
        self._held: OrderedDict[str, Staged] = OrderedDict()
        self._places: OrderedDict[str, tuple[tuple[int, ...], Layout]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PinnedArena {len(self._held)} models {self._books!r}>"

    @property
    def books(self) -> Extents:
        """What is free, and how fragmented."""
        return self._books

    def get(self, key: str) -> Staged | None:
        """A model that is held, which counts as a use."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def hold(self, key: str, flats: Sequence[torch.Tensor], order: Sequence[int]) -> Staged | None:
        """Copy a model's tensors (as bytes, in the order they should go up) in, if room can be made for them.

        In another order they are laid anew, unless copies from where they are still run. None when it is larger than
        what idle models could free; they stay then.
        """
        held = self.get(key)
        if held is not None:
            if held.order == tuple(order) or held.busy:
                return held
            self.let_go(key)
        sizes = [flat.numel() for flat in flats]
        if not self._could_hold(sizes):
            return None
        order_then, before = self._places.get(key, ((), None))
        layout = self._laid(sizes, before if order_then == tuple(order) else None)
        if layout is None:
            return None
        for offset, flat in zip(layout.offsets, flats, strict=True):
            self._memory[offset : offset + flat.numel()].copy_(flat)
        staged = self._held[key] = _staged(layout, sizes, tuple(order))
        return staged

    def source(self, run: Run) -> torch.Tensor:
        """The bytes of one run."""
        return self._memory[run.start : run.start + run.length]

    def let_go(self, key: str) -> None:
        """Free a model's extents, after its copies are complete."""
        staged = self._held.pop(key, None)
        if staged is None:
            return
        for landing in staged.landings:
            landing.finish()
        self._books.give(staged.layout)
        self._places[key] = staged.order, staged.layout
        self._places.move_to_end(key)
        while len(self._places) > PLACES:
            self._places.popitem(last=False)

    def _could_hold(self, sizes: Sequence[int]) -> bool:
        idle = sum(
            sum(extent.size for extent in staged.layout.extents) for staged in self._held.values() if not staged.busy
        )
        return sum(sizes) <= self._books.free + idle

    def _laid(self, sizes: Sequence[int], before: Layout | None) -> Layout | None:
        while True:
            try:
                return self._books.lay(sizes, before)
            except NoRoom:
                idle = next((key for key, staged in self._held.items() if not staged.busy), None)
                if idle is None:
                    return None
                self.let_go(idle)


def _staged(layout: Layout, sizes: Sequence[int], order: tuple[int, ...]) -> Staged:
    """Extents one after another, in the order of their first tensors; cut into runs."""
    first = {
        extent: min(
            (at for at, offset in enumerate(layout.offsets) if sizes[at] and extent.start <= offset < extent.end),
            default=len(sizes),
        )
        for extent in layout.extents
    }
    runs: list[Run] = []
    offsets, last_run = [0] * len(sizes), [-1] * len(sizes)
    at = 0
    for extent in sorted(layout.extents, key=lambda one: first[one]):
        mine = [
            index for index, offset in enumerate(layout.offsets) if sizes[index] and extent.start <= offset < extent.end
        ]
        used = max(layout.offsets[index] + sizes[index] for index in mine) - extent.start
        base = len(runs)
        runs += [Run(extent.start + start, at + start, min(CHUNK, used - start)) for start in range(0, used, CHUNK)]
        for index in mine:
            inside = layout.offsets[index] - extent.start
            offsets[index] = at + inside
            last_run[index] = base + (inside + sizes[index] - 1) // CHUNK
        at += aligned(used)
    return Staged(order, layout, offsets, at, runs, last_run)
