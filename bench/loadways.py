"""The ways to bring weights in that the load bench compares: classic, ours, the floors under both, and other loaders.

Belongs here: one function per way, and clocks. Never: which figure is good enough (`load.py`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from runtime.tiers.slabread import open_direct, read_data, scratch
from runtime.worker.mapping import TORCH_DTYPES, Mapping
from runtime.worker.skeleton import Skeleton

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping as Named
    from pathlib import Path

    from bench.architectures import Subject

COPY_STEP = 8 << 20
_POSIX_FADV_DONTNEED = 4


class Cost(NamedTuple):
    """Milliseconds of one piece of work: CPU of this process, and wall."""

    cpu: float
    wall: float


def cost(work: Callable[[], object]) -> Cost:
    """Run it once; what it returns dies outside the timer."""
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    kept = work()
    ended = Cost((time.process_time_ns() - cpu) / 1e6, (time.perf_counter_ns() - wall) / 1e6)
    del kept
    return ended


class Way(NamedTuple):
    """One way: what is measured, and what has to be done before each time, outside the timer."""

    work: Callable[[], object]
    before: Callable[[], object] = gc.collect
    times: int = 1


def interleaved(ways: Named[str, Way], rounds: int) -> dict[str, Cost]:
    """Every way once per round (or `times` times), in turn, odd rounds backwards; medians."""
    found: dict[str, list[Cost]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in list(ways.items())[:: -1 if turn % 2 else 1]:
            for _ in range(way.times):
                way.before()
                gc.collect()
                found[name].append(cost(way.work))
    return {
        name: Cost(median(each.cpu for each in rows), median(each.wall for each in rows))
        for name, rows in found.items()
    }


# -- what people do ------------------------------------------------------------------------------------


def classic(subject: Subject) -> torch.nn.Module:
    """`torch.load`, build, `load_state_dict`."""
    state = torch.load(subject.pickled)
    module = subject.factory()
    module.load_state_dict(state)
    return module.eval()


def safetensors_way(subject: Subject) -> torch.nn.Module:
    """`load_file`, build, `load_state_dict`; tied names are missing from the file, as transformers leaves them."""
    state = load_file(subject.plain)
    module = subject.factory()
    module.load_state_dict(state, strict=False)
    return module.eval()


# -- memory --------------------------------------------------------------------------------------------


class Arena:
    """Memory that is there already, as large as a slab's data, and a skeleton bound to it."""

    def __init__(self, subject: Subject) -> None:
        self.slab = subject.slab
        self.view = scratch(max(self.slab.header.length, mmap.PAGESIZE))
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)
        ctypes.memset(self.address, 1, self.slab.header.length)
        self.skeleton = Skeleton(subject.factory)
        names = frozenset(self.slab.index.entries) - self.slab.index.buffers
        self.bound = self.skeleton.bind(names, self._tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self.slab.index.entries[name]
        dtype = TORCH_DTYPES[entry.dtype]
        if not entry.size:
            return torch.empty(entry.shape, dtype=dtype)
        count, offset = entry.size // dtype.itemsize, entry.start - self.slab.data
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=offset).view(entry.shape)

    def copy_from(self, address: int) -> None:
        """A private copy of what is mapped at an address, and the swap."""
        copied(self.address, address, self.slab.header.length)
        self.skeleton.activate(self.bound)

    def read_from(self, descriptor: int, *, verify: bool, threads: int = 1) -> None:
        """The slab's data through a descriptor, and the swap."""
        read_data(descriptor, self.slab, self.view, verify=verify, threads=threads)
        self.skeleton.activate(self.bound)


def copied(target: int, source: int, size: int) -> None:
    """Copy resident memory in steps that leave the GIL to others between them."""
    for at in range(0, size, COPY_STEP):
        ctypes.memmove(target + at, source + at, min(COPY_STEP, size - at))


class Mapped:
    """A slab in memory, for copies to come from; its address is that of the data."""

    def __init__(self, subject: Subject) -> None:
        self._mapping = Mapping(subject.path, subject.slab.index)
        self._mapping.populate()
        self.address = self._mapping._address + subject.slab.data  # noqa: SLF001 - the product has no use for it
        touched(self.address, subject.slab.header.length)


def touched(address: int, size: int) -> int:
    """Read one byte of each page."""
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))[:: mmap.PAGESIZE]
    return int(pages.sum())


# -- disk ----------------------------------------------------------------------------------------------


def cold(*paths: Path) -> None:
    """Drop files from the page cache; whatever maps them has to be gone."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, _POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def raw_direct(subject: Subject, target: memoryview, *, threads: int, step: int) -> None:
    """The floor: O_DIRECT reads of the same bytes into the same memory, and nothing else."""
    descriptor = open_direct(subject.path)
    start, length = subject.slab.data, subject.slab.header.length

    def read(at: int) -> None:
        view = target[at : min(at + step, length)]
        while view:
            count = os.preadv(descriptor, [view], start + at)
            view, at = view[count:], at + count

    try:
        if threads == 1:
            for at in range(0, length, step):
                read(at)
            return
        shared = iter(range(0, length, step))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: deque(map(read, shared), 0), range(threads)))
    finally:
        os.close(descriptor)


# -- others --------------------------------------------------------------------------------------------


def peers(subject: Subject, folder: Path) -> dict[str, Callable[[], object] | str]:
    """Readers of other projects, warm, without a module; a text where one can't be used here."""
    found: dict[str, Callable[[], object] | str] = {"safetensors load_file": lambda: _summed(load_file(subject.plain))}
    for name, make in (
        ("tensorizer", _tensorizer),
        ("fastsafetensors", _fastsafetensors),
        ("runai-model-streamer", _runai),
    ):
        try:
            work = make(subject, folder)
            work()
        except ImportError:
            found[name] = "not installed"
        except Exception as error:  # noqa: BLE001 - another project's loader may fail in any way; the row says how
            found[name] = f"failed: {type(error).__name__}"
        else:
            found[name] = work
    return found


def _summed(tensors: Named[str, torch.Tensor]) -> int:
    """Touch every page, which a lazy reader would leave to the first forward."""
    total = 0
    for tensor in tensors.values():
        if tensor.nbytes:
            total += touched(tensor.data_ptr(), tensor.nbytes)
    return total


def _tensorizer(subject: Subject, folder: Path) -> Callable[[], object]:
    tensorizer: Any = importlib.import_module("tensorizer")
    path = folder / "tensorized"
    serializer = tensorizer.TensorSerializer(str(path))
    serializer.write_state_dict(load_file(subject.plain))
    serializer.close()

    def work() -> object:
        with tensorizer.TensorDeserializer(str(path), device="cpu") as read:
            return _summed(dict(read.items()))

    return work


def _fastsafetensors(subject: Subject, _: Path) -> Callable[[], object]:
    module: Any = importlib.import_module("fastsafetensors")

    def work() -> object:
        with module.fastsafe_open([str(subject.plain)], nogds=True, device="cpu") as file:
            return _summed({key: file.get_tensor_wrapped(key).get_raw() for key in file.keys()})  # noqa: SIM118

    return work


def _runai(subject: Subject, _: Path) -> Callable[[], object]:
    module: Any = importlib.import_module("runai_model_streamer")

    def work() -> object:
        with module.SafetensorsStreamer() as streamer:
            streamer.stream_file(str(subject.plain))
            return _summed({key: tensor.clone() for key, tensor in streamer.get_tensors()})

    return work
