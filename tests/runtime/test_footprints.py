"""Measured footprints: kept over restarts, believed before any guess, and never a reason not to start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from actors import events as e
from actors.clock import LoopClock
from actors.residency.model import Footprint, ModelKey, Rules, Tier, Trigger
from runtime.catalog.repository import Repository
from runtime.catalog.served import Exceptions, ServedModels
from runtime.footprints import Footprints
from runtime.history import History
from tests.runtime.catalog.directories import model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def at_once(work: Callable[..., object], *args: object) -> object:
    """An `Offload` that is a direct call."""
    return work(*args)


def load(history: History, fingerprint: str, tier: Tier, size: int, device: str = "cpu:0") -> None:
    """One finished load, as the caches state it."""
    wants, key = history.wants(), ModelKey("tiny@1")
    wants[e.LoadStarted](e.LoadStarted(1.0, "L1", device, tier, key, fingerprint, 10, Trigger.DEMAND))
    wants[e.LoadFinished](e.LoadFinished(2.0, "L1", device, tier, key, Trigger.DEMAND, Tier.DISK, 1.0, size))


async def served(folder: Path, measured: Footprints, own: Footprint | None = None) -> Footprint:
    """The footprint that planning sees of the one model in a folder."""
    exceptions = {("tiny", "1"): Exceptions(footprint=own)} if own else {}
    catalogue = ServedModels(
        Repository((folder,)),
        rules=Rules(),
        exceptions=exceptions,
        offload=at_once,  # type: ignore[arg-type]
        clock=LoopClock(),
        emit=lambda _: None,
        forget=lambda _: None,
        seconds={},
        measured=measured,
    )
    ((only,),) = (await catalogue.refresh()).values()
    return only.footprint


async def test_what_was_measured_is_planned_with_from_then_on(tmp_path: Path) -> None:
    """Declared until the first load of each tier, measured afterwards and after a restart; the operator's word wins."""
    model(tmp_path / "models" / "tiny", footprint={"device": 1000, "host": 2000})
    repository = Repository((tmp_path / "models",))
    repository.refresh()
    fingerprint = repository.find("tiny").fingerprint
    kept = Footprints(tmp_path / "footprints.json")
    assert await served(tmp_path / "models", kept) == Footprint(1000, 2000)
    history = History({}, kept)
    load(history, fingerprint, Tier.DEVICE, 1234)
    assert await served(tmp_path / "models", kept) == Footprint(1234, 2000)
    load(history, fingerprint, Tier.HOST, 777, device="host")
    assert await served(tmp_path / "models", kept) == Footprint(1234, 777)
    assert kept.save()
    after = Footprints(tmp_path / "footprints.json")
    assert await served(tmp_path / "models", after) == Footprint(1234, 777)
    assert await served(tmp_path / "models", after, own=Footprint(5, 6)) == Footprint(5, 6)


def test_the_largest_of_several_kinds_of_devices_counts(tmp_path: Path) -> None:
    """Two GPUs are one kind, measured last counts; a CPU is another."""
    kept = Footprints(tmp_path / "f")
    for device, size in (("cuda:0", 10), ("cuda:1", 8), ("cpu:0", 7)):
        kept.note("a", device, Tier.DEVICE, size)
    assert (kept.device("a"), kept.host("a"), kept.device("b")) == (8, None, None)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    """The same size again costs no write."""
    kept = Footprints(tmp_path / "f")
    assert not kept.save()
    kept.note("a", "cpu:0", Tier.DEVICE, 1)
    assert kept.save()
    kept.note("a", "cpu:0", Tier.DEVICE, 1)
    assert not kept.save()
    assert [one.name for one in tmp_path.iterdir()] == ["f"]


def test_it_is_bounded_and_forgets_the_oldest(tmp_path: Path) -> None:
    """A churn of fingerprints does not grow it; a reload keeps the newest."""
    kept = Footprints(tmp_path / "f", limit=3)
    for name in "abcad":
        kept.note(name, "cpu:0", Tier.DEVICE, 1)
    assert [kept.device(name) for name in "abcd"] == [1, None, 1, 1]
    kept.save()
    assert [Footprints(tmp_path / "f", limit=2).device(name) for name in "cad"] == [None, 1, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"format": 2, "rows": {}}',
        b'{"format": 1, "rows": [1]}',
    ],
)
def test_a_file_that_holds_something_else_counts_as_none(tmp_path: Path, content: bytes) -> None:
    """Damage costs the measurements, not the start."""
    (tmp_path / "f").write_bytes(content)
    kept = Footprints(tmp_path / "f")
    assert kept.device("a") is None
    kept.note("a", "cpu:0", Tier.DEVICE, 3)
    assert kept.save()
    assert Footprints(tmp_path / "f").device("a") == 3


def test_absurd_rows_are_left_out(tmp_path: Path) -> None:
    """Sizes are whole, not negative, and of this world."""
    row = {"cpu": -1, "cuda": 1 << 70, "host": True, "x": "7", "good": 9}
    (tmp_path / "f").write_text(json.dumps({"format": 1, "rows": {"a": row}}))
    kept = Footprints(tmp_path / "f")
    assert (kept.device("a"), kept.host("a")) == (9, None)


def test_a_disk_that_fails_is_tried_again(tmp_path: Path) -> None:
    """Nothing is lost while it runs."""
    kept = Footprints(tmp_path / "later" / "f")
    kept.note("a", "cpu:0", Tier.DEVICE, 3)
    assert not kept.save()
    (tmp_path / "later").mkdir()
    assert kept.save()
