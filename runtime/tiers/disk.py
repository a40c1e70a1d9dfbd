"""The disk tier: immutable weight files under the sha256 of their bytes, in a folder that is ours alone.

Belongs here: how bytes get in, checked on the way. Never: mapping, or changing a published file.
"""

from __future__ import annotations

import hashlib
import os
from threading import Lock
from typing import TYPE_CHECKING, Final

from actors.errors import CorruptWeights, ForeloadError
from runtime.tiers.blobs import Blobs, DiskSnapshot
from runtime.tiers.convert import Options, converting
from runtime.tiers.formats import check_descriptor, check_file
from runtime.tiers.index import read_index
from runtime.tiers.staging import Staging, clone
from runtime.tiers.verify import Digest, Verified, hashing, open_regular, unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from runtime.catalog.record import ModelRecord

BLOB_MODE: Final = 0o444


class Admission:
    """One admission that can be stopped between steps, from any thread.

    `step` returns True when `path` is ready; `undo` stops it, or gives back what it achieved.
    """

    def __init__(self, steps: Generator[None, None, Path], let_go: Callable[[Path], None]) -> None:
        self._steps = steps
        self._let_go = let_go
        self._lock = Lock()  # undo may come while a step still runs in its thread
        self.path: Path | None = None

    def step(self) -> bool:
        """Do the next piece of work (some tens of milliseconds, or one wait of 50)."""
        with self._lock:
            try:
                next(self._steps)
            except StopIteration as end:
                self.path = end.value
                return True
            return False

    def undo(self) -> None:
        """Give everything back: temporary files, locks, processes, and the hold on the blob."""
        with self._lock:
            self._steps.close()
            path, self.path = self.path, None
        if path is not None:
            self._let_go(path)


class DiskStore:
    """Blobs below `root`, at most `quota` bytes of them. Safe to share between threads and between processes.

    All methods block. A blob is held from its admission until `let_go`; what is not held may leave for others,
    least recently used first.
    """

    def __init__(self, root: Path, quota: int) -> None:
        self._converted = root / "converted"
        self._verified = Verified()
        try:
            for folder in (root, self._converted):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._staging = Staging(root)
            self._staging.reclaim()
            self._blobs = Blobs(root, quota, self._staging)
        except OSError as error:
            raise unwritable(error) from None

    def admit(self, record: ModelRecord) -> Path:
        """Bring a model's weights in, verified, and return the file that may be mapped; not held afterwards.

        Raises `CorruptWeights` (bytes are not the manifest's, or no checkpoint), `FetchFailed`, `DiskFull`, or
        `LoadFailed` (a converter that died). Messages hold no paths.
        """
        admission = self.begin(record)
        try:
            while not admission.step():
                pass
            path = admission.path
            assert path is not None
            return path
        finally:
            admission.undo()

    def begin(self, record: ModelRecord) -> Admission:
        """Start an admission that the caller steps; its blob stays held until `let_go`."""
        return Admission(self._admitting(record), self.let_go)

    def let_go(self, path: Path) -> None:
        """Give back one hold of an admitted file."""
        self._blobs.let_go(path)

    def snapshot(self) -> DiskSnapshot:
        """What is on disk now."""
        return self._blobs.snapshot()

    # -- admission -----------------------------------------------------------------------------------

    def _admitting(self, record: ModelRecord) -> Generator[None, None, Path]:
        try:
            manifest = record.manifest
            row = manifest.weights_row
            if manifest.pickled:
                return (yield from self._admit_pickle(record))
            if manifest.in_place:
                return (yield from self._check_original(record))
            blob = self._blobs.path(row.sha256)
            if not self._blobs.take(blob, row.size):
                yield from self._bring(record.weights, blob, row.size, row.sha256, manifest.engine)
        except ForeloadError as error:
            error.model = record.name
            raise
        except OSError as error:
            raise unwritable(error) from None
        return blob

    def _check_original(self, record: ModelRecord) -> Generator[None, None, Path]:
        """Verify the file where it lies and hold it; a descriptor is kept, so that it stays the one verified."""
        row = record.manifest.weights_row
        source = open_regular(record.weights)
        try:
            before = os.fstat(source)
            known = self._verified.recall(before)
            if known is None:
                known = (yield from hashing(source, most=row.size)).sha256
                self._verified.note(before, os.fstat(source), known)
            _must_match(Digest(before.st_size, known), row.size, row.sha256)
            check_descriptor(source, record.manifest.engine)
            return self._blobs.hold(record.weights, os.dup(source))
        finally:
            os.close(source)

    def _bring(self, source: Path, blob: Path, size: int, sha256: str, engine: str) -> Generator[None, None, None]:
        """Copy, verify, publish and hold one blob; whoever else brings the same one waits for us."""
        with self._staging.claim(blob.name) as claim:
            while not claim.try_lock():
                yield
            if self._blobs.take(blob, size):
                return
            with self._blobs.room(size), claim.temporary() as temporary:
                yield from self._copy(source, temporary, size, sha256)
                check_file(temporary, engine)
                self._blobs.publish(temporary, blob)
            self._blobs.must_take(blob, size)

    def _copy(self, source: Path, temporary: Path, size: int, sha256: str) -> Generator[None, None, None]:
        reading = open_regular(source)
        try:
            before = os.fstat(reading)
            known = self._verified.recall(before)
            if before.st_size != size or known not in {None, sha256}:
                # Hashed before and found wrong: it stays in quarantine until the file changes.
                _must_match(Digest(before.st_size, known or sha256), size, sha256)
            writing = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            try:
                # A clone shares the blocks, so only the hash has to be made; it is hashed after it cannot change.
                cloned = clone(reading, writing)
                if not cloned and size:
                    os.posix_fallocate(writing, 0, size)
                found = yield from hashing(writing if cloned else reading, None if cloned else writing, most=size)
                self._verified.note(before, os.fstat(reading), found.sha256)
                _must_match(found, size, sha256)
                os.fchmod(writing, BLOB_MODE)
                os.fsync(writing)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _admit_pickle(self, record: ModelRecord) -> Generator[None, None, Path]:
        row = record.manifest.weights_row
        options = Options(record.manifest.state_dict or "", tuple(sorted(record.manifest.rename.items())))
        key = hashlib.sha256(f"{row.sha256} {options.spelled}".encode()).hexdigest()
        known = self._recall_converted(key)
        if known is not None:
            return known
        with self._staging.claim(key) as claim:
            while not claim.try_lock():
                yield
            known = self._recall_converted(key)
            if known is not None:
                return known
            # The verified copy and its conversion lie side by side for a while.
            with self._blobs.room(2 * row.size), claim.temporary() as copy, claim.temporary() as target:
                yield from self._copy(record.weights, copy, row.size, row.sha256)
                yield from converting(copy, target, options, folder=self._staging.folder)
                read_index(target)
                digest = yield from self._seal(target)
                blob = self._blobs.path(digest.sha256)
                self._blobs.publish(target, blob)
            self._blobs.must_take(blob, digest.size)
            try:
                self._staging.write(self._converted / key, f"{digest.sha256} {digest.size}\n".encode())
            except BaseException:
                self.let_go(blob)
                raise
            return blob

    def _seal(self, path: Path) -> Generator[None, None, Digest]:
        descriptor = open_regular(path)
        try:
            digest = yield from hashing(descriptor)
            os.fchmod(descriptor, BLOB_MODE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return digest

    def _recall_converted(self, key: str) -> Path | None:
        try:
            sha256, size = (self._converted / key).read_text("ascii").split()
            blob = self._blobs.path(sha256)
            return blob if self._blobs.take(blob, int(size)) else None
        except (OSError, ValueError):
            return None

    def __repr__(self) -> str:
        return f"<DiskStore {self._blobs!r}>"


def _must_match(found: Digest, size: int, sha256: str) -> None:
    if found.size != size:
        raise CorruptWeights(f"the weights have {found.size} bytes, the manifest says {size}")
    if found.sha256 != sha256:
        detail = {"expected": sha256, "found": found.sha256}
        raise CorruptWeights("the weights' sha256 is not the manifest's", detail=detail)
