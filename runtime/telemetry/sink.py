"""Puts finished log lines on a stream from a thread of its own, so that a full pipe or closed stdout stalls nobody.

It knows bytes and a queue; what a line says is `logs.py`.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

ROOM: Final = 10_000
"""Lines that may wait; more are dropped and counted (F79)."""

_STOP: Final = None
_AT_ONCE: Final = 256


class LineSink:
    """A bounded queue of lines and the thread that writes them. `put` never blocks and never raises.

    `notice(n)` spells the line that says how many were dropped, written as soon as there is room again.
    """

    def __init__(self, stream: TextIO, notice: Callable[[int], str], *, room: int = ROOM) -> None:
        self._stream = stream
        self._fd = _descriptor(stream)
        self._notice = notice
        self._room = room
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0  # by full queue; written by callers
        self._lost = 0  # by dead stream; written by the thread
        self._told = 0
        self._dead = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="foreload-logs", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line, without its newline; safe in any thread and in a signal handler."""
        if self._closed or self._lines.qsize() >= self._room:
            self._dropped += 1
        else:
            self._lines.put(line)

    @property
    def dropped(self) -> int:
        """Lines that nobody will read: the queue was full, or the stream is gone."""
        return self._dropped + self._lost

    def close(self, cap: float = 1.0) -> bool:
        """Write what waits, within `cap` seconds; False if the stream would not take it."""
        if not self._closed:
            self._closed = True
            self._lines.put(_STOP)
        self._thread.join(cap)
        return not self._thread.is_alive() and not self._dead

    def _run(self) -> None:
        going_on = True
        while going_on:
            lines = [self._lines.get()]
            while len(lines) < _AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get())
            going_on = _STOP not in lines
            texts = [line for line in lines if line is not None]
            if self._dropped > self._told:
                texts.append(self._notice(self._dropped - self._told))
                self._told = self._dropped
            if texts:
                self._write(texts)
        if self._fd is not None:
            os.close(self._fd)

    def _write(self, texts: list[str]) -> None:
        if self._dead:
            self._lost += len(texts)
            return
        blob = "\n".join(texts) + "\n"
        try:
            if self._fd is None:
                self._stream.write(blob)
                self._stream.flush()
            else:
                _write_all(self._fd, blob.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError):  # EPIPE, EBADF, "I/O operation on closed file"
            self._dead = True
            self._lost += len(texts)

    def __repr__(self) -> str:
        return f"<LineSink waiting={self._lines.qsize()} dropped={self.dropped}>"


def _descriptor(stream: TextIO) -> int | None:
    """A descriptor of our own for what is below the stream, if anything is.

    Written to past the stream's buffer: a thread that hangs inside the buffer's lock aborts the interpreter at exit.
    Our own, so that a closed stdout whose number is given to a socket gets no log lines.
    """
    try:
        stream.flush()
        return os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _write_all(fd: int, blob: bytes) -> None:
    view = memoryview(blob)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody made the descriptor non-blocking
            select.select([], [fd], [])
