"""What one fingerprint keeps on the host between residencies: its mapping, its skeleton, its bound tensors.

Belongs here: bringing weights and module together and apart. Never: keys, calls, when to do it.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runtime.tiers.slab import read_weights
from runtime.worker.engine import Engine
from runtime.worker.landing import FirstUse, Gates
from runtime.worker.mapping import Mapping
from runtime.worker.memory import surviving
from runtime.worker.recipe import recipe_of
from runtime.worker.shelf import Spare
from runtime.worker.skeleton import Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import nn

    from runtime.worker.cuda import Upload
    from runtime.worker.engines.port import Runs
    from runtime.worker.skeleton import Bound
    from runtime.worker.skeleton_store import Draft
    from runtime.workers.port import LoadSpec


class Cancelled(Exception):  # a fact, named like the rest of the tree
    """Nobody wants the load any more; everything it had done is undone."""


class Uploads(Protocol):
    """A device with memory of its own; see `cuda.AcceleratorDevice`."""

    def upload(self, key: str, tensors: Sequence[torch.Tensor], order: Sequence[int]) -> Upload:
        """Copies on the device, in one allocation, perhaps still on their way."""
        ...


class Steps:
    """The phases of one load with their seconds; between them it may be cancelled."""

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self.taken: list[tuple[str, float]] = []

    def check(self) -> None:
        """Raise `Cancelled` if nobody waits any more."""
        if self._cancelled():
            raise Cancelled

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one phase."""
        self.check()
        began = time.perf_counter()
        yield
        self.taken.append((name, time.perf_counter() - began))


class Mount:
    """One fingerprint's weights and module. Any number of keys may use it; `users` counts them."""

    def __init__(
        self,
        spec: LoadSpec,
        factory: Callable[[], nn.Module],
        steps: Steps,
        device: Uploads | None,
        spare: Spare | None = None,
    ) -> None:
        """Map, build (unless there is a spare) and bind.

        Raises `ForeloadError`, `Cancelled`, or what the factory raises, and leaves nothing.
        """
        self.fingerprint = spec.fingerprint
        self.users = 0
        self.warm = spare is not None and spare.warm
        self.stale = False
        self.doomed = False
        self.failed = False
        self.told = False
        """Whether `recipe` was asked for since this process has the skeleton."""
        self.spared = spare is not None
        self._device = device
        self._writes = spare is not None and spare.writes
        self._empty_pages = False
        self.draft: Draft | None = None
        with steps("map"):
            path = Path(spec.weights)
            self._mapping = Mapping(path, read_weights(path))
            self._mapping.populate()
        if spare is None:
            with steps("skeleton"):
                self._skeleton = Skeleton(factory)
        else:
            self._skeleton = spare.skeleton
        with steps("bind"):
            names, extras = self._mapping.names, self._mapping.extras
            self._host = self._skeleton.bind(names, self._mapping.view, cast=spec.cast, extras=extras)
        self._active: Bound | None = None
        self._gates: Gates | None = None
        self.engines: dict[str, tuple[LoadSpec, Runs]] = {} if spare is None else spare.engines
        self.calm = threading.Lock()
        """Held while weights may not be taken away from the module."""

    def __repr__(self) -> str:
        return f"<Mount {self.fingerprint[:8]} {self._mapping.size} B {self.users} users>"

    @property
    def module(self) -> nn.Module:
        """The module, callable while activated."""
        return self._skeleton.module

    def engine(self, spec: LoadSpec, device: torch.device) -> Engine:
        """What runs the module under one key."""
        return Engine(self.module, spec.inputs, spec.outputs, device)

    @property
    def skeleton(self) -> Skeleton:
        """The module's tensors by name."""
        return self._skeleton

    @property
    def writes(self) -> bool:
        """Whether a forward wrote to the weights."""
        return self._writes

    @property
    def resident(self) -> int:
        """Bytes of the tensors that the module runs on."""
        return (self._active or self._host).resident

    def spare(self) -> Spare | None:
        """What a later load can start from once this mount is gone; None while it is in use or after it was spoilt."""
        if self.users or self.stale or self._active is not None:
            return None
        return Spare(self._skeleton, self.engines, self.warm, self._writes)

    def activate(self) -> None:
        """Make the module callable: a pointer swap on a CPU, an upload on a GPU. Nothing to do if it is already."""
        if self._active is not None:
            return
        self._refill()
        bound, landing = self._host, None
        if self._device is not None:
            tensors, landing = self._device.upload(self.fingerprint, bound.tensors, self._skeleton.order)
            bound = self._skeleton.stored(tensors, landing)
        self._skeleton.activate(bound)
        self._active = bound
        if landing is not None:
            self._gates = Gates(self.module, bound.tensors, landing, self._skeleton.early)

    def recipe(self) -> bytes:
        """How to lay a slab of these weights, after a first forward; empty if they lie in one already.

        Also for a module that writes what it computed when it was built: its buffers are not what they were.
        """
        return b"" if self._mapping.slab or self.stale else recipe_of(self._skeleton).spelled()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a first forward: learn in which order it reaches for weights, where uploads or a slab gain by it."""
        if self._active is None or (self._device is None and self._mapping.slab):
            yield
            return
        self.settle()
        seen = FirstUse()
        gates = Gates(self.module, self._active.tensors, seen)
        try:
            yield
        finally:
            gates.lift()
        self._skeleton.used_in(seen.order)

    def settle(self) -> None:
        """Wait for weights that are still on their way."""
        gates, self._gates = self._gates, None
        if gates is not None:
            gates.lift()

    def deactivate(self) -> int:
        """Take the weights away from the module again; bytes that something else still holds."""
        bound, self._active = self._active, None
        if bound is None:
            return 0
        self.settle()
        if bound is not self._host:  # on a CPU they run on the mapping, which stays
            self.untwin()
        self._skeleton.evict()
        if not self.warm:  # never warmed up, so never looked at
            self._writes = self._mapping.written() > 0
        self.restore()
        leaked = bound.leaked()
        if bound is self._host:
            return leaked
        resident, references = bound.resident, bound.references()
        del bound
        # On a device all tensors share one allocation: whoever keeps one of them keeps everything.
        return resident if leaked or surviving(references) else 0

    def untwin(self) -> None:
        """Take compiled twins away, before the memory goes that they run on."""
        for _, runs in self.engines.values():
            if isinstance(runs, Engine):
                runs.twin = None

    def part(self) -> int:
        """Nothing is left to close after `deactivate`; a `Package` has something."""
        return 0

    def warmed(self) -> None:
        """After the first forward: see whether the module writes its weights, and undo what it wrote."""
        self.warm = True
        self.settle()
        self._writes = self._mapping.written() > 0
        self.restore()
        if self._active is not self._host and self._active is not None and self._active.restore():
            self._active = None  # written on the device: upload again
        self._refill()
        self.activate()

    def _refill(self) -> None:
        if self._empty_pages:
            self._mapping.populate()
            self._empty_pages = False

    def restore(self) -> None:
        """Make the host's tensors what they were when they were bound; `stale` if that takes a new build."""
        moved = [self._host.tensors[at] for at in self._host.restore()]
        if moved or self._writes:
            self._mapping.reset()
            self._empty_pages = True
        self.stale |= not all(self._mapping.holds(tensor) for tensor in moved)
