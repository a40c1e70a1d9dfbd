"""What isolation costs: an echo of one image (602,112 bytes) through the ring to a process, against a thread executor.

One caller on one loop, ways interleaved in rounds, p50 of each round, median of the rounds. The gate compares with a
plain hand-off: the thread gets a reference and makes the output, one copy. The ring copies three times (in, echo, out);
an image in with 4 KB out (a classifier), and an echo of 4 KB, tell copying and transport apart.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING

import uvloop

from actors.residency.model import Footprint, Model
from bench.report import Row, arguments, finish
from runtime.workers.port import BuilderSpec, Call, Laid, LoadSpec, Timings
from runtime.workers.process import ProcessWorker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from runtime.workers.port import Note

BODY = bytes(602_112)
SMALL = bytes(4096)
LIMIT_US = 60.0
LIMIT_RATIO = 1.5
CALLS = 400
KEY = "echo@1"


class EchoCore:
    """A core whose only model gives the body back."""

    def __init__(self, device: str, allow: tuple[str, ...] = (), threads: int = 1) -> None:
        del device, allow, threads
        self._calls: list[tuple[memoryview, Callable[[Laid], None]]] = []

    def listen(self, tell: Callable[[Note], None]) -> None:
        """Compiles nothing."""

    def load(self, spec: LoadSpec, cancelled: Callable[[], bool]) -> EchoCore:
        """Nothing to do; the core is its own report."""
        del spec, cancelled
        return self

    resident, steps, reused = 0, (), False

    def submit(self, key: str, body: memoryview, json_length: int | None, done: Callable[[Laid], None]) -> EchoCore:
        """Queue it."""
        del key
        # A raw binary call (0) stands for a classifier: all in, little out.
        self._calls.append((body[: len(SMALL)] if json_length == 0 else body, done))
        return self

    def due(self) -> float | None:
        """At once."""
        return 0.0 if self._calls else None

    def step(self) -> None:
        """Give all bodies back; the slot's view itself is the answer, so the only copy is the ring's."""
        calls, self._calls = self._calls, []
        for body, done in calls:
            done(Laid((body,), None, Timings()))


async def p50_us(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Median microseconds of `count` calls, one after another."""
    spent = []
    for _ in range(count):
        began = time.perf_counter_ns()
        await call()
        spent.append(time.perf_counter_ns() - began)
    return median(spent) / 1e3


def resolve(model: Model) -> LoadSpec:
    """The one model."""
    return LoadSpec(model.key, model.fingerprint, "", 0, BuilderSpec("python"), (), ())


def one_copy() -> bytearray:
    """What a thread does for an echo: it has the body already, and makes an output."""
    return bytearray(BODY)


def one_small_copy() -> bytearray:
    """The hand-off itself, hardly any bytes."""
    return bytearray(SMALL)


async def measure(rounds: int) -> list[float]:
    """Median p50 in microseconds: ring, thread, image in and little out by ring, small by ring and by thread."""
    loop = asyncio.get_running_loop()
    worker = ProcessWorker(
        "cpu:0",
        resolve=resolve,
        on_ready=lambda _: None,
        on_lost=lambda _, cause: print(cause),
        slot_bytes=1 << 20,
        core="bench.ring:EchoCore",
    )
    async with worker:
        await worker.ready()
        await worker.load(Model("echo", "1", "f", Footprint(0, 0)))
        with ThreadPoolExecutor(1) as executor:
            ways: list[Callable[[], Awaitable[object]]] = [
                lambda: worker.infer(Call(KEY, BODY)),
                lambda: loop.run_in_executor(executor, one_copy),
                lambda: worker.infer(Call(KEY, BODY, 0)),
                lambda: worker.infer(Call(KEY, SMALL)),
                lambda: loop.run_in_executor(executor, one_small_copy),
            ]
            found: list[list[float]] = [[] for _ in ways]
            for turn in range(rounds + 1):
                for way, figures in zip(ways, found, strict=True):
                    p50 = await p50_us(way, CALLS)
                    if turn:  # the first round touches pages and warms caches
                        figures.append(p50)
    return [median(figures) for figures in found]


def main() -> int:
    """Measure, show, judge."""
    args = arguments(__doc__ or "").parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ring, thread, classify, small, small_thread = runner.run(measure(5 if args.quick else 25))
    ratio = ring / thread
    rows = [
        Row("602,112 B, ring against thread", ring, "us p50", thread, ratio, "<= 1.5x", ratio <= LIMIT_RATIO),
        Row(f"the same, absolute (aim {LIMIT_US:g} us, no gate)", ring, "us p50"),
        Row("602,112 B in, 4 KB out, ring against thread", classify, "us p50", small_thread, classify / small_thread),
        Row("4 KB, ring against thread", small, "us p50", small_thread, small / small_thread),
    ]
    return finish("ring", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
