"""How much a switch to a model on the host tier costs, against the classic way: build, `torch.load`, `load_state_dict`.

CPU time of the process, both ways interleaved in one process on one thread, medians; garbage is collected and the
model evicted outside the timer. The page cache is warm for both. Every figure is CPU milliseconds.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import save_file

from bench.report import Row, arguments, finish
from bench.vit import ViT
from runtime.worker.core import Core
from runtime.workers.port import BuilderSpec, LoadSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable


class Case(NamedTuple):
    """One size: the model's arguments, how often to repeat, and the ratio to reach."""

    name: str
    config: dict[str, object]
    rounds: int
    target: float | None


CASES = (
    Case("6 MB", {"width": 128, "depth": 6, "heads": 2}, 9, None),
    Case("90 MB", {"width": 384, "depth": 12, "heads": 6}, 7, 100),
    Case("350 MB", {"width": 768, "depth": 12, "heads": 12}, 5, 100),
)
SWITCHES = 15
"""Switches per round: one takes less than a tenth of a millisecond."""


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of this process for one piece of work; what it returns dies outside the timer."""
    began = time.process_time_ns()
    kept = work()
    ended = time.process_time_ns()
    del kept
    return (ended - began) / 1e6


def classic(path: Path, config: dict[str, object]) -> ViT:
    """What most servers do on a cold model."""
    module = ViT(**config)  # type: ignore[arg-type]  # integers, as CASES shows
    module.load_state_dict(torch.load(path))
    return module.eval()


def prepared(case: Case, folder: Path) -> tuple[Path, LoadSpec]:
    """The same random weights as a pickle and as safetensors, read once so that both lie in the page cache."""
    state = {name: torch.randn_like(tensor) * 0.02 for name, tensor in ViT(**case.config).state_dict().items()}  # type: ignore[arg-type]  # as above
    pickled, weights = folder / "w.pt", folder / "w.safetensors"
    torch.save(state, pickled)
    save_file(state, weights)
    for path in (pickled, weights):
        path.read_bytes()
    spec = LoadSpec(
        key="vit@1",
        fingerprint=case.name,
        weights=str(weights),
        weights_bytes=weights.stat().st_size,
        builder=BuilderSpec("python", "bench.vit:ViT", case.config),
        inputs=(TensorSpec("x", "FP32", (-1, 3, 224, 224)),),
        outputs=(TensorSpec("y", "FP32", (-1, 1000)),),
        warm_up=False,
    )
    return pickled, spec


def measured(case: Case, folder: Path) -> list[Row]:
    """The rows of one size."""
    pickled, spec = prepared(case, folder)
    core = Core("cpu:0", ("bench.",), threads=1)
    old: list[float] = []
    first: list[float] = []
    switch: list[float] = []
    for _ in range(case.rounds):
        gc.collect()
        old.append(cpu_ms(lambda: classic(pickled, case.config)))
        gc.collect()
        core.evict(spec.key)
        core.release_host(spec.fingerprint)
        first.append(cpu_ms(lambda: core.load(spec, lambda: False)))
        for _ in range(SWITCHES):
            core.evict(spec.key)
            gc.collect()
            switch.append(cpu_ms(lambda: core.load(spec, lambda: False)))
    base, hit, new = median(old), median(switch), median(first)
    target = "" if case.target is None else f">= {case.target:.0f}x"
    met = None if case.target is None else base / hit >= case.target
    size = f"{core.inventory()[0].resident / 1e6:.0f} MB"
    return [
        Row(f"{size}: host hit, n={len(switch)}", hit, "ms CPU", base, base / hit, target, met),
        Row(f"{size}: first load (map, build, bind), n={len(first)}", new, "ms CPU", base, base / new),
    ]


def main() -> int:
    """Run all sizes and report."""
    args = arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in CASES[:-1] if args.quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(case, Path(folder))
    return finish("switch", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
