"""What this machine has: memory behind a share, cores for a worker. No torch: GPUs are asked through NVML."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from actors.errors import ConfigError

if TYPE_CHECKING:
    from actors.ports import Memory
    from runtime.config.units import Amount


def capacity_of(place: str, amount: Amount, memory: Memory) -> int:
    """Bytes that an amount means on `host`, `cpu:N` or `cuda:N`. Raises `ConfigError` for a share of an unknown GPU."""
    if amount.size is not None:
        return amount.size
    if place.startswith("cuda:"):
        return amount.of(_gpu_memory(int(place.partition(":")[2])))
    return amount.of(memory.sample().limit)


def compute_threads(workers: int) -> int:
    """Threads for each of so many CPU workers, so that together they use the cores this process may use."""
    return max(len(os.sched_getaffinity(0)) // max(workers, 1), 1)


def _gpu_memory(index: int) -> int:
    try:
        import pynvml
    except ImportError:
        raise ConfigError(
            f"devices: a share of cuda:{index}'s memory needs NVML; install foreload[gpu] or write a size"
        ) from None
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total)
    except pynvml.NVMLError as error:
        raise ConfigError(f"devices: the memory of cuda:{index} could not be read: {error}") from None
