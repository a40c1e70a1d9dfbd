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
from runtime.tiers.blocks import Blocks
from runtime.tiers.convert import Options, converting
from runtime.tiers.formats import check_descriptor, check_file
from runtime.tiers.index import read_index
from runtime.tiers.landing import Landing
from runtime.tiers.reader import checking
from runtime.tiers.recipe import Recipe
from runtime.tiers.slabs import Slabs
from runtime.tiers.staging import Staging, clone
from runtime.tiers.verify import Digest, Verified, hashing, open_regular, unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from runtime.catalog.manifest import FileRow
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
            self._slabs = Slabs(self._blobs, self._staging)
            self._made = {path.name: path.read_text("ascii", "replace") for path in self._converted.iterdir()}
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

    def begin(self, record: ModelRecord, fetched: Mapping[str, Path] | None = None) -> Admission:
        """Start an admission that the caller steps; its blob stays held until `let_go`.

        `fetched` says where files of the manifest lie that are not in its directory.
        """
        return Admission(self._admitting(record, fetched or {}), self.let_go)

    def landing(self, row: FileRow, *, weights: bool) -> Landing:
        """Begin to bring in one file that comes over the network; `weights` says that it has to be safetensors."""
        blob = self._blobs.path(row.sha256)
        return Landing(
            row, blob, blobs=self._blobs, staging=self._staging, take=self._take, found=self._found, checkpoint=weights
        )

    def laid(self, record: ModelRecord) -> bool:
        """Whether there was a slab when somebody last looked, so that the file it came from need not be here."""
        return self._blobs.known(self._slabs.path(record.fingerprint).name)

    def present(self, record: ModelRecord) -> bool:
        """Whether the weights were here when somebody last looked: advice, at no cost."""
        row = record.manifest.weights_row
        if self.laid(record):
            return True
        if not record.manifest.pickled:
            return self._blobs.known(row.sha256)
        made = self._made.get(_key(record), "").split()
        return bool(made) and self._blobs.known(made[0])

    def begin_slab(self, record: ModelRecord, recipe: Recipe) -> Admission:
        """Start to lay a model's slab, which later admissions take instead of the file it was made from.

        It takes room only where nothing has to leave for it, else it raises `DiskFull`. Nothing is done if it exists.
        """
        return Admission(self._slab(record, {}, recipe, spare=True), self.let_go)

    def condemn(self, path: Path) -> None:
        """Set a file of ours aside whose bytes were found wrong; a mapping of it stays valid."""
        self._blobs.condemn(path)

    def let_go(self, path: Path) -> None:
        """Give back one hold of an admitted file."""
        self._blobs.let_go(path)

    def snapshot(self) -> DiskSnapshot:
        """What is on disk now."""
        return self._blobs.snapshot()

    # -- admission -----------------------------------------------------------------------------------

    def _admitting(self, record: ModelRecord, fetched: Mapping[str, Path]) -> Generator[None, None, Path]:
        try:
            known = self._slabs.take(record.fingerprint)
        except OSError as error:
            raise unwritable(error) from None
        if known is not None:
            return known
        if not record.variant.plain:
            return (yield from self._slab(record, fetched, Recipe()))
        return (yield from self._original(record, fetched))

    def _slab(
        self, record: ModelRecord, fetched: Mapping[str, Path], recipe: Recipe, *, spare: bool = False
    ) -> Generator[None, None, Path]:
        original = yield from self._original(record, fetched)
        try:
            return (
                yield from self._slabs.laying(
                    record.fingerprint,
                    original,
                    record.manifest.weights_row.sha256,
                    recipe,
                    record.variant,
                    spare=spare,
                )
            )
        except ForeloadError as error:
            error.model = record.name
            raise
        except OSError as error:
            raise unwritable(error) from None
        finally:
            self.let_go(original)

    def _original(self, record: ModelRecord, fetched: Mapping[str, Path]) -> Generator[None, None, Path]:
        """The weights as they came, verified and held."""
        try:
            manifest = record.manifest
            row = manifest.weights_row
            source = fetched.get(row.path, record.weights)
            if manifest.pickled:
                return (yield from self._admit_pickle(record, source))
            if manifest.in_place:
                return (yield from self._check_original(record))
            blob = self._blobs.path(row.sha256)
            if not (yield from self._take(blob, row.size)):
                yield from self._bring(source, blob, row.size, row.sha256, manifest.engine)
        except ForeloadError as error:
            error.model = record.name
            raise
        except OSError as error:
            raise unwritable(error) from None
        return blob

    def _take(self, blob: Path, size: int) -> Generator[None, None, bool]:
        """Hold a published blob if it is there and its bytes are still what they were; a damaged one is set aside.

        The reading that proves it is the one that brings it into memory, so it costs one pass of a fast checksum; and
        it is made once for as long as the file does not change.
        """
        if not self._blobs.take(blob, size):
            return False
        sound = False
        try:
            sound = yield from self._sound(blob)
        finally:
            if not sound:
                self._blobs.let_go(blob)
        if not sound:
            self._blobs.condemn(blob)
        return sound

    def _sound(self, blob: Path) -> Generator[None, None, bool]:
        descriptor = open_regular(blob)
        try:
            before = os.fstat(descriptor)
            if self._verified.recall(before) == blob.name:
                return True
            table = self._blobs.table(blob)
            if table is not None and table.size == before.st_size:
                if not (yield from checking(descriptor, table)):
                    return False
            else:
                blocks = Blocks()
                if (yield from hashing(descriptor, blocks=blocks)).sha256 != blob.name:
                    return False
                self._blobs.note_table(blob, blocks.table())
            self._verified.note(before, os.fstat(descriptor), blob.name)
        finally:
            os.close(descriptor)
        return True

    def _found(self, blob: Path, blocks: Blocks) -> None:
        """A blob was published whose bytes have just passed by: keep its checksums, and do not read it again."""
        self._blobs.note_table(blob, blocks.table())
        status = blob.stat()
        self._verified.note(status, status, blob.name)

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
            if (yield from self._take(blob, size)):
                return
            with self._blobs.room(size), claim.temporary() as temporary:
                blocks = yield from self._copy(source, temporary, size, sha256)
                check_file(temporary, engine)
                self._blobs.publish(temporary, blob)
            self._found(blob, blocks)
            self._blobs.must_take(blob, size)

    def _copy(self, source: Path, temporary: Path, size: int, sha256: str) -> Generator[None, None, Blocks]:
        blocks = Blocks()
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
                from_, to = (writing, None) if cloned else (reading, writing)
                found = yield from hashing(from_, to, most=size, blocks=blocks)
                self._verified.note(before, os.fstat(reading), found.sha256)
                _must_match(found, size, sha256)
                os.fchmod(writing, BLOB_MODE)
                os.fsync(writing)
            finally:
                os.close(writing)
        finally:
            os.close(reading)
        return blocks

    def _admit_pickle(self, record: ModelRecord, source: Path) -> Generator[None, None, Path]:
        row = record.manifest.weights_row
        options, key = _options(record), _key(record)
        known = yield from self._recall_converted(key)
        if known is not None:
            return known
        with self._staging.claim(key) as claim:
            while not claim.try_lock():
                yield
            known = yield from self._recall_converted(key)
            if known is not None:
                return known
            # The verified copy and its conversion lie side by side for a while.
            with self._blobs.room(2 * row.size), claim.temporary() as copy, claim.temporary() as target:
                yield from self._copy(source, copy, row.size, row.sha256)
                yield from converting(copy, target, options, folder=self._staging.folder)
                read_index(target)
                blocks = Blocks()
                digest = yield from self._seal(target, blocks)
                blob = self._blobs.path(digest.sha256)
                self._blobs.publish(target, blob)
            self._found(blob, blocks)
            self._blobs.must_take(blob, digest.size)
            try:
                made = f"{digest.sha256} {digest.size}\n"
                self._staging.write(self._converted / key, made.encode())
                self._made[key] = made
            except BaseException:
                self.let_go(blob)
                raise
            return blob

    def _seal(self, path: Path, blocks: Blocks) -> Generator[None, None, Digest]:
        descriptor = open_regular(path)
        try:
            digest = yield from hashing(descriptor, blocks=blocks)
            os.fchmod(descriptor, BLOB_MODE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return digest

    def _recall_converted(self, key: str) -> Generator[None, None, Path | None]:
        try:
            made = (self._converted / key).read_text("ascii")
            sha256, size = made.split()
            blob, length = self._blobs.path(sha256), int(size)
        except (OSError, ValueError):
            return None
        self._made[key] = made
        return blob if (yield from self._take(blob, length)) else None

    def __repr__(self) -> str:
        return f"<DiskStore {self._blobs!r}>"


def _options(record: ModelRecord) -> Options:
    return Options(record.manifest.state_dict or "", tuple(sorted(record.manifest.rename.items())))


def _key(record: ModelRecord) -> str:
    """Name of a conversion: the pickle's bytes and how they are read."""
    spelled = f"{record.manifest.weights_row.sha256} {_options(record).spelled}"
    return hashlib.sha256(spelled.encode()).hexdigest()


def _must_match(found: Digest, size: int, sha256: str) -> None:
    if found.size != size:
        raise CorruptWeights(f"the weights have {found.size} bytes, the manifest says {size}")
    if found.sha256 != sha256:
        detail = {"expected": sha256, "found": found.sha256}
        raise CorruptWeights("the weights' sha256 is not the manifest's", detail=detail)
