"""One file on its way in from elsewhere: claimed, resumed, written in order, proven, and only then published.

Belongs here: everything that touches our own disk on that way; all of it blocks. Never: the network (`pull.py`).
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from actors.errors import CorruptWeights
from runtime.tiers.blocks import Blocks
from runtime.tiers.index import read_index_at
from runtime.tiers.staging import locked
from runtime.tiers.verify import unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from runtime.catalog.manifest import FileRow
    from runtime.tiers.blobs import Blobs
    from runtime.tiers.partials import Partial
    from runtime.tiers.staging import Claim, Staging

_MODE: Final = 0o444


class Landing:
    """Steps in an order.

    `enter` until it is true; then, unless `path` is there, `recover` until it is true, `write` the chunks from
    `done` on, `finish`; `close` at any point, once. After `finish`, or an `enter` that found the file, the blob at
    `path` is held for the caller. Every step may raise `DiskFull` or `FetchFailed`; a step is short, so that who
    waits for its end can stop soon.
    """

    def __init__(
        self,
        row: FileRow,
        blob: Path,
        *,
        blobs: Blobs,
        staging: Staging,
        take: Callable[[Path, int], Generator[None, None, bool]],
        found: Callable[[Path, Blocks], None],
        checkpoint: bool,
    ) -> None:
        self._row = row
        self._blob = blob
        self._blobs = blobs
        self._found = found
        self._checkpoint = checkpoint
        self._stack = ExitStack()
        self._claim: Claim | None = None
        self._staging = staging
        self._take = take
        self._entering = self._enter()
        self._recovering: Generator[None, None, None] | None = None
        self._partial: Partial | None = None
        self._unfinished: Partial | None = None
        self._sha256 = hashlib.sha256()
        self._blocks = Blocks()
        self.path: Path | None = None

    @property
    def done(self) -> int:
        """Bytes from the beginning that are here."""
        return self._partial.done if self._partial is not None else 0

    @property
    def tag(self) -> str:
        """The version of the source that they are of."""
        return self._partial.tag if self._partial is not None else ""

    def enter(self) -> bool:
        """Wait, 50 ms at a time, for whoever else brings the same file; True when it is here or it is our turn."""
        return _step(self._entering)

    def _enter(self) -> Generator[None, None, None]:
        if (yield from self._take(self._blob, self._row.size)):
            self.path = self._blob
            return
        claim = self._stack.enter_context(self._staging.claim(self._blob.name))
        while not claim.try_lock():
            yield
        if (yield from self._take(self._blob, self._row.size)):
            self.path = self._blob
            return
        partial = self._stack.enter_context(self._blobs.partials.opened(self._row.sha256, self._row.size))
        self._recovering = self._recover(partial)
        self._partial = partial

    def recover(self) -> bool:
        """Prove what a former life left, chunk by chunk, then take the room for the rest; True when done."""
        assert self._recovering is not None
        return _step(self._recovering)

    def _recover(self, partial: Partial) -> Generator[None, None, None]:
        for _ in partial.recover(self._digest):
            yield
        self._unfinished = partial  # not before: what was not looked at yet is not to be given back
        # The file counts from the moment it has its size, so the reservation is only needed until then.
        with self._blobs.room(self._row.size - partial.done):
            partial.allocate()

    def _digest(self, piece: memoryview) -> None:
        self._sha256.update(piece)
        self._blocks.feed(piece)

    def write(self, pieces: list[memoryview], tag: str) -> None:
        """Write the next chunk, of that version of the source."""
        assert self._partial is not None
        try:
            self._partial.write(pieces, tag)
        except OSError as error:
            raise unwritable(error) from None
        for piece in pieces:
            self._digest(piece)

    def restart(self) -> None:
        """Begin again at the first byte: the source is another one than it was."""
        assert self._partial is not None
        self._partial.restart()
        self._sha256, self._blocks = hashlib.sha256(), Blocks()

    def finish(self) -> None:
        """Prove the whole and publish it. Raises `CorruptWeights`; then nothing of it is left."""
        assert self._partial is not None
        try:
            self._prove(self._partial)
        except CorruptWeights:
            self._partial.restart()
            raise
        try:
            os.fchmod(self._partial.descriptor, _MODE)
            os.fsync(self._partial.descriptor)
            self._blobs.publish(self._partial.path, self._blob)
            self._unfinished = None  # others may map it from now on: nothing of ours touches it any more
            locked(self._partial.descriptor, shared=True)  # it is the blob now, which is held by shared locks
            self._partial.discard()
            self._found(self._blob, self._blocks)
        except OSError as error:
            raise unwritable(error) from None
        self._blobs.must_take(self._blob, self._row.size)
        self.path = self._blob

    def _prove(self, partial: Partial) -> None:
        found = self._sha256.hexdigest()
        if partial.done != self._row.size or os.fstat(partial.descriptor).st_size != self._row.size:
            raise CorruptWeights(f"{partial.done} of {self._row.size} bytes were fetched")
        if found != self._row.sha256:
            detail = {"expected": self._row.sha256, "found": found}
            raise CorruptWeights("the fetched file's sha256 is not the manifest's", detail=detail)
        if self._checkpoint:
            read_index_at(partial.descriptor)

    def close(self) -> None:
        """Give claim and partial file back; what was written stays for the next one. The hold on `path` stays too."""
        self._entering.close()
        if self._recovering is not None:
            self._recovering.close()
        if self._unfinished is not None:
            self._unfinished.leave()
        self._stack.close()

    def __repr__(self) -> str:
        return f"<Landing {self._row.sha256[:8]} {self.done} of {self._row.size} B>"


def _step(steps: Generator[None, None, None]) -> bool:
    try:
        next(steps)
    except StopIteration:
        return True
    except OSError as error:
        raise unwritable(error) from None
    return False
