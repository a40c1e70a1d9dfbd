"""The recent past as rows with numbers: for the dashboard's stream, for stories in tests, for replay.

A ring in memory, pulled by its readers, so that a slow one costs the server nothing (R28). Imports nothing heavy:
the simulator uses it too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import anyio

from actors import events as e
from runtime.telemetry import redact
from runtime.telemetry.fanout import EVENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.events import Event
    from runtime.telemetry.epoch import Epoch
    from runtime.telemetry.fanout import Wants

LIMIT: Final = 10_000

PER_REQUEST: Final[Mapping[type, str]] = {
    e.RequestArrived: "thousands a second: they would push every load out of the ring",
    e.LeaseReleased: "the same",
    e.RequestFinished: "the same; one that failed is in the request log and the metrics",
}
"""What the ring leaves out unless built with `everything`; plain hits among `LeaseGranted` too."""

_FIELDS: Final = {kind: tuple(field.name for field in fields(kind)) for kind in EVENT_TYPES}


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows after some number. `missed` of them had left the ring already; `last` is where to go on from."""

    rows: tuple[dict[str, object], ...]
    missed: int
    last: int


class Feed:
    """A bounded ring of events with sequence numbers from 1 on, without gaps."""

    def __init__(self, epoch: Epoch | None = None, *, limit: int = LIMIT, everything: bool = False) -> None:
        self._ring: deque[Event] = deque(maxlen=limit)
        self._epoch = epoch
        self._everything = everything
        self._last = 0
        self._news: anyio.Event | None = None

    def wants(self) -> Wants:
        """Subscribe with this."""
        wants: dict[type[Any], Callable[[Any], None]] = dict.fromkeys(EVENT_TYPES, self._keep)
        if not self._everything:
            wants = {kind: fn for kind, fn in wants.items() if kind not in PER_REQUEST}
            wants[e.LeaseGranted] = self._keep_notable
        return wants

    def _keep(self, event: Event) -> None:
        self._ring.append(event)
        self._last += 1
        if self._news is not None:
            self._news.set()
            self._news = None

    def _keep_notable(self, event: e.LeaseGranted) -> None:
        if event.result != "hit":
            self._keep(event)

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    @property
    def first(self) -> int:
        """Number of the oldest event still here; `last + 1` if there is none."""
        return self._last - len(self._ring) + 1

    def events(self) -> tuple[Event, ...]:
        """What the ring holds, oldest first."""
        return tuple(self._ring)

    def since(self, seq: int, *, limit: int = 1_000, model: str | None = None) -> Slice:
        """Up to `limit` rows numbered above `seq`, of one model (its name or key) if asked.

        A number from another life of the server, above `last`, starts from the beginning.
        """
        start = max(seq if 0 <= seq <= self._last else 0, self.first - 1)
        missed = max(0, self.first - 1 - seq) if 0 <= seq <= self._last else 0
        rows: list[dict[str, object]] = []
        last = start
        for offset in range(start - self.first + 1, len(self._ring)):
            if len(rows) >= limit:
                break
            last = self.first + offset
            event = self._ring[offset]
            if model is None or _is_about(event, model):
                rows.append(self.row(last, event))
        return Slice(tuple(rows), missed, last)

    async def after(self, seq: int) -> None:
        """Wait until there is an event numbered above `seq`."""
        while self._last <= seq:
            if self._news is None:
                self._news = anyio.Event()
            await self._news.wait()

    def row(self, seq: int, event: Event) -> dict[str, object]:
        """One event as JSON knows it: `seq`, `kind`, `time` if calendar time is known, and its fields."""
        row: dict[str, object] = {"seq": seq, "kind": type(event).__name__}
        if self._epoch is not None:
            row["time"] = self._epoch.text(event.at)
        return row | as_fields(event)

    def __repr__(self) -> str:
        return f"<Feed {self.first}..{self._last}>"


def as_fields(event: Event) -> dict[str, object]:
    """An event's fields as JSON-able values, secrets masked in its texts."""
    return {name: _plain(getattr(event, name)) for name in _FIELDS[type(event)]}


def _plain(value: object) -> object:
    if isinstance(value, str):
        return redact.text(str(value)) if "://" in value or "=" in value or " " in value else str(value)
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value


def _is_about(event: Event, model: str) -> bool:
    key: str = getattr(event, "model", "")
    return model in {key, key.rpartition("@")[0]}
