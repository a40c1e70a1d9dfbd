"""Keeps weights from being paged out, as far as a budget and this process' rights go, and degrades in words.

Belongs here: mlock's limits and their accounting. Never: mapping.
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from runtime.tiers.mapping import Mapping

_log = logging.getLogger("foreload.tiers")

_STATUS: Final = Path("/proc/self/status")
_CAP_IPC_LOCK: Final = 14


def permitted(status: Path = _STATUS) -> int | None:
    """Bytes that this process may lock; None without a limit. Raises its soft limit to the hard one first."""
    try:
        rows = status.read_text("ascii", "replace").splitlines()
    except OSError:
        rows = []
    rights = next((int(row.split()[1], 16) for row in rows if row.startswith("CapEff:")), 0)
    if rights >> _CAP_IPC_LOCK & 1:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return None if hard == resource.RLIM_INFINITY else hard


class Locker:
    """Locks whole mappings while they fit into `budget` bytes (None: as much as the process may). For threads."""

    def __init__(self, budget: int | None) -> None:
        allowed = permitted()
        known = [each for each in (budget, allowed) if each is not None]
        self._budget = min(known) if known else None
        self._allowed = allowed
        self._lock = Lock()
        self._used = 0
        self._warned = False
        self.refused = 0

    def lock(self, mapping: Mapping) -> bool:
        """Lock a mapping that is populated; False where it stays like any other memory. The first time says why."""
        size = mapping.size
        with self._lock:
            fits = self._budget is None or self._used + size <= self._budget
            if fits:
                self._used += size
        if fits and mapping.lock():
            return True
        with self._lock:
            if fits:
                self._used -= size
            self.refused += 1
            first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "weights of %d bytes are not locked into memory: %s",
                size,
                "the system refused" if fits else self._why(),
            )
        return False

    def unlocked(self, size: int) -> None:
        """Take note that a locked mapping of so many bytes was closed."""
        with self._lock:
            self._used -= size

    def _why(self) -> str:
        if self._budget == self._allowed:
            return f"RLIMIT_MEMLOCK is {self._budget} bytes"
        return f"host.mlock_limit is {self._budget} bytes"

    def __repr__(self) -> str:
        return f"<Locker {self._used} of {self._budget} B, {self.refused} refused>"
