"""How fast this machine's memory is, measured once at the start: the floors that loads are compared with.

Belongs here: short measurements on a file of our own. Never: weights.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from runtime.tiers.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE: Final = 32 << 20
_ROUNDS: Final = 3
_STEP: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Floors:
    """Bytes per second: mapping what is in the page cache, and copying between resident memory. 0: not measured."""

    populate: float = 0.0
    copy: float = 0.0


def calibrate(folder: Path) -> Floors:
    """Measure with a file below `folder`, in some tens of milliseconds. A folder that can't be written gives zeros."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name, so that no crash leaves it behind
            for _ in range(SIZE // _STEP):
                file.write(b"\x01" * _STEP)
            file.flush()
            path = Path(f"/proc/self/fd/{file.fileno()}")
            populate = median(_populated(path) for _ in range(_ROUNDS))
    except OSError:
        return Floors()
    return Floors(SIZE / populate, SIZE / _copied())


def _populated(path: Path) -> float:
    mapping = Mapping(path)
    mapping.open()
    try:
        return _seconds(lambda: mapping.populate(0))
    finally:
        mapping.close()


def _copied() -> float:
    source, target = (ctypes.create_string_buffer(SIZE) for _ in range(2))
    for buffer in (source, target):
        ctypes.memset(buffer, 1, SIZE)
    return median(_seconds(lambda: ctypes.memmove(target, source, SIZE)) for _ in range(_ROUNDS))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)
