"""Skeletons that outlive their worker: local pickles that we wrote ourselves, so that the next worker builds nothing.

Belongs here: what may be kept, how it is proven ours, when it is stale. Never: weights, anything fetched, anything from
a model's folder. A pickle is code, so none is read that does not carry our keyed digest; what is damaged, foreign or
stale is left out and built again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import platform
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from runtime.worker.shelf import HEAVY, Spare
from runtime.worker.skeleton import Skeleton
from runtime.workers.device_loop import report

if TYPE_CHECKING:
    from torch import nn

    from runtime.worker.skeleton import Cell
    from runtime.workers.port import LoadSpec

FORMAT = 1
"""Changes with whatever `Skeleton` expects of a module."""
KEPT = 512
"""Entries of all workers together; least recently used go first."""
LARGEST = 16 << 20
"""Bytes of one entry."""
_DIGEST = 32
_KEY = "key"
_STALE_PART = 3600.0
_BY_VERSION = ("torch.", "builtins")
"""Modules whose code is told by the versions in an entry's name."""


class Source(msgspec.Struct, frozen=True):
    """One file of Python that a skeleton came of, as it was then."""

    path: str
    size: int
    modified: int
    changed: int


class _Entry(msgspec.Struct, frozen=True):
    skeleton: bytes
    sources: tuple[Source, ...]
    warm: bool
    writes: bool


_entries = msgspec.msgpack.Decoder(_Entry)


class Draft(NamedTuple):
    """A pickled skeleton that is not kept yet: how its first forward goes is not known."""

    name: str
    skeleton: bytes
    sources: tuple[Source, ...]


class SkeletonStore:
    """Entries below `folder` for workers that may run the modules of `allow`; shared by processes.

    What workers of another `allow` wrote is not readable here: a skeleton names code to run. Raises `OSError` if the
    folder can't be used or is not ours alone. Methods never raise; what fails is not kept.
    """

    def __init__(self, folder: Path, allow: tuple[str, ...]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._allow = allow
        self._began = time.time_ns()
        self._key = hashlib.blake2b(repr(allow).encode(), key=_key(folder), digest_size=_DIGEST).digest()

    def __repr__(self) -> str:
        return f"<SkeletonStore for {len(self._allow)} modules>"

    # -- taking --------------------------------------------------------------------------------------

    def take(self, spec: LoadSpec) -> Spare | None:
        """A skeleton of our own for these weights; None if there is none, or none that still holds."""
        name = self._name(spec)
        entry = self._read(name)
        if entry is None:
            return None
        if any(_source(Path(one.path)) != one for one in entry.sources):
            return None  # another edition of its code: the next one to be built replaces it
        try:
            skeleton: Skeleton = pickle.loads(entry.skeleton)  # noqa: S301 - written by us, as its digest proves
        except Exception:  # noqa: BLE001 - unpickling runs constructors, which may raise anything
            self.drop(spec)
            return None
        return Spare(skeleton, {}, entry.warm, entry.writes)

    def drop(self, spec: LoadSpec) -> None:
        """Forget it: it did not hold what it promised."""
        with suppress(OSError):
            (self._folder / self._name(spec)).unlink()

    # -- keeping -------------------------------------------------------------------------------------

    def draft(self, spec: LoadSpec, skeleton: Skeleton) -> Draft | None:
        """Pickle a skeleton that holds no weights yet; None for one that would not come back the same."""
        if skeleton.weight > HEAVY or _shares(skeleton):
            return None
        sources = self._sources(skeleton.module)
        if sources is None:
            return None
        try:
            raw = pickle.dumps(skeleton, protocol=pickle.HIGHEST_PROTOCOL)
            same = len(raw) <= LARGEST // 2 and _alike(skeleton, pickle.loads(raw))  # noqa: S301 - of the line above
        except Exception:  # noqa: BLE001 - lambdas, open files, C objects: many modules can't be pickled
            return None
        return Draft(self._name(spec), raw, sources) if same else None

    def keep(self, draft: Draft, *, warm: bool, writes: bool) -> None:
        """Write it. `warm`: a forward ran; `writes`: it wrote to its weights."""
        raw = msgspec.msgpack.encode(_Entry(draft.skeleton, draft.sources, warm, writes))
        part = self._folder / f".{secrets.token_hex(8)}.part"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(self._proof(draft.name, raw) + raw)
            # No fsync: what a power cut damages does not verify.
            part.rename(self._folder / draft.name)
        except OSError:
            with suppress(OSError):
                part.unlink()
            return
        self._prune()

    # -- files ---------------------------------------------------------------------------------------

    def _name(self, spec: LoadSpec) -> str:
        """Whatever a skeleton depends on but its code, hashed with our key."""
        versions = (platform.python_version(), str(torch.__version__), _transformers() if _needs(spec) else "")
        told = msgspec.msgpack.encode((FORMAT, spec.fingerprint, spec.builder, versions))
        return hashlib.blake2b(told, key=self._key, digest_size=_DIGEST).hexdigest()

    def _proof(self, name: str, raw: bytes) -> bytes:
        return hashlib.blake2b(name.encode() + raw, key=self._key, digest_size=_DIGEST).digest()

    def _read(self, name: str) -> _Entry | None:
        try:
            raw = _ours(self._folder / name, LARGEST)
            if not hmac.compare_digest(raw[:_DIGEST], self._proof(name, raw[_DIGEST:])):
                return None
            os.utime(self._folder / name)
            return _entries.decode(memoryview(raw)[_DIGEST:])
        except (OSError, msgspec.DecodeError):
            return None

    def _sources(self, module: nn.Module) -> tuple[Source, ...] | None:
        """The files that its classes, and all modules allowed here, came of; None if one may be newer than its code."""
        names = {type(one).__module__ for one in module.modules()} | {Skeleton.__module__}
        names |= {name for name in sys.modules if self._allows(name)}
        found: list[Source] = []
        for name in sorted(names):
            if name.startswith(_BY_VERSION):
                continue
            source = _source(Path(getattr(sys.modules.get(name), "__file__", None) or ""))
            if source is None:
                if self._allows(name) and getattr(sys.modules[name], "__path__", None):
                    continue  # a folder without code of its own
                return None
            if max(source.modified, source.changed) >= self._began and self._allows(name):
                return None  # perhaps replaced after it was imported
            found.append(source)
        return tuple(found)

    def _allows(self, name: str) -> bool:
        return any(name == one or (one.endswith(".") and name.startswith(one)) for one in self._allow)

    def _prune(self) -> None:
        """Let the oldest go, and what a killed worker left half-written."""
        now = time.time()
        aged: list[tuple[float, Path]] = []
        with suppress(OSError):
            for path in self._folder.iterdir():
                if path.name == _KEY:
                    continue
                age = now - path.lstat().st_mtime
                if path.suffix != ".part":
                    aged.append((age, path))
                elif age > _STALE_PART:
                    path.unlink(missing_ok=True)
            for _, path in sorted(aged)[KEPT:]:
                path.unlink(missing_ok=True)


def store_at(folder: str, allow: tuple[str, ...]) -> SkeletonStore | None:
    """The store in a folder; None for an empty name, and where it can't be used, which is said once."""
    if not folder:
        return None
    try:
        return SkeletonStore(Path(folder), allow)
    except OSError as error:
        report("skeletons_not_kept", error)
        return None


# -- files that are ours ------------------------------------------------------------------------------


def _ours(path: Path, limit: int) -> bytes:
    """The bytes of a regular file that belongs to us and that nobody else may write. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            msg = "a file that is not ours alone"
            raise PermissionError(msg)
        if found.st_size > limit:
            msg = f"a file of {found.st_size} bytes"
            raise OSError(msg)
        return file.read(limit)


def _key(folder: Path) -> bytes:
    """The key of this folder, made when there is none. Raises `OSError`."""
    path = folder / _KEY
    with suppress(FileNotFoundError):
        return _checked_key(path)
    part = folder / f".{secrets.token_hex(8)}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(secrets.token_bytes(_DIGEST))
        with suppress(FileExistsError):  # another worker was first
            os.link(part, path)
    finally:
        part.unlink()
    return _checked_key(path)


def _checked_key(path: Path) -> bytes:
    key = _ours(path, _DIGEST)
    if len(key) != _DIGEST:
        msg = "the key of the skeletons is damaged"
        raise OSError(msg)
    return key


# -- what a skeleton depends on -----------------------------------------------------------------------


def _needs(spec: LoadSpec) -> bool:
    return spec.builder.kind == "transformers"


def _transformers() -> str:
    from importlib.metadata import PackageNotFoundError, version

    loaded = sys.modules.get("transformers")
    try:
        return str(loaded.__version__) if loaded is not None else version("transformers")
    except PackageNotFoundError:
        return ""


def _source(path: Path) -> Source | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (
        Source(str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else None
    )


def _shares(skeleton: Skeleton) -> bool:
    """Whether two real tensors lie in one storage, which a pickle would take apart."""
    storages = [
        cell.like.untyped_storage().data_ptr() for cell in skeleton.cells if not cell.like.is_meta and cell.like.nbytes
    ]
    return len(set(storages)) != len(storages)


def _alike(one: Skeleton, two: Skeleton) -> bool:
    """Whether what came out of a pickle has the same tensors, in the same places, and the same attributes."""
    fresh = Skeleton(lambda: two.module)  # what is really there, whatever the pickled books say
    return (
        len(one.cells) == len(two.cells)
        and all(_same(mine, other) for mine, other in zip(one.cells, two.cells, strict=True))
        and [_places(cell) for cell in fresh.cells] == [_places(cell) for cell in two.cells]
        and all(
            type(mine) is type(other) and mine.__dict__.keys() == other.__dict__.keys()
            for mine, other in zip(one.module.modules(), two.module.modules(), strict=True)
        )
    )


def _places(cell: Cell) -> list[tuple[int, object]]:
    return [(id(store), key) for store, key in cell.places if store[key] is cell.like]


def _same(mine: Cell, other: Cell) -> bool:
    """Two cells of equal names and kind, in as many places, with equal values if they have any."""
    if (mine.names, mine.parameter, mine.persistent) != (other.names, other.parameter, other.persistent):
        return False
    if len(mine.places) != len(_places(other)):
        return False
    if (mine.like.shape, mine.like.dtype, mine.like.device) != (other.like.shape, other.like.dtype, other.like.device):
        return False
    return mine.like.is_meta or torch.equal(mine.like, other.like)
