"""Short time slices: the calling thread's alone, never inherited, and refused politely."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from runtime.workers import turns

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOW = "from tests.runtime.workers.test_turns import slice_of; print(slice_of())"


def slice_of() -> tuple[int, int]:
    """Policy and slice of the calling thread, in nanoseconds."""
    buffer = ctypes.create_string_buffer(turns._ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(turns._GET, 0, buffer, turns._ATTRIBUTES.size, 0) == 0
    _, policy, _, _, _, runtime, _, _ = turns._ATTRIBUTES.unpack(buffer.raw)
    return policy, runtime


def in_thread(work: Callable[[], object]) -> object:
    """What `work` returns in a thread of its own, so that this one stays as it is."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_only_the_calling_thread_gets_short_slices() -> None:
    """Threads and processes that it starts later (loads, converters) have the usual ones: `SCHED_RESET_ON_FORK`."""
    usual = slice_of()

    def work() -> tuple[bool, object, object, object]:
        taken = turns.short_slice()
        shown = subprocess.run([sys.executable, "-c", _SHOW], capture_output=True, check=True, text=True).stdout
        return taken, slice_of(), in_thread(slice_of), shown.strip()

    taken, own, child, process = in_thread(work)  # type: ignore[misc]
    assert taken == (usual[0] == os.SCHED_OTHER)
    assert child == usual
    assert process == str(usual)
    assert slice_of() == usual
    if taken and usual[1]:  # the kernel knows slices
        assert own == (os.SCHED_OTHER, turns.SLICE_NANOSECONDS)


def test_another_policy_is_left_alone() -> None:
    """Whoever started the server as a batch or idle job meant it."""

    def work() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return turns.short_slice(), os.sched_getscheduler(0)

    assert in_thread(work) == (False, os.SCHED_BATCH)


def test_a_patient_thread_is_so_alone_and_only_for_its_work() -> None:
    """Threads of a pool serve others afterwards; a policy that somebody chose is left alone."""

    def work() -> list[object]:
        during = turns.patiently(lambda: os.sched_getscheduler(0))
        after = os.sched_getscheduler(0)
        return [during, after, turns.patient(), turns.patient(), os.sched_getscheduler(0)]

    assert in_thread(work) == [os.SCHED_BATCH, os.SCHED_OTHER, True, False, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER

    def failing() -> int:
        with pytest.raises(ZeroDivisionError):
            turns.patiently(lambda: 1 // 0)
        return os.sched_getscheduler(0)

    assert in_thread(failing) == os.SCHED_OTHER


def test_an_unknown_machine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No system call number, no call."""
    monkeypatch.setattr(turns, "_SET", 0)
    before = slice_of()
    assert not in_thread(turns.short_slice)
    assert slice_of() == before


def test_the_interpreter_switches_often() -> None:
    """A process-wide setting; the test puts it back."""
    before = sys.getswitchinterval()
    try:
        turns.short_turns()
        assert sys.getswitchinterval() <= 0.0002
    finally:
        sys.setswitchinterval(before)
