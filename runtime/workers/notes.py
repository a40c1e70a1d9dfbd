"""What workers tell of compilations, as facts. Belongs here: that translation alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.events import CompileFailed, CompileFinished, CompileStarted
from actors.residency.model import ModelKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.ports import Emit
    from runtime.workers.port import Note


def noting(device: str, now: Callable[[], float], emit: Emit) -> Callable[[Note], None]:
    """A receiver of one device's notes that states them as events."""

    def noted(note: Note) -> None:
        at, key = now(), ModelKey(note.key)
        match note.phase:
            case "started":
                emit(CompileStarted(at, device, key, note.fingerprint))
            case "finished" | "reused":
                reused = note.phase == "reused"
                emit(CompileFinished(at, device, key, note.fingerprint, note.seconds, reused, note.saved))
            case _:
                emit(CompileFailed(at, device, key, note.fingerprint, note.cause))

    return noted
