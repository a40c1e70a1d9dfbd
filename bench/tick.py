"""What foresight costs for 10,000 models: on the loop roll, estimate, refill and plan; elsewhere a round of fitting.

Traffic as in `bench.counts`. Times are CPU, unless a row says wall: the machine is shared.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.counts import MODELS, START, ZONE, Traffic, run
from bench.look import looks
from bench.report import Row, arguments, finish
from forecasting.counts import Counts
from forecasting.estimate import Way, allowed, estimate
from forecasting.fit import fit
from forecasting.fitted import Fitted
from forecasting.planner import Job, schedule
from forecasting.refill import DEVICE, DISK, HOST, Scene, Tokens, refill
from forecasting.scenarios import HORIZONS

if TYPE_CHECKING:
    from forecasting.sources import Estimate

WAYS: tuple[Way, ...] = ("blend", "occurrence")
DEVICES = 400
"""Models on the device, and four times as many in host memory."""
GIB = 1 << 30


def counted(traffic: Traffic, days: int) -> Counts:
    """Counts after so many days."""
    counts = Counts(START, 0.0, zone=ZONE)
    for model in range(MODELS):
        counts.index(f"model-{model}@1")
    for step in range(days * 288):
        run(counts, traffic, step, 5, 300.0 * (step + 1))
    return counts


class Stage:
    """A device, a host tier and peaks, as the forecaster sees them."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        self.size = np.exp(random.uniform(np.log(0.006), np.log(2.0), MODELS)) * GIB
        self.host_cost, self.disk_cost = self.size / (4 * GIB), self.size / GIB
        self.where = np.full(MODELS, DISK, np.int8)
        order = random.permutation(MODELS)
        self.where[order[:DEVICES]] = DEVICE
        self.where[order[DEVICES : 5 * DEVICES]] = HOST
        self.tokens = Tokens()

    def look(self, guess: Estimate, may: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> int:
        """Choose what to bring now; how many."""
        on = self.where == DEVICE
        scene = Scene(
            np.where(may | on, guess.prefetch_rate, 0.0), self.size, self.host_cost, self.disk_cost, self.where, on,
            guess.evict_rate * self.host_cost / self.size, np.zeros(MODELS, np.bool_),
        )  # fmt: skip
        self.tokens.refill(10.0, 2.0)
        return len(refill(scene, free=0.0, tokens=self.tokens))

    def plan(self, now: float) -> int:
        """Place 50 declared loads; how many."""
        jobs = [
            Job(f"m{k}", "cpu:0", float(self.disk_cost[k]), now + 60.0 + 20 * k, now + 7200, 1.0, int(self.size[k]))
            for k in range(50)
        ]
        return len(schedule(jobs, now=now, capacity={"cpu:0": 64 * GIB}).placed)


def ticks(counts: Counts, traffic: Traffic, fitted: Fitted, *, at: float, number: int, mode: Way) -> list[Row]:
    """Looks 10 seconds apart; a minute is rolled in each sixth."""
    stage, step, parts = Stage(), int(at // 300), np.zeros((number, 4))
    fitted = replace(fitted, at=START + at, memo={})  # chances reach for an hour and a half
    for tick in range(number):
        now = at + 10.0 * (tick + 1)
        for index, requests in enumerate(traffic.draw(step + tick // 30, 1)):
            if requests and (index + tick) % 6 == 0:
                counts.add(index, requests)
        marks = [time.thread_time()]
        if tick % 6 == 0:
            counts.roll(START + now, now)
        marks.append(time.thread_time())
        guess = estimate(counts, fitted, wall=START + now, monotonic=now, mode=mode)
        may = allowed(counts, fitted, wall=START + now)
        guess.outlook(counts.keys, now, 60.0, counts.places)
        marks.append(time.thread_time())
        if tick % 6:  # as the forecaster does: the look that closes a minute brings nothing
            stage.look(guess, may)
        marks.append(time.thread_time())
        stage.plan(START + now)
        marks.append(time.thread_time())
        parts[tick] = np.diff(marks) * 1e3
    names = ("roll", "estimate", "refill", "plan of 50 loads")
    p99 = np.quantile(parts, 0.99, axis=0)
    every = float(np.quantile(parts.sum(axis=1), 0.99))
    together = float(np.quantile(parts[:, :2].sum(axis=1), 0.99))
    return [
        *(Row(f"{mode}: {name}", float(value), "ms CPU p99") for name, value in zip(names, p99, strict=True)),
        Row(f"{mode}: roll and estimate", together, "ms CPU p99"),
        Row(f"{mode}: all", every, "ms CPU p99", target="<= 2", met=every <= 2),
    ]


def fitting(counts: Counts, at: float) -> tuple[Fitted, list[Row]]:
    """One round, by part; and what the front has to hold of it."""
    snapshot = counts.snapshot()
    fit(Counts(START, 0.0).snapshot(), now=START, deadline=1.0)  # imports
    began = time.process_time()
    fitted = fit(snapshot, now=START + at, deadline=600.0, top=50, specialists=False)
    spent = time.process_time() - began
    arrays = fitted.served().to_arrays()
    kept, held = Fitted.from_arrays(arrays), sum(array.nbytes for array in arrays.values()) / 1e6
    numbers = kept.numbers
    every = spent - numbers.get("cpu_occurrence", 0.0) - numbers.get("cpu_chances", 0.0) - numbers.get("cpu_ahead", 0.0)
    rows = [
        Row(f"fit: {name.removeprefix('cpu_')}", value, "CPU s") for name, value in numbers.items() if "cpu_" in name
    ]
    rows += [
        Row("fit: profiles, next use, blend and gate", every, "CPU s"),
        Row("fit: all without specialists", spent, "CPU s", target="<= 10", met=spent <= 10),
        Row("what the front keeps of it", held, "MB"),
        Row("models that passed the gate", float(kept.skilled.mean() * 100), "%"),
    ]
    for horizon in HORIZONS:
        prefix = f"occurrence_{horizon.lead}_{horizon.span}"
        if f"{prefix}_brier" in numbers:
            rows.append(
                Row(
                    f"held-out day, {10 * horizon.span} min in {10 * horizon.lead} min: Brier",
                    numbers[f"{prefix}_brier"], "", numbers[f"{prefix}_climatology"],
                    numbers[f"{prefix}_brier"] / numbers[f"{prefix}_climatology"],
                )
            )  # fmt: skip
            rows.append(Row("its ECE", numbers[f"{prefix}_ece"], ""))
    return kept, rows


def main() -> int:
    """Measure, show, judge."""
    args = arguments(__doc__ or "").parse_args()
    traffic = Traffic(MODELS)
    days = 9 if args.quick else 15
    counts = counted(traffic, days)
    at = 86_400.0 * days
    fitted, rows = fitting(counts, at)
    number = 180 if args.quick else 500
    rows += ticks(counts, traffic, fitted, at=at, number=number, mode="blend")
    rows += ticks(counts, traffic, fitted, at=at + 10.0 * number, number=number, mode="occurrence")
    turns = [(source, declared) for source in WAYS for declared in (0, 50)]
    for turn, (source, declared) in enumerate(turns):
        began = at + 10.0 * number * (turn + 2) + 600.0 * turn
        fresh = replace(fitted, at=START + began, memo={})
        spent = looks(counts, traffic, fresh, at=began, number=number, source=source, declared=declared)
        most, name = float(np.quantile(spent, 0.99)), f"{source}: a look of the forecaster, {declared} declared windows"
        rows.append(Row(name, float(np.median(spent)), "ms CPU median"))
        rows.append(Row("the same", most, "ms CPU p99", target="<= 2", met=most <= 2))
    return finish(Path(__file__).stem, rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
