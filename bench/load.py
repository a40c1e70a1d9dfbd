"""What bringing weights in costs on a CPU, per way and per size, against what people use instead and the floors.

All ways round-robin in one process, medians; the unit is CPU ms unless a row says wall. `--quick` takes the two
smallest and repeats less; `--only NAME` takes one.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.architectures import ALLOW, ARCHITECTURES, PLAIN, Subject, prepared
from bench.loadways import (
    Arena,
    Mapped,
    Way,
    classic,
    cold,
    copied,
    interleaved,
    peers,
    raw_direct,
    safetensors_way,
)
from bench.report import Row, arguments, finish
from bench.sharing import lag_rows, sharing_rows
from runtime.tiers import mapping as tier
from runtime.tiers.slabread import open_direct
from runtime.worker.core import Core

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SWITCHES = 15
QUICK = 2
HIT_MS = 0.3
MAPPING = 1.1
COPY, COPY_MS = 1.1, 0.2
VERIFY_WARM, VERIFY_COLD = 1.20, 1.03
DIRECT, DIRECT_CPU_MS, DIRECT_PER = 1.15, 10.0, 350e6
COLD_CPU, COLD_WALL = 60, 8.5
THREADS, DIRECT_STEP = 4, 4 << 20


def warm(subject: Subject, rounds: int) -> list[Row]:
    """Everything in the page cache."""
    core = Core("cpu:0", ALLOW, threads=1)
    arena, mapped = Arena(subject), Mapped(subject)
    length = subject.slab.header.length
    descriptor = os.open(subject.path, os.O_RDONLY)

    def load() -> object:
        return core.load(subject.spec, lambda: False)

    def unmapped() -> None:
        core.evict(subject.spec.key)
        core.release_host(subject.spec.fingerprint)

    load()
    unmapped()
    costs = interleaved(
        {
            "classic": Way(lambda: classic(subject)),
            "safetensors": Way(lambda: safetensors_way(subject)),
            "new": Way(load, unmapped, 3),
            "hit": Way(load, lambda: core.evict(subject.spec.key), SWITCHES),
            "memcpy": Way(lambda: copied(arena.address, mapped.address, length), times=3),
            "copy": Way(lambda: arena.copy_from(mapped.address), arena.skeleton.evict, 3),
            "pread": Way(lambda: arena.read_from(descriptor, verify=False), arena.skeleton.evict, 3),
            "verified": Way(lambda: arena.read_from(descriptor, verify=True), arena.skeleton.evict, 3),
        },
        rounds,
    )
    os.close(descriptor)
    cpu = {name: each.cpu for name, each in costs.items()}
    least, label = subject.architecture.hit, subject.label
    ratio = cpu["classic"] / cpu["hit"]
    return [
        Row(
            f"{label}: host hit, mapped",
            cpu["hit"],
            "ms CPU",
            cpu["classic"],
            ratio,
            f"<= {HIT_MS} ms, >= {least:g}x",
            cpu["hit"] <= HIT_MS and ratio >= least,
        ),
        _over(f"{label}: new mapping, against memcpy", cpu["new"], cpu["memcpy"], MAPPING),
        Row(
            f"{label}: new mapping, against classic", cpu["new"], "ms CPU", cpu["classic"], cpu["classic"] / cpu["new"]
        ),
        Row(
            f"{label}: private copy into an arena, against memcpy",
            cpu["copy"],
            "ms CPU",
            cpu["memcpy"],
            cpu["copy"] / cpu["memcpy"],
            f"<= {COPY}x + {COPY_MS} ms",
            cpu["copy"] <= COPY * cpu["memcpy"] + COPY_MS,
        ),
        _over(f"{label}: page cache to arena, checked against not", cpu["verified"], cpu["pread"], VERIFY_WARM),
        Row(
            f"{label}: safetensors load_file + build + load_state_dict",
            cpu["safetensors"],
            "ms CPU",
            cpu["classic"],
            cpu["classic"] / cpu["safetensors"],
        ),
    ]


def _over(name: str, value: float, base: float, most: float, unit: str = "ms CPU") -> Row:
    return Row(name, value, unit, base, value / base, f"<= {most:g}x", value / base <= most)


def from_disk(subject: Subject, rounds: int) -> list[Row]:
    """Nothing in the page cache; wall where a row says so, since a disk is what is waited for."""
    arena = Arena(subject)

    def direct(*, verify: bool) -> None:
        descriptor = open_direct(subject.path)
        try:
            arena.read_from(descriptor, verify=verify, threads=THREADS)
        finally:
            os.close(descriptor)

    def buffered() -> None:
        mapping = tier.Mapping(subject.path)
        mapping.open()
        offset = 0
        while offset < mapping.size:
            offset = mapping.populate(offset, verify=True)
        mapping.close()

    def evicted() -> None:
        arena.skeleton.evict()
        cold(subject.path, subject.pickled)

    def raw(threads: int, step: int) -> Callable[[], None]:
        return lambda: raw_direct(subject, arena.view, threads=threads, step=step)

    costs = interleaved(
        {
            "raw 1": Way(raw(1, 8 << 20), evicted),
            "raw 4": Way(raw(THREADS, DIRECT_STEP), evicted),
            "direct": Way(lambda: direct(verify=False), evicted),
            "verified": Way(lambda: direct(verify=True), evicted),
            "buffered": Way(buffered, evicted),
            "classic": Way(lambda: classic(subject), evicted),
        },
        rounds,
    )
    label, size = subject.label, subject.slab.header.length
    floor = min(costs["raw 1"].wall, costs["raw 4"].wall)
    mine, old = costs["direct"], costs["classic"]
    scaled = mine.cpu * DIRECT_PER / size
    return [
        _over(f"{label}: cold, direct, against raw O_DIRECT", mine.wall, floor, DIRECT, "ms wall"),
        Row(
            f"{label}: the same per 350 MB",
            scaled,
            "ms CPU",
            target=f"<= {DIRECT_CPU_MS:g} ms",
            met=scaled <= DIRECT_CPU_MS,
        ),
        Row(
            f"{label}: the same, against classic",
            mine.cpu,
            "ms CPU",
            old.cpu,
            old.cpu / mine.cpu,
            f">= {COLD_CPU}x",
            old.cpu / mine.cpu >= COLD_CPU,
        ),
        Row(
            f"{label}: the same, against classic",
            mine.wall,
            "ms wall",
            old.wall,
            old.wall / mine.wall,
            f">= {COLD_WALL}x",
            old.wall / mine.wall >= COLD_WALL,
        ),
        _over(f"{label}: cold, direct, checked against not", costs["verified"].wall, mine.wall, VERIFY_COLD, "ms wall"),
        Row(f"{label}: raw O_DIRECT alone", min(costs["raw 1"].cpu, costs["raw 4"].cpu), "ms CPU"),
        Row(
            f"{label}: cold, page cache filled, checked, mapped",
            costs["buffered"].wall,
            "ms wall",
            floor,
            costs["buffered"].wall / floor,
        ),
    ]


def side_by_side(subject: Subject, rounds: int, folder: Path) -> list[Row]:
    """Readers of other projects, warm, against a slab that is mapped and bound; every page is touched by all."""
    core = Core("cpu:0", ALLOW, threads=1)

    def load() -> object:
        return core.load(subject.spec, lambda: False)

    def unmapped() -> None:
        core.evict(subject.spec.key)
        core.release_host(subject.spec.fingerprint)

    load()
    others = peers(subject, folder)
    ways = {name: Way(work, times=2) for name, work in others.items() if not isinstance(work, str)}
    costs = interleaved({"ours": Way(load, unmapped, 3), **ways}, rounds)
    ours = costs["ours"].cpu
    rows = [Row(f"{subject.label}: slab mapped, populated, bound to its module", ours, "ms CPU")]
    for name, work in others.items():
        if isinstance(work, str):
            rows.append(Row(f"{subject.label}: {name}: {work}", float("nan"), ""))
        else:
            cpu = costs[name].cpu
            rows.append(Row(f"{subject.label}: {name}, tensors only", cpu, "ms CPU", ours, cpu / ours))
    return rows


def measured(args: argparse.Namespace) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    beside = "resnet50" if args.quick else "vit-b"
    sizes = ARCHITECTURES[:QUICK] if args.quick else ARCHITECTURES
    chosen = [each for each in sizes if args.only in {"", each.name}]
    for architecture in chosen:
        rounds = max(3, architecture.rounds // 2) if args.quick else architecture.rounds
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            subject = prepared(architecture, Path(name))
            rows += warm(subject, rounds)
            gc.collect()
            if architecture.name in {"resnet50", "vit-b", "blip"}:
                rows += from_disk(subject, rounds)
            if architecture.name == beside:
                rows += side_by_side(subject, 3, Path(name))
            del subject
            gc.collect()
    if args.only in {"", PLAIN.name}:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            subject = prepared(PLAIN, Path(name))
            rows += sharing_rows(subject)
            rows += lag_rows(subject, 9 if args.quick else 15)
    return rows


def main() -> int:
    """Measure, show, judge."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="NAME", help="one architecture: " + ", ".join(a.name for a in ARCHITECTURES)
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the weights are written, several GB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    return finish("load", measured(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
