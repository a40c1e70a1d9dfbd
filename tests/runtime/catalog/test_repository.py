"""Promises of the repository: only complete directories are served, and each bad one is its own problem."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from actors.errors import UnknownModel
from runtime.catalog.manifest import FILE_NAME
from runtime.catalog.repository import Repository, Source, State, version_order
from tests.runtime.catalog.directories import model, weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def states(repository: Repository) -> dict[str, State]:
    return {change.label: change.state for change in repository.refresh()}


def reasons(repository: Repository) -> str:
    return "\n".join(change.reason for change in repository.refresh())


def test_one_bad_manifest_does_not_hide_the_others(tmp_path: Path) -> None:
    """R22: with an empty, a broken and a binary manifest among five, the others are served and these reported."""
    for number in range(5):
        model(tmp_path / f"m{number}", seed=number, name=f"m{number}")
    (tmp_path / "m1" / FILE_NAME).write_bytes(b"")
    (tmp_path / "m2" / FILE_NAME).write_text("name: [", "utf-8")
    (tmp_path / "m3" / FILE_NAME).write_bytes(b"\xff\xfe\0")
    repository = Repository((tmp_path,))
    found = states(repository)
    assert found == {
        "m0@1": State.ADMITTED,
        "m1": State.REJECTED,
        "m2": State.REJECTED,
        "m3": State.REJECTED,
        "m4@1": State.ADMITTED,
    }
    assert repository.names() == ("m0", "m4")
    assert [row.label for row in repository.listing()] == ["m0@1", "m1", "m2", "m3", "m4@1"]


def test_a_directory_being_copied_is_pending_until_its_last_byte(tmp_path: Path) -> None:
    """F15, R35, T9: at each stage of a slow copy nothing is served; when it is whole, it is, without a restart."""
    model(tmp_path / "source")
    content = (tmp_path / "source" / "model.safetensors").read_bytes()
    target = tmp_path / "root" / "m"
    target.mkdir(parents=True)
    repository = Repository((tmp_path / "root",))
    assert states(repository) == {"m": State.PENDING}
    shutil.copy(tmp_path / "source" / FILE_NAME, target)
    assert "model.safetensors is missing" in reasons(repository)
    for size in (0, 1, len(content) - 1):
        (target / "model.safetensors").write_bytes(content[:size])
        assert f"model.safetensors has {size} of {len(content)} bytes" in reasons(repository)
        with pytest.raises(UnknownModel):
            repository.find("tiny")
    (target / "model.safetensors").write_bytes(content)
    assert states(repository) == {"tiny@1": State.ADMITTED}
    assert repository.find("tiny").directory == target


def test_a_missing_blob_of_a_snapshot_is_listed(tmp_path: Path) -> None:
    """R38: a snapshot whose link leads nowhere is incomplete, by name."""
    model(tmp_path / "root" / "m")
    weights_file = tmp_path / "root" / "m" / "model.safetensors"
    weights_file.unlink()
    weights_file.symlink_to("../blobs/gone")
    repository = Repository((tmp_path / "root",))
    assert reasons(repository) == "incomplete: model.safetensors is missing"


def test_an_unchanged_repository_reports_nothing(tmp_path: Path) -> None:
    """A second look changes nothing: not even the record object is made again."""
    model(tmp_path / "m")
    repository = Repository((tmp_path,))
    assert len(repository.refresh()) == 1
    record = repository.find("tiny")
    assert repository.refresh() == ()
    assert repository.find("tiny") is record


def test_changed_weights_are_a_new_fingerprint_and_changed_labels_are_not(tmp_path: Path) -> None:
    """The change carries the record before and after, so that the owner can reload or leave it."""
    model(tmp_path / "m")
    repository = Repository((tmp_path,))
    repository.refresh()
    first = repository.find("tiny")
    model(tmp_path / "m", labels={"a": "b"})
    (change,) = repository.refresh()
    assert change.record is not None
    assert change.record.fingerprint == first.fingerprint
    model(tmp_path / "m", seed=1)
    (change,) = repository.refresh()
    assert (change.state, change.was is not None) == (State.ADMITTED, True)
    assert repository.find("tiny").fingerprint != first.fingerprint


def test_a_broken_replacement_leaves_the_old_model_known(tmp_path: Path) -> None:
    """A failed reload keeps the old one; the report says what is wrong; taking the manifest away ends it."""
    model(tmp_path / "m")
    repository = Repository((tmp_path,))
    repository.refresh()
    first = repository.find("tiny")
    (tmp_path / "m" / FILE_NAME).write_text("name: x\n", "utf-8")
    (change,) = repository.refresh()
    assert (change.label, change.state) == ("tiny@1", State.REJECTED)
    assert repository.find("tiny") is first
    (tmp_path / "m" / FILE_NAME).unlink()
    (change,) = repository.refresh()
    assert (change.state, change.was, change.record) == (State.PENDING, first, None)
    with pytest.raises(UnknownModel):
        repository.find("tiny")


def test_a_removed_directory_is_reported_once(tmp_path: Path) -> None:
    """Its models are unknown at once."""
    model(tmp_path / "m")
    repository = Repository((tmp_path,))
    repository.refresh()
    shutil.rmtree(tmp_path / "m")
    assert states(repository) == {"tiny@1": State.REMOVED}
    assert repository.refresh() == ()
    assert repository.names() == ()


def test_a_swapped_data_link_is_noticed_once(tmp_path: Path) -> None:
    """R30: a mounted ConfigMap changes by renaming `..data`; that is one change, and never a mixture."""
    folder = tmp_path / "root" / "m"
    for generation in (1, 2):
        model(folder / f"..{generation}", seed=generation)
    (folder / "..data").symlink_to("..1")
    for name in (FILE_NAME, "model.safetensors"):
        (folder / name).symlink_to(f"..data/{name}")
    repository = Repository((tmp_path / "root",))
    assert states(repository) == {"tiny@1": State.ADMITTED}
    first = repository.find("tiny").fingerprint
    (folder / "..next").symlink_to("..2")
    (folder / "..next").rename(folder / "..data")
    assert states(repository) == {"tiny@1": State.ADMITTED}
    assert repository.refresh() == ()
    assert repository.find("tiny").fingerprint != first


def test_links_may_end_inside_an_allowed_root_only(tmp_path: Path) -> None:
    """F18: the Hugging Face layout of links into `blobs` is served; a link out of everything is refused."""
    hub = tmp_path / "hub"
    snapshot = hub / "snapshots" / "m"
    model(snapshot)
    (hub / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(hub / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert "out of the allowed" in reasons(Repository((hub / "snapshots",)))
    assert states(Repository((hub / "snapshots",), allowed=(hub,))) == {"tiny@1": State.ADMITTED}
    assert states(Repository((), (Source("tiny", snapshot),), allowed=(hub,))) == {"tiny@1": State.ADMITTED}


def test_a_found_directory_may_not_be_a_link_out_and_a_named_one_may(tmp_path: Path) -> None:
    """F18: whoever can write into a root cannot make the server look elsewhere; the configuration can."""
    model(tmp_path / "elsewhere")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "m").symlink_to(tmp_path / "elsewhere")
    assert "out of the allowed" in reasons(Repository((tmp_path / "root",)))
    named = (Source("tiny", tmp_path / "root" / "m"),)
    assert states(Repository((tmp_path / "root",), named)) == {"tiny@1": State.ADMITTED}


def test_a_loop_of_links_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """F18: loops among files, as the manifest, and as a directory."""
    model(tmp_path / "a", name="a")
    (tmp_path / "a" / "model.safetensors").unlink()
    (tmp_path / "a" / "model.safetensors").symlink_to("model.safetensors")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / FILE_NAME).symlink_to(FILE_NAME)
    (tmp_path / "c").symlink_to("c")
    repository = Repository((tmp_path,))
    assert {change.label: (change.state, change.reason) for change in repository.refresh()} == {
        "a@1": (State.REJECTED, "model.safetensors: a loop of links"),
        "b": (State.REJECTED, "the manifest cannot be read: a loop of links"),
    }


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """A FIFO or a directory in place of weights or manifest never blocks a scan."""
    model(tmp_path / "a", name="a")
    (tmp_path / "a" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "a" / "model.safetensors")
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / FILE_NAME)
    (tmp_path / "c" / FILE_NAME).mkdir(parents=True)
    found = {change.label: change.reason for change in Repository((tmp_path,)).refresh()}
    assert found["a@1"] == "model.safetensors is not a regular file"
    assert found["b"] == "the manifest is not a regular file"
    assert "manifest" in found["c"]


def test_the_same_version_twice_is_served_once(tmp_path: Path) -> None:
    """The first directory by name wins, the second is told; when the first goes, the second takes over."""
    model(tmp_path / "a", seed=1)
    model(tmp_path / "b", seed=2)
    repository = Repository((tmp_path,))
    assert [change.state for change in repository.refresh()] == [State.ADMITTED, State.REJECTED]
    assert repository.find("tiny").directory == tmp_path / "a"
    shutil.rmtree(tmp_path / "a")
    repository.refresh()
    assert repository.find("tiny").directory == tmp_path / "b"


def test_versions_may_lie_in_directories_of_their_own(tmp_path: Path) -> None:
    """`root/name/version/foreload.yaml`; no version asked for means the highest."""
    for version in ("1", "2", "10", "10-rc1"):
        model(tmp_path / "m" / version, version=version)
    repository = Repository((tmp_path,))
    assert len(repository.refresh()) == 4
    assert repository.find("tiny").version == "10"
    assert repository.find("tiny", "2").version == "2"
    assert [record.version for record in repository.records()] == ["1", "2", "10-rc1", "10"]
    with pytest.raises(UnknownModel, match="version"):
        repository.find("tiny", "3")


def test_an_entry_must_agree_with_its_manifest(tmp_path: Path) -> None:
    """A name or version in the configuration that the manifest does not have is said, not guessed around."""
    model(tmp_path / "m")
    assert "manifest's name is tiny" in reasons(Repository((), (Source("other", tmp_path / "m"),)))
    assert "manifest's version is 1" in reasons(Repository((), (Source("tiny", tmp_path / "m", "2"),)))
    assert states(Repository((tmp_path,), (Source("tiny", tmp_path / "m", "1"),))) == {"tiny@1": State.ADMITTED}


def test_missing_roots_and_entries_are_pending_not_fatal(tmp_path: Path) -> None:
    """A volume that is not mounted yet does not stop the server."""
    repository = Repository((tmp_path / "none",), (Source("m", tmp_path / "absent"),))
    assert states(repository) == {"m": State.PENDING}
    model(tmp_path / "absent", name="m")
    assert states(repository) == {"m@1": State.ADMITTED}


@contextmanager
def without_descriptors() -> Iterator[None]:
    """As when too many connections are open: nothing can be opened, while `stat` still works."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_cannot_be_read_now_keeps_its_models(tmp_path: Path) -> None:
    """F39, and a file server that hiccups: said once, served on, and looked at again as soon as it can be."""
    model(tmp_path / "m", name="m")
    model(tmp_path / "versions" / "2", name="v", version="2")
    repository = Repository((tmp_path,))
    assert states(repository) == {"m@1": State.ADMITTED, "v@2": State.ADMITTED}
    with without_descriptors():
        told = repository.refresh()
        again = repository.refresh()
        assert repository.names() == ("m", "v")
    assert [(change.state, change.reason) for change in told] == [
        (State.REJECTED, "the folder cannot be read: Too many open files")
    ]
    assert again == ()
    assert {change.reason for change in repository.refresh()} == {"the folder can be read again"}
    assert repository.refresh() == ()
    shutil.rmtree(tmp_path / "m")
    assert states(repository) == {"m@1": State.REMOVED}


def test_a_manifest_that_could_not_be_read_is_read_the_next_time(tmp_path: Path) -> None:
    """Although nothing about its file changes by then."""
    repository = Repository((), (Source("m", tmp_path / "m"),))
    model(tmp_path / "m", name="m")
    with without_descriptors():
        assert "Too many open files" in reasons(repository)
    assert states(repository) == {"m@1": State.ADMITTED}


@pytest.mark.parametrize("name", ["..", "../m", "m/../m", "", "\0", "x" * 5000, "CON", "m."])
def test_a_name_is_a_key_and_never_a_path(tmp_path: Path, name: str) -> None:
    """F19: lookup touches no file, whatever is asked."""
    model(tmp_path / "m")
    repository = Repository((tmp_path,))
    repository.refresh()
    with pytest.raises(UnknownModel):
        repository.find(name)


def test_versions_are_ordered_as_people_do() -> None:
    """Numbers compare as numbers, a suffix after a dash comes before the plain version."""
    ordered = ["1", "1.2", "1.9", "1.10", "2-rc1", "2-rc2", "2", "2.0.1", "10", "2024-01"]
    shuffled = sorted(ordered, key=lambda version: version[::-1])
    assert sorted(shuffled, key=version_order) == ordered


def test_reasons_hold_no_paths_of_this_machine(tmp_path: Path) -> None:
    """Reasons reach clients through the index; they name files relative to the model."""
    for number, content in enumerate([b"", b"name: [", b"\xff", b"a: &a [*a]", b"x" * (1 << 21)]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / FILE_NAME).write_bytes(content)
    weights(tmp_path / "9" / "model.safetensors")
    for change in Repository((tmp_path,)).refresh():
        assert str(tmp_path) not in change.reason
        assert change.reason
