"""How this process' allocator and garbage collector treat memory that comes and goes with each request.

Settings for the start of a process, front and worker alike. Nothing here measures, or knows what memory is for.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

KEPT: Final = 32 << 20
"""Bytes of free heap that are kept; more than that goes back to the system."""
OWN_MAPPING: Final = 16 << 20
"""Blocks of so many bytes get a mapping of their own, which goes back as soon as they are freed."""
THRESHOLDS: Final = (700, 10, 200)
"""Of the three generations; the last one by default is 10, which is four full collections in an import."""
_CONSOLIDATES: Final = 96 << 10
"""Bytes of a block whose freeing makes glibc look at the top of its heap (over 64 KiB), and that has no mapping."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_pages() -> bool:
    """Let bodies of a few megabytes reuse the pages of those before them; False without glibc.

    By default glibc returns such blocks to the kernel at once, and the next request pays a page fault for every
    4 KiB of its body: measured, half of the front's CPU for an image.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING))


def give_back() -> None:
    """Return free heap to the system, that of other threads too; off the loop, since it takes milliseconds.

    For after work that is rare and large. `malloc_trim` leaves the top of every heap but the main thread's; glibc cuts
    that of the calling thread when a block is freed into it and it is over the threshold.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    libc.mallopt(_M_TRIM_THRESHOLD, _CONSOLIDATES)
    libc.free(libc.malloc(_CONSOLIDATES))
    libc.mallopt(_M_TRIM_THRESHOLD, KEPT)
    libc.malloc_trim(0)


def spare_collections() -> None:
    """Leave what exists now out of all collections, and make full ones rare; call it when a process stands.

    A full collection holds the GIL, and with it every request: 55 ms in a front, 130 ms in a worker that imported
    transformers. Garbage in cycles is still found, just later if it is old.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
