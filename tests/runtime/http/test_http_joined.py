"""A response's head goes out with its body: in order, once, whatever comes between them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from runtime.http.joined import JoinedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire:
    """An asyncio transport that notes each call that sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, ...] | str] = []

    def write(self, data: bytes) -> None:
        self.sent.append((data,))

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.sent.append(tuple(parts))

    def write_eof(self) -> None:
        self.sent.append("eof")

    def close(self) -> None:
        self.sent.append("close")

    def abort(self) -> None:
        self.sent.append("abort")

    def get_write_buffer_size(self) -> int:
        return 5

    def get_extra_info(self, name: str) -> str:
        return name


def pair() -> tuple[Wire, JoinedTransport]:
    wire = Wire()
    return wire, JoinedTransport(cast("asyncio.Transport", wire), asyncio.get_running_loop())


async def test_head_and_body_are_one_call() -> None:
    """The usual answer; nothing is left for the loop's next turn."""
    wire, joined = pair()
    joined.write(HEAD)
    assert wire.sent == []
    assert joined.get_write_buffer_size() == 5 + len(HEAD)
    joined.write(b"ok")
    assert wire.sent == [(HEAD, b"ok")]
    await asyncio.sleep(0)
    assert len(wire.sent) == 1
    joined.write(b"more")
    assert wire.sent[1:] == [(b"more",)]


async def test_a_head_alone_leaves_with_the_next_turn() -> None:
    """A HEAD request, `100 Continue`, a stream whose first piece is not there yet."""
    wire, joined = pair()
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert wire.sent == [(HEAD,)]
    joined.write(b"later")
    assert wire.sent[1:] == [(b"later",)]


async def test_two_heads_in_a_row_stay_in_order() -> None:
    """`100 Continue` and then the answer's head."""
    wire, joined = pair()
    joined.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    joined.write(HEAD)
    joined.write(b"ok")
    assert b"".join(b"".join(part) for part in wire.sent) == b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"ok"


@pytest.mark.parametrize(
    ("end", "rest"),
    [
        (lambda joined: joined.close(), [(HEAD,), "close"]),
        (lambda joined: joined.write_eof(), [(HEAD,), "eof"]),
        (lambda joined: joined.flush(), [(HEAD,)]),
        (lambda joined: joined.abort(), ["abort"]),
    ],
)
async def test_an_end_sends_what_is_held_and_an_abort_does_not(
    end: Callable[[JoinedTransport], None], rest: list[object]
) -> None:
    """Closing must not take the head from a client; aborting takes everything."""
    wire, joined = pair()
    joined.write(HEAD)
    end(joined)
    await asyncio.sleep(0)
    assert wire.sent == rest
    joined.flush()
    assert wire.sent == rest


async def test_a_body_that_looks_like_a_head_is_only_late_by_a_turn() -> None:
    """Nothing is lost or reordered by a guess that was wrong."""
    wire, joined = pair()
    for part in (b"HTTP/1.x\r\n\r\n", b"HTTP/1.y\r\n\r\n", b"z"):
        joined.write(part)
    await asyncio.sleep(0)
    assert b"".join(b"".join(part) for part in wire.sent) == b"HTTP/1.x\r\n\r\nHTTP/1.y\r\n\r\nz"
    assert joined.get_extra_info("peername") == "peername"
