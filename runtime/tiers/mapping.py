"""A read-only shared mapping of one weights file, held without ever being read here.

Belongs here: mmap, populate and mlock through ctypes, because Python's own `mmap.madvise` keeps the GIL for the whole
call. Never: views or tensors; the front process only keeps the pages in memory for the workers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from threading import Lock
from typing import TYPE_CHECKING, Final

from actors.errors import CorruptWeights, FetchFailed, OutOfMemory
from runtime.tiers.slab import BLOCK, slab_at
from runtime.tiers.slabread import blocks_within, check_block, scratch
from runtime.tiers.verify import identity_of, open_regular

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.tiers.slab import Slab
    from runtime.tiers.verify import Identity

STEP: Final = 64 << 20
"""Bytes populated per call: a few milliseconds from the page cache, some tens from disk."""

_PROT_READ = 1
_MAP_SHARED = 1
_MADV_HUGEPAGE = 14
"""What is not in the page cache yet comes into it in pages of 2 MiB, where the file system has them: half of the time
of reading it the usual way, and every later mapping of it takes a thirtieth. A wish; where it is refused, nothing is
lost. The kernel places a mapping of that size so that it can be seen through such pages."""
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_READ_STEP = 8 << 20
_EHWPOISON = 133

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Mapping:
    """One mapped file. `size` bytes; `locked` says whether the kernel promised to keep them in memory.

    `paging` is the seconds that `populate` spent on the page table so far: `close` takes less than that.
    All methods may take long, so they run in threads, but for `close` where `paging` was short; it waits for a
    `populate` that is under way.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._address: int | None = None
        self._descriptor = -1
        self._closed = False
        self._slab: Slab | None = None
        self.size = 0
        self.identity: Identity | None = None
        self.paging = 0.0
        self.locked = False

    def open(self) -> int:
        """Map the file and return its size. Raises `FetchFailed`, `CorruptWeights` or `OutOfMemory`."""
        with self._lock:
            if self._closed:  # given up while this waited for its thread
                return 0
            descriptor = open_regular(self._path)
            try:
                self._map(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            return self.size

    @property
    def checked(self) -> bool:
        """Whether the file brings checksums of its blocks, which `populate` can compare."""
        return self._slab is not None

    def populate(self, offset: int, *, verify: bool = False) -> int:
        """Bring up to 64 MiB from `offset` into memory and into the page table; returns the next offset.

        With `verify` a slab's blocks are compared then, from the page cache. Raises `CorruptWeights` for a damaged
        block, or if the file was truncated meanwhile: that would be a reader's SIGBUS.
        """
        with self._lock:
            if self._address is None:
                return self.size
            length = min(STEP, self.size - offset)
            if length <= 0:
                return self.size
            began = time.perf_counter()
            if _libc.madvise(self._address + offset, length, _MADV_POPULATE_READ):
                self._populate_failed(ctypes.get_errno(), offset, length)
            self.paging += time.perf_counter() - began
            if verify and self._slab is not None:
                buffer = scratch(BLOCK)
                for number in blocks_within(self._slab, offset, offset + length):
                    check_block(self._descriptor, self._slab, number, buffer)
            return offset + length

    def lock(self) -> bool:
        """Ask the kernel to keep all of it in memory; False where the limit or the permission is missing."""
        with self._lock:
            self.locked = self._address is not None and _libc.mlock(self._address, self.size) == 0
            return self.locked

    def close(self) -> int:
        """Unmap and return the bytes given back; 0 when it was closed before. The lock goes with the mapping.

        The pages stay in the page cache until somebody needs the memory, so coming back soon is cheap.
        """
        with self._lock:
            self._closed = True
            if self._address is None:
                return 0
            _libc.munmap(self._address, self.size)
            os.close(self._descriptor)
            self._address = None
            self.locked = False
            return self.size

    def _map(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        size = status.st_size
        if not size:
            raise CorruptWeights("the weights file is empty")
        self._slab = slab_at(descriptor)
        self.identity = identity_of(status)
        address = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            kind = OutOfMemory if number == errno.ENOMEM else FetchFailed
            raise kind(f"the weights cannot be mapped: {os.strerror(number)}")
        _libc.madvise(address, size, _MADV_HUGEPAGE)
        self._address, self._descriptor, self.size = address, descriptor, size

    def _populate_failed(self, number: int, offset: int, length: int) -> None:
        if number in {errno.EINVAL, errno.ENOSYS}:  # before Linux 5.14; reading at least fills the page cache
            self._read(offset, length)
        elif number in {errno.EFAULT, _EHWPOISON}:
            raise CorruptWeights("the weights were truncated or cannot be read")
        elif number == errno.ENOMEM:
            raise OutOfMemory("no memory for the weights on the host")
        else:
            raise FetchFailed(f"the weights cannot be read: {os.strerror(number)}")

    def _read(self, offset: int, length: int) -> None:
        buffer = memoryview(mmap.mmap(-1, _READ_STEP))  # a bytearray would be zeroed under the GIL
        end = offset + length
        while offset < end:
            count = os.preadv(self._descriptor, [buffer[: end - offset]], offset)
            if not count:
                raise CorruptWeights("the weights were truncated or cannot be read")
            offset += count

    def __repr__(self) -> str:
        return f"<Mapping {self.size} B{' locked' if self.locked else ''}>"
