"""A skeleton that outlived its worker is the one that was built, or it is built again; nobody else's is ever read."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from actors.errors import LoadFailed
from runtime.worker import skeleton_store
from runtime.worker.core import Cancelled, Core
from runtime.worker.skeleton import Skeleton
from runtime.worker.skeleton_store import SkeletonStore, store_at
from runtime.workers.port import BuilderSpec, TensorSpec
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for
from tests.runtime.worker.test_core import SHAPES, ask, golden, loadable, never

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.workers.port import LoadSpec

MARK = "unpickled"


class Bomb:
    """A pickle of it runs code where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def life(folder: Path, allow: tuple[str, ...] = ALLOW) -> Core:
    """A worker's core as it is after a start."""
    return Core("cpu:0", allow, skeletons=str(folder))


def steps(core: Core, spec: LoadSpec) -> set[str]:
    """The phases of a load."""
    return {name for name, _ in core.load(spec, never).steps}


def entries(folder: Path) -> list[Path]:
    """What is kept."""
    return sorted(path for path in folder.iterdir() if path.name != "key")


@pytest.fixture
def plain(tmp_path: Path) -> LoadSpec:
    """A model that can be kept."""
    return spec_for(saved(tmp_path / "w.safetensors", randomised(modules.Linear)), "Linear")


# -- it comes back the same ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_second_life_builds_nothing_and_answers_the_same(name: str, tmp_path: Path) -> None:
    """Tied weights, statistics, LSTMs, lists of tensors, buffers that no file holds: bit by bit as plain torch."""
    spec, wanted = loadable(name, tmp_path)
    folder = tmp_path / "kept"
    assert "skeleton" in steps(life(folder), spec)
    core = life(folder)
    found = steps(core, spec)
    assert found.isdisjoint({"skeleton", "warm_up"})
    how = {"name": spec.inputs[0].name, "datatype": spec.inputs[0].datatype}
    answers = ask(core, spec.key, SHAPES[name][2], **how)
    for got, expected in zip(answers.values(), wanted, strict=True):
        np.testing.assert_array_equal(got, expected.numpy())
    assert core.evict(spec.key).leaked == 0
    core.load(spec, never)
    again = ask(core, spec.key, SHAPES[name][2], **how)
    for got, expected in zip(again.values(), wanted, strict=True):
        np.testing.assert_array_equal(got, expected.numpy())


def test_a_module_that_writes_its_weights_is_known_to_in_its_second_life(tmp_path: Path) -> None:
    """Without a warm-up nobody looks again, so what the first life saw has to come along."""
    spec = spec_for(saved(tmp_path / "w", randomised(modules.Writer)), "Writer", outputs=modules.X4)
    folder, x = tmp_path / "kept", np.ones((1, 4), np.float32)
    first = life(folder)
    first.load(spec, never)
    wanted = ask(first, spec.key, x)
    core = life(folder)
    assert "warm_up" not in steps(core, spec)
    for _ in range(2):
        (got,) = ask(core, spec.key, x).values()
        np.testing.assert_array_equal(got, next(iter(wanted.values())))
        core.evict(spec.key)
        core.load(spec, never)


def test_a_model_without_a_warm_up_is_warmed_up_when_that_is_asked_for(tmp_path: Path, plain: LoadSpec) -> None:
    """Being kept says nothing about a forward that never ran."""
    life(tmp_path / "kept").load(msgspec.structs.replace(plain, warm_up=False), never)
    assert "warm_up" in steps(life(tmp_path / "kept"), plain)


def test_what_can_not_come_back_the_same_is_not_kept(tmp_path: Path) -> None:
    """Lambdas, heavy buffers, two tensors in one storage, attributes that a pickle drops: built each time."""
    store = SkeletonStore(tmp_path / "kept", ALLOW)
    spec = spec_for(tmp_path / "w", "Linear")

    def drafted(change: Any) -> bool:
        skeleton = Skeleton(modules.Linear)
        change(skeleton.module)
        return store.draft(spec, Skeleton(lambda: skeleton.module)) is not None

    both = torch.zeros(4)
    assert drafted(lambda _: None)
    assert not drafted(lambda module: setattr(module, "f", lambda: 0))
    assert not drafted(lambda module: module.register_buffer("big", torch.zeros(2 << 20), persistent=False))
    assert not drafted(
        lambda module: [module.register_buffer(f"half{n}", both[2 * n : 2 * n + 2], persistent=False) for n in (0, 1)]
    )
    assert not drafted(lambda module: setattr(module, "inner", Forgetful()))
    assert entries(tmp_path / "kept") == []


class Forgetful(torch.nn.Module):
    """Loses an attribute on the way through a pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["cache"]
        return state


def test_a_load_that_fails_or_is_cancelled_keeps_nothing(tmp_path: Path, plain: LoadSpec) -> None:
    """Only what was served once is worth a second life."""
    folder = tmp_path / "kept"
    with pytest.raises(LoadFailed):
        life(folder).load(msgspec.structs.replace(plain, inputs=(TensorSpec("x", "FP32", (-1, 5)),)), never)
    asked: list[int] = []

    def soon() -> bool:
        asked.append(1)
        return len(asked) > 4

    with pytest.raises(Cancelled):
        life(folder).load(plain, soon)
    assert entries(folder) == []


def test_a_kept_skeleton_that_fails_is_forgotten(tmp_path: Path, plain: LoadSpec) -> None:
    """The next attempt builds, as if nothing had been kept."""
    folder = tmp_path / "kept"
    life(folder).load(plain, never)
    wrong = msgspec.structs.replace(plain, weights=str(saved(tmp_path / "x", randomised(modules.Linear, width=9))))
    with pytest.raises(LoadFailed):
        life(folder).load(wrong, never)
    assert entries(folder) == []
    assert "skeleton" in steps(life(folder), plain)


# -- it is ours, and fresh -----------------------------------------------------------------------------


def flipped(raw: bytes) -> bytes:
    at = len(raw) // 2
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda raw: raw[:-1],
        lambda raw: raw[:20],
        lambda _: b"",
        lambda raw: raw + b"\0",
        lambda raw: raw[32:],
        lambda raw: bytes(32) + raw[32:],
        lambda _: bytes(skeleton_store.LARGEST + 1),
    ],
    ids=["flipped", "short", "very short", "empty", "long", "unsigned", "zero digest", "huge"],
)
def test_a_damaged_entry_is_built_again_and_replaced(tmp_path: Path, plain: LoadSpec, damage: Any) -> None:
    """Torn by a power cut, or by anyone: never unpickled, never an error."""
    folder = tmp_path / "kept"
    life(folder).load(plain, never)
    (entry,) = entries(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    assert "skeleton" in steps(life(folder), plain)
    assert "skeleton" not in steps(life(folder), plain)


def test_a_strangers_pickle_is_never_read(tmp_path: Path, plain: LoadSpec) -> None:
    """S2: right name, right form, digest of another key (or of none): its code does not run."""
    folder, mark = tmp_path / "kept", tmp_path / MARK
    life(folder).load(plain, never)
    (entry,) = entries(folder)
    bomb = skeleton_store._Entry(pickle.dumps(Bomb(mark)), (), warm=True, writes=False)
    raw = msgspec.msgpack.encode(bomb)
    elsewhere = SkeletonStore(tmp_path / "elsewhere", ALLOW)
    for proof in (bytes(32), entry.read_bytes()[:32], elsewhere._proof(entry.name, raw)):
        entry.write_bytes(proof + raw)
        assert "skeleton" in steps(life(folder), plain)
        assert not mark.exists()
    ours = SkeletonStore(folder, ALLOW)
    entry.write_bytes(ours._proof(entry.name, raw) + raw)
    ours.take(plain)
    assert mark.exists(), "the bomb is real: with our own digest it would have gone off"


def test_an_entry_under_another_name_is_not_taken(tmp_path: Path, plain: LoadSpec) -> None:
    """A digest covers the name: what was kept for one model can't be passed off as another's."""
    folder = tmp_path / "kept"
    other = msgspec.structs.replace(plain, fingerprint="f2", key="n@1")
    life(folder).load(plain, never)
    (first,) = entries(folder)
    life(folder).load(other, never)
    (second,) = [path for path in entries(folder) if path != first]
    second.write_bytes(first.read_bytes())
    assert "skeleton" in steps(life(folder), other)


@pytest.mark.parametrize("how", ["readable by others", "a symlink", "a folder", "a pipe"])
def test_what_others_could_have_written_is_not_read(tmp_path: Path, plain: LoadSpec, how: str) -> None:
    """S2: a regular file of ours that only we may touch, or none; a pipe does not block the load either."""
    folder = tmp_path / "kept"
    life(folder).load(plain, never)
    (entry,) = entries(folder)
    if how == "readable by others":
        entry.chmod(0o644)
    else:
        entry.rename(tmp_path / "moved")
        match how:
            case "a symlink":
                entry.symlink_to(tmp_path / "moved")
            case "a folder":
                entry.mkdir()
            case _:
                os.mkfifo(entry, 0o600)
    assert "skeleton" in steps(life(folder), plain)


def test_files_and_folder_are_for_their_owner_alone(tmp_path: Path, plain: LoadSpec) -> None:
    """0600 and 0700, key included, whatever the umask."""
    folder = tmp_path / "kept"
    before = os.umask(0)
    try:
        life(folder).load(plain, never)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("change", ["allow", "fingerprint", "builder", "python", "torch", "format"])
def test_other_circumstances_are_another_entry(
    tmp_path: Path, plain: LoadSpec, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trust, weights, configuration and versions: what differs in one of them builds."""
    folder, allow = tmp_path / "kept", ALLOW
    life(folder).load(plain, never)
    match change:
        case "allow":
            allow = (*ALLOW, "more.")
        case "fingerprint":
            plain = msgspec.structs.replace(plain, fingerprint="f2")
        case "builder":
            plain = msgspec.structs.replace(plain, builder=BuilderSpec("python", plain.builder.target, {"width": 8}))
        case "python":
            monkeypatch.setattr(skeleton_store.platform, "python_version", lambda: "3.99.0")
        case "torch":
            monkeypatch.setattr(skeleton_store.torch, "__version__", "9.9.9")
        case _:
            monkeypatch.setattr(skeleton_store, "FORMAT", 99)
    assert "skeleton" in steps(life(folder, allow), plain)
    assert len(entries(folder)) == 2


EDITION = """
from torch import nn
class Edited(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.scale = {scale}
    def forward(self, x):
        return self.a(x) * self.scale
"""


def test_another_edition_of_the_code_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's fix of a constructor must not be undone by what was kept before it."""
    source = tmp_path / "edited_model.py"
    source.write_text(EDITION.format(scale=1.0))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder, allow = tmp_path / "kept", ("edited_model",)
    spec = msgspec.structs.replace(
        spec_for(saved(tmp_path / "w", randomised(modules.Summed)), "Linear"),
        builder=BuilderSpec("python", "edited_model:Edited", {}),
    )
    x = np.ones((1, 4), np.float32)
    core = life(folder, allow)
    assert "skeleton" in steps(core, spec)
    (once,) = ask(core, spec.key, x).values()
    assert "skeleton" not in steps(life(folder, allow), spec)

    source.write_text(EDITION.format(scale=2.0) + "# longer\n")
    other = msgspec.structs.replace(spec, fingerprint="f2", key="n@1")
    assert "skeleton" in steps(core, other)
    assert len(entries(folder)) == 1, "an import from before the edit: what it builds belongs to no edition on disk"
    del sys.modules["edited_model"]
    core = life(folder, allow)
    assert "skeleton" in steps(core, spec), "the file changed"
    (twice,) = ask(core, spec.key, x).values()
    np.testing.assert_array_equal(twice, once * 2)
    assert "skeleton" not in steps(life(folder, allow), spec)
    del sys.modules["edited_model"]


def test_code_that_is_no_longer_allowed_is_not_run_from_what_was_kept(tmp_path: Path, plain: LoadSpec) -> None:
    """S2: a shorter allow-list counts at once."""
    folder = tmp_path / "kept"
    life(folder).load(plain, never)
    with pytest.raises(LoadFailed, match="not on the allow-list"):
        life(folder, ()).load(plain, never)


# -- the folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["a file", "bad key", "short key", "key for all"])
def test_an_unusable_folder_costs_speed_and_nothing_else(
    tmp_path: Path, plain: LoadSpec, trouble: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Models are built and served as without it, and an operator is told once."""
    folder = tmp_path / "kept"
    if trouble == "a file":
        folder.write_text("in the way")
    else:
        folder.mkdir(0o700)
        key = folder / "key"
        key.write_bytes(b"" if trouble == "bad key" else bytes(31 if trouble == "short key" else 32))
        key.chmod(0o644 if trouble == "key for all" else 0o600)
    core = life(folder)
    assert "skeleton" in steps(core, plain)
    assert capfd.readouterr().err.count("skeletons_not_kept") == 1


def test_a_full_disk_while_keeping_is_no_failed_load(
    tmp_path: Path, plain: LoadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-written file goes, the model is served."""
    core = life(tmp_path / "kept")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "rename", full)
    core.load(plain, never)
    assert entries(tmp_path / "kept") == []


def test_no_name_means_no_store() -> None:
    """The default of a core on its own."""
    assert store_at("", ALLOW) is None


def test_the_least_recently_used_leave_and_old_pieces_of_killed_workers_too(
    tmp_path: Path, plain: LoadSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded in number; a piece that is being written now stays."""
    monkeypatch.setattr(skeleton_store, "KEPT", 2)
    folder = tmp_path / "kept"
    specs = [msgspec.structs.replace(plain, fingerprint=f"f{n}") for n in range(3)]
    for age, spec in enumerate(specs[:2]):
        life(folder).load(spec, never)
        for path in entries(folder):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 - age))
    assert "skeleton" not in steps(life(folder), specs[0]), "used now, so the second is the oldest"
    stale, fresh = folder / ".0.part", folder / ".1.part"
    for part in (stale, fresh):
        part.touch()
    os.utime(stale, (0, 0))
    life(folder).load(specs[2], never)
    assert not stale.exists()
    assert fresh.exists()
    assert "skeleton" not in steps(life(folder), specs[0])
    assert "skeleton" in steps(life(folder), specs[1])


def test_workers_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    """Eight at once in an empty folder: what one keeps, all can read."""
    found: list[bytes] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        found.append(SkeletonStore(tmp_path / "kept", ALLOW)._key)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["key"]


def test_two_workers_that_keep_the_same_model_at_once_leave_one_good_entry(tmp_path: Path, plain: LoadSpec) -> None:
    """Whole files replace whole files."""
    folder = tmp_path / "kept"
    stores = [SkeletonStore(folder, ALLOW) for _ in range(4)]
    drafts = [store.draft(plain, Skeleton(modules.Linear)) for store in stores]

    def keep(store: SkeletonStore, draft: skeleton_store.Draft) -> None:
        for _ in range(20):
            store.keep(draft, warm=True, writes=False)

    threads = [threading.Thread(target=keep, args=pair) for pair in zip(stores, filter(None, drafts), strict=True)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        spare = stores[0].take(plain)
        assert spare is None or (spare.warm and not spare.writes)
    for thread in threads:
        thread.join()
    assert len(entries(folder)) == 1
    assert stores[0].take(plain) is not None


def test_each_taker_gets_a_skeleton_of_its_own(tmp_path: Path, plain: LoadSpec) -> None:
    """Two mounts must never share a module."""
    life(tmp_path / "kept").load(plain, never)
    store = SkeletonStore(tmp_path / "kept", ALLOW)
    one, two = store.take(plain), store.take(plain)
    assert one is not None
    assert two is not None
    assert one.skeleton.module is not two.skeleton.module
    assert one.skeleton.cells[0].like is not two.skeleton.cells[0].like


def test_golden_values_are_those_of_plain_torch() -> None:
    """What the comparisons above rest on is computed without this code."""
    plain_module = randomised(modules.Linear)
    assert len(golden("Linear", plain_module)) == 1
