"""A breaker per artefact (a model's key and fingerprint): what failed to load is left alone for a while.

When its back-off ends one probe may try. The back-off doubles from `first` to `limit` seconds; an explicit load, or
other weights, start afresh.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Breaker:
    failures: int
    until: float
    code: str
    cause: str
    probing: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an artefact is left alone, and for how many more seconds."""

    code: str
    cause: str
    remaining: float
    failures: int


class Quarantine:
    """Remembers at most `size` artefacts, the oldest forgotten first."""

    def __init__(self, *, first: float = 1.0, limit: float = 300.0, size: int = 4096) -> None:
        self._first = first
        self._limit = limit
        self._size = size
        self._breakers: OrderedDict[str, _Breaker] = OrderedDict()

    def verdict(self, artefact: str, now: float) -> Verdict | None:
        """None when a load may be tried now."""
        breaker = self._breakers.get(artefact)
        if breaker is None or (now >= breaker.until and not breaker.probing):
            return None
        remaining = max(breaker.until - now, 0.0)
        return Verdict(breaker.code, breaker.cause, remaining, breaker.failures)

    def trying(self, artefact: str) -> None:
        """A load of it starts: if it had failed before, this is the single probe."""
        if (breaker := self._breakers.get(artefact)) is not None:
            breaker.probing = True

    def failed(self, artefact: str, *, code: str, cause: str, now: float) -> float:
        """Count a failure; returns the back-off in seconds."""
        known = self._breakers.pop(artefact, None)
        failures = known.failures + 1 if known else 1
        pause = min(self._first * 2.0 ** min(failures - 1, 62), self._limit)
        self._breakers[artefact] = _Breaker(failures, now + pause, code, cause)
        while len(self._breakers) > self._size:
            self._breakers.popitem(last=False)
        return pause

    def gave_up(self, artefact: str) -> None:
        """The probe was cancelled: the next one may try."""
        if (breaker := self._breakers.get(artefact)) is not None:
            breaker.probing = False

    def clear(self, artefact: str) -> None:
        """It loaded, or an operator asked for it explicitly."""
        self._breakers.pop(artefact, None)

    def last(self, artefact: str) -> tuple[str, str] | None:
        """Code and cause of the last failure, while it is remembered."""
        breaker = self._breakers.get(artefact)
        return (breaker.code, breaker.cause) if breaker else None

    def __repr__(self) -> str:
        return f"<Quarantine {len(self._breakers)} artefacts>"
