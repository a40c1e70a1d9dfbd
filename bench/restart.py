"""What it costs to be back after a worker was killed, forked from a zygote or spawned anew; and N workers' memory.

CPU time of the whole tree (front, zygote, new worker) from SIGKILL until the model that it held is callable again, both
ways interleaved, medians. The weights lie in the page cache. "A respawn" is a fresh interpreter that imports torch and
builds the module; the forked one finds its skeleton in the local store. Forwards are left out (`warm_up: false`, for
both) but for the rows that say so. Memory is PSS and private bytes after each worker answered a call.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import uvloop

from actors.residency.model import Footprint, Model
from bench.report import Row, arguments, finish
from runtime.workers.port import Call
from runtime.workers.process import DEFAULT_CORE, Backoff, ProcessWorker
from runtime.workers.zygotes import Zygotes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.switch import Case
    from runtime.workers.port import LoadSpec
    from runtime.workers.start import Starter

LIMIT_CPU_MS = 60.0
LIMIT_RATIO = 40.0
LIMIT_PRIVATE = 150.0
"""MiB of each worker."""
GATED_BYTES = 300_000_000
"""The limits are about a model of the size of ViT-B."""
LIMIT_WEIGHTS = 1.05
"""Of the weights' size, all workers together."""
ALLOW = ("bench.",)


class Spent(NamedTuple):
    """Milliseconds from the kill until the model was callable, and those of the first call after it."""

    cpu: float
    wall: float
    first_call: float


def cpu_ns(pid: int) -> int:
    """Nanoseconds of CPU that a process has used, all its threads together (the kernel's clock of that process)."""
    return time.clock_gettime_ns((~pid << 3) | 2)


class Way:
    """A worker that is killed again and again, and the process it comes from."""

    def __init__(self, starter: Starter | None, spec: LoadSpec, skeletons: str, device: str = "cpu:0") -> None:
        self.model = Model("vit", "1", spec.fingerprint, Footprint(spec.weights_bytes, spec.weights_bytes))
        self.starter = starter if isinstance(starter, Zygotes) else None
        self.up = asyncio.Event()
        self.worker = ProcessWorker(
            device,
            resolve=lambda _: spec,
            on_ready=lambda _: self.up.set(),
            on_lost=lambda *_: None,
            allow=ALLOW,
            slot_bytes=4 << 20,
            backoff=Backoff(0.0, 0.0),
            starter=starter,
            skeletons=skeletons,
        )

    async def restart(self, body: bytes) -> Spent:
        """Kill it and wait until its model is callable again; then call it once."""
        parents = [os.getpid(), *([self.starter.pid] if self.starter else [])]
        self.up.clear()
        before = [cpu_ns(pid) for pid in parents]
        began = time.perf_counter()
        os.kill(self.worker.pid, signal.SIGKILL)
        await self.up.wait()
        await self.worker.load(self.model)
        wall = time.perf_counter() - began
        # The new worker first: it may go on using CPU for what is not on the way (threads that end, answers sent).
        spent = cpu_ns(self.worker.pid) + sum(cpu_ns(pid) for pid in parents) - sum(before)
        return Spent(spent / 1e6, wall * 1e3, await self.call(body))

    async def call(self, body: bytes) -> float:
        """CPU milliseconds of the worker for one call."""
        before = cpu_ns(self.worker.pid)
        await self.worker.infer(Call(self.model.key, body, body.index(b"}]}") + 3))
        return (cpu_ns(self.worker.pid) - before) / 1e6


async def restarts(spec: LoadSpec, folder: Path, body: bytes, rounds: int) -> list[Row]:
    """Kill both, in turns."""
    async with AsyncExitStack() as stack:
        zygotes = await stack.enter_async_context(Zygotes(DEFAULT_CORE, notify=print, insist=True))
        forked = Way(zygotes, spec, str(folder / "skeletons"))
        spawned = Way(None, spec, "")
        ways = [forked, spawned]
        for way in ways:
            await stack.enter_async_context(way.worker)
            await way.worker.ready()
            await way.worker.load(way.model)
        found: list[list[Spent]] = [[], []]
        for turn in range(rounds):
            for way, figures in list(zip(ways, found, strict=True))[:: 1 if turn % 2 else -1]:
                figures.append(await way.restart(body))
        later = median([await forked.call(body) for _ in range(3)])
    new, old = (Spent(*(median(column) for column in zip(*figures, strict=True))) for figures in found)
    ratio = old.cpu / new.cpu
    size = f"{spec.weights_bytes / 1e6:.0f} MB"
    rows = [
        Row(f"{size}: kill to callable, forked, n={rounds}", new.cpu, "ms CPU"),
        Row(f"{size}: the same against a respawn", new.cpu, "ms CPU", old.cpu, ratio),
        Row(f"{size}: the same, wall (no gate)", new.wall, "ms", old.wall, old.wall / new.wall),
        Row(f"{size}: first call, against a later one", new.first_call, "ms CPU", later, new.first_call / later),
    ]
    if spec.weights_bytes >= GATED_BYTES:
        rows[0] = replace(rows[0], target=f"<= {LIMIT_CPU_MS:g} ms", met=new.cpu <= LIMIT_CPU_MS)
        rows[1] = replace(rows[1], target=f">= {LIMIT_RATIO:g}x", met=ratio >= LIMIT_RATIO)
    return rows


def memory(pid: int, path: str) -> tuple[float, float, float]:
    """Megabytes of a process: PSS, private, and PSS of one mapped file."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    total = {row[0]: int(row[1]) / 1024 for row in rows}
    mapped, inside = 0.0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(None, 1)[0]
        if not first.endswith(":"):
            inside = line.endswith(path)
        elif inside and first == "Pss:":
            mapped += int(line.split()[1]) / 1024
    return total["Pss:"], total["Private_Clean:"] + total["Private_Dirty:"], mapped


async def memories(spec: LoadSpec, folder: Path, body: bytes, count: int) -> list[Row]:
    """`count` forked workers that hold the same model, each after one call."""
    async with AsyncExitStack() as stack:
        zygotes = await stack.enter_async_context(Zygotes(DEFAULT_CORE, notify=print, insist=True))
        ways = [Way(zygotes, spec, str(folder / "skeletons"), f"cpu:{number}") for number in range(count)]
        for way in ways:
            await stack.enter_async_context(way.worker)
            await way.worker.ready()
            await way.worker.load(way.model)
            await way.call(body)
        found = [memory(way.worker.pid, spec.weights) for way in ways]
        parent, _, _ = memory(zygotes.pid, spec.weights)
    size = spec.weights_bytes / (1 << 20)
    weights = sum(row[2] for row in found)
    # With one worker its private bytes hold the weights too: nobody shares them.
    private = max(row[1] for row in found) - (size if count == 1 else 0.0)
    name = f"{count} forked, {size:.0f} MiB of weights"
    once = f"<= {LIMIT_WEIGHTS}x"
    return [
        Row(f"{name}: PSS of all and the zygote", sum(row[0] for row in found) + parent, "MiB"),
        Row(f"{name}: PSS of weights", weights, "MiB", size, weights / size, once, weights / size <= LIMIT_WEIGHTS),
        Row(
            f"{name}: private, most", private, "MiB", None, None, f"<= {LIMIT_PRIVATE:g} MiB", private <= LIMIT_PRIVATE
        ),
    ]


def request() -> bytes:
    """One image, as binary data behind its JSON."""
    image = np.zeros((1, 3, 224, 224), np.float32).tobytes()
    head = msgspec.json.encode(
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": "FP32",
                    "shape": [1, 3, 224, 224],
                    "parameters": {"binary_data_size": len(image)},
                }
            ]
        }
    )
    return head + image


def cases(quick: bool) -> Sequence[Case]:  # noqa: FBT001 - the option
    """The sizes of `bench.switch`; the small and the middle one with `--quick`."""
    from bench.switch import CASES

    return CASES[:-1] if quick else CASES


def main() -> int:
    """Measure, show, judge."""
    from bench.switch import prepared

    args = arguments(__doc__ or "").parse_args()
    # A respawn that compiled our sources each time would make the forked one look better than it is.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows: list[Row] = []
    for case in cases(args.quick):
        with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            _, spec = prepared(case, Path(folder))
            rows += runner.run(restarts(spec, Path(folder), request(), 5 if args.quick else 9))
            if case is cases(args.quick)[-1]:
                for count in (1, 3):
                    rows += runner.run(memories(spec, Path(folder), request(), count))
    return finish("restart", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
