"""What counting costs: a request, the minute's tick, memory, the checkpoint and the restore, for 10,000 models.

Traffic: the public LLM clients of `FORELOAD_SHARED` (`traces/servegen_mlarge_10min_counts.csv.gz`), each model one of
them, shifted and scaled at random; without that file, clients made up with the same shares of idle hours. Times are
CPU, unless a row says wall: the machine is shared.
"""

from __future__ import annotations

import csv
import gc
import gzip
import os
import tempfile
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import anyio
import anyio.to_thread
import numpy as np
import psutil

from bench.report import Row, arguments, finish
from forecasting.counts import Counts
from forecasting.history import read_logs
from forecasting.store import Store
from runtime.fitting.worker import FittingWorker

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODELS = 10_000
STEPS = 4032  # 5-minute steps of two weeks, which the traffic repeats
START = 1_772_409_600.0  # a Monday in March 2026, 00:00 UTC
ZONE = ZoneInfo("Europe/Berlin")
TRACE = "traces/servegen_mlarge_10min_counts.csv.gz"


class Traffic:
    """Requests of each model in any 5 minutes."""

    def __init__(self, models: int) -> None:
        self.random = np.random.default_rng(7)
        self.rates, self.source = _clients(self.random)
        self.client = self.random.integers(0, len(self.rates), models)
        self.shift = self.random.integers(0, STEPS, models)
        self.scale = 0.3 * np.exp(self.random.normal(0, 1, models))

    def draw(self, step: int, minutes: int = 5) -> list[int]:
        """Requests in so many minutes of a step."""
        rates = self.rates[self.client, (step + self.shift) % STEPS] * self.scale
        found: list[int] = self.random.poisson(rates * (minutes / 5)).tolist()
        return found


def _clients(random: np.random.Generator) -> tuple[NDArray[np.float64], str]:
    """Expected requests of each client in each 5-minute step, and where they are from."""
    path = Path(os.environ.get("FORELOAD_SHARED", "../shared")) / TRACE
    if not path.exists():
        active = random.choice([0.02, 0.15, 0.6, 0.97], 160, p=[0.29, 0.21, 0.21, 0.29])
        hours = random.random((160, STEPS // 12)) < active[:, None]
        level = np.exp(random.normal(3, 1.5, (160, 1)))
        day = 1 + 0.6 * np.sin(np.arange(STEPS) / 288 * 2 * np.pi)
        return np.repeat(hours, 12, axis=1) * level * day, "synthetic"
    clients: dict[str, NDArray[np.float64]] = {}
    with gzip.open(path, "rt", newline="") as stream:
        for row in csv.DictReader(stream):
            place = 2 * int(row["window"])
            counts = clients.setdefault(row["key"], np.zeros(STEPS))
            counts[place : place + 2] = float(row["count"]) / 2
    return np.stack(list(clients.values())), "ServeGen"


def hit_ns(counts: Counts) -> float:
    """Nanoseconds of one request, the best of many short runs."""
    runs = timeit.repeat("hit(17)", globals={"hit": counts.hit}, number=100_000, repeat=20)
    return min(runs) / 100_000 * 1e9


def run(counts: Counts, traffic: Traffic, step: int, minutes: int, at: float) -> tuple[float, float]:
    """Count so many minutes and roll once: CPU and wall milliseconds of the roll."""
    for index, number in enumerate(traffic.draw(step, minutes)):
        if number:
            counts.add(index, number)
    cpu, wall = time.thread_time(), time.perf_counter()
    counts.roll(START + at, at)
    return (time.thread_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def main() -> int:
    """Measure, show, judge."""
    args = arguments(__doc__ or "").parse_args()
    process = psutil.Process()
    traffic = Traffic(MODELS)
    traffic.draw(0)
    anyio.run(awake)
    before = process.memory_info().rss
    counts = Counts(START, 0.0, zone=ZONE)
    for model in range(MODELS):
        counts.index(f"model-{model}@1")

    days = 9 if args.quick else 29
    for step in range(days * 288):
        run(counts, traffic, step, 5, 300.0 * (step + 1))
    ticks = [run(counts, traffic, days * 288 + m // 5, 1, 86_400.0 * days + 60.0 * (m + 1)) for m in range(1440)]
    cpu, wall = (float(np.quantile([tick[place] for tick in ticks], 0.99)) for place in (0, 1))
    memory = (process.memory_info().rss - before) / 1e6

    hit = hit_ns(counts)
    rows = [
        Row("one request", hit, "ns", target="<= 250", met=hit <= 250),
        Row(f"minute tick, {MODELS:,} models, {traffic.source}", cpu, "ms CPU p99", target="<= 2", met=cpu <= 2),
        Row("the same", wall, "ms wall p99"),
        Row(f"resident memory after {days + 1} days", memory, "MB", target="<= 100", met=memory <= 100),
        with_fit(counts, process, before),
        *snapshots(counts),
        *on_disk(counts, traffic, days + 1),
        imported(20_000 if args.quick else 200_000),
    ]
    return finish("counts", rows, args)


async def awake() -> None:
    """What a server has before it counts anything: a loop and a thread."""
    await anyio.to_thread.run_sync(gc.collect)


def with_fit(counts: Counts, process: psutil.Process, before: int) -> Row:
    """Memory after a round of the fitting process, whose result is kept, on top of what there was `before` counting."""
    worker, snapshot = FittingWorker(budget=600.0, specialists=False), counts.snapshot()
    fitted = anyio.run(worker.fit, snapshot)
    memory = (process.memory_info().rss - before) / 1e6
    if len(fitted.keys) != MODELS:
        raise RuntimeError(f"only {len(fitted.keys)} models were fitted")
    return Row("the same with what a fit found", memory, "MB", target="<= 100", met=memory <= 100)


def snapshots(counts: Counts) -> list[Row]:
    """A snapshot on the loop, and the matrices from it in a thread."""
    began = time.thread_time()
    snapshot = counts.snapshot()
    taken = (time.thread_time() - began) * 1e3
    began = time.thread_time()
    snapshot.sums()
    return [
        Row("snapshot", taken, "ms CPU", target="<= 2", met=taken <= 2),
        Row("its sums and exposure, off the loop", (time.thread_time() - began) * 1e3, "ms CPU"),
    ]


def on_disk(counts: Counts, traffic: Traffic, days: int) -> list[Row]:
    """Bytes and times of checkpoint, journal and restore."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.db"
        store, _ = Store.open(path)
        began = time.process_time()
        store.checkpoint(counts.snapshot())
        first = (time.process_time() - began) * 1e3
        stored = {table: size / MODELS for table, size in store.stored_bytes().items()}

        spent: dict[str, list[float]] = {"append": [], "checkpoint": []}
        for minute in range(30):
            at = 86_400.0 * days + 60.0 * (minute + 1)
            after = counts.tiers.end - 1
            run(counts, traffic, days * 288 + minute // 5, 1, at)
            snapshot = counts.snapshot()
            began = time.process_time()
            store.append(snapshot.table, snapshot.born, counts.closed(after))
            spent["append"].append((time.process_time() - began) * 1e3)
            if minute % 5 == 4:
                began = time.process_time()
                store.checkpoint(snapshot)
                spent["checkpoint"].append((time.process_time() - began) * 1e3)
        store.close()
        size = path.stat().st_size / MODELS
        seconds, wall = restored(path, days)
    slots = stored["slots"]
    return [
        Row("week sums and exposure on disk", slots, "B/model", target="<= 700", met=slots <= 700),
        Row("5- and 15-minute rows on disk (28 days)", stored["fives"] + stored["quarters"], "B/model"),
        Row("whole file, journal included", size, "B/model"),
        Row("first checkpoint, in a thread", first, "ms CPU"),
        Row("checkpoint after 5 minutes, in a thread", max(spent["checkpoint"]), "ms CPU max"),
        Row("journal of a minute, in a thread", max(spent["append"]), "ms CPU max"),
        Row(f"restore {MODELS:,} models", seconds, "s CPU", target="<= 1", met=seconds <= 1),
        Row("the same", wall, "s wall"),
    ]


def restored(path: Path, days: int) -> tuple[float, float]:
    """CPU and wall seconds until counting can go on."""
    cpu, wall = time.process_time(), time.perf_counter()
    store, _ = Store.open(path)
    with store:
        saved, _ = store.load()
        if saved is None:
            raise RuntimeError("the store came back empty")
        Counts.restore(saved, START + 86_400.0 * (days + 1), 0.0, zone=ZONE)
        return time.process_time() - cpu, time.perf_counter() - wall


def imported(lines: int) -> Row:
    """A log of the combined format read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "access.log"
        with path.open("w") as log:
            for line in range(lines):
                when = f"{line // 3600 % 24:02}:{line // 60 % 60:02}:{line % 60:02}"
                log.write(
                    f'10.0.0.1 - - [29/Mar/2026:{when} +0000] "POST /v2/models/m{line % 97}/infer HTTP/1.1" 200 9\n'
                )
        began = time.process_time()
        found = read_logs([path], now=1_774_872_000.0)
        seconds = time.process_time() - began
        if found.report.counted != lines:
            raise RuntimeError(f"read {found.report.counted} of {lines} lines")
    return Row("log import, combined format", lines / seconds, "lines/s CPU")


if __name__ == "__main__":
    raise SystemExit(main())
