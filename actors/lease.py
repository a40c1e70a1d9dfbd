"""The right to use a resident, as an async context manager whose ticket the client chooses.

A hit is a synchronous call on the owning actor. Everything else is one `ask`. Leaving, at any point and by
any way, sends `Release(ticket)`: it is idempotent and also means "I left the queue".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.messages import Acquire, Grant, Release
from actors.tier_cache import TierCache

if TYPE_CHECKING:
    from types import TracebackType

    from actors.actor import Ref
    from actors.messages import Command


class Lease:
    """Holds `ask.ticket` of one cache. Raises what `Acquire` may be answered with."""

    __slots__ = ("_ask", "_cache")

    def __init__(self, cache: Ref[Command], ask: Acquire) -> None:
        self._cache = cache
        self._ask = ask

    async def __aenter__(self) -> Grant:
        ask = self._ask
        owner = self._cache.owner
        if isinstance(owner, TierCache):
            result = owner.lease_now(ask.model, ask.ticket, ask.request)
            if result is not None:
                return Grant(result, owner.tier)
        try:
            return await self._cache.ask(ask)
        except BaseException:
            self._cache.tell(Release(ask.ticket))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give it back; harmless to repeat."""
        owner = self._cache.owner
        if not (isinstance(owner, TierCache) and owner.release_now(self._ask.ticket)):
            self._cache.tell(Release(self._ask.ticket))
