"""Skeletons whose weights have left the host: kept, so that the next load builds nothing.

Belongs here: what is kept and for how long. Never: weights, mounts, threads (the core's lock is held around each call).

Building is the dear part of a load and the only one that runs a model's own Python, under the GIL and beside other
models' forwards; an empty skeleton is small. Least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.worker.engines.port import Runs
    from runtime.worker.skeleton import Skeleton
    from runtime.workers.port import LoadSpec

KEPT = 64
"""Skeletons of one worker; about half a megabyte each for a few hundred tensors."""
HEAVY = 4 << 20
"""Bytes of real tensors (buffers that no file holds) above which a skeleton is no small thing to keep."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A skeleton without weights, and what its models showed while they had some.

    `warm`: a forward ran. `writes`: it wrote to its weights. `engines`: by key, with the spec each was made for.
    """

    skeleton: Skeleton
    engines: dict[str, tuple[LoadSpec, Runs]]
    warm: bool
    writes: bool


class Shelf:
    """Spares by fingerprint."""

    def __init__(self, kept: int = KEPT, heavy: int = HEAVY) -> None:
        self._kept = kept
        self._heavy = heavy
        self._spares: OrderedDict[str, Spare] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Shelf {len(self._spares)} of {self._kept}>"

    def __len__(self) -> int:
        return len(self._spares)

    def put(self, fingerprint: str, spare: Spare) -> None:
        """Keep it, unless it is heavy or holds tensors that it did not have when it was built."""
        if spare.skeleton.weight > self._heavy or spare.skeleton.grown():
            return
        self._spares[fingerprint] = spare
        self._spares.move_to_end(fingerprint)
        while len(self._spares) > self._kept:
            self._spares.popitem(last=False)

    def take(self, fingerprint: str) -> Spare | None:
        """The spare, which is the caller's from now on; None if there is none."""
        return self._spares.pop(fingerprint, None)
