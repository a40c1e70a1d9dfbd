"""What the front door tells the log about requests that end without an answer worth trusting.

Belongs here: the fact and its default way out. Never: a body, a query string, a header (S10).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from runtime.http.errors import CLIENT_LEFT

if TYPE_CHECKING:
    from runtime.http.exchange import Exchange

_log: Final = logging.getLogger("foreload.http")
_LONGEST_PATH: Final = 256


@dataclass(frozen=True, slots=True)
class Incident:
    """`status` 500 and 503 come with a `cause`; 499 means that the client left and nothing was sent."""

    status: int
    method: str
    path: str
    request_id: str
    trace_id: str
    cause: BaseException | None = None

    @classmethod
    def of(cls, status: int, exchange: Exchange, cause: BaseException | None = None) -> Incident:
        """State what happened to a request; a hostile path is cut."""
        path = exchange.path[:_LONGEST_PATH]
        return cls(status, exchange.method, path, exchange.request_id, exchange.trace_id, cause)


Notify: TypeAlias = Callable[[Incident], None]
"""Takes incidents. Never raises, never blocks."""


def to_log(incident: Incident) -> None:
    """Write an incident to the standard log; an error with its traceback, a lost client at debug level."""
    level = logging.DEBUG if incident.status == CLIENT_LEFT else logging.ERROR
    text = "%s %r ended with %d, request %s, trace %s"
    parts = (incident.method, incident.path, incident.status, incident.request_id, incident.trace_id)
    _log.log(level, text, *parts, exc_info=incident.cause)
