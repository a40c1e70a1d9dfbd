"""What the forecaster hears: each request, counted on its path, and whatever may change the plan. A subscriber.

Nothing is decided here; an actor that is down misses nothing, because counts are not its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actors import events as facts
from actors.forecaster import Nudged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.actor import Ref
    from actors.forecaster import ForecastMessage
    from forecasting.counts import Counts

QUIET: Final = 1.0
"""Seconds between two nudges."""


class Ears:
    """Counts each request on its path, and nudges the actor when the plan may have changed."""

    def __init__(self, ref: Ref[ForecastMessage], counts: Counts, *, now: Callable[[], float]) -> None:
        self._ref = ref
        self._counts = counts
        self._now = now
        self._nudged = 0.0
        self._hit = counts.hit
        self._indices: dict[str, int] = {}

    def wants(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """Subscribe with this."""
        return {
            facts.RequestArrived: self._arrived,
            facts.LoadFinished: self._changed,
            facts.LoadFailed: self._changed,
            facts.CatalogChanged: self._forget_indices,
        }

    def _arrived(self, event: facts.RequestArrived) -> None:
        index = self._indices.get(event.model)
        if index is None:
            try:
                index = self._indices[event.model] = self._counts.index(event.model)
            except LookupError:
                return  # more models than can be counted: the others go on
        self._hit(index)

    def _changed(self, _event: object) -> None:
        now = self._now()
        if now - self._nudged >= QUIET:
            self._nudged = now
            self._ref.tell(Nudged())

    def _forget_indices(self, _event: object) -> None:
        # A model that leaves gives its index away; looking it up again is cheap.
        self._indices.clear()
