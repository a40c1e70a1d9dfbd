"""The memory of a ring: one sealed memfd with an input and an output area per slot.

Areas are as large as the body limit but sparse, so only touched pages cost memory. No doorbells here, no events.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.workers.port import Parts

_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
LEAST_SLOT_BYTES = 4096
"""So that an error always fits into a slot."""
ALIGNMENT = 64
"""What the tensor bytes behind a JSON part are aligned to: kernels read them in place, and none needs more."""
MOST_SLOTS = 65535
"""What a doorbell's slot number can say."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _fallocate() -> Callable[[int, int, int, int], int]:
    # By ctypes because `mmap.madvise(MADV_REMOVE)` keeps the GIL while the kernel frees thousands of pages.
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    return call


def length_of(body: bytes | Parts) -> int:
    """Bytes of a body, whole or in parts."""
    return sum(map(len, body)) if isinstance(body, tuple) else len(body)


def _check_sizes(slots: int, slot_bytes: int) -> None:
    if not 1 <= slots <= MOST_SLOTS or slot_bytes < LEAST_SLOT_BYTES:
        msg = f"a ring has 1 to {MOST_SLOTS} slots of {LEAST_SLOT_BYTES} bytes or more, not {slots} of {slot_bytes}"
        raise ValueError(msg)


class SlotMemory:
    """`slots` pairs of areas of `slot_bytes` each, in bytes; both sides map the same file.

    The file is sealed against resizing: a side that could shrink it would kill the other with SIGBUS.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        _check_sizes(slots, slot_bytes)
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = 2 * slots * self._stride
        if os.fstat(fd).st_size != size:
            msg = f"the ring's memory has {os.fstat(fd).st_size} bytes, {slots} slots of {slot_bytes} need {size}"
            raise ValueError(msg)
        self._map = mmap.mmap(fd, size)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> SlotMemory:
        """Make a new anonymous file; it goes away with the last process that holds it."""
        _check_sizes(slots, slot_bytes)
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("foreload-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 2 * slots * stride)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, slots, slot_bytes)
        except BaseException:
            os.close(fd)
            raise

    def _input_start(self, slot: int, length: int, json_length: int | None) -> int:
        """Where a body lies, the same for both sides: what follows its JSON part is aligned if there is room for it."""
        shift = -(json_length or 0) % ALIGNMENT
        return 2 * slot * self._stride + (shift if length + shift <= self._stride else 0)

    def put_input(self, slot: int, body: bytes, json_length: int | None = None) -> None:
        """Copy a body in. The caller has checked its length."""
        start = self._input_start(slot, len(body), json_length)
        self._map[start : start + len(body)] = body

    def input(self, slot: int, length: int, json_length: int | None = None) -> memoryview:
        """Writable view of a body, without a copy; valid until the slot is answered."""
        start = self._input_start(slot, length, json_length)
        return memoryview(self._map)[start : start + length]

    def put_output(self, slot: int, body: bytes | Parts) -> None:
        """Copy an answer in, part after part. The caller has checked its length."""
        start = (2 * slot + 1) * self._stride
        for part in body if isinstance(body, tuple) else (body,):
            end = start + len(part)
            self._map[start:end] = part
            start = end

    def output(self, slot: int, length: int) -> bytes:
        """Copy an answer out. The caller has checked its length."""
        start = (2 * slot + 1) * self._stride
        return self._map[start : start + length]

    def punch(self, slot: int, keep: int) -> None:
        """Give a free slot's pages beyond the first `keep` bytes of each area back. Blocks; not for the loop."""
        first = -(-keep // mmap.PAGESIZE) * mmap.PAGESIZE
        if first >= self._stride:
            return
        fallocate = _fallocate()
        for area in (2 * slot, 2 * slot + 1):
            if fallocate(self.fd, _KEEP_SIZE_PUNCH_HOLE, area * self._stride + first, self._stride - first) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    def allocated(self) -> int:
        """Bytes of memory that the file really takes."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Unmap and close. Blocks for as long as freeing the touched pages takes."""
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __repr__(self) -> str:
        return f"<SlotMemory {self.slots} x 2 x {self.slot_bytes} B>"
