"""Promises of slabs in the disk and host tiers: when one is laid, taken, checked, and set aside."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from actors.errors import CorruptWeights, DiskFull, LoadFailed
from actors.residency.model import Footprint, Model
from runtime.catalog.record import fingerprint_of, load_spec
from runtime.tiers.background import SlabLaying
from runtime.tiers.disk import DiskStore
from runtime.tiers.host import HostStore
from runtime.tiers.index import read_index
from runtime.tiers.mapping import Mapping
from runtime.tiers.offload import ThreadOffload
from runtime.tiers.recipe import Recipe
from runtime.tiers.slab import read_slab
from tests.runtime.catalog.directories import record

if TYPE_CHECKING:
    from runtime.catalog.record import ModelRecord
    from runtime.tiers.disk import Admission

QUOTA = 1 << 30


def run(admission: Admission) -> Path:
    """Step it to its end; what it holds is given back."""
    try:
        while not admission.step():
            pass
        assert admission.path is not None
        return admission.path
    finally:
        admission.undo()


def leftovers(root: Path) -> list[Path]:
    return list((root / "staging").iterdir())


def values(path: Path, name: str = "w") -> np.ndarray[Any, Any]:
    entry = read_slab(path).index.entries[name]
    return np.frombuffer(path.read_bytes()[entry.start : entry.end], np.float32)


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def of(each: ModelRecord) -> Model:
    return Model(each.name, each.version, each.fingerprint, Footprint(each.weights_bytes, each.weights_bytes))


# -- disk ----------------------------------------------------------------------------------------------


def test_the_file_serves_until_there_is_a_slab_and_then_the_slab_does(tmp_path: Path) -> None:
    """One per fingerprint, read-only, named by it, with the same values; nothing is left half-done or held."""
    model = record(tmp_path / "m")
    store = DiskStore(tmp_path / "cache", QUOTA)
    plain = store.admit(model)
    assert plain.name == model.manifest.weights_row.sha256
    slab = run(store.begin_slab(model, Recipe()))
    assert slab.name == f"{model.fingerprint}.slab"
    assert stat.S_IMODE(slab.stat().st_mode) == 0o444
    assert store.admit(model) == slab
    assert run(store.begin_slab(model, Recipe(order=("w",)))) == slab
    entry = read_index(plain).entries["w"]
    assert values(slab).tobytes() == plain.read_bytes()[entry.start : entry.end]
    assert not leftovers(tmp_path / "cache")
    assert store.snapshot().held == 0
    assert DiskStore(tmp_path / "cache", QUOTA).admit(model) == slab


def test_a_slab_needs_neither_the_original_nor_its_copy(tmp_path: Path) -> None:
    """What it was laid from may leave."""
    model = record(tmp_path / "m")
    store = DiskStore(tmp_path / "cache", QUOTA)
    slab = run(store.begin_slab(model, Recipe()))
    model.weights.unlink()
    assert store.laid(model)
    assert store.present(model)
    store.admit(model)
    (slab.parents[1] / model.manifest.weights_row.sha256[:2] / model.manifest.weights_row.sha256).unlink()
    assert store.admit(model) == slab


def test_a_damaged_header_is_set_aside_and_laid_anew(tmp_path: Path) -> None:
    """The file that came is still there, so nobody waits for it."""
    model = record(tmp_path / "m")
    store = DiskStore(tmp_path / "cache", QUOTA)
    slab = run(store.begin_slab(model, Recipe()))
    flip(slab, 40)
    assert store.admit(model).name == model.manifest.weights_row.sha256
    assert [path.name for path in (tmp_path / "cache" / "quarantine").iterdir()] == [slab.name]
    assert run(store.begin_slab(model, Recipe())) == slab


def test_a_slab_of_another_model_is_not_taken(tmp_path: Path) -> None:
    """Names are no proof: the fingerprint inside counts."""
    one, other = record(tmp_path / "one"), record(tmp_path / "other", seed=1)
    store = DiskStore(tmp_path / "cache", QUOTA)
    wrong = store._slabs.path(other.fingerprint)
    wrong.parent.mkdir(parents=True, exist_ok=True)
    run(store.begin_slab(one, Recipe())).rename(wrong)
    assert store.admit(other).name == other.manifest.weights_row.sha256
    assert not wrong.exists()


def test_a_slab_takes_no_room_from_others(tmp_path: Path) -> None:
    """With too little quota left there is none, and what was admitted stays."""
    model, other = record(tmp_path / "m", count=4096), record(tmp_path / "o", seed=1, count=4096)
    store = DiskStore(tmp_path / "cache", model.weights_bytes * 2 + 4096)
    both = store.admit(model), store.admit(other)
    with pytest.raises(DiskFull, match="room to spare"):
        run(store.begin_slab(model, Recipe()))
    assert all(path.exists() for path in both)
    assert store.snapshot().held == 0
    assert not leftovers(tmp_path / "cache")


def test_two_stores_lay_one_slab(tmp_path: Path) -> None:
    """Whoever comes second waits and takes what the first one made."""
    model = record(tmp_path / "m", count=1 << 20)
    stores = [DiskStore(tmp_path / "cache", QUOTA) for _ in range(2)]
    found: list[Path] = []

    def work(store: DiskStore) -> None:
        found.append(run(store.begin_slab(model, Recipe())))

    threads = [threading.Thread(target=work, args=(each,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert len(set(found)) == 1
    assert not leftovers(tmp_path / "cache")


def test_laying_can_be_given_up_after_any_step(tmp_path: Path) -> None:
    """Nothing stays: no file, no lock, no hold."""
    model = record(tmp_path / "m", count=5 << 20)
    store = DiskStore(tmp_path / "cache", QUOTA)
    store.admit(model)
    steps = 0
    admission = store.begin_slab(model, Recipe())
    while not admission.step():
        steps += 1
    admission.undo()
    store._slabs.path(model.fingerprint).unlink()
    assert steps >= 2
    for stop in range(steps + 1):
        admission = store.begin_slab(model, Recipe())
        for _ in range(stop):
            admission.step()
        admission.undo()
        assert not leftovers(tmp_path / "cache")
        assert store.snapshot().held == 0
        assert not store._slabs.path(model.fingerprint).exists()


# -- variants ------------------------------------------------------------------------------------------


def test_precisions_of_one_source_are_models_of_their_own(tmp_path: Path) -> None:
    """Each with its fingerprint, its bytes and its slab; the source is in the cache once."""
    store = DiskStore(tmp_path / "cache", QUOTA)
    full = record(tmp_path / "fp32", count=100_000)
    half = record(tmp_path / "fp16", count=100_000, version="1-fp16", dtype="fp16")
    short = record(tmp_path / "bf16", count=100_000, version="1-bf16", dtype="bf16")
    assert len({each.fingerprint for each in (full, half, short)}) == 3
    assert (half.weights_bytes, short.weights_bytes) == (200_000, 200_000)
    paths = [store.admit(each) for each in (full, half, short)]
    assert [path.suffix for path in paths] == ["", ".slab", ".slab"]
    assert sorted(path.suffix for path in (tmp_path / "cache" / "blobs").rglob("*") if path.is_file()) == [
        "",
        ".slab",
        ".slab",
    ]
    assert load_spec(half, paths[1]).builder.dtype == "fp16"
    assert load_spec(full, paths[0]).builder.dtype == ""


def test_what_says_nothing_new_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Measurements by fingerprint survive the new keys: defaults are not part of it."""
    model = record(tmp_path / "m")
    assert fingerprint_of(model.manifest) == model.fingerprint
    spelled = record(tmp_path / "n", dtype=None, tensors={"include": [], "exclude": []})
    assert spelled.fingerprint == model.fingerprint


def test_a_partial_load_takes_what_the_manifest_names(tmp_path: Path) -> None:
    """A filter that takes nothing is refused at admission, naming the key."""
    store = DiskStore(tmp_path / "cache", QUOTA)
    some = record(tmp_path / "some", tensors={"include": ["w*"]})
    assert set(read_slab(store.admit(some)).index.entries) == {"w"}
    none = record(tmp_path / "none", tensors={"exclude": ["v*"]})
    with pytest.raises(LoadFailed, match=r"tensors\.exclude") as caught:
        store.admit(none)
    assert caught.value.model == "tiny"
    assert store.snapshot().held == 0


def test_a_variant_of_a_file_served_in_place_is_a_copy(tmp_path: Path) -> None:
    """The original stays as it is; other bytes need another file."""
    model = record(tmp_path / "m", in_place=True, dtype="bf16")
    before = model.weights.read_bytes()
    path = DiskStore(tmp_path / "cache", QUOTA).admit(model)
    assert path.suffix == ".slab"
    assert model.weights.read_bytes() == before


def test_a_damaged_source_makes_no_variant(tmp_path: Path) -> None:
    """F16: what a slab is laid from was verified before."""
    model = record(tmp_path / "m", dtype="bf16")
    flip(model.weights, model.weights.stat().st_size - 1)
    with pytest.raises(CorruptWeights, match="sha256"):
        DiskStore(tmp_path / "cache", QUOTA).admit(model)
    assert not list((tmp_path / "cache" / "blobs").rglob("*.slab"))


# -- host ----------------------------------------------------------------------------------------------


class Tiers:
    """A disk and a host store with one model."""

    def __init__(self, folder: Path, model: ModelRecord) -> None:
        self.model = model
        self.disk = DiskStore(folder / "cache", QUOTA)
        self.offload = ThreadOffload(2)
        self.host = HostStore(self.disk, self.find, self.offload, self.release, mlock=False)

    def find(self, _: Model) -> ModelRecord:
        return self.model

    def release(self, _: str) -> None:
        pass


async def test_a_damaged_slab_is_never_mapped_and_the_next_load_is_good(tmp_path: Path) -> None:
    """The first load of a process compares the checksums: refused, set aside, and served from the source then."""
    model = record(tmp_path / "m", count=3 << 20)
    tiers = Tiers(tmp_path, model)
    slab = run(tiers.disk.begin_slab(model, Recipe()))
    flip(slab, slab.stat().st_size // 2)
    with pytest.raises(CorruptWeights, match="block 1 of the slab is damaged"):
        await tiers.host.load(of(model))
    assert tiers.host.snapshot().models == 0
    assert tiers.disk.snapshot().held == 0
    await tiers.host.load(of(model))
    assert tiers.host.path_of(of(model)).name == model.manifest.weights_row.sha256


async def test_a_slab_is_compared_once_per_process(tmp_path: Path) -> None:
    """A second load trusts what has not changed since; a changed file is compared again."""
    model = record(tmp_path / "m", count=3 << 20)
    tiers = Tiers(tmp_path, model)
    slab = run(tiers.disk.begin_slab(model, Recipe()))
    await tiers.host.load(of(model))
    assert tiers.host.path_of(of(model)) == slab
    assert tiers.host.snapshot().speed > 0
    await tiers.host.evict(model.key)
    assert len(tiers.host._sound) == 1
    await tiers.host.load(of(model))
    await tiers.host.evict(model.key)
    flip(slab, slab.stat().st_size // 2)
    with pytest.raises(CorruptWeights, match="damaged"):
        await tiers.host.load(of(model))


def large_pages(path: Path) -> int:
    """Bytes of a file that a mapping sees through pages of 2 MiB."""
    mapping = Mapping(path)
    mapping.open()
    mapping.populate(0)
    rows = Path("/proc/self/smaps").read_text("utf-8").split("\n")
    start = next(at for at, row in enumerate(rows) if row.endswith(str(path)))
    found = next(row for row in rows[start:] if row.startswith("FilePmdMapped:"))
    mapping.close()
    return int(found.split()[1]) << 10


def test_a_slab_lies_in_large_pages_where_a_plain_file_does(tmp_path: Path) -> None:
    """Whatever pieces its tensors come in: mapping and locking it then takes a thirtieth of the time."""
    plain = tmp_path / "plain"
    plain.write_bytes(b"x" * (12 << 20))
    model = record(tmp_path / "m", count=3 << 20)
    found = []
    for attempt in range(3):  # the kernel may be short of such pages for a moment
        slab = run(DiskStore(tmp_path / f"cache{attempt}", QUOTA).begin_slab(model, Recipe()))
        assert slab.stat().st_size > 12 << 20
        found.append(large_pages(slab))
    assert max(found) >= large_pages(plain)


def test_a_slab_truncated_while_mapped_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """F17: whether its blocks are compared or only populated."""
    model = record(tmp_path / "m", count=5 << 20)
    slab = run(DiskStore(tmp_path / "cache", QUOTA).begin_slab(model, Recipe()))
    for verify in (True, False):
        mapping = Mapping(slab)
        mapping.open()
        size = slab.stat().st_size
        slab.chmod(0o644)
        with slab.open("r+b") as file:
            file.truncate(8192)
            with pytest.raises(CorruptWeights, match="truncated"):
                mapping.populate(0, verify=verify)
            file.truncate(size)
        assert mapping.close() == size


async def test_slabs_are_laid_beside_serving(tmp_path: Path) -> None:
    """What a worker learned is worked off; bad recipes and models that left are counted and stop nothing."""
    model = record(tmp_path / "m")
    tiers = Tiers(tmp_path, model)
    laying = SlabLaying(tiers.disk, tiers.find, tiers.offload)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(laying.run)
        laying.note(of(model), b"nonsense")
        while not laying.failed:
            await anyio.lowlevel.checkpoint()
        laying.note(of(model), Recipe(order=("w",)).spelled())
        while not laying.laid:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert tiers.disk.admit(model).suffix == ".slab"
    assert tiers.disk.snapshot().held == 0


async def test_what_is_served_in_place_gets_no_slab(tmp_path: Path) -> None:
    """In place means: not copied."""
    model = record(tmp_path / "m", in_place=True)
    tiers = Tiers(tmp_path, model)
    laying = SlabLaying(tiers.disk, tiers.find, tiers.offload)
    await laying._lay(of(model), Recipe().spelled())
    assert (laying.laid, laying.failed) == (0, 0)
    assert not list((tmp_path / "cache" / "blobs").rglob("*.slab"))
