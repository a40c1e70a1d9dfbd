"""What a pull needs of a place on the network: ranged reads that say of which version of the file they are.

The port and its words only. Implementations: `origin_object.py` (obstore), `origin_web.py` (httpx).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager


class Passing(Exception):
    """A fault that may be gone a moment later: a connection that broke, a server that is busy. Worth another try."""


class Replaced(Exception):
    """The file at the source is another one than before: what was fetched of it is worth nothing."""


class RangeIgnored(Exception):
    """The place answers with whole files only."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of one answer. `size` is the whole file's, if it was told; `tag` names its version, if it has one."""

    pieces: AsyncIterator[memoryview]
    size: int | None
    tag: str


class Origin(Protocol):
    """One file somewhere else. Messages of its errors hold no address and no secret."""

    def read(self, start: int, end: int | None, tag: str) -> AbstractAsyncContextManager[Answer]:
        """Ask for the bytes `[start, end)`, or the whole file where `end` is None, of version `tag` if that is said.

        Raises `Passing`, `Replaced`, `RangeIgnored`, or `FetchFailed` for what will not pass by itself. A place whose
        answer is of another range raises `Passing`; one that sends more or fewer bytes is the caller's to notice.
        """
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...
