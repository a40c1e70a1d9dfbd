"""What compilers made, kept between lives of workers: by a key of everything it depends on, in a folder of ours.

Belongs here: entries, their integrity, their space. Never: torch, what an entry is for.
An entry is a folder that appears whole by a rename, with `about.json` naming its files' sizes and sha256. Code is run
from it, so nothing is taken that does not match. Several processes may share the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ABOUT: Final = "about.json"
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAKING: Final = ".making-"
_GONE: Final = ".gone-"
_LOCK: Final = ".lock"
_NEST: Final = ".nest-"


def key_of(kind: str, parts: Mapping[str, object]) -> str:
    """Name an entry: blake3 over the kind of artefact and all that it depends on. 64 hex digits."""
    return blake3(json.dumps([kind, parts], sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One artefact: its folder, the seconds it took to make, and what its maker wrote down."""

    folder: Path
    seconds: float
    facts: Mapping[str, Any]


class Artefacts:
    """The folder, with at most `size` bytes of entries; least recently used go first. Methods block.

    Raises `OSError` from a disk that does not do its part; the caller then does without.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"<Artefacts {self.used()} of {self._size} B>"

    @contextmanager
    def taken(self, key: str) -> Iterator[Entry | None]:
        """The entry, which nobody clears away meanwhile; None if there is none that is whole."""
        folder = self._folder / key
        try:
            about = os.open(folder / ABOUT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            fcntl.flock(about, fcntl.LOCK_SH)
            entry = _read(folder)
            if entry is None:
                self._drop(folder)
            else:
                os.utime(folder / ABOUT)
            yield entry
        finally:
            os.close(about)

    @contextmanager
    def making(self, key: str) -> Iterator[Path]:
        """An empty folder to make an entry in, alone: whoever else wants to make it waits. See `publish`."""
        lock = os.open(self._folder / f"{key}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._clear(f"{_MAKING}{key}-*")  # of a maker that was killed: its lock went with it
            making = self._folder / f"{_MAKING}{key}-{secrets.token_hex(4)}"
            making.mkdir(mode=0o700)
            try:
                yield making
            finally:
                shutil.rmtree(making, ignore_errors=True)
        finally:
            os.close(lock)

    def publish(self, key: str, made: Path, *, seconds: float, facts: Mapping[str, Any]) -> None:
        """Make what lies in `made` the entry, then make room."""
        files = {one.name: [one.stat().st_size, _sha256(one)] for one in sorted(made.iterdir()) if one.is_file()}
        about = {"seconds": seconds, "facts": dict(facts), "files": files}
        (made / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        for one in made.iterdir():
            descriptor = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._drop(self._folder / key)
        made.rename(self._folder / key)
        self.sweep()

    def nest(self) -> Path:
        """A folder for temporary files of this process, made anew each time; gone with a sweep after the process."""
        nest = self._folder / f"{_NEST}{secrets.token_hex(8)}"
        nest.mkdir(mode=0o700)
        descriptor = os.open(nest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # never let go: the lock is what says that the process lives
        return nest

    def used(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self._entries())

    def sweep(self) -> int:
        """Clear away the least recently used entries beyond the size, and what killed makers left; bytes freed."""
        self._clear(f"{_GONE}*")
        for nest in self._folder.glob(f"{_NEST}*"):
            if self._idle(nest):
                shutil.rmtree(nest, ignore_errors=True)
        for left in self._folder.glob(f"{_MAKING}*"):
            key = left.name.removeprefix(_MAKING)[:64]
            if self._idle(self._folder / f"{key}{_LOCK}"):
                shutil.rmtree(left, ignore_errors=True)
        entries = sorted(self._entries())
        over = sum(size for _, size, _ in entries) - self._size
        freed = 0
        for _, size, folder in entries:
            if freed >= over:
                break
            if self._idle(folder / ABOUT):
                self._drop(folder)
                freed += size
        return freed

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """When each was last used (ns), its bytes, its folder."""
        for folder in self._folder.iterdir():
            if not _KEY.fullmatch(folder.name):
                continue
            with suppress(OSError):
                size = sum(one.stat().st_size for one in folder.iterdir())
                yield (folder / ABOUT).stat().st_mtime_ns, size, folder

    @staticmethod
    def _idle(file: Path) -> bool:
        """Whether nobody holds a lock on it. A file that is gone is held by nobody."""
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    def _drop(self, folder: Path) -> None:
        """Take an entry away in one step, so that nobody finds half of it."""
        gone = self._folder / f"{_GONE}{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _clear(self, pattern: str) -> None:
        for left in self._folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _read(folder: Path) -> Entry | None:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        files, seconds, facts = about["files"], float(about["seconds"]), dict(about["facts"])
        if {one.name for one in folder.iterdir()} != {*files, ABOUT}:
            return None
        for name, (size, sha256) in files.items():
            path = folder / name
            if path.stat().st_size != size or _sha256(path) != sha256:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Entry(folder, seconds, facts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
