"""What loads do to others: weights counted once over several workers, and the lag that a load adds to an event loop.

Belongs here: processes and a ticker. Never: costs of loads (`load.py`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from bench.architectures import ALLOW, lay
from bench.report import Row
from runtime.tiers import mapping as tier
from runtime.tiers.recipe import Recipe
from runtime.worker.core import Core
from runtime.workers.turns import short_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.architectures import Subject

WORKERS = 3
PRIVATE_MB = 150.0
ONCE = 1.02
LAG_MS = 2.0
_TICK = 0.001
_LEAST = 0.1


# -- memory --------------------------------------------------------------------------------------------


def _held(pid: int, path: Path) -> tuple[float, float]:
    """Bytes of a process: its proportional share of one file's mappings, and what it shares with nobody."""
    of_file = own = 0.0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if "-" in key and " " in key:  # the first line of a mapping: addresses, rights, ..., path
            inside = line.endswith(str(path))
        elif key == "Pss" and inside:
            of_file += int(value.split()[0]) * 1024
        elif key == "Anonymous":
            own += int(value.split()[0]) * 1024
    return of_file, own


def sharing_rows(subject: Subject) -> list[Row]:
    """Several workers hold the same weights."""
    command = [
        sys.executable,
        "-c",
        "from bench.holder import main; main()",
        msgspec.json.encode(subject.spec).decode(),
    ]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
        for _ in range(WORKERS)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != b"held\n":
                raise RuntimeError("a worker could not load")
        shares = [_held(child.pid, subject.path) for child in children]
    finally:
        for child in children:
            child.communicate()
    weights = sum(of_file for of_file, _ in shares) / 1e6
    private = median(own for _, own in shares) / 1e6
    whole = subject.slab.size / 1e6
    return [
        Row(
            f"{WORKERS} workers: weights, PSS of all",
            weights,
            "MB",
            whole,
            weights / whole,
            f"<= {ONCE}x",
            weights / whole <= ONCE,
        ),
        Row(
            "each worker's own memory, torch included",
            private,
            "MB",
            target=f"<= {PRIVATE_MB:g} MB",
            met=private <= PRIVATE_MB,
        ),
    ]


# -- lag -----------------------------------------------------------------------------------------------


async def _worst(work: Callable[[], object]) -> float:
    """Largest lateness of a 1 ms tick, in ms, while work runs in a thread (and for 100 ms at least)."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    job = loop.run_in_executor(None, work)
    worst = 0.0
    while not job.done() or time.perf_counter() - began < _LEAST:
        due = time.perf_counter() + _TICK
        await asyncio.sleep(_TICK)
        worst = max(worst, time.perf_counter() - due)
    await job
    return worst * 1e3


def lag_rows(subject: Subject, rounds: int) -> list[Row]:
    """A loop that ticks beside loads, against one that ticks beside nothing; as in the server, with short turns."""
    core = Core("cpu:0", ALLOW, threads=1)
    target = subject.path.with_suffix(".again")

    def in_front() -> None:
        mapping = tier.Mapping(subject.path)
        mapping.open()
        offset = 0
        while offset < mapping.size:
            offset = mapping.populate(offset, verify=True)
        mapping.close()

    def in_worker() -> None:
        core.load(subject.spec, lambda: False)
        core.evict(subject.spec.key)
        core.release_host(subject.spec.fingerprint)

    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "host tier: check, populate, unmap": in_front,
        "a worker in a thread: map, bind, evict, unmap": in_worker,
        "laying a slab": lambda: lay(subject.plain, target, Recipe()),
    }
    before = sys.getswitchinterval()
    short_turns()
    in_worker()
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(rounds):
            for name, work in ways.items():
                found[name].append(asyncio.run(_worst(work)))
    finally:
        sys.setswitchinterval(before)
        target.unlink(missing_ok=True)
    idle = median(found.pop("nothing"))
    return [
        Row(
            f"loop lag, worst tick beside {name} (least {min(worst):.1f} ms)",
            median(worst),
            "ms wall",
            idle,
            None,
            f"<= idle + {LAG_MS:g} ms",
            median(worst) - idle <= LAG_MS,
        )
        for name, worst in found.items()
    ]
