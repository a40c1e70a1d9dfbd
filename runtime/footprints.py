"""What models were measured to take, by fingerprint and place, kept over restarts: planning uses it before any guess.

Belongs here: the table and its file. Never: measuring (the tiers do), planning. `note` is called on the loop and only
writes a dict; `save` blocks and is called off it.
"""

from __future__ import annotations

import json
import os
import secrets
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from actors.residency.model import Tier

if TYPE_CHECKING:
    from pathlib import Path

FORMAT: Final = 1
LIMIT: Final = 65_536
_LARGEST: Final = 1 << 60
_FILE_CAP: Final = 64 << 20


class Footprints:
    """Measured bytes. At most `limit` fingerprints; those that were noted longest ago leave."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        """Read what is there; a file that cannot be read, or holds something else, counts as none."""
        self._path = path
        self._limit = limit
        self._lock = Lock()
        self._rows = dict(list(_read(path).items())[-limit:])
        self._saved = True

    def __repr__(self) -> str:
        return f"<Footprints of {len(self._rows)} fingerprints>"

    def note(self, fingerprint: str, device: str, tier: Tier, size: int) -> None:
        """A load of `size` bytes was measured on a tier of a device (`cpu:0`, `cuda:1`)."""
        place = device.partition(":")[0] if tier is Tier.DEVICE else tier.value
        with self._lock:
            row = self._rows.pop(fingerprint, {})
            if row.get(place) != size:
                self._saved = False
            self._rows[fingerprint] = {**row, place: size}
            while len(self._rows) > self._limit:
                del self._rows[next(iter(self._rows))]

    def device(self, fingerprint: str) -> int | None:
        """Bytes on a device, the largest where kinds of devices differ; None if it was never there."""
        row = self._rows.get(fingerprint, {})
        return max((size for place, size in row.items() if place != Tier.HOST.value), default=None)

    def host(self, fingerprint: str) -> int | None:
        """Bytes in host memory; None if it was never there."""
        return self._rows.get(fingerprint, {}).get(Tier.HOST.value)

    def save(self) -> bool:
        """Write the table if it changed; whether it did. A disk that fails is tried again with the next call."""
        with self._lock:
            if self._saved:
                return False
            text = json.dumps({"format": FORMAT, "rows": self._rows})
            self._saved = True
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError:
            with self._lock:
                self._saved = False
            temporary.unlink(missing_ok=True)
            return False
        return True


def _read(path: Path) -> dict[str, dict[str, int]]:
    try:
        if path.stat().st_size > _FILE_CAP:
            return {}
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            return {}
        rows = {str(name): dict(row) for name, row in tree["rows"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        name: {str(place): size for place, size in row.items() if type(size) is int and 0 <= size <= _LARGEST}
        for name, row in rows.items()
    }
