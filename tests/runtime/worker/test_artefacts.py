"""Kept artefacts: whole or not there, within their size, safe among processes."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from runtime.worker.artefacts import ABOUT, Artefacts, key_of

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = (key_of("test", {"n": n}) for n in range(3))


def make(kept: Artefacts, key: str, content: bytes = b"x" * 1000) -> None:
    """Make one entry."""
    with kept.making(key) as folder:
        (folder / "code").write_bytes(content)
        kept.publish(key, folder, seconds=2.5, facts={"n": 1})


def has(kept: Artefacts, key: str) -> bool:
    """Whether there is a whole entry."""
    with kept.taken(key) as entry:
        return entry is not None


def test_an_entry_is_there_with_all_that_was_said_of_it(tmp_path: Path) -> None:
    """Files, seconds, facts; nothing else is left in the folder but locks."""
    kept = Artefacts(tmp_path / "new", 1 << 20)
    assert not has(kept, A)
    make(kept, A)
    with kept.taken(A) as entry:
        assert entry is not None
        assert ((entry.folder / "code").read_bytes(), entry.seconds, entry.facts) == (b"x" * 1000, 2.5, {"n": 1})
    assert sorted(one.name for one in (tmp_path / "new").iterdir()) == sorted([A, f"{A}.lock"])


def test_keys_tell_apart_all_that_an_artefact_depends_on() -> None:
    """Any changed part gives another name; the order of parts does not."""
    assert len({A, B, C}) == 3
    assert key_of("k", {"a": 1, "b": [2]}) == key_of("k", {"b": [2], "a": 1})
    assert key_of("k", {"a": 1}) != key_of("l", {"a": 1})


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "extra", "about", "facts"])
def test_a_damaged_entry_is_not_there_and_is_cleared_away(tmp_path: Path, damage: str) -> None:
    """Code is run from entries: what does not match to the byte is never taken."""
    kept = Artefacts(tmp_path, 1 << 20)
    make(kept, A)
    file = tmp_path / A / "code"
    match damage:
        case "flip":
            file.write_bytes(b"y" + file.read_bytes()[1:])
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "gone":
            file.unlink()
        case "extra":
            (tmp_path / A / "more").write_bytes(b"")
        case "about":
            (tmp_path / A / ABOUT).write_bytes(b"{" * 2000)
        case _:
            about = json.loads((tmp_path / A / ABOUT).read_text())
            (tmp_path / A / ABOUT).write_text(json.dumps({**about, "files": {"../../etc/passwd": [1, "a"]}}))
    assert not has(kept, A)
    assert not (tmp_path / A).exists()
    make(kept, A)
    assert has(kept, A)


def test_the_least_recently_used_leave_when_it_gets_too_much(tmp_path: Path) -> None:
    """A use counts; a larger newcomer pushes two out; one larger than everything does not stay."""
    kept = Artefacts(tmp_path, 2600)
    make(kept, A)
    make(kept, B)
    assert has(kept, A)
    make(kept, C)
    assert [has(kept, key) for key in (A, B, C)] == [True, False, True]
    make(kept, B, b"z" * 2200)
    assert [has(kept, key) for key in (A, B, C)] == [False, True, False]
    make(kept, A, b"z" * 5000)
    assert kept.used() == 0


def test_what_is_in_use_is_not_cleared_away(tmp_path: Path) -> None:
    """An entry that somebody reads stays, whatever its age."""
    kept = Artefacts(tmp_path, 1300)
    make(kept, A)
    with kept.taken(A) as entry:
        assert entry is not None
        make(Artefacts(tmp_path, 1300), B)
        assert (entry.folder / "code").read_bytes() == b"x" * 1000
    kept.sweep()
    assert kept.used() <= 1300


def test_one_maker_at_a_time(tmp_path: Path) -> None:
    """A second maker waits for the first and finds its entry."""
    kept = Artefacts(tmp_path, 1 << 20)
    entered, found = threading.Event(), []

    def second() -> None:
        entered.set()
        with kept.making(A), kept.taken(A) as entry:
            found.append(entry is not None)

    with kept.making(A) as folder:
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        (folder / "code").write_bytes(b"1")
        kept.publish(A, folder, seconds=1, facts={})
    thread.join()
    assert found == [True]


def _half(folder: Path, ready: multiprocessing.synchronize.Event) -> None:
    with Artefacts(folder, 1 << 20).making(A) as making:
        (making / "code").write_bytes(b"half")
        ready.set()
        signal.pause()


def test_what_a_killed_maker_left_is_reclaimed(tmp_path: Path) -> None:
    """F24: its lock goes with it, and its half entry with the next sweep."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    maker = context.Process(target=_half, args=(tmp_path, ready))
    maker.start()
    assert ready.wait(60)
    kept = Artefacts(tmp_path, 1 << 20)
    kept.sweep()
    assert [*tmp_path.glob(".making-*")], "a living maker is left alone"
    assert maker.pid is not None
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()
    maker.close()
    kept.sweep()
    assert not [*tmp_path.glob(".making-*")]
    make(kept, A)
    assert has(kept, A)


def _nesting(folder: Path, ready: multiprocessing.synchronize.Event) -> None:
    (Artefacts(folder, 1 << 20).nest() / "unpacked").write_bytes(b"x")
    ready.set()
    signal.pause()


def test_temporary_files_of_a_killed_process_are_cleared_away(tmp_path: Path) -> None:
    """They stay as long as it lives, whatever sweeps meanwhile."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    owner = context.Process(target=_nesting, args=(tmp_path, ready))
    owner.start()
    assert ready.wait(60)
    kept = Artefacts(tmp_path, 1 << 20)
    kept.sweep()
    assert [*tmp_path.glob(".nest-*/unpacked")]
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    owner.close()
    kept.sweep()
    assert not [*tmp_path.iterdir()]


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """An exception inside `making` takes the folder along and lets the next one in."""
    kept = Artefacts(tmp_path, 1 << 20)

    def fail() -> None:
        with kept.making(A) as folder:
            (folder / "code").write_bytes(b"1")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert [one.name for one in tmp_path.iterdir()] == [f"{A}.lock"]
    with (tmp_path / f"{A}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
