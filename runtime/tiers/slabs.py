"""The slabs of the disk tier: one per fingerprint, beside the files that they were laid from.

Belongs here: names, claims, publishing, and setting damaged ones aside. Never: the format, or when one is laid.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from actors.errors import CorruptWeights, DiskFull, FetchFailed
from runtime.tiers.index import opened
from runtime.tiers.lay import laying, plan
from runtime.tiers.slab import read_weights, slab_at
from runtime.tiers.verify import open_regular

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from runtime.tiers.blobs import Blobs
    from runtime.tiers.recipe import Recipe
    from runtime.tiers.staging import Staging
    from runtime.tiers.variant import Variant

MODE = 0o444


class Slabs:
    """Slabs among the blobs; they count in the same quota and leave by the same rule."""

    def __init__(self, blobs: Blobs, staging: Staging) -> None:
        self._blobs = blobs
        self._staging = staging

    def path(self, fingerprint: str) -> Path:
        """Where the slab of that fingerprint is, or would be."""
        return self._blobs.path(fingerprint).with_suffix(".slab")

    def take(self, fingerprint: str) -> Path | None:
        """Hold the slab if it is there and whole; one whose header is damaged is set aside."""
        path = self.path(fingerprint)
        try:
            with opened(path) as descriptor:
                slab = slab_at(descriptor)
        except FetchFailed:
            return None
        except CorruptWeights:
            self._staging.quarantine(path)
            return None
        if slab is None or slab.header.fingerprint != fingerprint:
            self._staging.quarantine(path)
            return None
        return path if self._blobs.take(path, slab.size) else None

    def laying(
        self, fingerprint: str, source: Path, sha256: str, recipe: Recipe, variant: Variant, *, spare: bool = False
    ) -> Generator[None, None, Path]:
        """Lay, publish and hold a slab; whoever else lays the same one waits. Yields between steps.

        With `spare` nothing has to leave for it: it raises `DiskFull` instead. Raises besides what `plan` and `laying`
        of `lay.py` do.
        """
        path = self.path(fingerprint)
        with self._staging.claim(path.name) as claim:
            while not claim.try_lock():
                yield
            known = self.take(fingerprint)
            if known is not None:
                return known
            layout = plan(read_weights(source), recipe, variant, fingerprint=fingerprint, source=sha256)
            if spare:
                self._must_fit(layout.size)
            with self._blobs.room(layout.size), claim.temporary() as temporary:
                reading = open_regular(source)
                try:
                    writing = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
                    try:
                        yield from laying(layout, reading, writing)
                        os.fchmod(writing, MODE)
                        os.fsync(writing)
                    finally:
                        os.close(writing)
                finally:
                    os.close(reading)
                self._blobs.publish(temporary, path)
            self._blobs.must_take(path, layout.size)
            return path

    def _must_fit(self, size: int) -> None:
        shown = self._blobs.snapshot()
        if shown.used + size > shown.quota:
            raise DiskFull("the disk tier has no room to spare for a slab")

    def __repr__(self) -> str:
        return f"<Slabs in {self._blobs!r}>"
