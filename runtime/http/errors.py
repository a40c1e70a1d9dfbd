"""The only table error class -> status, and the error object every refusal carries (protocol, section 5).

Belongs here: statuses, `Retry-After`, the error body. Never: a decision about whether to refuse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from actors import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

CLIENT_LEFT: Final = 499
"""Never sent: the word in logs and metrics for a client that did not wait for its answer."""

STATUS: Final[Mapping[type[errors.ForeloadError], int]] = {
    errors.ForeloadError: 500,
    errors.Refused: 503,
    errors.Busy: 429,
    errors.StillLoading: 503,
    errors.Draining: 503,
    errors.Quarantined: 503,
    errors.NoEvictableSpace: 503,
    errors.NotReady: 503,
    errors.Invalid: 400,
    errors.BadRequest: 400,
    errors.BadTensor: 400,
    errors.UnknownModel: 404,
    errors.NotFound: 404,
    errors.WrongVerb: 405,
    errors.TooLarge: 413,
    errors.TooSlow: 408,
    errors.HeadersTooLarge: 431,
    errors.UriTooLong: 414,
    errors.UnsupportedEncoding: 415,
    errors.Unsupported: 501,
    errors.Unauthorized: 401,
    errors.NotAllowed: 403,
    errors.Conflict: 409,
    errors.NeverFits: 507,
    errors.DiskFull: 507,
    errors.Broken: 503,
    errors.LoadFailed: 503,
    errors.FetchFailed: 503,
    errors.CorruptWeights: 503,
    errors.OutOfMemory: 503,
    errors.InferenceFailed: 503,
    errors.WorkerDied: 503,
    errors.ActorStopped: 503,
    errors.DeadlineExceeded: 504,
    errors.ConfigError: 500,
}
"""One row per class; a class of a later version takes its parent's row."""

_COME_BACK: Final = frozenset({429, 503})
_LONGEST_WAIT: Final = 86_400
_INTERNAL: Final = "internal error; quote the trace id when you report it"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it goes over the wire; `headers` come beside content type and length."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


def status_of(error: BaseException) -> int:
    """Look a status up; 500 for anything that is not a `ForeloadError`."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500


def refusal(error: BaseException, trace_id: str) -> Refusal:
    """Put an error into words. The text of an exception that is not ours never leaves the process."""
    status = status_of(error)
    if not isinstance(error, errors.ForeloadError) or status == 500:  # noqa: PLR2004 - the status says it best
        return Refusal(500, _encode({"error": _INTERNAL, "code": "internal", "trace_id": trace_id}))
    content: dict[str, object] = {"error": error.message, "code": error.code, "trace_id": trace_id}
    if error.model is not None:
        content["model"] = error.model
    if error.detail:
        content["detail"] = error.detail
    return Refusal(status, _encode(content), _headers(status, error))


def _headers(status: int, error: errors.ForeloadError) -> tuple[tuple[bytes, bytes], ...]:
    if status in _COME_BACK:
        return ((b"retry-after", b"%d" % _seconds(error.retry_after)),)
    if status == 401:  # noqa: PLR2004 - the status says it best
        return ((b"www-authenticate", b"Bearer"),)
    if status == 405 and "allow" in error.detail:  # noqa: PLR2004 - the status says it best
        return ((b"allow", str(error.detail["allow"]).encode("ascii", "replace")),)
    return ()


def _seconds(wait: float | None) -> int:
    """Whole seconds, rounded up, at least one; a wait that is no number counts as one second."""
    if wait is None or not math.isfinite(wait):
        return 1
    return min(max(1, math.ceil(wait)), _LONGEST_WAIT)


def _encode(content: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(content)
    except TypeError:
        # A lone surrogate (a hostile name, an undecodable file name) must not turn a refusal into a 500.
        return orjson.dumps({key: _printable(value) for key, value in content.items()})


def _printable(value: object) -> object:
    if isinstance(value, dict):
        return {str(_printable(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, bool | float) or value is None:
        return value
    return str(value).encode("utf-8", "replace").decode()
