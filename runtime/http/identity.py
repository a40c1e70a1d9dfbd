"""Who a request is in logs and traces: request id, W3C trace context, trace id.

Belongs here: hygiene of identifiers that come from outside. Never: a span, a clock, Starlette.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Final

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(rb"[\x20-\x7e]{1,512}")
_TRACE_ID: Final = re.compile(r"(?!0{32})[0-9a-f]{32}")


def request_id_of(given: bytes | None) -> str:
    """Accept a caller's id of at most 128 visible ASCII characters, or make a fresh one in the form of a trace id."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return os.urandom(16).hex()


def traceparent_of(given: bytes | None) -> str:
    """Return a valid W3C `traceparent`; empty when there is none or it is malformed, as the standard asks."""
    if given is None or _TRACEPARENT.fullmatch(given) is None:
        return ""
    return given.decode("ascii")


def tracestate_of(given: bytes | None) -> str:
    """Return a `tracestate` of at most 512 printable characters; empty otherwise."""
    if given is None or _TRACESTATE.fullmatch(given) is None:
        return ""
    return given.decode("ascii")


def trace_of(request_id: str, traceparent: str) -> str:
    """Derive the trace id (32 hex digits) both sides use, so that an error body and the span agree without talking.

    It is the caller's trace, else the request id if that has the form of one, else a hash of the request id.
    """
    if traceparent:
        return traceparent[3:35]
    if _TRACE_ID.fullmatch(request_id):
        return request_id
    return hashlib.blake2b(request_id.encode("utf-8", "replace"), digest_size=16).hexdigest()
