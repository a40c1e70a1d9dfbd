"""Looks at one model directory: complete, still being written, or wrong, and why.

Belongs here: completeness and path hygiene by stat alone. Never: hashes of large files, which wait for admission.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from actors.errors import ConfigError
from runtime.catalog.manifest import FILE_NAME, Manifest, parse_manifest
from runtime.catalog.record import ModelRecord, record_of
from runtime.tiers.verify import Identity, identity_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from runtime.catalog.manifest import FileRow

    Refusal: TypeAlias = Callable[[Mapping[str, str]], str]

_MANIFEST_CAP = 1 << 20
_SHOWN_FILES = 20
_ATTEMPTS = 3
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR})
"""What a process short of descriptors or a file server that hiccups says of files that are fine."""

Stamp: TypeAlias = tuple[Identity | None, ...]
"""Identity of the manifest and of each listed file; None for what is not there."""


class State(StrEnum):
    """What became of a directory."""

    ADMITTED = "admitted"
    PENDING = "pending"
    REJECTED = "rejected"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Examined:
    """One look at a directory. `record` is there exactly when the state is ADMITTED."""

    state: State
    reason: str
    stamp: Stamp
    manifest: Manifest | None = None
    record: ModelRecord | None = None
    passing: bool = False
    """Whether the same files may well be found in order the next time: the machine failed, not they."""

    @property
    def withdrawn(self) -> bool:
        """Whether there is no manifest at all: taking it away takes the model out of service."""
        return self.stamp[:1] == (None,)


def stamp(directory: Path, manifest: Manifest | None) -> Stamp:
    """Take the identities of a directory's files, links followed, so that a swapped `..data` link is a change."""
    paths = [FILE_NAME, *(row.path for row in _own(manifest))] if manifest else [FILE_NAME]
    return tuple(_identity(f"{directory}/{path}") for path in paths)


def _own(manifest: Manifest) -> list[FileRow]:
    """The files that the directory itself has to have."""
    return [row for row in manifest.files if manifest.source_of(row) is None]


def examine(directory: Path, allowed: Sequence[Path], refusal: Refusal = lambda _: "") -> Examined:
    """Look at a directory. `allowed` are the resolved roots that its files must lie in, all links followed.

    `refusal` says of addresses by path why one of them may not be used, or nothing.

    A link swapped between reading the manifest and looking at the files would mix two generations; the stamp is
    taken on both sides and the look repeated until they agree.
    """
    found = _examine(directory, allowed, refusal)
    for _ in range(_ATTEMPTS):
        if stamp(directory, found.manifest) == found.stamp:
            return found
        found = _examine(directory, allowed, refusal)
    # No stamp, so that the next refresh looks again even if it settled on what was seen last.
    return Examined(State.PENDING, "the directory keeps changing", (), found.manifest)


def _examine(directory: Path, allowed: Sequence[Path], refusal: Refusal) -> Examined:
    before = stamp(directory, None)
    try:
        manifest = _parse(directory, allowed)
    except FileNotFoundError:
        return Examined(State.PENDING, f"no {FILE_NAME} yet", before)
    except (OSError, RuntimeError) as error:
        reason = f"the manifest cannot be read: {_reason(error)}"
        return Examined(State.REJECTED, reason, before, passing=getattr(error, "errno", 0) in _PASSING)
    except ConfigError as error:
        return Examined(State.REJECTED, error.message, before)
    full = (*before, *stamp(directory, manifest)[1:])
    missing, wrong, passing = _check_files(directory, manifest, allowed)
    if manifest.sources and (refused := refusal(manifest.sources)):
        wrong.append(refused)
    if wrong or missing:
        state, reason = (State.REJECTED, "") if wrong else (State.PENDING, "incomplete: ")
        return Examined(state, reason + _listed(wrong or missing), full, manifest, passing=passing)
    return Examined(State.ADMITTED, "", full, manifest, record_of(directory, manifest))


def _parse(directory: Path, allowed: Sequence[Path]) -> Manifest:
    text = _read_manifest(directory, allowed)
    if not text.strip():
        raise ConfigError("the manifest is empty")
    return parse_manifest(text)


def _read_manifest(directory: Path, allowed: Sequence[Path]) -> str:
    path = directory / FILE_NAME
    real = path.resolve(strict=True)
    if not _inside(real, allowed):
        raise ConfigError("the manifest is a link out of the allowed directories")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError("the manifest is not a regular file")
        raw = file.read(_MANIFEST_CAP + 1)
    if len(raw) > _MANIFEST_CAP:
        raise ConfigError(f"the manifest is over {_MANIFEST_CAP} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the manifest is not UTF-8 at byte {error.start}") from None


def _check_files(directory: Path, manifest: Manifest, allowed: Sequence[Path]) -> tuple[list[str], list[str], bool]:
    """Split the listed files' faults into what time may cure and what not; and whether one was the machine's."""
    passing = False
    missing: list[str] = []
    wrong: list[str] = []
    for row in _own(manifest):
        path = directory / row.path
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except FileNotFoundError:
            missing.append(f"{row.path} is missing")
            continue
        except (OSError, RuntimeError) as error:
            wrong.append(f"{row.path}: {_reason(error)}")
            passing |= getattr(error, "errno", 0) in _PASSING
            continue
        if not _inside(real, allowed):
            wrong.append(f"{row.path} is a link out of the allowed directories")
        elif not stat.S_ISREG(status.st_mode):
            wrong.append(f"{row.path} is not a regular file")
        elif status.st_size != row.size:
            missing.append(f"{row.path} has {status.st_size} of {row.size} bytes")
    return missing, wrong, passing


def _inside(path: Path, homes: Sequence[Path]) -> bool:
    return any(path.is_relative_to(home) for home in homes)


def _identity(path: str) -> Identity | None:
    try:
        return identity_of(os.stat(path))  # noqa: PTH116 -- called for every file on each refresh
    except OSError as error:
        if error.errno in _PASSING:
            raise  # not "gone": whoever looks at the catalogue keeps what was there
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.errno != errno.ELOOP:
        return os.strerror(error.errno)
    return "a loop of links"


def _listed(faults: list[str]) -> str:
    more = len(faults) - _SHOWN_FILES
    return "; ".join(faults[:_SHOWN_FILES]) + (f"; and {more} more" if more > 0 else "")
