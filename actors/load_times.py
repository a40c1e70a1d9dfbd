"""How long loads take, learned from the loads themselves: mean, variance and a high quantile, by model and source.

A subscriber to events. Until a model was loaded from somewhere, its declared guess stands.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from actors import events as e
from actors.residency.model import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.residency.model import Model, ModelKey

WEIGHT: Final = 0.3
"""Of the newest load in the moving mean: a few loads are enough to follow a disk that became slow."""

Z: Final = 1.64
FLOOR: Final = 0.05
"""Least relative standard deviation: nobody knows a load time exactly."""

GUESSED: Final = 0.5
"""Relative standard deviation of a load that was never seen."""

HOST_SHARE: Final = 0.2
"""Guess of how much of a load from disk is left when the bytes are on the host already."""


class LoadTimes:
    """Seconds on a device's channel, by model and by whether the bytes came from the host or from below it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[ModelKey, bool], tuple[float, float]] = {}
        self._news: set[ModelKey] = set()

    def wants(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """Subscribe with this."""
        return {e.LoadFinished: self._finished}

    def _finished(self, event: e.LoadFinished) -> None:
        if event.tier is not Tier.DEVICE:
            return
        at = event.model, event.source is Tier.HOST
        mean, variance = self._seen.get(at, (event.seconds, (FLOOR * event.seconds) ** 2))
        self._news.add(event.model)
        off = event.seconds - mean
        # West (1979), "Updating mean and variance estimates": the exponentially weighted form.
        self._seen[at] = mean + WEIGHT * off, (1 - WEIGHT) * (variance + WEIGHT * off * off)

    def news(self) -> frozenset[ModelKey]:
        """Models whose loads were seen since this was last asked."""
        found = frozenset(self._news)
        self._news.clear()
        return found

    def mean(self, model: Model, *, on_host: bool) -> float:
        """Seconds that a load is expected to take."""
        return self._of(model, on_host)[0]

    def variance(self, model: Model, *, on_host: bool) -> float:
        """Its variance, in square seconds."""
        return self._of(model, on_host)[1]

    def high(self, model: Model, *, on_host: bool) -> float:
        """The 95 % quantile, in seconds, as if load times were normal."""
        mean, variance = self._of(model, on_host)
        return mean + Z * math.sqrt(variance)

    def forget(self, key: ModelKey) -> None:
        """The model is served no more."""
        self._news.discard(key)
        for on_host in (True, False):
            self._seen.pop((key, on_host), None)

    def _of(self, model: Model, on_host: bool) -> tuple[float, float]:  # noqa: FBT001 - half of the key
        seen = self._seen.get((model.key, on_host))
        if seen is not None:
            mean, variance = seen
            return mean, max(variance, (FLOOR * mean) ** 2)
        guess = max(model.load_seconds, 1e-3) * (HOST_SHARE if on_host else 1.0)
        return guess, (GUESSED * guess) ** 2

    def __repr__(self) -> str:
        return f"<LoadTimes of {len(self._seen)} ways>"
