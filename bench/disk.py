"""What does a checked read of published weights cost over the raw one, past the page cache and through it?

Method of record: all ways round-robin in one process, order reversed on odd rounds, medians; the floor is the best raw
O_DIRECT read of the same run. Cold means `fdatasync` and `POSIX_FADV_DONTNEED` before each read. CPU time is user plus
system of the process; wall time is only worth something on a quiet machine.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Row, arguments, finish
from runtime.tiers.blocks import BLOCK, Blocks, BlockTable
from runtime.tiers.reader import checking, read_into

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 346 << 20
"""A ViT-B in fp32, near enough."""

QUICK = 96 << 20


@dataclass(slots=True)
class Way:
    """One way of reading, its samples in milliseconds, and whether the file is cold when it starts."""

    name: str
    run: Callable[[], object]
    cold: bool
    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    def sample(self, path: Path) -> None:
        """Read once."""
        if self.cold:
            drop(path)
        cpu, wall = time.process_time(), time.perf_counter()
        self.run()
        self.wall.append((time.perf_counter() - wall) * 1e3)
        self.cpu.append((time.process_time() - cpu) * 1e3)

    @property
    def best(self) -> float:
        """Shortest wall milliseconds: what the disk can do."""
        return min(self.wall)


def main() -> int:
    """Measure, print, and say whether the targets are met."""
    parser = arguments(str(__doc__))
    parser.add_argument("--folder", type=Path, help="measure the disk that this folder is on")
    args = parser.parse_args()
    size, rounds = (QUICK, 5) if args.quick else (SIZE, 11)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "weights"
        table = write(path, size)
        arena = mmap.mmap(-1, size)
        arena.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin per read, where the system has any
        target = memoryview(arena)
        target[:: mmap.PAGESIZE] = bytes(len(target[:: mmap.PAGESIZE]))  # resident, as an arena is
        direct = read_into(path, target).direct
        ways = ways_of(path, target, table)
        for number in range(rounds):
            for way in reversed(ways) if number % 2 else ways:
                way.sample(path)
    return finish("disk", rows({way.name: way for way in ways}, size, direct=direct), args)


def write(path: Path, size: int) -> BlockTable:
    """Make the file and its checksums."""
    blocks = Blocks()
    piece = os.urandom(BLOCK)
    with path.open("wb") as file:
        for _ in range(size // BLOCK):
            file.write(piece)
            blocks.feed(piece)
        file.flush()
        os.fsync(file.fileno())
    return blocks.table()


def drop(path: Path) -> None:
    """Take the file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def ways_of(path: Path, target: memoryview, table: BlockTable) -> list[Way]:
    """Everything that is compared."""
    return [
        Way("raw, 1 x 8 MiB", lambda: raw(path, target, os.O_DIRECT), cold=True),
        Way("raw, 4 x 4 MiB", lambda: read_into(path, target), cold=True),
        Way("checked, 4 x 4 MiB", lambda: read_into(path, target, table), cold=True),
        Way("buffered", lambda: raw(path, target, 0), cold=True),
        Way("buffered, checked", lambda: checked(path, table), cold=True),
        Way("warm", lambda: through(path), cold=False),
        Way("warm, checked", lambda: checked(path, table), cold=False),
    ]


def raw(path: Path, target: memoryview, flags: int) -> None:
    """One thread, 8 MiB at a time, into memory that is there; where O_DIRECT is refused, the page cache serves."""
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
    step = 2 * BLOCK
    for start in range(0, len(target), step):
        os.preadv(descriptor, [target[start : start + step]], start)
    os.close(descriptor)


def through(path: Path) -> None:
    """The reads of `checking` without the checks."""
    descriptor = os.open(path, os.O_RDONLY)
    buffer = memoryview(mmap.mmap(-1, 1 << 20))
    for start in range(0, os.fstat(descriptor).st_size, len(buffer)):
        os.preadv(descriptor, [buffer], start)
    os.close(descriptor)


def checked(path: Path, table: BlockTable) -> None:
    """As the disk tier proves a blob at its first load."""
    descriptor = os.open(path, os.O_RDONLY)
    steps = checking(descriptor, table)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        if not end.value:
            raise RuntimeError("a file that nobody touched is not what was written") from None
    finally:
        os.close(descriptor)


def rows(ways: dict[str, Way], size: int, *, direct: bool) -> list[Row]:
    """The table."""
    floor = min(way.best for name, way in ways.items() if name.startswith("raw"))
    found = [
        Row(f"{name}, {unit}", statistics.median(getattr(way, clock)), "ms")
        for name, way in ways.items()
        for clock, unit in (("wall", "wall"), ("cpu", "CPU"))
    ]
    bare, way = ways["raw, 4 x 4 MiB"], ways["checked, 4 x 4 MiB"]
    return [
        *found,
        Row("O_DIRECT is used", float(direct), "yes/no", target="= 1", met=direct),
        Row("best raw read", size / floor / 1e6, "GB/s"),
        gate("cold, checked, over the best raw read", statistics.median(way.wall), floor, 1.15, "wall"),
        gate("cold, checks alone", statistics.median(way.wall), statistics.median(bare.wall), 1.03, "wall"),
        gate("cold, raw, per 350 MB", statistics.median(bare.cpu) / (size / 350e6), 10.0, 1.0, "CPU"),
        gate(
            "warm, checks alone",
            statistics.median(ways["warm, checked"].cpu),
            statistics.median(ways["warm"].cpu),
            1.20,
            "CPU",
        ),
    ]


def gate(name: str, value: float, baseline: float, most: float, clock: str) -> Row:
    """A figure that may be so many times its baseline."""
    ratio = value / baseline
    return Row(name, value, f"ms {clock}", baseline, ratio, f"<= {most:.2f}x", ratio <= most)


if __name__ == "__main__":
    raise SystemExit(main())
