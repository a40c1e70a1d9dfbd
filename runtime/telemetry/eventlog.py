"""Which events are worth a log line, at which level, and where they belong in a trace.

No set-up of logging (`logs.py`) and no counting. Hits are never logged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from actors import events as e
from actors.errors import Broken, by_code
from runtime.telemetry.feed import as_fields
from runtime.telemetry.places import BELOW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.events import Event
    from runtime.telemetry.fanout import Wants

    TraceOf = Callable[[str], tuple[str, str]]


class Log(Protocol):
    """The part of a structlog logger that is used here."""

    def debug(self, event: str, /, **fields: object) -> object:
        """Below the default level."""
        ...

    def info(self, event: str, /, **fields: object) -> object:
        """What an operator reads to see what went on."""
        ...

    def warning(self, event: str, /, **fields: object) -> object:
        """What an operator should look at."""
        ...

    def error(self, event: str, /, **fields: object) -> object:
        """What an operator must look at."""
        ...

    def is_enabled_for(self, level: int) -> bool:
        """Whether a line of this level, as the standard library counts them, is written at all."""
        ...


class _Level(NamedTuple):
    """A level: the logger's method, and the standard library's number."""

    name: str
    number: int


_DEBUG: Final = _Level("debug", logging.DEBUG)
_INFO: Final = _Level("info", logging.INFO)
_WARNING: Final = _Level("warning", logging.WARNING)
_ERROR: Final = _Level("error", logging.ERROR)


_NOT_OURS: Final = frozenset({"ok", "cancelled"})
"""Outcomes that are no error codes: an answer, and a client that left before it (499)."""


def _nowhere(_id: str) -> tuple[str, str]:
    return "", ""


class EventLog:
    """Writes lines for events. `trace_of` maps a request's id, `load_trace` a load's, to its trace and span id.

    Subscribe it before the spans, as the metrics: a failed request's line needs its trace while it is open.
    """

    IGNORED: ClassVar[Mapping[type, str]] = {
        e.RequestArrived: "thousands a second",
        e.LeaseGranted: "hits are not logged, and a miss is told by its load",
        e.LeaseReleased: "thousands a second",
        e.WaiterJoined: "told by its load",
        e.SubscriberDropped: "the fan-out logs it itself, with the traceback, even if this subscriber is the one",
    }

    def __init__(self, log: Log, *, trace_of: TraceOf = _nowhere, load_trace: TraceOf = _nowhere) -> None:
        self._log = log
        self._trace_of = trace_of
        self._load_trace = load_trace

    def wants(self) -> Wants:
        """Subscribe with this."""
        return {
            e.WaiterLeft: self._waiter_left,
            e.RequestFinished: self._finished,
            e.LoadStarted: self._load_started,
            e.LoadUpgraded: lambda event: self._say(_DEBUG, "load upgraded", event),
            e.LoadFinished: lambda event: self._say_load(_INFO, "loaded", event),
            e.LoadFailed: lambda event: self._say_load(_WARNING, "load failed", event),
            e.LoadCancelled: lambda event: self._say_load(_INFO, "load cancelled", event),
            e.FetchStarted: lambda event: self._say(_INFO, "fetching", event),
            e.FetchProgressed: lambda event: self._say(_DEBUG, "fetch under way", event),
            e.FetchFinished: lambda event: self._say(_INFO, "fetch ended", event),
            e.EvictionStarted: lambda event: self._say_load(_DEBUG, "evicting", event),
            e.Evicted: self._evicted,
            e.Adopted: lambda event: self._say(_WARNING, "adopted", event),
            e.PrefetchSettled: lambda event: self._say(_DEBUG, "prefetch settled", event),
            e.PressureChanged: self._pressure,
            e.PrefetchWithheld: lambda event: self._say(_DEBUG, "prefetch withheld", event),
            e.PeakInfeasible: self._infeasible,
            e.ForecastFitted: lambda event: self._say(_INFO, "forecast fitted", event),
            e.ForecastDemoted: self._demoted,
            e.ForecastJudged: lambda event: self._say(_DEBUG, "forecast judged", event),
            e.ForecastFell: lambda event: self._say(_WARNING, "forecast fell back", event),
            e.ForesightReported: lambda event: self._say(_INFO, "foresight report", event),
            e.WarmSettled: self._warm,
            e.WorkerStarted: lambda event: self._say(_INFO, "worker started", event),
            e.WorkerLost: lambda event: self._say(_ERROR, "worker lost", event),
            e.CompileStarted: lambda event: self._say(_DEBUG, "compiling", event),
            e.CompileFinished: lambda event: self._say(_INFO, "compiled", event),
            e.CompileFailed: lambda event: self._say(_WARNING, "compilation failed", event),
            e.ActorRestarted: lambda event: self._say(_ERROR, "actor restarted", event),
            e.CatalogChanged: self._catalog,
            e.DrainStarted: lambda event: self._say(_INFO, "drain started", event),
            e.DrainFinished: self._drained,
        }

    def _say(self, how: _Level, what: str, event: Event, where: tuple[str, str] = ("", "")) -> None:
        if not self._log.is_enabled_for(how.number):
            return  # before the fields are made: a load is some lines below the default level
        fields = as_fields(event)
        del fields["at"]  # loop seconds mean nothing to a reader; the line has its time
        if where[0]:
            fields["trace_id"] = where[0]
        if where[1]:
            fields["span_id"] = where[1]
        getattr(self._log, how.name)(what, **fields)

    def _say_load(
        self,
        how: _Level,
        what: str,
        event: e.LoadFinished | e.LoadFailed | e.LoadCancelled | e.EvictionStarted,
    ) -> None:
        self._say(how, what, event, self._load_trace(event.load))

    def _load_started(self, event: e.LoadStarted) -> None:
        where = self._trace_of(event.request) if event.request else ("", "")
        self._say(_DEBUG, "load started", event, where)

    def _waiter_left(self, event: e.WaiterLeft) -> None:
        if event.device not in BELOW:
            self._say(_DEBUG, "waiter left", event, self._trace_of(event.request))

    def _finished(self, event: e.RequestFinished) -> None:
        """Only what broke on our side; a caller's own mistake is the caller's to read."""
        if event.outcome not in _NOT_OURS and issubclass(by_code(event.outcome), Broken):
            self._say(_WARNING, "request failed", event, self._trace_of(event.request))

    def _evicted(self, event: e.Evicted) -> None:
        how = _WARNING if event.leaked > 0 else _INFO
        self._say(how, "evicted", event)

    def _pressure(self, event: e.PressureChanged) -> None:
        how = _WARNING if event.high else _INFO
        self._say(how, "memory pressure" if event.high else "memory pressure over", event)

    def _infeasible(self, event: e.PeakInfeasible) -> None:
        self._say(_ERROR if event.required else _WARNING, "peak will be cold", event)

    def _demoted(self, event: e.ForecastDemoted) -> None:
        self._say(_INFO, "forecast demoted" if event.demoted else "forecast trusted again", event)

    def _warm(self, event: e.WarmSettled) -> None:
        how = _INFO if event.ready else _WARNING
        self._say(how, "warm model ready" if event.ready else "warm model not ready", event)

    def _catalog(self, event: e.CatalogChanged) -> None:
        how = _WARNING if event.state == "rejected" else _INFO
        self._say(how, "catalogue changed", event)

    def _drained(self, event: e.DrainFinished) -> None:
        how = _WARNING if event.abandoned else _INFO
        self._say(how, "drain finished", event)
