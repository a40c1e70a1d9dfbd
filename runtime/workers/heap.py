"""How this process' allocator treats memory that comes and goes with each request.

One setting, for the start of a process. Nothing here allocates, measures or frees.
"""

from __future__ import annotations

import ctypes
from typing import Final

KEPT: Final = 32 << 20
"""Bytes of free heap that are kept; more than that goes back to the system."""
OWN_MAPPING: Final = 16 << 20
"""Blocks of so many bytes get a mapping of their own, which goes back as soon as they are freed."""
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
