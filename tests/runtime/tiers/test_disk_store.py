"""Promises of the disk tier: only verified bytes are published, and nothing half-done stays."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.errors import CorruptWeights, DiskFull, FetchFailed
from runtime.tiers.disk import DiskStore
from runtime.tiers.index import read_index
from tests.runtime.catalog.directories import record
from tests.runtime.tiers.headers import blob, tensor

QUOTA = 1 << 30
ROOT = Path(__file__).parents[3]


def leftovers(root: Path) -> list[Path]:
    return list((root / "staging").iterdir())


def blobs(root: Path) -> list[Path]:
    return [path for path in (root / "blobs").rglob("*") if path.is_file()]


def test_an_admitted_file_is_a_read_only_copy_under_its_hash(tmp_path: Path) -> None:
    """The blob is named by its sha256, has mode 0444, is ours alone, and outlives the original."""
    model = record(tmp_path / "m")
    store = DiskStore(tmp_path / "cache", QUOTA)
    path = store.admit(model)
    content = model.weights.read_bytes()
    assert path.read_bytes() == content
    assert path.name == model.manifest.weights_row.sha256
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert path.stat().st_ino != model.weights.stat().st_ino
    shutil.rmtree(model.directory)
    assert store.admit(model) == path
    assert path.read_bytes() == content
    assert not leftovers(tmp_path / "cache")


def test_truncating_the_original_leaves_the_published_file_alone(tmp_path: Path) -> None:
    """F17: what may be mapped is never the user's file, so truncating that one reaches nobody."""
    model = record(tmp_path / "m")
    path = DiskStore(tmp_path / "cache", QUOTA).admit(model)
    os.truncate(model.weights, 10)
    assert path.stat().st_size == model.weights_bytes


def test_a_flipped_byte_of_equal_size_is_never_served(tmp_path: Path) -> None:
    """F16, R39, T9: the right size with wrong bytes is refused, again on a second try, and leaves nothing."""
    model = record(tmp_path / "m")
    content = bytearray(model.weights.read_bytes())
    content[-1] ^= 1
    model.weights.write_bytes(content)
    store = DiskStore(tmp_path / "cache", QUOTA)
    for _ in range(2):
        with pytest.raises(CorruptWeights, match="sha256") as caught:
            store.admit(model)
        assert caught.value.model == "tiny"
        assert str(tmp_path) not in caught.value.message
    assert not blobs(tmp_path / "cache")
    assert not leftovers(tmp_path / "cache")
    content[-1] ^= 1
    model.weights.write_bytes(content)
    assert store.admit(model).read_bytes() == content


def test_a_known_bad_file_is_not_read_again(tmp_path: Path) -> None:
    """F16: the first refusal takes a reading step and a verdict, the second one is immediate."""
    model = record(tmp_path / "m")
    content = bytearray(model.weights.read_bytes())
    content[-1] ^= 1
    model.weights.write_bytes(content)
    store = DiskStore(tmp_path / "cache", QUOTA)
    first, second = store.begin(model), store.begin(model)
    assert not first.step()
    with pytest.raises(CorruptWeights):
        first.step()
    with pytest.raises(CorruptWeights, match="sha256"):
        second.step()


@pytest.mark.parametrize("size", [0, 4, 100, 327])
def test_a_truncated_original_is_refused(tmp_path: Path, size: int) -> None:
    """F1, F15: a file shorter than its manifest says is told with both numbers."""
    model = record(tmp_path / "m")
    assert size < model.weights_bytes
    os.truncate(model.weights, size)
    with pytest.raises(CorruptWeights, match=f"has {size}|have {size} bytes, the manifest says {model.weights_bytes}"):
        DiskStore(tmp_path / "cache", QUOTA).admit(model)


def test_verified_bytes_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    """F4, F14: a manifest may be true of a file that is nonsense; nonsense is not published."""
    model = record(tmp_path / "a")
    for content in (blob({"a": tensor()}, bytes(18)), b"<html>404</html>"):
        model.weights.write_bytes(content)
        bad = record_again(model.directory)
        with pytest.raises(CorruptWeights):
            DiskStore(tmp_path / "cache", QUOTA).admit(bad)
    assert not blobs(tmp_path / "cache")


def record_again(directory: Path):
    from runtime.catalog.describe import write_manifest
    from runtime.catalog.record import record_of
    from tests.runtime.catalog.directories import SETTINGS

    return record_of(directory, write_manifest(directory, SETTINGS))


def test_a_missing_original_is_a_failed_fetch(tmp_path: Path) -> None:
    """The message says what happened and holds no path."""
    model = record(tmp_path / "m")
    model.weights.unlink()
    with pytest.raises(FetchFailed, match="No such file") as caught:
        DiskStore(tmp_path / "cache", QUOTA).admit(model)
    assert str(tmp_path) not in str(caught.value)


def test_in_place_serves_the_verified_original(tmp_path: Path) -> None:
    """Read-only stores are not copied, but are verified all the same, once per change."""
    model = record(tmp_path / "m", in_place=True)
    store = DiskStore(tmp_path / "cache", QUOTA)
    assert store.admit(model) == model.weights
    assert store.admit(model) == model.weights
    assert not blobs(tmp_path / "cache")
    content = bytearray(model.weights.read_bytes())
    content[-1] ^= 1
    model.weights.write_bytes(content)
    with pytest.raises(CorruptWeights, match="sha256"):
        store.admit(model)


def test_a_damaged_blob_of_ours_is_set_aside_and_made_again(tmp_path: Path) -> None:
    """A blob with the wrong size after a broken disk or a hand is quarantined, not served."""
    model = record(tmp_path / "m")
    store = DiskStore(tmp_path / "cache", QUOTA)
    path = store.admit(model)
    path.unlink()
    path.write_bytes(b"short")
    assert DiskStore(tmp_path / "cache", QUOTA).admit(model).read_bytes() == model.weights.read_bytes()
    assert (tmp_path / "cache" / "quarantine" / path.name).read_bytes() == b"short"


def test_room_is_made_by_the_least_recently_used_that_nobody_holds(tmp_path: Path) -> None:
    """The quota evicts in order of use; a held blob stays however old its use is."""
    models = [record(tmp_path / str(n), seed=n) for n in range(4)]
    size = models[0].weights_bytes
    store = DiskStore(tmp_path / "cache", 3 * size)
    held = store.begin(models[0])
    while not held.step():
        pass
    first, second = store.admit(models[1]), store.admit(models[2])
    store.admit(models[1])
    store.admit(models[3])
    assert held.path is not None
    assert held.path.exists()
    assert first.exists()
    assert not second.exists()
    assert store.snapshot().used == 3 * size
    held.undo()
    assert store.snapshot().held == 0


def test_a_quota_that_cannot_hold_it_is_told_with_numbers(tmp_path: Path) -> None:
    """F22: refused before a byte is written, naming need and quota."""
    model = record(tmp_path / "m")
    with pytest.raises(DiskFull) as caught:
        DiskStore(tmp_path / "cache", 100).admit(model)
    assert caught.value.detail == {"needed": model.weights_bytes, "quota": 100, "used": 0}
    assert not leftovers(tmp_path / "cache")


def test_what_another_process_holds_is_not_removed(tmp_path: Path) -> None:
    """Two stores on one folder respect each other's holds through file locks."""
    models = [record(tmp_path / str(n), seed=n) for n in range(2)]
    size = models[0].weights_bytes
    mine, other = DiskStore(tmp_path / "cache", size), DiskStore(tmp_path / "cache", size)
    held = mine.begin(models[0])
    while not held.step():
        pass
    with pytest.raises(DiskFull, match="other processes"):
        other.admit(models[1])
    held.undo()
    assert other.admit(models[1]).exists()


def test_two_admissions_of_one_blob_make_one(tmp_path: Path) -> None:
    """Single flight through the claim: the second waits for the first and copies nothing."""
    model = record(tmp_path / "m", count=5 << 20)
    stores = [DiskStore(tmp_path / "cache", QUOTA) for _ in range(2)]
    first = stores[0].begin(model)
    assert not first.step()
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(stores[1].admit(model)))
    waiter.start()
    while not first.step():
        assert len(leftovers(tmp_path / "cache")) <= 1
    waiter.join(20)
    assert found == [first.path]
    assert len(blobs(tmp_path / "cache")) == 1
    first.undo()


def test_stopping_at_any_step_leaves_nothing(tmp_path: Path) -> None:
    """An admission undone between any two steps has no temporary file, hold or claim left."""
    model = record(tmp_path / "m", count=5 << 20)
    store = DiskStore(tmp_path / "cache", QUOTA)
    for stop in range(4):
        admission = store.begin(model)
        for _ in range(stop):
            assert not admission.step()
        admission.undo()
        assert not leftovers(tmp_path / "cache")
        assert not blobs(tmp_path / "cache")
        assert store.snapshot().held == 0
    assert store.admit(model).exists()


ADMIT = """
import sys
from pathlib import Path
from runtime.catalog.record import record_of
from runtime.catalog.manifest import parse_manifest
from runtime.tiers.disk import DiskStore
directory = Path(sys.argv[1])
store = DiskStore(Path(sys.argv[2]), 1 << 30)
admission = store.begin(record_of(directory, parse_manifest((directory / "foreload.yaml").read_text())))
if len(sys.argv) > 3:
    admission.step()
    print("begun", flush=True)
    sys.stdin.read()
while not admission.step():
    pass
print(admission.path)
"""


def spawn(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ADMIT, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )


def test_a_killed_admission_is_taken_over(tmp_path: Path) -> None:
    """F24: after kill -9 in the middle of a copy the next store reclaims the leftover and admits at once."""
    model = record(tmp_path / "m", count=5 << 20)
    with spawn(model.directory, tmp_path / "cache", "pause") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        store = DiskStore(tmp_path / "cache", QUOTA)
        assert len(leftovers(tmp_path / "cache")) == 1  # a live writer's file is not a leftover
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert len(leftovers(tmp_path / "cache")) == 1
    assert store.admit(model).exists()
    assert not leftovers(tmp_path / "cache")


def test_leftovers_are_reclaimed_at_start(tmp_path: Path) -> None:
    """F24: a temporary file that nobody locks goes when a store starts."""
    DiskStore(tmp_path / "cache", QUOTA)
    (tmp_path / "cache" / "staging" / "dead.part").write_bytes(b"x")
    DiskStore(tmp_path / "cache", QUOTA)
    assert not leftovers(tmp_path / "cache")


def test_two_processes_admit_one_blob(tmp_path: Path) -> None:
    """Concurrent processes agree on one file, whole and published once."""
    model = record(tmp_path / "m", count=5 << 20)
    with spawn(model.directory, tmp_path / "cache") as one, spawn(model.directory, tmp_path / "cache") as two:
        answers = {child.communicate(timeout=60)[0].strip() for child in (one, two)}
    assert len(answers) == 1
    assert Path(answers.pop()).read_bytes() == model.weights.read_bytes()
    assert len(blobs(tmp_path / "cache")) == 1
    assert not leftovers(tmp_path / "cache")


@pytest.mark.real
def test_a_full_disk_is_told_and_leaves_the_others_alone(tmp_path: Path) -> None:
    """F22: on a real 5 MB file system; the temporary file is gone and an admitted model still serves."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        store = DiskStore(mount / "cache", QUOTA)
        small = store.admit(record(tmp_path / "small-model"))
        with pytest.raises(DiskFull, match="no room"):
            store.admit(record(tmp_path / "large", seed=1, count=2 << 20))
        assert not leftovers(mount / "cache")
        assert blobs(mount / "cache") == [small]
        assert read_index(small).total == 256
    finally:
        subprocess.run(["umount", str(mount)], check=True)
