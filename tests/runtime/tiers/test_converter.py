"""Promises of the jailed converter: weights come out right, and nothing in a pickle ever runs."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from actors.errors import CorruptWeights, LoadFailed
from runtime.catalog.record import load_spec
from runtime.tiers import convert
from runtime.tiers.convert import Options, converting
from runtime.tiers.disk import DiskStore
from runtime.tiers.index import read_index
from runtime.worker.convert import Job, Outcome, check_before_loading
from runtime.worker.convert import convert as convert_here
from tests.runtime.catalog.directories import pickled

torch.set_num_threads(1)
QUOTA = 1 << 30
PLAIN = Options()


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def converted(folder: Path, content: bytes, options: Options = PLAIN, timeout: float = 120) -> Outcome:
    """Run the real converter on these bytes; the result is `folder/out`."""
    (folder / "in").write_bytes(content)
    steps = converting(folder / "in", folder / "out", options, folder=folder, timeout=timeout)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def here(folder: Path, content: bytes, **options: Any) -> Outcome:
    """The same work in this process, which saves importing torch once more."""
    (folder / "in").write_bytes(content)
    job = Job(str(folder / "in"), str(folder / "out"), 4 * len(content) + (1 << 20), **options)
    check_before_loading(job)
    return convert_here(job)


def test_every_kind_of_tensor_comes_through(tmp_path: Path) -> None:
    """Dtypes, scalars, empty, transposed, sliced and tied tensors, nested dicts and parameters keep name and value.

    The jail around it reports whether it could cut the network; as root it has to.
    """
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    embedding = torch.nn.Parameter(torch.randn(5, 3))
    state = {
        "f32": base,
        "transposed": base.t(),
        "slice": base[2:4],
        "bf16": torch.randn(3).bfloat16(),
        "i64": torch.arange(4),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3),
        "embedding": embedding,
        "head": embedding,
        "inner": {"deep": {"w": torch.ones(2)}},
        "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    }
    outcome = converted(tmp_path, saved(state))
    assert outcome.network == "isolated" if os.geteuid() == 0 else outcome.network in {"isolated", "shared"}
    found = load_file(tmp_path / "out")
    assert found.keys() == (state.keys() - {"inner", "head"}) | {"inner.deep.w"}
    for name in found.keys() - {"inner.deep.w"}:
        assert torch.equal(found[name], state[name].detach().resolve_conj()), name
    index = read_index(tmp_path / "out")
    assert index.aliases == {"head": "embedding"}
    assert index.entries["head"] == index.entries["embedding"]
    assert (outcome.tensors, outcome.aliases) == (11, 1)
    assert outcome.size == index.total


def test_the_state_dict_is_picked_and_prefixes_are_renamed(tmp_path: Path) -> None:
    """`state_dict` walks into a training checkpoint; the longest matching prefix is replaced once."""
    state = {"module.a.w": torch.ones(1), "module.b": torch.zeros(1), "c": torch.zeros(2)}
    content = saved({"epoch": 3, "model": {"ema": state}, "optimizer": {"lr": 0.1}})
    here(tmp_path, content, state_dict="model.ema", rename={"module.": "", "module.a.": "first."})
    assert set(load_file(tmp_path / "out")) == {"first.w", "b", "c"}


def test_a_legacy_file_is_read(tmp_path: Path) -> None:
    """Files of torch < 1.6 are a bare pickle stream without a zip around it."""
    here(tmp_path, saved({"w": torch.arange(3.0)}, _use_new_zipfile_serialization=False))
    assert load_file(tmp_path / "out")["w"].tolist() == [0, 1, 2]


class Evil:
    """Its pickle asks for a command to be run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path, form: str) -> None:
    """F11, S5: refused by name of what it wants, in every container; the side effect's file is absent."""
    evil = {"w": torch.ones(1), "x": Evil(tmp_path / "touched")}
    if form == "bare":
        content = pickle.dumps(evil["x"], protocol=2)
    else:
        content = saved(evil, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CorruptWeights) as caught:
        (converted if form == "zip" else here)(tmp_path, content)
    if form != "bare":
        assert "posix.system" in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "out").exists()


def bomb() -> bytes:
    """A compressed zip that declares 64 MB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", saved({}))
        archive.writestr("archive/data/0", bytes(64 << 20))
    return buffer.getvalue()


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name, b"x")
    return buffer.getvalue()


def scripted() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer)
    return buffer.getvalue()


CYCLE: dict[str, object] = {}
CYCLE["again"] = CYCLE

REFUSED = {
    "F12 zip bomb": (bomb, "zip bomb: 6"),
    "F12 small compressed zip": (lambda: repacked(saved({"w": torch.randn(64)})), "compressed|zip bomb"),
    "F12 a stride of zero": (lambda: saved({"w": torch.zeros(1).expand(1 << 40)}), "over the limit"),
    "F13 TorchScript": (scripted, "TorchScript"),
    "F14 html": (lambda: b"<html><body>Not found</body></html>", "looks like html"),
    "F14 xml": (lambda: b"<?xml version='1.0'?><Error/>", "looks like xml"),
    "F14 empty": (lambda: b"", "an empty file"),
    "F20 zip slip": (lambda: archive("a/data.pkl", "../../x"), "leaves it"),
    "another zip": (lambda: archive("a/readme.txt"), "without data.pkl"),
    "a truncated zip": (lambda: saved({"w": torch.ones(64)})[:-40], "truncated or damaged zip"),
    "a damaged pickle": (
        lambda: saved({"w": torch.ones(64)}).replace(b"torch._utils", b"torch._xxxxx"),
        "not weights|d",
    ),
    "nothing in it": (lambda: saved({}), "no tensors"),
    "a tensor alone": (lambda: saved(torch.ones(1)), "is a Tensor, not a dict"),
    "a training checkpoint": (lambda: saved({"epoch": 1, "model": {"w": torch.ones(1)}}), r"'epoch' is a int.*'model'"),
    "a key that is a number": (lambda: saved({1: torch.ones(1)}), "key of type int"),
    "a cycle": (lambda: saved(CYCLE), "nested deeper"),
    "a sparse tensor": (lambda: saved({"w": torch.eye(2).to_sparse()}), "not a plain tensor|not weights"),
    "F7 a bad name": (lambda: saved({"../x": torch.ones(1)}), "looks like a path"),
    "two names that collide": (lambda: saved({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}), "two tensors"),
}


def repacked(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_a_state_dict_is_refused_in_words(tmp_path: Path, make: Any, words: str) -> None:
    """F12-F14, F20, R40: each kind of wrong file is named; nothing is written."""
    with pytest.raises(CorruptWeights, match=words) as caught:
        here(tmp_path, make())
    assert str(tmp_path) not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_missing_state_dict_names_what_there_is(tmp_path: Path) -> None:
    """The hint lists the dicts at the place where the path breaks off."""
    with pytest.raises(CorruptWeights, match=r"no 'net' \(candidates: 'model'\)"):
        here(tmp_path, saved({"model": {"w": torch.ones(1)}}), state_dict="net.x")


def test_a_converter_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """The time limit is the parent's; afterwards no process and no folder is left."""
    with pytest.raises(LoadFailed, match=r"not converted within 0\.1 s"):
        converted(tmp_path, saved({"w": torch.ones(1)}), timeout=0.1)
    assert not [child for child in psutil.Process().children() if "runtime.worker.convert" in child.cmdline()]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


PARENT = """
import sys
from pathlib import Path
from runtime.tiers.convert import Options, converting
folder = Path(sys.argv[1])
steps = converting(folder / "in", folder / "out", Options(), folder=folder)
next(steps)
print("started", flush=True)
sys.stdin.read()
"""


def test_the_converter_dies_with_its_parent(tmp_path: Path) -> None:
    """After kill -9 of the parent no converter stays; it would hold memory and write into our cache."""
    (tmp_path / "in").write_bytes(saved({"w": torch.ones(1)}))
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        gone, _ = psutil.wait_procs(children, timeout=10)
    assert len(gone) == 1


def test_the_converter_sees_no_environment_of_ours(tmp_path: Path) -> None:
    """Credentials and proxies of the server never reach the process that reads a hostile file."""
    environment = convert._environment(str(tmp_path))
    assert not environment.keys() & {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "https_proxy", "PATH"}
    assert environment["HOME"] == environment["TMPDIR"] == str(tmp_path)


def test_the_disk_tier_converts_once(tmp_path: Path) -> None:
    """A .pth becomes a safetensors blob keyed by source and options; the second admission starts no converter."""
    state = {"w": torch.arange(4.0), "tied": torch.ones(2)}
    state["also"] = state["tied"]
    model = pickled(tmp_path / "m", saved(state))
    store = DiskStore(tmp_path / "cache", QUOTA)
    path = store.admit(model)
    index = read_index(path)
    assert index.aliases == {"also": "tied"}
    assert path.stat().st_mode & 0o777 == 0o444
    assert load_spec(model, path).weights_bytes == path.stat().st_size
    again = DiskStore(tmp_path / "cache", QUOTA).begin(model)
    assert again.step()
    assert again.path == path
    again.undo()
    assert not list((tmp_path / "cache" / "staging").iterdir())


def test_undoing_an_admission_ends_its_converter(tmp_path: Path) -> None:
    """Nobody wants it any more: process, temporary files and claim are gone when `undo` returns."""
    model = pickled(tmp_path / "m", saved({"w": torch.ones(4)}))
    store = DiskStore(tmp_path / "cache", QUOTA)
    admission = store.begin(model)
    while not (running := [each for each in psutil.Process().children() if "runtime.worker.convert" in each.cmdline()]):
        assert not admission.step()
    admission.undo()
    assert not psutil.wait_procs(running, timeout=0)[1]
    assert not list((tmp_path / "cache" / "staging").iterdir())
    assert store.snapshot().blobs == 0


def test_options_are_part_of_the_key(tmp_path: Path) -> None:
    """The same file read differently is another blob."""
    content = saved({"m.w": torch.arange(4.0)})
    store = DiskStore(tmp_path / "cache", QUOTA)
    plain = store.admit(pickled(tmp_path / "a", content))
    renamed = store.admit(pickled(tmp_path / "b", content, rename={"m.": ""}))
    assert [list(read_index(path).entries) for path in (plain, renamed)] == [["m.w"], ["w"]]


def test_a_pickle_whose_bytes_are_not_the_manifests_is_never_read(tmp_path: Path) -> None:
    """F16: the hash is checked before the converter starts; nothing is left of it."""
    model = pickled(tmp_path / "m", saved({"w": torch.ones(4)}))
    content = bytearray(model.weights.read_bytes())
    content[100] ^= 1
    model.weights.write_bytes(content)
    with pytest.raises(CorruptWeights, match="sha256"):
        DiskStore(tmp_path / "cache", QUOTA).admit(model)
    assert not list((tmp_path / "cache" / "staging").iterdir())
