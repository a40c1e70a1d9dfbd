"""How long a thread waits for its turn on a CPU: short slices for threads that answer, patience for those that load.

Belongs here: two requests to the kernel, one to the interpreter. Never: pinning to a CPU, priorities (they need rights,
and starve a load).

Under EEVDF a thread that wakes up waits until the running one has used its slice: up to a tick, 4 ms, of a load's
copying or page faults. A thread that asks for a shorter slice has the earlier deadline and goes first, at the price
of being interrupted sooner itself; its share of the CPU stays the same.

A thread that answers and wakes one that loads would lose its CPU to it in the same moment, in the middle of an answer.
The batch policy keeps the share and only gives that up: such a thread begins when the CPU is free, or at a tick.

Sources: sched(7), SCHED_BATCH; "An EEVDF CPU scheduler for Linux", LWN 925371; `sched_attr.sched_runtime` for
SCHED_OTHER since Linux 6.12.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

SLICE_NANOSECONDS: Final = 100_000
"""The shortest that the kernel takes."""
SWITCH_SECONDS: Final = 0.0001
"""How long another thread may keep the GIL from one that answers; the default of 5 ms would show in every p99."""
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""`struct sched_attr`, version 0: size, policy, flags, nice, priority, runtime, deadline, period."""
_RESET_ON_FORK: Final = 1
_OTHER: Final = 0


def patient() -> bool:
    """Let the calling thread, and what it starts, take a CPU from nobody when it wakes up.

    False, and nothing changed, for a thread with another policy than the default one, or where that is forbidden.
    """
    if not hasattr(os, "sched_setscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True
    return False


def patiently(work: Callable[[], R]) -> R:
    """Run `work` as `patient` says; afterwards the thread, which may serve others, is as it was."""
    changed = patient()
    try:
        return work()
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


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
