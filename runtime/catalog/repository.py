"""Which model directories there are, which are complete, and why the others are not.

Belongs here: scanning and the rules of completeness. Never: hashing or moving weights (`tiers.disk`), or torch.
One bad directory never hides another. All of it blocks, so it is called through `Offload`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Final, TypeAlias

from actors.errors import UnknownModel
from actors.residency.model import key_of
from runtime.catalog.examine import Examined, State, examine, stamp
from runtime.catalog.manifest import FILE_NAME
from runtime.catalog.record import ModelRecord, load_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Change", "ModelRecord", "Repository", "Source", "State", "load_spec", "version_order"]

MOST_DIRECTORIES: Final = 20_000
"""Directories that one scan looks at; the rest is not served."""

Order: TypeAlias = tuple[tuple[tuple[int, int, str], ...], bool, tuple[tuple[int, int, str], ...], str]


@dataclass(frozen=True, slots=True)
class Source:
    """A model directory named in the configuration; its manifest must say the same name and version."""

    name: str
    directory: Path
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What a scan found different.

    `label` is `name@version`, or the directory's own name while there is no manifest that can be read.
    `record` is what the directory serves now, `was` what it served before.
    """

    label: str
    state: State
    reason: str = ""
    record: ModelRecord | None = None
    was: ModelRecord | None = None


@dataclass(slots=True)
class _Place:
    """What is known of one directory. `serving` outlives a bad or half-written replacement until it is gone."""

    source: Source | None
    examined: Examined
    serving: ModelRecord | None = None
    shown: tuple[State, str, str] | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """One directory as the repository sees it, for people."""

    label: str
    state: State
    reason: str
    record: ModelRecord | None = field(default=None)


class Repository:
    """Model directories under some roots, and those named one by one.

    A root's children that hold a manifest are model directories; a child without one may hold its versions in
    directories of their own. Files may be symbolic links as long as they end inside the directory, a root, or one
    of `allowed`; `refusal` says why an address that files come from may not be used. `refresh` compares stat values
    only, so it is cheap enough to call every second or so.
    """

    def __init__(
        self,
        roots: tuple[Path, ...],
        entries: tuple[Source, ...] = (),
        *,
        allowed: tuple[Path, ...] = (),
        refusal: Callable[[Mapping[str, str]], str] = lambda _: "",
    ) -> None:
        self._roots = roots
        self._refusal = refusal
        self._entries = entries
        self._allowed = (*roots, *allowed)
        self._places: dict[Path, _Place] = {}
        self._names: dict[str, dict[str, ModelRecord]] = {}
        self._unread: dict[Path, str] = {}
        self._told: dict[Path, str] = {}
        self._lock = RLock()

    def refresh(self) -> tuple[Change, ...]:
        """Look again at every directory whose files changed since, and return what is different."""
        allowed = tuple(path for root in self._allowed if (path := _resolved(root)))
        with self._lock:
            found = dict(self._directories())
            gone = [self._gone(path) for path in [*self._places] if path not in found]
            for path, source in found.items():
                self._look(path, source, allowed)
            return (*gone, *self._reading(), *self._settle(found))

    def find(self, name: str, version: str | None = None) -> ModelRecord:
        """Find what is served; no version means the highest. Raises `UnknownModel`."""
        versions = self._names.get(name)
        if not versions:
            raise UnknownModel("no such model", model=name)
        if version is None:
            return versions[max(versions, key=version_order)]
        if version not in versions:
            raise UnknownModel("the model has no such version", model=name)
        return versions[version]

    def names(self) -> tuple[str, ...]:
        """Names of all models that are served, sorted."""
        return tuple(sorted(self._names))

    def records(self) -> tuple[ModelRecord, ...]:
        """Everything that is served, by name and version."""
        names = self._names
        return tuple(
            names[name][version] for name in sorted(names) for version in sorted(names[name], key=version_order)
        )

    def listing(self) -> tuple[Listing, ...]:
        """Every directory with its state, the bad and the unfinished ones included."""
        with self._lock:
            shown = [(place, place.shown) for place in self._places.values() if place.shown]
            return tuple(Listing(place.label, state[0], state[1], place.serving) for place, state in shown)

    def _directories(self) -> Iterator[tuple[Path, Source | None]]:
        for entry in self._entries:
            yield entry.directory, entry
        named = {entry.directory for entry in self._entries}
        left = MOST_DIRECTORIES
        for root in self._roots:
            for path in self._below(root):
                left -= 1
                if left < 0:
                    return
                if path in named:
                    continue
                versions = () if (path / FILE_NAME).is_file() else self._versions(path)
                for each in versions or (path,):
                    yield each, None

    def _below(self, folder: Path) -> Iterable[Path]:
        """The directories in a folder; those known before if it cannot be read now.

        A file server that hiccups, or a process short of descriptors, must not look like a folder without models.
        """
        try:
            found = _children(folder)
        except OSError as error:
            self._unread[folder] = os.strerror(error.errno or 0)
            return [path for path in self._places if folder in path.parents]
        self._unread.pop(folder, None)
        return found

    def _versions(self, path: Path) -> tuple[Path, ...]:
        return tuple(child for child in self._below(path) if (child / FILE_NAME).is_file())

    def _reading(self) -> Iterator[Change]:
        """Say once that a folder cannot be read, and once that it can be again."""
        for folder, reason in self._unread.items():
            if self._told.get(folder) != reason:
                yield Change(_named(folder), State.REJECTED, f"the folder cannot be read: {reason}")
        for folder in self._told.keys() - self._unread.keys():
            yield Change(_named(folder), State.ADMITTED, "the folder can be read again")
        self._told = dict(self._unread)

    def _look(self, path: Path, source: Source | None, allowed: Sequence[Path]) -> None:
        place = self._places.get(path)
        known = place.examined if place is not None else None
        if known is not None and not known.passing and known.stamp == stamp(path, known.manifest):
            return
        # A directory named in the configuration may lie, or link, anywhere; one that was only found may not.
        own = _resolved(path) if source is not None else None
        examined = examine(path, (own, *allowed) if own else allowed, self._refusal)
        if place is None:
            self._places[path] = _Place(source, examined)
        else:
            place.examined = examined

    def _gone(self, path: Path) -> Change:
        place = self._places.pop(path)
        return Change(place.label, State.REMOVED, "the directory is gone", was=place.serving)

    def _settle(self, order: Mapping[Path, Source | None]) -> Iterator[Change]:
        """Give each name and version to the first directory that has it, and say what that changed."""
        names: dict[str, dict[str, ModelRecord]] = {}
        for path in order:
            place = self._places[path]
            was = place.serving
            state, reason = self._verdict(place, names)
            if state is State.ADMITTED:
                place.serving = place.examined.record
            elif place.examined.withdrawn or (was and was.version in names.get(was.name, {})):
                place.serving = None
            if place.serving is not None:
                names.setdefault(place.serving.name, {})[place.serving.version] = place.serving
            change = self._change(path, place, state, reason, was)
            if change is not None:
                yield change
        self._names = names

    def _verdict(self, place: _Place, taken: dict[str, dict[str, ModelRecord]]) -> tuple[State, str]:
        record, source = place.examined.record, place.source
        if record is None:
            return place.examined.state, place.examined.reason
        if source is not None and source.name != record.name:
            return State.REJECTED, f"the manifest's name is {record.name}, the configuration's is {source.name}"
        if source is not None and source.version not in {None, record.version}:
            return State.REJECTED, f"the manifest's version is {record.version}, the configuration's {source.version}"
        if record.version in taken.get(record.name, {}):
            return State.REJECTED, f"{record.key} is already there from another directory"
        return State.ADMITTED, ""

    def _change(self, path: Path, place: _Place, state: State, reason: str, was: ModelRecord | None) -> Change | None:
        fingerprint = place.examined.record.fingerprint if place.examined.record else ""
        shown = (state, reason, fingerprint)
        if shown == place.shown and was is place.serving:
            return None
        place.shown = shown
        place.label = _label(path, place)
        return Change(place.label, state, reason, place.serving, was)

    def __repr__(self) -> str:
        return f"<Repository {len(self._names)} models in {len(self._places)} directories>"


def version_order(version: str) -> Order:
    """Order versions as people do: numbers as numbers, and what follows a first dash comes before the plain version."""
    core, dash, suffix = version.partition("-")
    return _parts(core), not dash, _parts(suffix), version


def _label(path: Path, place: _Place) -> str:
    """Name a directory for people: by its manifest as far as it has one, else by the configuration or itself."""
    if place.examined.manifest is not None:
        return key_of(place.examined.manifest.name, place.examined.manifest.version)
    if place.serving is not None:
        return place.serving.key
    return place.source.name if place.source else ascii(path.name)[1:-1][:128]


def _parts(text: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[^\d._]+", text))


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None


def _children(root: Path) -> list[Path]:
    """Directories under a root, sorted; hidden ones (`..data`, `.git`) are how files got there, not models.

    None for a root that is not there. Raises `OSError` for one that cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            found = sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_directory(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [root / name for name in found[:MOST_DIRECTORIES]]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def _named(folder: Path) -> str:
    return ascii(folder.name)[1:-1][:128]
