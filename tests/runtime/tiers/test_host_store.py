"""Promises of the host tier: held or not held, never half, whatever is cancelled or fails."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from actors.errors import CorruptWeights, NotReady, UnknownModel, WorkerDied
from actors.residency.model import Footprint, Model, Tier
from runtime.tiers import host as host_module
from runtime.tiers import mapping as mapping_module
from runtime.tiers.disk import DiskStore
from runtime.tiers.host import HostStore
from runtime.tiers.mapping import Mapping
from runtime.tiers.offload import ThreadOffload
from tests.runtime.catalog.directories import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.catalog.record import ModelRecord


class Place:
    """A host store over real files, with workers that note what is released and an offload that can be stopped."""

    def __init__(self, folder: Path, *records: ModelRecord, mlock: bool = False) -> None:
        self.records = {each.key: each for each in records}
        self.disk = DiskStore(folder / "cache", 1 << 30)
        self.released: list[str] = []
        self.calls = 0
        self.at: Callable[[int], None] = lambda _: None
        self.threads = ThreadOffload(2)
        self.store = HostStore(self.disk, self.find, self.offload, self.release, mlock)

    def find(self, model: Model) -> ModelRecord:
        if model.key not in self.records:
            raise UnknownModel("no such model")
        return self.records[model.key]

    def release(self, fingerprint: str) -> None:
        self.released.append(fingerprint)

    async def offload(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.at(self.calls)
        return await self.threads(work, *args, **kwargs)

    def empty(self) -> bool:
        shown = self.store.snapshot()
        return (shown.models, shown.mapped, self.disk.snapshot().held) == (0, 0, 0)


def of(each: ModelRecord, **changes: Any) -> Model:
    values = {"name": each.name, "version": each.version, "fingerprint": each.fingerprint, **changes}
    return Model(**values, footprint=Footprint(each.weights_bytes, each.weights_bytes))


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


async def test_a_loaded_model_is_mapped_and_an_evicted_one_is_not(tmp_path: Path) -> None:
    """The report counts the file's bytes and names its steps; evicting gives the same number back and unmaps."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)
    report = await place.store.load(of(each))
    assert (report.resident, report.source) == (each.weights_bytes, Tier.DISK)
    assert [name for name, _ in report.steps] == ["admit", "map", "populate"]
    path = place.store.path_of(of(each))
    assert mapped(path)
    assert [(held.model, held.resident) for held in await place.store.inventory()] == [(of(each), each.weights_bytes)]
    evicted = await place.store.evict(each.key)
    assert (evicted.returned, evicted.leaked) == (each.weights_bytes, 0)
    assert not mapped(path)
    assert place.released == [each.fingerprint]
    assert place.empty()


@pytest.mark.parametrize("quick", [True, False])
async def test_weights_that_are_on_disk_come_with_one_hop_and_go_with_one_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    """Each hop to a thread costs the loop, and so every request, more than opening a file does."""
    monkeypatch.setattr(host_module, "QUICK", 60.0 if quick else 0.0)
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)
    await place.store.load(of(each))
    for _ in range(2):
        place.calls = 0
        await place.store.evict(each.key)
        assert place.calls == (0 if quick else 1)
        await place.store.load(of(each))
        assert place.calls == (1 if quick else 2)


async def test_evicting_what_is_not_held_returns_nothing(tmp_path: Path) -> None:
    """Contract of `Residence`: zero bytes, and no worker is disturbed."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)
    assert (await place.store.evict(each.key)).returned == 0
    assert not place.released
    with pytest.raises(NotReady):
        place.store.path_of(of(each))


async def test_loading_twice_holds_once(tmp_path: Path) -> None:
    """A second load of the same fingerprint finds it here."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)
    await place.store.load(of(each))
    assert (await place.store.load(of(each))).source is Tier.HOST
    assert place.disk.snapshot().held == 1


async def test_a_new_fingerprint_replaces_the_old_one_after_it_is_there(tmp_path: Path) -> None:
    """Load, then let go: the old weights leave only when the new ones are mapped."""
    old, new = record(tmp_path / "old"), record(tmp_path / "new", seed=1)
    place = Place(tmp_path, old)
    await place.store.load(of(old))
    before = place.store.path_of(of(old))
    place.records[new.key] = new
    await place.store.load(of(new))
    assert place.released == [old.fingerprint]
    assert not mapped(before)
    assert mapped(place.store.path_of(of(new)))
    assert place.store.snapshot().models == 1


async def test_workers_keep_what_another_name_still_uses(tmp_path: Path) -> None:
    """Two names with the same weights and code: the fingerprint is released with the last of them."""
    one, two = record(tmp_path / "1", name="one"), record(tmp_path / "2", name="two")
    assert one.fingerprint == two.fingerprint
    place = Place(tmp_path, one, two)
    await place.store.load(of(one))
    await place.store.load(of(two))
    await place.store.evict(one.key)
    assert place.released == []
    await place.store.evict(two.key)
    assert place.released == [one.fingerprint]
    assert place.empty()


async def test_a_load_cancelled_at_any_step_holds_nothing(tmp_path: Path) -> None:
    """Rule 17: cancelled before each call in turn, by a scope and by the task, everything is given back."""
    each = record(tmp_path / "m", count=5 << 20)
    place = Place(tmp_path, each)
    await place.store.load(of(each))
    total = place.calls
    await place.store.evict(each.key)
    assert total >= 3
    for stop in range(1, total + 1):
        for blob in (tmp_path / "cache" / "blobs").rglob("?" * 64):
            blob.unlink()
        place.calls = 0
        with anyio.CancelScope() as scope:
            place.at = lambda call, stop=stop, scope=scope: scope.cancel() if call == stop else None
            await place.store.load(of(each))
        assert scope.cancelled_caught
        assert place.empty(), stop
        assert not list((tmp_path / "cache" / "staging").iterdir())


async def test_a_load_whose_task_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    """Plain asyncio cancellation does not wait for the thread; what that still finishes is undone all the same."""
    each = record(tmp_path / "m", count=5 << 20)
    for stop in range(1, 9):
        place = Place(tmp_path / str(stop), each) if (tmp_path / str(stop)).mkdir() is None else None
        assert place is not None
        task = asyncio.ensure_future(place.store.load(of(each)))

        def cancel(call: int, stop: int = stop, task: asyncio.Future[Any] = task) -> None:
            if call == stop:
                asyncio.get_running_loop().call_soon(task.cancel)

        place.at = cancel
        await asyncio.wait([task])
        if task.cancelled():
            assert place.empty(), stop
            assert not list((tmp_path / str(stop) / "cache" / "staging").iterdir())
        else:
            await place.store.evict(each.key)
            assert place.empty(), stop


async def test_an_eviction_is_finished_even_if_cancelled(tmp_path: Path) -> None:
    """Half an eviction would be a leak, so it is shielded."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)
    await place.store.load(of(each))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await place.store.evict(each.key)
    assert place.empty()


async def test_a_dead_worker_does_not_keep_the_mapping(tmp_path: Path) -> None:
    """The release call may fail; the bytes still come back."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)

    def fail(_: str) -> None:
        raise WorkerDied("gone")

    store = HostStore(place.disk, place.find, place.offload, fail, mlock=False)
    await store.load(of(each))
    path = store.path_of(of(each))
    with pytest.raises(WorkerDied):
        await store.evict(each.key)
    assert not mapped(path)
    assert place.empty()


async def test_corrupt_weights_hold_nothing(tmp_path: Path) -> None:
    """F16: a load that fails is undone to the byte, and the error names the model."""
    each = record(tmp_path / "m")
    content = bytearray(each.weights.read_bytes())
    content[-1] ^= 1
    each.weights.write_bytes(content)
    place = Place(tmp_path, each)
    with pytest.raises(CorruptWeights) as caught:
        await place.store.load(of(each))
    assert caught.value.model == "tiny"
    assert place.empty()


async def test_a_model_that_left_or_changed_is_not_ready(tmp_path: Path) -> None:
    """Between decision and load the catalogue may move on; that is not the load's failure."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each)
    with pytest.raises(NotReady, match="left the catalogue"):
        await place.store.load(of(each, name="other"))
    with pytest.raises(NotReady, match="changed"):
        await place.store.load(of(each, fingerprint="0" * 64))
    assert place.empty()


async def test_locking_degrades_without_failing(tmp_path: Path) -> None:
    """With `mlock` the snapshot says what is locked; a refusal is counted and the model is held all the same."""
    each = record(tmp_path / "m")
    place = Place(tmp_path, each, mlock=True)
    await place.store.load(of(each))
    shown = place.store.snapshot()
    assert (shown.locked, shown.refused_locks) in {(each.weights_bytes, 0), (0, 1)}
    assert shown.models == 1
    await place.store.evict(each.key)


async def test_a_file_truncated_while_mapped_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """F17: populating a mapping whose file shrank says so; this process never reads it and so never dies of it."""
    each = record(tmp_path / "m", count=5 << 20, in_place=True)
    mapping = Mapping(each.weights)
    mapping.open()
    os.truncate(each.weights, 4096)
    with pytest.raises(CorruptWeights, match="truncated"):
        mapping.populate(0)
    assert mapping.close() == each.weights_bytes
    assert mapping.close() == 0


def test_populate_goes_through_the_file_in_steps(tmp_path: Path) -> None:
    """Each call does at most 64 MiB, so that cancelling never waits long; also by reading, on old kernels."""
    path = tmp_path / "f"
    size = 2 * mapping_module.STEP + 5
    with path.open("wb") as file:
        file.truncate(size)
    mapping = Mapping(path)
    assert mapping.open() == size
    offsets = [0]
    while offsets[-1] < size:
        offsets.append(mapping.populate(offsets[-1]))
    assert offsets == [0, mapping_module.STEP, 2 * mapping_module.STEP, size]
    mapping._read(size - 5, 5)
    with pytest.raises(CorruptWeights):
        mapping._read(size - 5, 6)
    mapping.close()
    assert mapping.populate(0) == size


async def test_the_offload_limits_how_much_runs_at_once() -> None:
    """A third piece of work waits for one of two; arguments and results pass through."""
    offload = ThreadOffload(2)
    gate, started, results = threading.Event(), threading.Semaphore(0), []

    def work(number: int, *, base: int) -> int:
        started.release()
        gate.wait(20)
        return number + base

    async def run(number: int) -> None:
        results.append(await offload(work, number, base=10))

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(run, number)
        for _ in range(2):
            await anyio.to_thread.run_sync(started.acquire)
        assert repr(offload) == "<ThreadOffload 2/2>"
        assert not started.acquire(blocking=False)
        gate.set()
    assert sorted(results) == [10, 11, 12]
