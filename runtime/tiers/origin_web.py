"""Files on web servers, through httpx: allowed hosts only, the address that was checked is the one connected to.

obstore's HTTP client follows redirects by itself and resolves names by itself, so neither could be checked. Here each
hop is: its scheme, its host, every address of that host; at most three of them; no credential goes to another host.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin, urlsplit

import anyio

from actors.errors import ConfigError, FetchFailed
from runtime.tiers.origin import Answer, Passing, RangeIgnored, Replaced
from runtime.tiers.sources import WEB_SCHEMES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from runtime.tiers.sources import Address, Permits

REDIRECTS: Final = 3
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_MOVED = frozenset({301, 302, 303, 307, 308})
_OK, _PART, _UNAUTHORIZED, _FORBIDDEN, _GONE, _CHANGED, _BEYOND, _BUSY, _OURS = (
    200,
    206,
    401,
    403,
    404,
    412,
    416,
    429,
    500,
)


async def addresses_of(host: str, port: int) -> list[Address]:
    """Every address of a name, as the system resolves it. Raises `Passing`."""
    try:
        found = await anyio.getaddrinfo(host, port, type=1)
    except OSError:
        raise Passing("the host's name cannot be resolved") from None
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]


class WebClient:
    """Makes checked requests; shared by all files. `connect` and `stall` in seconds.

    One connection pool per host name: two names on one address must not share a connection whose certificate was
    checked for the first.
    """

    def __init__(
        self,
        permits: Permits,
        *,
        connect: float,
        stall: float,
        connections: int,
        resolve: Callable[[str, int], Awaitable[list[Address]]] = addresses_of,
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError("remote.hosts and remote.hub need httpx: install foreload[remote]") from None
        self._httpx = httpx
        self._permits = permits
        self._resolve = resolve
        self._timeout = httpx.Timeout(stall, connect=connect, pool=None)
        self._limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._tls = ssl.create_default_context()
        self._clients: dict[str, Any] = {}

    @asynccontextmanager
    async def get(self, url: str, headers: dict[str, str], token: str) -> AsyncIterator[Any]:
        """Follow a URL to its answer, with its body unread. Raises `FetchFailed` or `Passing`."""
        home = urlsplit(url).netloc
        async with AsyncExitStack() as stack:
            for _ in range(REDIRECTS + 1):
                own = {"Authorization": f"Bearer {token}"} if token and urlsplit(url).netloc == home else {}
                response = await stack.enter_async_context(self._hop(url, {**headers, **own}))
                if response.status_code not in _MOVED:
                    yield response
                    return
                url = _joined(url, response.headers.get("location", ""))
                await response.aclose()
            raise FetchFailed(f"the source redirects more than {REDIRECTS} times")

    @asynccontextmanager
    async def _hop(self, url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        parts, address = await self._checked(url)
        host = parts.hostname or ""
        shown = f"[{address}]" if isinstance(address, ipaddress.IPv6Address) else str(address)
        pinned = parts._replace(netloc=f"{shown}:{parts.port}" if parts.port else shown, fragment="").geturl()
        request = self._httpx.Request(
            "GET",
            pinned,
            headers={**headers, "Host": parts.netloc, "Accept-Encoding": "identity", "User-Agent": "foreload"},
            extensions={"sni_hostname": host, "timeout": self._timeout.as_dict()},
        )
        try:
            response = await self._client(host).send(request, stream=True)
        except self._httpx.HTTPError as error:
            raise self._passing(error) from None
        try:
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _checked(self, url: str) -> tuple[Any, Address]:
        """Take an address apart and find where to connect to. Raises `FetchFailed` for what is not allowed."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)
        except ValueError:
            raise FetchFailed("the source leads to an address that cannot be read") from None
        host = (parts.hostname or "").lower()
        if parts.scheme not in WEB_SCHEMES or not host or "@" in parts.netloc:
            raise FetchFailed("the source leads to an address that is not allowed")
        if parts.scheme == "http" and not self._permits.allow_http:
            raise FetchFailed("the source leads to http, which is not allowed")
        if self._permits.host_entry(host) is None:
            raise FetchFailed("the source leads to a host that is not among remote.hosts")
        found = await self._resolve(host, port)
        bad = [each for each in found if not self._permits.reaches(host, each)]
        if bad or not found:
            raise FetchFailed("the source's host has an address outside the public internet and remote.networks")
        return parts, found[0]

    def _client(self, host: str) -> Any:
        if host not in self._clients:
            self._clients[host] = self._httpx.AsyncClient(
                verify=self._tls, timeout=self._timeout, limits=self._limits, follow_redirects=False, trust_env=False
            )
        return self._clients[host]

    def _passing(self, error: Exception) -> Passing:
        if isinstance(error, self._httpx.ConnectTimeout | self._httpx.ConnectError):
            return Passing("the source cannot be connected to")
        if isinstance(error, self._httpx.TimeoutException):
            return Passing("the source sends nothing")
        return Passing("the connection to the source broke")

    async def pieces(self, response: Any) -> AsyncIterator[memoryview]:
        """The body as it arrives, so that a broken connection costs no byte that came. Raises `Passing`."""
        try:
            async for piece in response.aiter_raw():
                yield memoryview(piece)
        except self._httpx.HTTPError as error:
            raise self._passing(error) from None

    async def close(self) -> None:
        """Close every connection."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    def __repr__(self) -> str:
        return f"<WebClient {len(self._clients)} hosts>"


class WebOrigin:
    """One file on a web server; implements `Origin`."""

    def __init__(self, client: WebClient, url: str, token: str = "") -> None:
        self._client = client
        self._url = url
        self._token = token

    @asynccontextmanager
    async def read(self, start: int, end: int | None, tag: str) -> AsyncIterator[Answer]:
        """See `Origin.read`."""
        headers = {} if end is None else {"Range": f"bytes={start}-{end - 1}"}
        if tag.startswith('"'):  # a weak tag, or a date, is only compared
            headers["If-Match"] = tag
        async with self._client.get(self._url, headers, self._token) as response:
            size = _size_told(response, start, end)
            found = response.headers.get("etag", "") or response.headers.get("last-modified", "")
            if tag and found != tag:
                raise Replaced
            yield Answer(self._client.pieces(response), size, found)

    async def close(self) -> None:
        """The client is the caller's."""

    def __repr__(self) -> str:
        return "<WebOrigin>"


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchFailed("the source leads to an address that cannot be read") from None


def _size_told(response: Any, start: int, end: int | None) -> int | None:
    """Check status and range of an answer; returns the size of the whole file if it was told."""
    status = int(response.status_code)
    if status == _CHANGED:
        raise Replaced
    if status == _BUSY or status >= _OURS:
        raise Passing(f"the source answers {status}")
    if status in {_UNAUTHORIZED, _FORBIDDEN}:
        raise FetchFailed("the source refuses these credentials")
    if status == _BEYOND:
        raise Replaced  # it is shorter than it was, or than the manifest says
    if status not in {_OK, _PART}:
        raise FetchFailed("the source has no such file" if status == _GONE else f"the source answers {status}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchFailed("the source sends the file in another encoding than it was asked for")
    if end is None or status == _OK:
        if end is not None:
            raise RangeIgnored
        length = response.headers.get("content-length", "")
        return int(length) if length.isdigit() and status == _OK else None
    found = _RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found[1]) != start or int(found[2]) >= end:
        raise Passing("the source answered with another range")
    return None if found[3] == "*" else int(found[3])
