"""What does a verified, resumable pull from S3 cost over the bare ranged reads of the same client?

A real S3 server (SeaweedFS) on this machine, in a process of its own. Round-robin in one process, medians. The floor is
obstore alone: the same ranges, as many at a time, thrown away. Beyond it a pull hashes (sha256, xxh3), writes and
proves; sha256 alone is shown, for it is the most of that. Wall time is only worth something on a quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore

from bench.report import Row, arguments, finish
from runtime.catalog.manifest import FileRow
from runtime.tiers.disk import DiskStore
from runtime.tiers.offload import ThreadOffload
from runtime.tiers.origin_object import ObjectOrigin, open_store
from runtime.tiers.pull import Pace, Pull
from tests.runtime.tiers import s3

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SIZE = 256 << 20
QUICK = 64 << 20
PATH = "bench/weights"


def main() -> int:
    """Measure, print, and say whether the target is met."""
    args = arguments(str(__doc__)).parse_args()
    size, rounds = (QUICK, 3) if args.quick else (SIZE, 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "s3").mkdir()
        with s3.running(folder / "s3") as running:
            content = os.urandom(size)
            running.put(PATH, content)
            place = open_store(running.place(), connect=5, stall=30, allow_http=True)
            samples = asyncio.run(measured(place, content, folder, rounds))
    return finish("remote", rows(samples, size), args)


async def measured(place: Any, content: bytes, folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall milliseconds of every way."""
    row = FileRow(path="weights", size=len(content), sha256=hashlib.sha256(content).hexdigest())
    pace, numbers = Pace(), itertools.count()
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "bare ranges": lambda: bare(place, len(content), pace),
        "sha256 alone": lambda: hashed(content),
        "pull": lambda: pulled(place, row, folder / f"cache{next(numbers)}", pace),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            cpu, wall = time.process_time(), time.perf_counter()
            await way()
            taken = (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
            if number:  # the first round fills the server's cache and opens connections
                samples[name].append(taken)
    return samples


async def bare(place: Any, size: int, pace: Pace) -> None:
    """The client alone."""
    slots = asyncio.Semaphore(pace.parallel)

    async def one(start: int) -> None:
        async with slots:
            await obstore.get_range_async(place, PATH, start=start, end=min(start + pace.chunk, size))

    await asyncio.gather(*(one(start) for start in range(0, size, pace.chunk)))


async def hashed(content: bytes) -> None:
    """What proving the whole costs, wherever it comes from."""
    hashlib.sha256(content).digest()


async def pulled(place: Any, row: FileRow, cache: Path, pace: Pace) -> None:
    """All of it: into a disk tier of its own, published."""
    landing = DiskStore(cache, 1 << 40).landing(row, weights=False)
    while not landing.enter():
        pass
    await Pull(
        ObjectOrigin(place, PATH), landing, row.size, pace=pace, offload=ThreadOffload(4), told=lambda _: None
    ).run()
    landing.close()
    with contextlib.suppress(OSError):
        shutil.rmtree(cache)


def rows(samples: dict[str, list[tuple[float, float]]], size: int) -> list[Row]:
    """The table."""
    cpu = {name: statistics.median(each[0] for each in taken) for name, taken in samples.items()}
    wall = {name: statistics.median(each[1] for each in taken) for name, taken in samples.items()}
    found = [Row(f"{name}, wall", size / wall[name] / 1e3, "MB/s") for name in samples]
    found += [Row(f"{name}, per 100 MB", cpu[name] * 1e8 / size, "ms CPU") for name in samples]
    floor = cpu["bare ranges"] + cpu["sha256 alone"]
    ratio = cpu["pull"] / floor
    return [*found, Row("pull over ranges and sha256", cpu["pull"], "ms CPU", floor, ratio, "<= 1.5x", ratio <= 1.5)]


if __name__ == "__main__":
    raise SystemExit(main())
