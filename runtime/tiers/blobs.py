"""The published files of the disk tier: who holds them, and who leaves when room is needed.

Belongs here: holds, publishing, the quota. Never: how bytes are brought in or checked (`disk.py`).
A blob is only ever linked and unlinked, so whatever mapped it keeps it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from actors.errors import DiskFull, FetchFailed
from runtime.tiers.blocks import BlockTable
from runtime.tiers.partials import Partials
from runtime.tiers.staging import Staging, locked, opened, publish, same_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """Bytes and number of blobs on disk, the quota in bytes, and how many blobs are held by somebody here."""

    used: int
    blobs: int
    quota: int
    held: int


class Blobs:
    """Files below `root/blobs` under the sha256 of their bytes, at most `quota` bytes of them."""

    def __init__(self, root: Path, quota: int, staging: Staging) -> None:
        self._folder = root / "blobs"
        self._tables = root / "blocks"
        for folder in (self._folder, self._tables):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._quota = quota
        self._staging = staging
        self.partials = Partials(root)
        self._lock = Lock()  # over the room, and so over deleting files
        self._books = Lock()  # over holds and uses: for moments, since `let_go` may be called on the loop
        self._held: dict[Path, list[int]] = {}
        self._coming = 0
        self._uses: dict[Path, int] = {}
        self._turn = 0
        self._known = {path.name for path, _ in self._listed()}

    def path(self, sha256: str) -> Path:
        """Where the blob of that hash is, or would be."""
        return self._folder / sha256[:2] / sha256

    def known(self, sha256: str) -> bool:
        """Whether such a blob was here when somebody last looked; advice that costs no look at the disk."""
        return sha256 in self._known

    def hold(self, path: Path, descriptor: int) -> Path:
        """Hold a file by an open descriptor, which `let_go` closes."""
        with self._books:
            self._held.setdefault(path, []).append(descriptor)
            self._turn += 1
            self._uses[path] = self._turn
        return path

    def take(self, blob: Path, size: int) -> bool:
        """Hold a published blob if it is there and whole; a damaged one is set aside.

        The hold is a shared file lock, so that no other process makes room with what is in use here.
        """
        try:
            descriptor = os.open(blob, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            self._known.discard(blob.name)
            return False
        if not locked(descriptor, shared=True) or not same_file(descriptor, blob):
            os.close(descriptor)  # it is leaving right now
            return False
        if os.fstat(descriptor).st_size != size:
            os.close(descriptor)
            self.condemn(blob)
            return False
        self._known.add(blob.name)
        self.hold(blob, descriptor)
        return True

    def condemn(self, blob: Path) -> None:
        """Set a damaged blob aside: nobody takes it any more, and whoever mapped it keeps what they have."""
        self._known.discard(blob.name)
        self._staging.quarantine(blob)

    def table(self, blob: Path) -> BlockTable | None:
        """The checksums of a published blob; None where there are none that can be read."""
        try:
            return BlockTable.from_bytes((self._tables / blob.name).read_bytes())
        except OSError:
            return None

    def note_table(self, blob: Path, table: BlockTable) -> None:
        """Keep the checksums of a blob whose sha256 was found right."""
        self._staging.write(self._tables / blob.name, table.to_bytes())

    def must_take(self, blob: Path, size: int) -> None:
        """Hold a blob that was published a moment ago. Raises `FetchFailed`."""
        if not self.take(blob, size):
            raise FetchFailed("the disk tier lost these weights as soon as they were there")

    def publish(self, temporary: Path, blob: Path) -> None:
        """Give a finished file its name, durably; the first one of that name stays."""
        blob.parent.mkdir(mode=0o700, exist_ok=True)
        publish(temporary, blob)
        self._staging.sync(blob.parent)
        self._staging.sync(self._folder)
        self._known.add(blob.name)

    def _listed(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    with contextlib.suppress(OSError):
                        yield path, path.lstat()

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Reserve bytes of the quota while they come in. Raises `DiskFull`."""
        listed = (*self._staging.set_aside(), *self.partials.listed(), *self._listed())
        rows = [(path, status.st_size, status.st_mtime_ns) for path, status in listed]
        with self._lock:
            self._make_room(rows, size)
            self._coming += size
        try:
            yield
        finally:
            with self._lock:
                self._coming -= size

    def _make_room(self, rows: list[tuple[Path, int, int]], size: int) -> None:
        """Unlink blobs that nobody holds, least recently used first, until `size` bytes fit into the quota."""
        used = sum(length for _, length, _ in rows) + self._coming
        # What was not used since the start is older than all that was; among those, publishing time decides. What was
        # set aside and halves of downloads that nobody continues go first.
        # Who holds one from here on is seen by its lock on the file.
        with self._books:
            loose = sorted(
                (self._uses.get(path, 0) if self._folder in path.parents else -1, at, path, length)
                for path, length, at in rows
                if path not in self._held
            )
        if used - sum(length for *_, length in loose) + size > self._quota:
            detail = {"needed": size, "quota": self._quota, "used": used}
            raise DiskFull("the disk tier's quota has no room for these weights", detail=detail)
        for _, _, path, length in loose:
            if used + size <= self._quota:
                return
            if _unlink_unlocked(path):
                with self._books:
                    self._uses.pop(path, None)
                self.partials.forget(path)
                if self._folder in path.parents:
                    self._known.discard(path.name)
                    (self._tables / path.name).unlink(missing_ok=True)
                used -= length
        if used + size > self._quota:
            raise DiskFull("the disk tier is full of weights that other processes use")

    def let_go(self, path: Path) -> None:
        """Give back one hold of an admitted file."""
        with self._books:
            descriptors = self._held[path]
            os.close(descriptors.pop())
            if not descriptors:
                del self._held[path]

    def snapshot(self) -> DiskSnapshot:
        """What is on disk now."""
        sizes = [status.st_size for _, status in self._listed()]
        with self._books:
            return DiskSnapshot(sum(sizes), len(sizes), self._quota, len(self._held))

    def __repr__(self) -> str:
        return f"<Blobs quota {self._quota} B, {len(self._held)} held>"


def _unlink_unlocked(path: Path) -> bool:
    """Unlink a blob unless some process holds it."""
    try:
        with opened(path, os.O_RDONLY) as descriptor:
            if not locked(descriptor):
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True
