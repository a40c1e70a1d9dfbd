"""One weights file in memory: mapped, filled without holding the GIL, seen as tensors, and made clean again.

Belongs here: pages and views. Never: modules, keys that are missing, anything that copies weights.

The mapping is private and copy-on-write over a descriptor that cannot write. While nobody writes, its pages *are* the
page cache, shared with every other process and as cheap as a read-only mapping; a model that does write its weights
gets a private copy of just those pages. A read-only mapping would end the whole worker with SIGSEGV instead, for
all models, on whatever later request reaches such a write. `written` finds the copies, `reset` drops them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from actors.errors import CorruptWeights, FetchFailed, OutOfMemory
from runtime.worker.skeleton import Extras

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.tiers.index import Entry, WeightIndex

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""safetensors' dtype words."""

_MAP_NORESERVE = 0x4000
_MADV_WILLNEED = 3
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_POPULATE_STEP = 64 << 20
_PRESENT, _FILE = np.uint64(63), np.uint64(61)
"""Bits of a pagemap entry: page in memory; page of a file or shared (a private copy is neither)."""

# Through ctypes, because `mmap.madvise` keeps the GIL: tens of milliseconds of stall per few hundred megabytes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """The weights of one immutable file. Close it after the last view is gone."""

    def __init__(self, path: Path, index: WeightIndex) -> None:
        """Map the file lazily. Raises `FetchFailed`, or `CorruptWeights` for a file shorter than its index."""
        self._index = index
        end = max((entry.end for entry in index.entries.values()), default=0)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise FetchFailed(f"the weights cannot be opened: {os.strerror(fault.errno or 0)}") from None
        try:
            size = os.fstat(descriptor).st_size
            if size < end:
                raise CorruptWeights(f"the weights file has {size} bytes where its header needs {end}")
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            self._map = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as fault:
            raise FetchFailed(f"the weights cannot be mapped: {os.strerror(fault.errno or 0)}") from None
        finally:
            os.close(descriptor)
        self.size = size
        self._address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        _libc.madvise(self._address, size, _MADV_HUGEPAGE)  # as the front does: see `runtime.tiers.mapping`

    def __repr__(self) -> str:
        return f"<Mapping {len(self._index.entries)} tensors {self.size} B>"

    def populate(self) -> None:
        """Bring every page in, with the GIL released. Raises `CorruptWeights` or `OutOfMemory`, never a signal."""
        for at in range(0, self.size, _POPULATE_STEP):
            length = min(_POPULATE_STEP, self.size - at)
            if not _libc.madvise(self._address + at, length, _MADV_POPULATE_READ):
                continue
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # a kernel before 5.14: faults move into the first forward
                _libc.madvise(self._address + at, length, _MADV_WILLNEED)
            elif code == errno.ENOMEM:
                raise OutOfMemory("the weights do not fit in memory")
            else:
                raise CorruptWeights(f"the weights cannot be read into memory: {os.strerror(code)}")

    def view(self, name: str) -> torch.Tensor:
        """The named tensor over the mapped bytes; a copy if the file places it against its alignment."""
        entry = self._index.entries[name]
        dtype = TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CorruptWeights(f"tensor {name!r}: dtype {entry.dtype} is not offered")
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.start % dtype.itemsize:
            return _copied(self._map, entry, dtype)
        count = (entry.end - entry.start) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def written(self) -> int:
        """Bytes that have become private because something wrote to them; 0 where the kernel does not tell."""
        page = mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123  # unbuffered, not a text file
                pagemap.seek(self._address // page * 8)
                pages = np.frombuffer(pagemap.read(-(-self.size // page) * 8), np.uint64)
        except OSError:
            return 0
        private = ((pages >> _PRESENT) & ~(pages >> _FILE)) & np.uint64(1)
        return int(private.sum()) * page

    def reset(self) -> None:
        """Forget everything that was written; the file's bytes are back at the next touch."""
        _libc.madvise(self._address, self.size, _MADV_DONTNEED)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values lie in the mapping, so that `reset` undoes writes to it."""
        return self._address <= tensor.data_ptr() < self._address + self.size

    @property
    def names(self) -> frozenset[str]:
        """Every tensor of the file that is state."""
        return frozenset(self._index.entries) - self._index.buffers

    @property
    def slab(self) -> bool:
        """Whether the file is a slab."""
        return self._index.slab

    @property
    def extras(self) -> Extras:
        """What only a slab has."""
        return Extras(self._index.buffers, self._index.left_out)


def _copied(source: mmap.mmap, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(source[entry.start : entry.end]), dtype=dtype).view(entry.shape)
