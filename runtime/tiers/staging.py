"""The disk tier's workshop: claims, temporary files that survive no crash, durable writes, quarantine.

Belongs here: the mechanics of files in our own cache. Never: what is admitted, or when something leaves (`disk.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

_FICLONE: Final = 0x40049409
_WAIT = 0.05


def clone(source: int, target: int) -> bool:
    """Let `target` share the blocks of `source` where the file system can (btrfs, XFS); True if it did."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


class Staging:
    """Folders for work in progress below `root`.

    Every temporary file is locked by its writer for as long as it lives, so an unlocked one is a crash's leftover.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / "staging"
        self._locks = root / "locks"
        self._quarantine = root / "quarantine"
        for folder in (self.folder, self._locks, self._quarantine):
            folder.mkdir(mode=0o700, exist_ok=True)

    def reclaim(self, prefix: str = "") -> int:
        """Remove what crashed writers left behind and return how many files that were."""
        count = 0
        for path in self.folder.glob(f"{prefix}*.part"):
            with contextlib.suppress(OSError), opened(path, os.O_RDWR) as descriptor:
                if locked(descriptor):
                    path.unlink()
                    count += 1
        return count

    def claim(self, name: str) -> Claim:
        """Claim the making of one named thing, across threads and processes."""
        return Claim(self, self._locks / name)

    def write(self, path: Path, content: bytes) -> None:
        """Write a small file atomically and durably."""
        temporary = self.folder / f"{path.name}.{secrets.token_hex(8)}.part"
        try:
            with opened(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
                locked(descriptor)
                os.write(descriptor, content)
                os.fsync(descriptor)
                temporary.replace(path)
            self.sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def sync(self, folder: Path) -> None:
        """Make a folder's entries durable."""
        with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)

    def set_aside(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every damaged file that was set aside, with its status; any of them may be removed."""
        for path in self._quarantine.iterdir():
            with contextlib.suppress(OSError):
                yield path, path.lstat()

    def quarantine(self, path: Path) -> None:
        """Set a damaged file of ours aside, for people to look at; one per name is kept."""
        with contextlib.suppress(OSError):
            path.replace(self._quarantine / path.name)


class Claim:
    """The right to make one thing, as a file lock that a crash releases. Use as a context manager, then `try_lock`."""

    def __init__(self, staging: Staging, path: Path) -> None:
        self._staging = staging
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def try_lock(self) -> bool:
        """Take the lock and remove what crashed owners left; or wait 50 ms for its owner and return False."""
        if not locked(self._descriptor):
            time.sleep(_WAIT)
            return False
        self._staging.reclaim(self._path.name)
        return True

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """Make a file beside the final ones that is gone afterwards, whatever happened; link it to publish it."""
        while True:
            path = self._staging.folder / f"{self._path.name}.{secrets.token_hex(8)}.part"
            with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
                # Another process that starts now may take it for a leftover before it is locked.
                if not locked(descriptor) or not same_file(descriptor, path):
                    continue
                try:
                    yield path
                finally:
                    path.unlink(missing_ok=True)
            return


def same_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def publish(temporary: Path, final: Path) -> None:
    """Give a finished file its name, unless that name is taken: then the first one stays.

    A link never replaces, so nobody's mapped file loses its name. Where there are no hard links, a rename serves.
    """
    try:
        os.link(temporary, final)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}:
            raise
        temporary.rename(final)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Generator[int, None, None]:
    """Open a file of ours for the length of a block."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def locked(descriptor: int, *, shared: bool = False) -> bool:
    """Take the file lock of an open file if nobody else has it; it lasts until the descriptor is closed."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EAGAIN}:
            return False
        raise
    return True
