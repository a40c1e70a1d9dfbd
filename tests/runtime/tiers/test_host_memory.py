"""Promises of the memory reading: what can be used, never what happens to be free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from runtime.tiers.pressure import HostMemory

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n", encoding="ascii")


def memory(tmp_path: Path, own: str, total: int = 64 * GIB, available: int = 60 * GIB) -> HostMemory:
    (tmp_path / "own").write_text(own, encoding="ascii")
    return HostMemory(cgroups=tmp_path / "cg", own_groups=tmp_path / "own", machine=lambda: (total, available))


def test_without_a_cgroup_it_is_the_machines_available_memory(tmp_path: Path) -> None:
    """No files at all: MemAvailable."""
    sample = HostMemory(cgroups=tmp_path, own_groups=tmp_path / "none", machine=lambda: (10, 4)).sample()
    assert (sample.limit, sample.available) == (10, 4)


def test_file_pages_nobody_uses_count_as_available(tmp_path: Path) -> None:
    """F63: a page-cache filler does not look like pressure: available = limit - (current - inactive_file)."""
    group(
        tmp_path / "cg" / "a",
        memory__max=8 * GIB,
        memory__current=8 * GIB,
        memory__stat=f"anon 1\nfile 7\ninactive_file {6 * GIB}\nactive_file 5",
    )
    sample = memory(tmp_path, "0::/a\n").sample()
    assert (sample.limit, sample.available) == (8 * GIB, 6 * GIB)
    assert sample.used_ratio == 0.25


def test_the_tightest_group_around_us_counts(tmp_path: Path) -> None:
    """A parent's limit binds its children; `max` is no limit."""
    group(tmp_path / "cg" / "a", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat="inactive_file 0")
    group(tmp_path / "cg" / "a" / "b", memory__max="max", memory__current=GIB, memory__stat="inactive_file 0")
    sample = memory(tmp_path, "0::/a/b\n").sample()
    assert (sample.limit, sample.available) == (4 * GIB, GIB)


def test_a_roomy_group_on_a_full_machine_has_what_the_machine_has(tmp_path: Path) -> None:
    """The machine may be tighter than the group."""
    group(tmp_path / "cg" / "a", memory__max=32 * GIB, memory__current=0, memory__stat="")
    sample = memory(tmp_path, "0::/a\n", available=GIB).sample()
    assert (sample.limit, sample.available) == (32 * GIB, GIB)


def test_version_1_groups_are_read(tmp_path: Path) -> None:
    """The old layout: its own files, under the memory controller's mount; its unlimited value is a huge number."""
    group(
        tmp_path / "cg" / "memory" / "x",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}",
    )
    group(
        tmp_path / "cg" / "memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=50 * GIB,
        memory__stat="total_inactive_file 0",
    )
    sample = memory(tmp_path, "5:cpu:/\n4:memory:/x\n0::/\n").sample()
    assert (sample.limit, sample.available) == (4 * GIB, 2 * GIB)


def test_inside_a_container_the_mount_is_our_group(tmp_path: Path) -> None:
    """The path in /proc may be the host's and not exist here; a path that climbs is not followed."""
    group(tmp_path / "cg", memory__max=2 * GIB, memory__current=GIB, memory__stat="inactive_file 0")
    for own in ("0::/docker/abc\n", "0::/../../..\n"):
        assert memory(tmp_path, own).sample().limit == 2 * GIB


def test_more_used_than_allowed_is_nothing_available(tmp_path: Path) -> None:
    """A limit lowered below the usage gives 0, never a negative number; nonsense lines are skipped."""
    group(tmp_path / "cg", memory__max=GIB, memory__current=3 * GIB, memory__stat="inactive_file 0")
    assert memory(tmp_path, "nonsense\n0::/\n").sample().available == 0


def test_the_real_machine_gives_a_sensible_reading() -> None:
    """On whatever this runs: something is available, and no more than there is."""
    sample = HostMemory().sample()
    assert 0 < sample.available <= sample.limit <= psutil.virtual_memory().total
