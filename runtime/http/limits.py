"""How large, long and slow a request may be, and the checks that need nothing but the ASGI scope.

Belongs here: numbers and comparisons. Never: reading a body, a route, a decision about who may ask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from actors.errors import BadRequest, HeadersTooLarge, UriTooLong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Scope

_HOST: Final = re.compile(rb"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::[0-9]{1,5})?")
_SINGLE: Final = frozenset(
    {
        b"host",
        b"authorization",
        b"content-length",
        b"content-encoding",
        b"transfer-encoding",
        b"inference-header-content-length",
        b"foreload-timeout",
        b"foreload-priority",
    }
)
_REMEMBERED_HOSTS: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that are on by default. Sizes in bytes, times in seconds.

    `body` counts on the wire and again after decompression; `small_body` bounds the bodies of repository calls.
    `json_depth` is enforced by the codec that parses the body. `header_idle` is how long a connection may take to
    send a complete header, `body_idle` how long a body may stand still in either direction.
    """

    body: int = 64 << 20
    small_body: int = 1 << 20
    headers: int = 32 << 10
    header_count: int = 100
    url: int = 8 << 10
    json_depth: int = 64
    chunks: int = 65_536
    body_idle: float = 30.0
    header_idle: float = 10.0
    keep_alive: int = 5
    compared: int = 16
    connections: int = 20_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                msg = f"limits.{field.name} must be above zero, not {value!r}"
                raise ValueError(msg)


def headers_of(scope: Scope, limits: Limits) -> dict[bytes, bytes]:
    """Headers by lower-case name, after the limits on URL and header section.

    A header that may occur once and does not is refused: two readers of it could disagree. Others are joined by
    commas as RFC 9110 says. Raises `UriTooLong`, `HeadersTooLarge`, `BadRequest`.
    """
    raw: Sequence[tuple[bytes, bytes]] = scope["headers"]
    if len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) > limits.url:
        raise UriTooLong(f"the URL is longer than {limits.url} bytes", detail={"limit": limits.url})
    if len(raw) > limits.header_count:
        raise HeadersTooLarge(f"more than {limits.header_count} headers", detail={"limit": limits.header_count})
    found = dict(raw)
    if len(found) != len(raw):
        found = _joined(raw)
    if sum(map(len, found)) + sum(map(len, found.values())) > limits.headers:
        raise HeadersTooLarge(f"the headers exceed {limits.headers} bytes", detail={"limit": limits.headers})
    if found.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        raise BadRequest("transfer-encoding: only chunked is understood")
    return found


def _joined(raw: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in raw:
        if name not in found:
            found[name] = value
        elif name in _SINGLE:
            raise BadRequest(f"{name.decode('ascii')}: sent more than once")
        else:
            found[name] += b", " + value
    return found


class Hosts:
    """The names this server answers to: exact, `*.example.com`, or `*` for any. None at all refuses everything.

    This is what keeps a page in an operator's browser from reaching the server by rebinding a name of its own.
    """

    __slots__ = ("_any", "_exact", "_known", "_suffixes")

    def __init__(self, patterns: Sequence[str]) -> None:
        lowered = [pattern.lower() for pattern in patterns]
        self._any = "*" in lowered
        self._exact = frozenset(pattern.strip("[]") for pattern in lowered if not pattern.startswith("*"))
        self._suffixes = tuple(pattern[1:] for pattern in lowered if pattern.startswith("*."))
        if any("*" in pattern.removeprefix("*.") for pattern in lowered if pattern != "*"):
            msg = "a trusted host is a name, `*.name` or `*`"
            raise ValueError(msg)
        self._known: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<Hosts {'any' if self._any else ', '.join(sorted(self._exact))}>"

    def check(self, headers: Mapping[bytes, bytes], http_version: str) -> None:
        """Raise `BadRequest` unless the Host header is well-formed and trusted; HTTP/1.0 may leave it out."""
        value = headers.get(b"host")
        if value in self._known:
            return
        if value is None:
            if http_version == "1.0":
                return
            raise BadRequest("host: missing")
        match = _HOST.fullmatch(value)
        if match is None:
            raise BadRequest("host: malformed")
        if not self._trusted(match[1].decode("ascii").lower().strip("[]")):
            raise BadRequest("host: this server does not answer to that name")
        if len(self._known) < _REMEMBERED_HOSTS:
            self._known.add(value)

    def _trusted(self, name: str) -> bool:
        return self._any or name in self._exact or name.endswith(self._suffixes)
