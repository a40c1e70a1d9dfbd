"""`/api/v1/state` in a few lines for people. Reads what it knows and skips the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def lines(state: Any) -> Iterator[str]:
    """Give one line per device and tier: bytes used of capacity, and who is there."""
    yield "residency now:"
    devices = state.get("devices", []) if isinstance(state, Mapping) else []
    for device in devices if isinstance(devices, Sequence) else ():
        if isinstance(device, Mapping):
            yield f"  {device.get('id', '?')}"
