"""How much memory this machine, or the container around us, has left.

Belongs here: reading the kernel's numbers. Never: judging them; watermarks are the actors' business.
Free memory is never meant: the page cache fills it, and gives it back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import psutil  # type: ignore[import-untyped, unused-ignore]  # its stubs are a distribution of their own

from actors.ports import MemorySample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Reading: TypeAlias = tuple[int, int]
"""Total and available bytes."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


def _machine() -> Reading:
    memory = psutil.virtual_memory()
    return memory.total, memory.available


class HostMemory:
    """Reads MemAvailable and the memory limit of our cgroup and of those around it, v2 or v1; the tightest counts.

    What a cgroup can still use is its limit less what it uses, but file pages that nobody used lately do not count as
    used: the kernel drops them before it refuses anything.
    """

    def __init__(
        self,
        *,
        cgroups: Path = _CGROUPS,
        own_groups: Path = _OWN_GROUPS,
        machine: Callable[[], Reading] = _machine,
    ) -> None:
        self._cgroups = cgroups
        self._own_groups = own_groups
        self._machine = machine

    def sample(self) -> MemorySample:
        """One reading of `limit` and `available` in bytes."""
        total, available = self._machine()
        limit = total
        for group_limit, group_available in self._groups():
            limit = min(limit, group_limit)
            available = min(available, group_available)
        return MemorySample(limit, max(0, min(available, limit)))

    def _groups(self) -> Iterator[Reading]:
        try:
            lines = self._own_groups.read_text("ascii", "replace").splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "-", "")
            if not controllers:
                yield from self._walk(self._cgroups, path, _read_v2)
            elif "memory" in controllers.split(","):
                yield from self._walk(self._cgroups / "memory", path, _read_v1)

    def _walk(self, mount: Path, path: str, read: Callable[[Path], Reading | None]) -> Iterator[Reading]:
        """Read our group and all around it. Inside a container the path may be the host's, and only the top is ours."""
        group = mount / path.lstrip("/")
        if not group.is_dir() or ".." in group.parts:
            group = mount
        while True:
            reading = read(group)
            if reading is not None:
                yield reading
            if group == mount:
                return
            group = group.parent

    def __repr__(self) -> str:
        sample = self.sample()
        return f"<HostMemory {sample.available} of {sample.limit} B available>"


def _read_v2(group: Path) -> Reading | None:
    return _reading(group, "memory.max", "memory.current", "inactive_file")


def _read_v1(group: Path) -> Reading | None:
    return _reading(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _reading(group: Path, limit_file: str, used_file: str, inactive: str) -> Reading | None:
    limit = _number(group / limit_file)
    used = _number(group / used_file)
    if limit is None or used is None:
        return None  # no limit ("max"), or no such group
    rows = _text(group / "memory.stat").splitlines()
    reclaimable = next((int(row.split()[1]) for row in rows if row.startswith(f"{inactive} ")), 0)
    return limit, limit - max(0, used - reclaimable)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
