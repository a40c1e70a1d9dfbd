"""Lays slabs beside serving: one after another, at most half of the time, and never at anybody's cost.

Belongs here: the queue and its pace. Never: how a slab is laid (`slabs.py`), or any blocking call on the loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import anyio

from actors.errors import DiskFull, ForeloadError
from runtime.tiers.recipe import recipe_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.ports import Offload
    from actors.residency.model import Model
    from runtime.catalog.record import ModelRecord
    from runtime.tiers.disk import DiskStore

_log = logging.getLogger("foreload.tiers")

WAITING: Final = 256
"""Recipes that wait; further ones are forgotten, and come again when their model is loaded by a new worker."""


class SlabLaying:
    """`note` takes what a worker learned at a first load, `run` works it off. `laid` and `failed` count."""

    def __init__(self, disk: DiskStore, find: Callable[[Model], ModelRecord], offload: Offload) -> None:
        self._disk = disk
        self._find = find
        self._offload = offload
        self._waiting: dict[str, tuple[Model, bytes]] = {}
        self._more = anyio.Event()
        self.laid = 0
        self.failed = 0

    def note(self, model: Model, recipe: bytes) -> None:
        """Remember to lay a slab. Never waits."""
        if len(self._waiting) < WAITING:
            self._waiting.setdefault(model.fingerprint, (model, recipe))
            self._more.set()

    async def run(self) -> None:
        """Lay what was noted, for ever."""
        while True:
            await self._more.wait()
            self._more = anyio.Event()
            while self._waiting:
                fingerprint = next(iter(self._waiting))
                await self._try(*self._waiting[fingerprint])
                del self._waiting[fingerprint]

    async def _try(self, model: Model, recipe: bytes) -> None:
        try:
            await self._lay(model, recipe)
        except DiskFull as error:  # the file that came serves as well
            self.failed += 1
            _log.info("no slab of %s: %s", model.key, error.message)
        except ForeloadError as error:
            self.failed += 1
            _log.warning("no slab of %s: %s", model.key, error.message)

    async def _lay(self, model: Model, raw: bytes) -> None:
        record = self._find(model)
        # A file that is served where it lies is not to be copied, and one that changed meanwhile brings a new recipe.
        if record.manifest.in_place or record.fingerprint != model.fingerprint:
            return
        admission = self._disk.begin_slab(record, recipe_from(raw))
        try:
            done = False
            while not done:
                began = anyio.current_time()
                done = await self._offload(admission.step)
                await anyio.sleep(anyio.current_time() - began)
        finally:
            with anyio.CancelScope(shield=True):
                await self._offload(admission.undo)
        self.laid += 1

    def __repr__(self) -> str:
        return f"<SlabLaying {self.laid} laid {self.failed} failed>"
