"""One error tree, grouped by what the caller should do next.

A `ForeloadError` is a reply: it travels to whoever asked. Any other exception inside an actor is a crash
and ends that incarnation. No status codes here; `runtime/http/errors.py` is the only table that knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeAlias

Detail: TypeAlias = Mapping[str, int | float | str | bool]
"""Numbers and words for programs; never a path, host name or secret."""


class ForeloadError(Exception):
    """Root of everything foreload says to a caller.

    `code` is a stable word for programs, `detail` holds numbers, `retry_after` is in seconds.
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        model: str | None = None,
        detail: Detail | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.model = model
        self.detail: Detail = dict(detail or {})
        self.retry_after = retry_after

    def again(self) -> ForeloadError:
        """Give each waiter an exception object of its own, so tracebacks never pile up on a shared one."""
        return type(self)(self.message, model=self.model, detail=self.detail, retry_after=self.retry_after)


# -- come back later ---------------------------------------------------------------------------------


class Refused(ForeloadError):
    """Come back later; `retry_after` says when."""

    code = "refused"


class Busy(Refused):
    """A waiter or queue limit is reached."""

    code = "busy"


class StillLoading(Refused):
    """The server's own wait limit for a cold model passed; the load goes on."""

    code = "still_loading"


class Draining(Refused):
    """The server, or this model, is being stopped."""

    code = "draining"


class Quarantined(Refused):
    """This fingerprint failed to load and is left alone until its back-off ends."""

    code = "quarantined"


class NoEvictableSpace(Refused):
    """It would fit, but everything in the way is leased, pinned or too young."""

    code = "no_evictable_space"


class NotReady(Refused):
    """A required part is not up: a model directory still being written, a worker restarting."""

    code = "not_ready"


# -- change the request ------------------------------------------------------------------------------


class Invalid(ForeloadError):
    """Change the request."""

    code = "invalid"


class BadRequest(Invalid):
    """Malformed body, JSON, parameter or length."""

    code = "bad_request"


class BadTensor(Invalid):
    """A tensor's shape, datatype, count or bytes are wrong; the message names it."""

    code = "bad_tensor"


class UnknownModel(Invalid):
    """No such model or version."""

    code = "unknown_model"


class NotFound(Invalid):
    """No such path."""

    code = "not_found"


class WrongVerb(Invalid):
    """The path exists, with another verb."""

    code = "method_not_allowed"


class TooLarge(Invalid):
    """A body or tensor is over its limit."""

    code = "too_large"


class TooSlow(Invalid):
    """The body arrives too slowly."""

    code = "too_slow"


class HeadersTooLarge(Invalid):
    """The header section is over its limit."""

    code = "headers_too_large"


class UriTooLong(Invalid):
    """The URL is over its limit."""

    code = "uri_too_long"


class UnsupportedEncoding(Invalid):
    """A content encoding other than gzip or deflate."""

    code = "unsupported_encoding"


class Unsupported(Invalid):
    """An extension of the protocol that this server does not offer."""

    code = "unsupported"


class Unauthorized(Invalid):
    """No key, or a bad one."""

    code = "unauthorized"


class NotAllowed(Invalid):
    """The key lacks the scope, or the request comes from another site."""

    code = "not_allowed"


class Conflict(Invalid):
    """An operation in conflict with what is going on, such as unloading a leased model without draining."""

    code = "conflict"


# -- change the set-up -------------------------------------------------------------------------------


class NeverFits(ForeloadError):
    """Larger than the tier can ever hold; `detail` has the numbers."""

    code = "never_fits"


class DiskFull(NeverFits):
    """The disk tier has no room for this artefact."""

    code = "disk_full"


# -- call an operator --------------------------------------------------------------------------------


class Broken(ForeloadError):
    """Something of ours or of the artefact is broken."""

    code = "broken"


class LoadFailed(Broken):
    """The model could not be built or bound from its weights."""

    code = "load_failed"


class FetchFailed(Broken):
    """The artefact could not be read."""

    code = "fetch_failed"


class CorruptWeights(Broken):
    """The artefact is not what its manifest or header says."""

    code = "corrupt_weights"


class OutOfMemory(Broken):
    """A tier ran out of memory while loading or running."""

    code = "out_of_memory"


class InferenceFailed(Broken):
    """The model itself raised."""

    code = "inference_failed"


class WorkerDied(Broken):
    """The device worker ended; the message says how."""

    code = "worker_died"


class ActorStopped(Broken):
    """The actor that owned the answer stopped before giving it."""

    code = "actor_stopped"


# -- time and configuration --------------------------------------------------------------------------


class DeadlineExceeded(ForeloadError):
    """The caller's own deadline passed."""

    code = "deadline_exceeded"


class ConfigError(ForeloadError):
    """The configuration is refused; the message lists file, line, key and hint of every fault."""

    code = "config_error"


def _leaves(kind: type[ForeloadError]) -> dict[str, type[ForeloadError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found.update(_leaves(child))
    return found


def by_code(code: str) -> type[ForeloadError]:
    """Find the class of a stable word; `Broken` for a word this version does not know."""
    return _leaves(ForeloadError).get(code, Broken)
