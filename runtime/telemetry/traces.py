"""Small values that spans share: a W3C trace context read, where something belongs, one request's open span.

No event is looked at here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.span import TraceState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Noted: TypeAlias = "dict[str, str | bool | float]"
"""Attributes of a span in the making."""

# https://www.w3.org/TR/trace-context/#traceparent-header; a later version may carry more after the flags.
_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_LIMIT: Final = 512


class Trace(NamedTuple):
    """Where something belongs: hex ids as log lines and error bodies carry them; empty strings for nowhere."""

    trace_id: str = ""
    span_id: str = ""


class Acquire:
    """One recording request's open span. A request that does not record is only its trace id."""

    __slots__ = ("loads", "noted", "span", "trace_id")

    def __init__(self, span: Span, trace_id: str) -> None:
        self.span = span
        self.trace_id = trace_id
        self.noted: Noted = {}
        self.loads: tuple[str, ...] = ()


def parse(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """Read a W3C trace context; None for an absent or malformed one, as the standard asks (start a new trace)."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if more is not None and version == "00":
        return None
    state = TraceState.from_header([tracestate]) if 0 < len(tracestate) <= _STATE_LIMIT else None
    # By position: keywords cost on the hit path. The True says that the parent is another process' span.
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16) & 1), state)
    return context if context.is_valid else None


def name_model(noted: Noted, key: str) -> None:
    """Note name and version of `name@version`."""
    name, _, version = key.rpartition("@")
    noted["foreload.model.name"] = name or key
    if name:
        noted["foreload.model.version"] = version
