"""What last happened to each model on a device, for the repository index and for people. A subscriber to events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors import events as e
from actors.residency.model import Tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from actors.residency.model import ModelKey
    from runtime.footprints import Footprints


class History:
    """Bounded by the catalogue: `forget` drops a model that is served no more.

    `seconds` takes what loads took, by fingerprint, for the catalogue's next look; `footprints` what they measured.
    """

    def __init__(self, seconds: dict[str, float], footprints: Footprints | None = None) -> None:
        self._last: dict[ModelKey, str] = {}
        self._fingerprints: dict[str, str] = {}
        self._seconds = seconds
        self._footprints = footprints

    def wants(self) -> dict[type[Any], Callable[[Any], None]]:
        """Subscribe with this."""
        return {
            e.LoadStarted: self._started,
            e.LoadFinished: self._loaded,
            e.LoadFailed: self._failed,
            e.LoadCancelled: self._cancelled,
            e.Evicted: self._evicted,
        }

    def reason(self, key: ModelKey) -> str | None:
        """Why it is not resident: empty if it is, or was not yet; None if it was never touched."""
        return self._last.get(key)

    def forget(self, key: ModelKey) -> None:
        """It is served no more."""
        self._last.pop(key, None)

    def _started(self, event: e.LoadStarted) -> None:
        self._fingerprints[event.load] = event.fingerprint

    def _loaded(self, event: e.LoadFinished) -> None:
        fingerprint = self._fingerprints.pop(event.load, None)
        if fingerprint is not None and self._footprints is not None:
            self._footprints.note(fingerprint, event.device, event.tier, event.resident)
        if event.tier is Tier.DEVICE:
            self._last[event.model] = ""
            if fingerprint is not None:
                self._seconds[fingerprint] = event.seconds

    def _failed(self, event: e.LoadFailed) -> None:
        self._fingerprints.pop(event.load, None)
        if event.tier is Tier.DEVICE:
            self._last[event.model] = f"{event.code}: {event.cause}"

    def _cancelled(self, event: e.LoadCancelled) -> None:
        self._fingerprints.pop(event.load, None)

    def _evicted(self, event: e.Evicted) -> None:
        if event.tier is Tier.DEVICE:
            self._last[event.model] = "unloaded" if event.reason == "unload" else f"evicted: {event.reason}"

    def __repr__(self) -> str:
        return f"<History of {len(self._last)} models>"
