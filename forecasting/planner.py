"""When to load what, so that it is ready in time: many loads, one channel per device and one shared disk.

Pure: jobs in, a schedule out. Admission by memory, choice by the exact dynamic programme of Lawler and Moore (1969,
"A functional equation and its application to resource allocation and sequencing problems", section 3: maximise the
weight of on-time jobs on one machine), placement backward from the deadlines, slack from the variance of load times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    _Measure: TypeAlias = "Callable[[Job], float]"

GRID = 1.0
"""Seconds of a step of the programme: durations are rounded up and deadlines down, so a plan is never too tight."""

TOUCHING = 1e-9
"""Seconds between two loads that count as none."""

Z = 1.64
"""Standard deviations of a busy block's length that it starts early: the 95 % quantile of a normal."""

LONGEST = 200_000
"""Steps of the programme at most; a longer horizon gets a coarser grid."""

CELLS = 400_000
FINEST = 10_000
"""Cells and steps up to which the grid is halved: loads of milliseconds due in a second must not round to too late."""


@dataclass(frozen=True, slots=True)
class Job:
    """One load that should be over by `ready_by` (epoch seconds), kept until `release`.

    `seconds` is the 95 % quantile of the load on the device's channel and `variance` its variance; `disk_seconds` of
    it are spent reading the disk that all devices share (0: the bytes are in memory already). `value` is what being
    ready is worth, in expected seconds of waiting saved; `require` ones are dropped last.
    """

    key: str
    device: str
    seconds: float
    ready_by: float
    release: float
    value: float
    bytes: int
    variance: float = 0.0
    disk_seconds: float = 0.0
    require: bool = False

    def __post_init__(self) -> None:
        # A sum with infinity or NaN in it is one of them.
        if not math.isfinite(
            self.seconds + self.ready_by + self.release + self.value + self.variance + self.disk_seconds
        ):
            raise ValueError(f"job {self.key} has a number that is not finite: {self!r}")
        if self.seconds < 0 or self.disk_seconds < 0 or self.variance < 0 or self.bytes < 0:
            raise ValueError(f"job {self.key} has a negative duration or size: {self!r}")
        if self.release < self.ready_by:
            raise ValueError(f"job {self.key} would be released before it is ready")


@dataclass(frozen=True, slots=True)
class Placed:
    """Load between `start` and `ready_by`, keep until `release`; epoch seconds."""

    job: Job
    start: float
    ready_by: float
    release: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """What will not be ready in time. `reason` is late, memory, channel or disk; `remedy` says what would help."""

    job: Job
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """Loads in the order of their start, and what could not be placed."""

    placed: tuple[Placed, ...]
    dropped: tuple[Dropped, ...]

    @property
    def infeasible(self) -> tuple[Dropped, ...]:
        """What was declared as required and will be cold."""
        return tuple(each for each in self.dropped if each.job.require)


def schedule(
    jobs: Sequence[Job],
    *,
    now: float,
    capacity: Mapping[str, int],
    occupied: Mapping[str, int] | None = None,
    busy_until: Mapping[str, float] | None = None,
    disk_busy_until: float = 0.0,
    eager: bool = False,
) -> Schedule:
    """Plan all jobs from `now` on.

    `capacity` bytes per device, of which `occupied` cannot be had; channels are taken until `busy_until`. With
    `eager` (memory costs nothing) loads are pulled forward as far as the channel allows.
    """
    occupied = occupied or {}
    busy_until = busy_until or {}
    dropped: list[Dropped] = []
    late = {id(job) for job in jobs if job.ready_by - now < job.seconds}
    dropped += [
        Dropped(job, "late", f"it takes {job.seconds:.1f} s and is due in {max(job.ready_by - now, 0):.1f} s")
        for job in jobs
        if id(job) in late
    ]
    by_device: defaultdict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        if id(job) not in late:
            by_device[job.device].append(job)
    # Memory first: what will not fit anyway must not take the channel or the disk from what will.
    fitting: list[Job] = []
    for device in sorted(by_device):
        kept, refused = _admit_memory(by_device[device], capacity.get(device, 0) - occupied.get(device, 0))
        fitting += kept
        dropped += refused
    alive, refused = _admit_disk(fitting, max(now, disk_busy_until))
    dropped += refused
    placed: list[Placed] = []
    for device in sorted(by_device):
        start = max(now, busy_until.get(device, now))
        here = [job for job in alive if job.device == device]
        chosen, refused = _choose(here, start, "channel", lambda job: job.seconds, lambda job: job.ready_by)
        dropped += refused
        placed += _place_backward(chosen, start, eager=eager)
    placed.sort(key=lambda each: (each.start, each.job.key))
    return Schedule(tuple(placed), tuple(dropped))


# -- admission by memory -------------------------------------------------------------------------------


def _admit_memory(jobs: Sequence[Job], room: int) -> tuple[list[Job], list[Dropped]]:
    """Sweep the intervals in which jobs hold memory; where they overflow, the least value per byte goes."""
    if not jobs:
        return [], []
    begins = np.array([job.ready_by - job.seconds for job in jobs])
    ends = np.maximum(np.array([job.release for job in jobs]), np.nextafter(begins, np.inf))
    sizes = np.array([job.bytes for job in jobs], dtype=np.int64)
    instants = np.concatenate((begins, ends))
    # At one instant what ends goes before what begins, so that loads may follow each other in the same memory.
    order = np.lexsort((np.repeat((1, 0), len(jobs)), instants))
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    held = np.cumsum(np.concatenate((sizes, -sizes))[order])
    cheapest = sorted(range(len(jobs)), key=lambda at: (jobs[at].require, _per_byte(jobs[at]), jobs[at].key))
    rank = np.empty(len(jobs), np.int64)
    rank[cheapest] = np.arange(len(jobs))
    gone: dict[int, Dropped] = {}
    begun = np.zeros(order.size, np.bool_)
    begun[place[: len(jobs)]] = True
    at = 0
    # What is dropped only lowers what is held later, so the sweep never goes back.
    while (over := (held[at:] > room) & begun[at:]).any():
        at += int(over.argmax())
        instant, peak = instants[order[at]], int(held[at])
        inside = (begins <= instant) & (instant < ends)
        index = int(np.argmin(np.where(inside, rank, len(jobs))))
        held[place[index] : place[index + len(jobs)]] -= sizes[index]
        begins[index], begun[place[index]] = np.inf, False
        gone[index] = Dropped(jobs[index], "memory", f"{peak - room} more bytes, or one model less at that time")
    return [job for index, job in enumerate(jobs) if index not in gone], list(gone.values())


def _per_byte(job: Job) -> float:
    return job.value / max(job.bytes, 1)


def _admit_disk(jobs: Sequence[Job], start: float) -> tuple[list[Job], list[Dropped]]:
    """The shared disk serves one load at a time, and each must be off it early enough for its device's part."""
    reading = [job for job in jobs if job.disk_seconds > 0]
    others = [job for job in jobs if job.disk_seconds <= 0]
    chosen, dropped = _choose(
        reading,
        start,
        "disk",
        lambda job: job.disk_seconds,
        lambda job: job.ready_by - max(job.seconds - job.disk_seconds, 0.0),
    )
    return others + chosen, dropped


# -- the choice: Lawler and Moore ----------------------------------------------------------------------


def _choose(
    jobs: Sequence[Job],
    start: float,
    resource: str,
    length: _Measure,
    due: _Measure,
) -> tuple[list[Job], list[Dropped]]:
    """The set of greatest value that one serial resource can finish in time, from `start` on."""
    if not jobs:
        return [], []
    # A required job outweighs any number of others, but two required ones still compete by value.
    bonus = 1.0 + sum(max(job.value, 0.0) for job in jobs)
    values = [max(job.value, 0.0) + (bonus if job.require else 0.0) for job in jobs]
    taken = on_time([length(job) for job in jobs], [due(job) - start for job in jobs], values)
    chosen = [job for job, take in zip(jobs, taken, strict=True) if take]
    dropped = [
        Dropped(job, resource, f"the {resource} is taken by loads worth more; start earlier or load less at that time")
        for job, take in zip(jobs, taken, strict=True)
        if not take
    ]
    return chosen, dropped


def on_time(lengths: Sequence[float], deadlines: Sequence[float], values: Sequence[float]) -> list[bool]:
    """Which jobs to do on one machine, so that the sum of values of those done by their deadlines is greatest.

    Seconds from the start; durations are rounded up to the grid and deadlines down. Exact on the grid, O(n * horizon).
    """
    count = len(lengths)
    if count == 0:
        return []
    grid = _grid(min(max(deadlines), sum(lengths) + count * GRID), count)
    steps = [max(math.ceil(round(length / grid, 9)), 0) for length in lengths]
    ends = [math.floor(round(deadline / grid, 9)) for deadline in deadlines]
    total = min(max(ends), sum(steps))
    order = sorted(range(count), key=lambda index: (ends[index], steps[index], index))
    if total < 0:
        return [False] * count
    if _all_fit([index for index in order if values[index] > 0], steps, ends):
        return [value > 0 for value in values]
    best: NDArray[np.float64] = np.full(total + 1, -np.inf)
    best[0] = 0.0
    take = np.zeros((count, total + 1), dtype=np.bool_)
    for index in order:
        step, end = steps[index], min(ends[index], total)
        if step > end or values[index] <= 0:
            continue
        offered = best[: end - step + 1] + values[index]
        current = best[step : end + 1]
        np.greater(offered, current, out=take[index, step : end + 1])
        np.maximum(offered, current, out=current)
    return _trace_back(order, steps, take, int(np.argmax(best)))


def _all_fit(order: Sequence[int], steps: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether one after the other, earliest deadline first, all are over in time: then there is nothing to choose."""
    return all(over <= ends[index] for index, over in zip(order, accumulate(steps[i] for i in order), strict=True))


def _grid(horizon: float, count: int) -> float:
    """Seconds of a step. Halves of `GRID`, so that whole seconds stay exact."""
    if horizon / GRID > LONGEST:
        return horizon / LONGEST
    grid = GRID
    while 0 < horizon / grid * 2 <= min(CELLS / count, FINEST):
        grid /= 2
    return grid


def _trace_back(order: Sequence[int], steps: Sequence[int], take: NDArray[np.bool_], at: int) -> list[bool]:
    chosen = [False] * len(steps)
    for index in reversed(order):
        if take[index, at]:
            chosen[index] = True
            at -= steps[index]
    return chosen


# -- placement -----------------------------------------------------------------------------------------


def _place_backward(jobs: Sequence[Job], start: float, *, eager: bool) -> list[Placed]:
    """Latest deadline first, each as late as the one behind it allows; then slack, block by block."""
    placed: list[Placed] = []
    following = math.inf
    for job in sorted(jobs, key=lambda job: (job.ready_by, job.key), reverse=True):
        end = min(job.ready_by, following)
        following = end - job.seconds
        placed.append(Placed(job, following, end, job.release))
    placed.reverse()
    return _slacken(placed, start, eager=eager)


def _slacken(placed: Sequence[Placed], start: float, *, eager: bool) -> list[Placed]:
    """Shift each busy block earlier by what its length may vary, never before `start` nor into the block before it."""
    result: list[Placed] = []
    free_from = start
    for block in _blocks(placed):
        wanted = block[0].start - Z * math.sqrt(sum(each.job.variance for each in block))
        first = free_from if eager else max(wanted, free_from)
        shift = max(block[0].start - first, 0.0)
        result += [Placed(each.job, each.start - shift, each.ready_by - shift, each.release) for each in block]
        free_from = max(result[-1].ready_by, free_from)
    return result


def _blocks(placed: Iterable[Placed]) -> list[list[Placed]]:
    """Runs of loads without a gap between them."""
    blocks: list[list[Placed]] = []
    for each in placed:
        if blocks and abs(blocks[-1][-1].ready_by - each.start) < TOUCHING:
            blocks[-1].append(each)
        else:
            blocks.append([each])
    return blocks
