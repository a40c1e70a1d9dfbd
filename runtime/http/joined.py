"""A transport that sends a response's head together with what follows it.

uvicorn writes the head and the body apart, and uvloop sends each at once: two system calls, and two wake-ups of a
client on the same machine, for an answer of a few hundred bytes. Here the head waits for the next write, at most until
the loop's next turn. Nothing here reads, parses or counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

_FIRST: Final = b"HTTP/1."
_LAST: Final = b"\r\n\r\n"


class JoinedTransport:
    """A drop-in for the asyncio transport it wraps; what it does not change is the inner one's."""

    __slots__ = ("_due", "_head", "_inner", "_loop")

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._head = b""
        self._due: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"<JoinedTransport {len(self._head)} B held of {self._inner!r}>"

    def write(self, data: bytes) -> None:
        """Send; a head is held until the next call of any kind, or the next turn of the loop."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
            head, self._head = self._head, b""
            self._inner.writelines((head, data))
        elif data.endswith(_LAST) and data.startswith(_FIRST):
            self._head = data
            self._due = self._loop.call_soon(self.flush)
        else:
            self._inner.write(data)

    def flush(self) -> None:
        """Send what is held."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
            head, self._head = self._head, b""
            self._inner.write(head)

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._head) + self._inner.get_write_buffer_size()

    def write_eof(self) -> None:
        """See `asyncio.WriteTransport`."""
        self.flush()
        self._inner.write_eof()

    def close(self) -> None:
        """See `asyncio.BaseTransport`; what is held goes out first."""
        self.flush()
        self._inner.close()

    def abort(self) -> None:
        """See `asyncio.WriteTransport`; what is held is lost like the rest."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
            self._head = b""
        self._inner.abort()
