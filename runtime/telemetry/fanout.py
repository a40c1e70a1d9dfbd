"""One way out for facts: hands each event to the subscribers that want its type, in order, on the loop's thread.

No knowledge of what subscribers do with it, no queue to another thread, no I/O but the report of a dropped subscriber.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_args

from actors.events import Event, SubscriberDropped

_log = logging.getLogger("foreload.telemetry")

EVENT_TYPES: tuple[type[Any], ...] = get_args(Event)
"""Every class of the closed union."""

Wants: TypeAlias = Mapping[type[Any], Callable[[Any], None]]
"""What a subscriber wants: one function per event type."""

_STORM = 1_000
_CAUSE = 200


class Fanout:
    """`actors.ports.Emit` for the whole process. Never raises, never blocks; call it on the loop's thread only.

    A subscriber that raises is switched off and reported as `SubscriberDropped`; the others go on. An event stated
    by a subscriber is delivered after the current one, so everybody sees the same order.
    """

    __slots__ = ("_busy", "_pending", "_routes", "_wants")

    def __init__(self) -> None:
        self._wants: dict[str, Wants] = {}
        self._routes: dict[type[Any], tuple[tuple[str, Callable[[Any], None]], ...]] = {}
        self._pending: deque[Event] = deque()
        self._busy = False

    def subscribe(self, name: str, wants: Wants | Callable[[Any], None]) -> None:
        """Add a subscriber at the end. A plain function gets every event. Raises ValueError for a name in use."""
        if name in self._wants:
            raise ValueError(f"a subscriber named {name!r} is there already")
        routes = dict(wants) if isinstance(wants, Mapping) else dict.fromkeys(EVENT_TYPES, wants)
        foreign = [kind.__name__ for kind in routes if kind not in EVENT_TYPES]
        if foreign:
            raise ValueError(f"subscriber {name!r} wants {', '.join(sorted(foreign))}, which are not events")
        self._wants[name] = routes
        self._rebuild()

    @property
    def subscribers(self) -> tuple[str, ...]:
        """Names in order of delivery."""
        return tuple(self._wants)

    def __call__(self, event: Event, /) -> None:
        """Deliver one event. Nested calls are queued behind the current one."""
        if self._busy:
            self._pending.append(event)
            return
        self._busy = True
        try:
            self._deliver(event)
            if self._pending:
                self._drain()
        finally:
            self._busy = False

    def _deliver(self, event: Event) -> None:
        wants = self._wants
        for name, fn in self._routes.get(type(event), ()):
            if name not in wants:  # taken out by a subscriber before it
                continue
            try:
                fn(event)
            except Exception as error:  # noqa: BLE001  the promise is: whatever a subscriber raises, serving goes on
                self._drop(name, event.at, error)

    def _drain(self) -> None:
        """Deliver what subscribers stated meanwhile; whoever still speaks after so many rounds is dropped."""
        delivered = 0
        while self._pending:
            event = self._pending.popleft()
            delivered += 1
            if delivered < _STORM:
                self._deliver(event)
            else:
                self._last_rounds(event)

    def _last_rounds(self, event: Event) -> None:
        for name, fn in self._routes.get(type(event), ()):
            waiting = len(self._pending)
            try:
                fn(event)
            except Exception as error:  # noqa: BLE001  as above
                self._drop(name, event.at, error)
                continue
            if len(self._pending) > waiting:
                self._drop(name, event.at, RecursionError("it answers events with events without end"))

    def _drop(self, name: str, at: float, error: Exception) -> None:
        if self._wants.pop(name, None) is None:
            return
        self._rebuild()
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")[:_CAUSE]
        _log.error("event subscriber %s raised and is switched off", name, exc_info=error)
        self._pending.append(SubscriberDropped(at=at, subscriber=name, cause=cause))

    def _rebuild(self) -> None:
        routes: dict[type[Any], list[tuple[str, Callable[[Any], None]]]] = {}
        for name, wants in self._wants.items():
            for kind, fn in wants.items():
                routes.setdefault(kind, []).append((name, fn))
        self._routes = {kind: tuple(found) for kind, found in routes.items()}

    def __repr__(self) -> str:
        return f"<Fanout {', '.join(self._wants) or 'nobody'}>"
