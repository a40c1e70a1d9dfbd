"""All views of the events, built and subscribed in the one order that works.

For the composition root. Nothing here looks at an event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from runtime.telemetry import export
from runtime.telemetry.epoch import Epoch
from runtime.telemetry.eventlog import EventLog
from runtime.telemetry.fanout import Fanout
from runtime.telemetry.feed import Feed
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.readings import Reading
from runtime.telemetry.spans import Spans
from runtime.telemetry.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.telemetry.logs import Logs


class Views:
    """Everything that is derived from events. `emit` is the process' `Emit`; further subscribers may be added to it.

    `now` is the loop's clock. `otlp` is a collector's base address; None leaves that to `OTEL_*`. `reading` is called
    at scrape time; losses of spans and log lines are added to it. `models` is how many may have series of their own.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        version: str,
        otlp: str | None = None,
        reading: Callable[[], Reading] = Reading,
        logs: Logs | None = None,
        models: int = 1_000,
    ) -> None:
        epoch = Epoch(now)
        self.epoch = epoch
        self._reading = reading
        self._logs = logs
        self.emit = Fanout()
        self.spans = Spans(export.otlp(otlp) if export.wanted(otlp) else None, epoch)
        self.feed = Feed(epoch)
        self.tally = Tally(epoch)
        self.metrics = Metrics(
            version=version,
            reading=self._read,
            sampled=self.spans.sampled,
            load_trace=self.spans.load_trace,
            limit=models,
        )
        lines = EventLog(
            structlog.get_logger("foreload").bind(), trace_of=self.spans.trace_of, load_trace=self.spans.load_trace
        )
        self.emit.subscribe("feed", self.feed.wants())
        self.emit.subscribe("tally", self.tally.wants())
        self.emit.subscribe("metrics", self.metrics.wants())
        self.emit.subscribe("log", lines.wants())
        # Last: metrics and log ask for the trace of a request that ends, and the spans forget it then.
        self.emit.subscribe("spans", self.spans.wants())

    def read_from(self, reading: Callable[[], Reading]) -> None:
        """Take the gauges from here on; whoever knows the actors is built after the views."""
        self._reading = reading

    def _read(self) -> Reading:
        reading = self._reading()
        lost = {**reading.lost, "spans": self.spans.lost}
        if self._logs is not None:
            lost["logs"] = self._logs.dropped
        return replace(reading, lost=lost)

    def close(self) -> bool:
        """Send the last spans; False if some were given up. Blocks up to 3 s: call it away from the loop."""
        return self.spans.close()

    def __repr__(self) -> str:
        return f"<Views {self.emit!r} {self.spans!r}>"
