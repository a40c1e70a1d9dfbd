"""Promises of locking: never over the budget, degraded in one sentence, and measured floors are real."""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING

from runtime.tiers import locking
from runtime.tiers.calibrate import calibrate
from runtime.tiers.locking import Locker, permitted
from runtime.tiers.mapping import Mapping

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def mapping(path: Path, size: int = 8192) -> Mapping:
    path.write_bytes(bytes(size))
    one = Mapping(path)
    one.open()
    one.populate(0)
    return one


def locked_kib() -> int:
    rows = locking._STATUS.read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmLck:"))


def test_only_what_fits_the_budget_is_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two of three fit; the third is refused with one warning, and fits once another left. The kernel agrees."""
    maps = [mapping(tmp_path / str(number)) for number in range(3)]
    locker = Locker(2 * 8192)
    before = locked_kib()
    with caplog.at_level(logging.WARNING, "foreload.tiers"):
        assert [locker.lock(each) for each in maps] == [True, True, False]
        assert not locker.lock(maps[2])
    assert locked_kib() - before == 16
    assert locker.refused == 2
    assert [row.getMessage() for row in caplog.records] == [
        "weights of 8192 bytes are not locked into memory: host.mlock_limit is 16384 bytes"
    ]
    locker.unlocked(maps[0].close())
    assert locker.lock(maps[2])
    for each in maps:
        each.close()
    assert locked_kib() == before


def test_a_refusal_of_the_system_degrades(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is not mapped any more can't be locked; the budget is given back."""
    one = mapping(tmp_path / "f")
    locker = Locker(8192)
    one.close()
    with caplog.at_level(logging.WARNING, "foreload.tiers"):
        assert not locker.lock(one)
    assert "the system refused" in caplog.text
    other = mapping(tmp_path / "g")
    assert locker.lock(other)
    other.close()


def test_the_limit_of_the_process_counts_unless_it_has_the_right(tmp_path: Path) -> None:
    """CAP_IPC_LOCK lifts RLIMIT_MEMLOCK; without it the soft limit is raised to the hard one."""
    status = tmp_path / "status"
    status.write_text("CapEff:\t0000000000004000\n", encoding="ascii")
    assert permitted(status) is None
    status.write_text("CapEff:\t0000000000000000\n", encoding="ascii")
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    assert permitted(status) == (None if hard == resource.RLIM_INFINITY else hard)
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (hard, hard)
    assert permitted(tmp_path / "none") == permitted(status)


def test_floors_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    """Some GB per second on any machine; a folder that can't be written is no reason not to start."""
    floors = calibrate(tmp_path)
    assert floors.populate > 1e8
    assert floors.copy > 1e8
    assert not list(tmp_path.iterdir())
    assert calibrate(tmp_path / "none").populate == 0
