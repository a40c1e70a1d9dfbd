"""Log lines: structlog set-up, the standard library routed in, secrets masked, one JSON object per line.

Nothing here decides what is worth a line; for events that is `eventlog.py`, for code its author.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TextIO, TypeAlias

import orjson
import structlog

from runtime.telemetry import redact
from runtime.telemetry.sink import ROOM, LineSink

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from structlog.typing import EventDict, Processor, WrappedLogger

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
Format: TypeAlias = Literal["auto", "json", "pretty"]

_LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_QUIET: Final[Mapping[str, int]] = {
    "uvicorn.access": logging.WARNING,  # would carry query strings (S10)
    "urllib3": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "asyncio": logging.WARNING,
    "opentelemetry.trace.span": logging.ERROR,  # warns of each bad tracestate that a client sends
}
_OWN_SINKS: Final = ("uvicorn", "uvicorn.error", "uvicorn.access")
_LONGEST: Final = 32_768


class Logs:
    """The running set-up. Close it last: it writes what waits, within a second, and puts everything back."""

    def __init__(self, sink: LineSink, target: logging.Handler, former: dict[str, Any] | None) -> None:
        self._sink = sink
        self._structlog = former
        root = logging.getLogger()
        self._target = target
        self._former = (root.level, root.handlers[:])
        root.handlers[:] = [target]

    @property
    def dropped(self) -> int:
        """Lines lost to a full queue or a stream that is gone."""
        return self._sink.dropped

    def close(self) -> bool:
        """Write what waits and undo the set-up; False if the stream would not take all of it."""
        structlog.reset_defaults()
        if self._structlog is not None:
            structlog.configure(**self._structlog)
        root = logging.getLogger()
        if root.handlers == [self._target]:
            root.setLevel(self._former[0])
            root.handlers[:] = self._former[1]
        return self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Logs {self._sink!r}>"


class _ToSink(logging.Handler):
    """Formats a standard-library record like our own lines and queues it."""

    def __init__(self, sink: LineSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sink.put(self.format(record))
        except Exception as error:  # noqa: BLE001  a record that cannot be spelled must not break who logged it
            self._sink.put(
                orjson.dumps({"level": "error", "event": "log line lost", "cause": type(error).__name__}).decode()
            )


class _Lines:
    """What structlog calls a logger: takes the finished line."""

    def __init__(self, sink: LineSink) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = self.exception = sink.put
        self.log = self.fatal = self.warn = self.err = sink.put


def configure(
    level: Level = "info",
    format: Format = "auto",  # noqa: A002  it is the setting's name
    stream: TextIO | None = None,
    *,
    room: int = ROOM,
) -> Logs:
    """Send every log line of the process to `stream` (stdout) through a queue of `room` lines.

    `auto` is pretty on a terminal and JSON elsewhere. Give uvicorn `log_config=None`, or it adds outputs of its own.
    """
    # Python has no stdout at all when it was started with that descriptor closed (F79).
    out = stream or sys.stdout or io.StringIO()
    pretty = format == "pretty" or (format == "auto" and out.isatty())
    render: Processor = structlog.dev.ConsoleRenderer(colors=out.isatty()) if pretty else _json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp" if pretty else "time"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _masked,
    ]
    sink = LineSink(out, lambda lost: _say(render, "log lines dropped", lost), room=room)
    former = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _Lines(sink),
        cache_logger_on_first_use=False,  # else loggers made before a close would write to a closed sink
    )
    target = _ToSink(sink)
    foreign: list[Processor] = [structlog.stdlib.ExtraAdder(), _name_source, *shared]
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    target.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=foreign, processors=[strip, render], keep_exc_info=False)
    )
    logs = Logs(sink, target, former)
    logging.getLogger().setLevel(_LEVELS[level])
    for name in _OWN_SINKS:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, _LEVELS[level]))
    return logs


def _masked(_logger: WrappedLogger, _name: str, event: EventDict) -> MutableMapping[str, Any]:
    """Mask secrets in a line's fields. structlog's own, with a leading underscore, are objects and go on untouched."""
    own = {name: value for name, value in event.items() if name.startswith("_")}
    return redact.fields({name: value for name, value in event.items() if name not in own}) | own


def _name_source(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    record: logging.LogRecord | None = event.get("_record")
    if record is not None:
        event["logger"] = record.name
        event.pop("color_message", None)  # uvicorn says it once more, in colour
    return event


def _json(_logger: WrappedLogger, _name: str, event: EventDict) -> str:
    """One object per line; time, level and event first, so that a line reads well."""
    first = {name: event.pop(name) for name in ("time", "level", "event") if name in event}
    whole = {**first, **event}
    try:
        line = orjson.dumps(whole, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # a lone surrogate, an integer beyond 64 bits: spell every value as ASCII text
        line = json.dumps({str(name): str(value) for name, value in whole.items()})
    if len(line) <= _LONGEST:
        return line
    return json.dumps({**first, "event": str(first.get("event"))[:1_024], "cut": len(line)})


def _say(render: Processor, what: str, count: int) -> str:
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")
    line = render(None, "warning", dict(stamp(None, "", {"event": what, "level": "warning", "dropped": count})))
    return str(line)
