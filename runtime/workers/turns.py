"""How long a thread waits for its turn on a CPU that others use: short time slices for threads that answer.

Belongs here: one request to the kernel, one to the interpreter. Never: pinning to a CPU, priorities (they need rights,
and starve a load).

Under EEVDF a thread that wakes up waits until the running one has used its slice: up to a tick, 4 ms, of a load's
copying or page faults. A thread that asks for a shorter slice has the earlier deadline and goes first, at the price
of being interrupted sooner itself; its share of the CPU stays the same.
Source: "An EEVDF CPU scheduler for Linux", LWN 925371; `sched_attr.sched_runtime` for SCHED_OTHER since Linux 6.12.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from typing import Final

SLICE_NANOSECONDS: Final = 100_000
"""The shortest that the kernel takes."""
SWITCH_SECONDS: Final = 0.0001
"""How long another thread may keep the GIL from one that answers; the default of 5 ms would show in every p99."""
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""`struct sched_attr`, version 0: size, policy, flags, nice, priority, runtime, deadline, period."""
_RESET_ON_FORK: Final = 1
_OTHER: Final = 0


def short_turns() -> None:
    """Let threads of this process take turns at the GIL often."""
    sys.setswitchinterval(SWITCH_SECONDS)


def short_slice(nanoseconds: int = SLICE_NANOSECONDS) -> bool:
    """Ask for short slices for the calling thread, not for the threads and processes that it starts.

    False, and nothing changed, for a thread with another policy than the default one, for a kernel that does not
    offer it (before 6.12 the wish is ignored), or where a container forbids the call.
    """
    libc = ctypes.CDLL(None)
    if not _SET or not hasattr(libc, "syscall"):
        return False
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if libc.syscall(_GET, 0, buffer, _ATTRIBUTES.size, 0):
        return False
    _, policy, flags, nice, priority, _, _, _ = _ATTRIBUTES.unpack(buffer.raw)
    if policy != _OTHER:
        return False
    wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, flags | _RESET_ON_FORK, nice, priority, nanoseconds, 0, 0)
    return not libc.syscall(_SET, 0, wish, 0)
