"""Results that several calls want, made once: a cache bounded in bytes, and one maker at a time per result.

Belongs here: who makes it, who waits, who leaves. Never: what a result is made of.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias

from runtime.worker.preprocess.bad import Undecodable
from runtime.workers.pipelines import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


class _Making:
    """A result on its way: the array, or the fault of the file."""

    __slots__ = ("array", "done", "fault")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.array: Array | None = None
        self.fault = ""


class SharedResults:
    """Read-only arrays by key, least recently used first to go; any thread."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes; 0 keeps nothing, and still makes once what is wanted twice at one time."""
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Array] = OrderedDict()
        self._making: dict[bytes, _Making] = {}
        self._bytes = 0
        self._hits = 0
        self._misses = 0

    def __repr__(self) -> str:
        return f"<SharedResults {len(self._kept)} kept, {self._bytes} of {self._capacity} B>"

    def snapshot(self) -> Prepared:
        """Hits, misses and bytes."""
        with self._lock:
            return Prepared(self._hits, self._misses, self._bytes)

    def get(self, key: bytes, make: Callable[[], Array]) -> Array:
        """The result of a key: kept, waited for, or made now. Raises what `make` raises.

        A file's fault is everybody's; any other failure is that of the one it happened to, and the next one tries.
        """
        while True:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
                    self._hits += 1
                    return kept
                making = self._making.get(key)
                if making is None:
                    own = self._making[key] = _Making()
                    self._misses += 1
                    break
            making.done.wait()  # its maker runs on a thread of its own, and waits for nobody
            if making.array is not None:
                with self._lock:
                    self._hits += 1
                return making.array
            if making.fault:
                raise Undecodable(making.fault)
        try:
            own.array = make()
            if own.array.base is not None:  # a view would keep alive, and hide from the bound, what it was cut from
                own.array = own.array.copy()
            own.array.flags.writeable = False
        except Undecodable as fault:
            own.fault = str(fault)
            raise
        finally:
            with self._lock:
                del self._making[key]
                if own.array is not None:
                    self._keep(key, own.array)
            own.done.set()
        return own.array

    def _keep(self, key: bytes, array: Array) -> None:
        if array.nbytes > self._capacity:
            return
        self._kept[key] = array
        self._bytes += array.nbytes
        while self._bytes > self._capacity:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.nbytes
