"""A running server as the command line sees it: plain HTTP by the standard library.

No rendering here, and nothing of the server's own code: a client of the published protocol like any other.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from runtime.config.checks import is_loopback, url

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_BYTES: Final = 64 << 20
_SHOWN: Final = 500


class Declined(Exception):  # an answer, not a failure of ours
    """The server said no: its words, its stable code and the HTTP status."""

    def __init__(self, message: str, code: str, status: int, retry_after: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retry_after = retry_after


class Unreachable(Exception):  # named for what it says of the server
    """There is no server there, or what answers is not one."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Never follows a redirect: the key must not travel to another host."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class Server:
    """One server. `timeout` in seconds bounds every silence; raises `ValueError` for an address that is none."""

    def __init__(self, address: str, *, key: str | None = None, timeout: float = 10.0) -> None:
        self._base = url(address).rstrip("/")
        self._timeout = timeout
        self._headers = {"accept": "application/json", "user-agent": "foreload"}
        if key:
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ValueError("the key holds characters that a header cannot carry; check FORELOAD_KEY")
            self._headers["authorization"] = f"Bearer {key}"
        routes: list[urllib.request.BaseHandler] = [_Stay()]
        if is_loopback(urlsplit(self._base).hostname or ""):
            routes.append(urllib.request.ProxyHandler({}))  # a proxy would look for the server on itself
        self._opener = urllib.request.build_opener(*routes)

    def get(self, path: str) -> Any:
        """GET a path and read its JSON. Raises `Declined` or `Unreachable`."""
        return self._send("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """POST a JSON body and read the JSON that comes back; None for an empty answer."""
        return self._send("POST", path, json.dumps(body).encode())

    def _send(self, verb: str, path: str, body: bytes | None) -> Any:
        headers = {**self._headers, **({"content-type": "application/json"} if body is not None else {})}
        request = urllib.request.Request(self._base + path, data=body, headers=headers, method=verb)  # noqa: S310  # http(s) only, checked by `url`
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return _json(answer.read(_MOST_BYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                raise _declined(error) from None
        except TimeoutError:
            raise Unreachable(f"{self._base} did not answer within {self._timeout:g} s") from None
        except urllib.error.URLError as error:
            raise Unreachable(f"{self._base} cannot be reached: {_cause(error.reason)}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._base} broke off: {_cause(error)}") from None


def load_path(model: str) -> str:
    """Where a load is asked for."""
    return f"/v2/repository/models/{quote(model, safe='')}/load"


def unload_path(model: str) -> str:
    """Where an unload is asked for."""
    return f"/v2/repository/models/{quote(model, safe='')}/unload"


def _json(raw: bytes) -> Any:
    if not raw.strip():
        return None
    try:
        if len(raw) <= _MOST_BYTES:
            return json.loads(raw)
    except (ValueError, RecursionError):
        pass
    raise Unreachable("the answer is not one of foreload's: not JSON, or too long")


def _declined(error: urllib.error.HTTPError) -> Declined:
    try:
        body = json.loads(error.read(1 << 20))
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        body = None
    fields = body if isinstance(body, dict) else {}
    message = str(fields.get("error") or error.reason or "no reason given")[:_SHOWN]
    return Declined(message, str(fields.get("code") or f"http_{error.code}"), error.code, error.headers["retry-after"])


def _cause(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason)[:_SHOWN] or type(reason).__name__
