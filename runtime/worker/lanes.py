"""What an upload needs of a device: memory that can be copied from, memory to copy to, and copies in order.

Belongs here: the few calls into `torch.cuda`. Never: layouts, models, decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from runtime.worker.landing import Mark


class Lanes(Protocol):
    """One direction of copies to one device. From one thread at a time."""

    def page_locked(self, size: int) -> torch.Tensor:
        """Host memory that the device reads by itself, as bytes. Raises `RuntimeError` where there is not so much."""
        ...

    def memory(self, size: int) -> torch.Tensor:
        """Device memory, as bytes; what was there is undefined. Raises `torch.OutOfMemoryError`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from `page_locked` memory; it comes after all that were queued before."""
        ...

    def mark(self) -> Mark:
        """The point after what is queued so far."""
        ...


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it no further
        self._event.record(stream)
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # as above

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaLanes:
    """A copy stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Raises `RuntimeError` where there is no such device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types it no further

    def __repr__(self) -> str:
        return f"<CudaLanes {self._device}>"

    def page_locked(self, size: int) -> torch.Tensor:
        """See `Lanes`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def memory(self, size: int) -> torch.Tensor:
        """See `Lanes`."""
        with torch.cuda.device(self._device):
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        # It may have been freed by a kernel that still runs, and the copies must come after that.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Lanes`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See `Lanes`."""
        return _CudaMark(self._stream, self._device)
