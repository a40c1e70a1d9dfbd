"""Which calls share a forward: natural micro-batching per model, models taking turns.

Belongs here: queues and the choice of a batch. Never: torch, decoding itself, answers.
While the device is busy calls queue up; when it is free it takes all that fit. Nobody waits unless a delay is set.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_LOOK_AHEAD = 4
"""How many batches' worth of calls with other shapes are looked past to fill one."""


@dataclass(frozen=True, slots=True)
class Group:
    """`shape` is what calls must share (each input's name, datatype and extents but the first); `rows` is its own."""

    shape: Hashable
    rows: int


class Batchable(Protocol):
    """A queued call, as the batcher sees it."""

    @property
    def arrived(self) -> int:
        """Nanoseconds of the batcher's clock."""
        ...

    @property
    def settled(self) -> bool:
        """It has been answered or cancelled, so it is to be left out."""
        ...


T = TypeVar("T", bound=Batchable)


@dataclass(slots=True)
class _Queue(Generic[T]):
    calls: deque[T]
    max_size: int
    delay: int


class Batcher(Generic[T]):
    """Queues of calls by model. Used from the device thread only."""

    def __init__(self, clock: Callable[[], int], group: Callable[[T], Group | None]) -> None:
        """`clock` counts nanoseconds.

        `group` looks at a call when its turn comes (this is where it is decoded). None, or a call settled meanwhile,
        means that it cannot share a forward, or needs none any more.
        """
        self._clock = clock
        self._group = group
        self._queues: OrderedDict[str, _Queue[T]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Batcher {len(self)} calls of {len(self._queues)} models>"

    def __len__(self) -> int:
        return sum(len(queue.calls) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, model: str, call: T, *, max_size: int, delay: float) -> None:
        """Queue a call. `max_size` 1 turns batching off; `delay` in seconds is how long a lone call may wait."""
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _Queue(deque(), max_size, 0)
        queue.max_size, queue.delay = max_size, round(delay * 1e9)
        queue.calls.append(call)

    def due(self) -> float | None:
        """Seconds until a batch is ripe, 0 if one is, None if nothing is queued."""
        now = self._clock()
        waits = [self._wait(queue, now) for queue in self._queues.values()]
        return min(waits) / 1e9 if waits else None

    def take(self) -> list[T]:
        """The next batch in turn, in order of arrival; empty when nothing is ripe, or all of it was cancelled."""
        now = self._clock()
        for model in list(self._queues):
            queue = self._queues[model]
            if self._wait(queue, now) > 0:
                continue
            batch = self._gather(queue)
            del self._queues[model]
            if queue.calls:
                self._queues[model] = queue  # to the back: models take turns
            if batch:
                return batch
        return []

    def _wait(self, queue: _Queue[T], now: int) -> int:
        if queue.max_size <= 1 or not queue.delay or len(queue.calls) >= queue.max_size:
            return 0
        return max(0, queue.calls[0].arrived + queue.delay - now)

    def _gather(self, queue: _Queue[T]) -> list[T]:
        batch: list[T] = []
        others: list[T] = []
        shape: Hashable = None
        rows = 0
        while queue.calls and rows < queue.max_size and len(others) < _LOOK_AHEAD * queue.max_size:
            call = queue.calls.popleft()
            if call.settled:
                continue
            group = self._group(call)
            if _gone(call):
                continue
            if not batch and (group is None or queue.max_size <= 1):
                batch.append(call)
                break
            if group is not None and (not batch or (group.shape == shape and rows + group.rows <= queue.max_size)):
                batch.append(call)
                shape = group.shape
                rows += group.rows
                continue
            others.append(call)
            if group is not None and group.shape == shape:
                break  # it would fit but for its rows; a later one must not overtake it
        queue.calls.extendleft(reversed(others))
        return batch


def _gone(call: Batchable) -> bool:
    """Looking at a call may settle it; asked in a function, since a type checker takes attributes for constant."""
    return call.settled
