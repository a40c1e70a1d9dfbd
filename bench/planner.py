"""What does planning loads cost, is the choice optimal, how long does memory idle, and what does a look cost?

The plan of `forecasting.planner` for 50, 200 and 1,000 loads on one device; its choice against all subsets of random
sets; backward placement against as soon as possible; and the forecaster's arithmetic of one minute tick for 10,000
models. Times are CPU: the machine is shared.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.report import Row, arguments, finish
from forecasting.calendar import WEEK
from forecasting.counts import Counts
from forecasting.estimate import estimate
from forecasting.fitted import SHAPES, Fitted
from forecasting.planner import Job, on_time, schedule
from forecasting.refill import DEVICE, DISK, HOST, Guards, Scene, Tokens, refill

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.random import Generator
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

NOW: Final = 1_772_409_600.0  # a Monday in March 2026, 00:00 UTC
GIB: Final = 1 << 30
SPAN: Final = 3_600.0
"""Seconds of windows that a plan looks at."""
CROWDED: Final = 200
MODELS: Final = 10_000


def main() -> int:
    """Measure, show, judge."""
    args = arguments(__doc__ or "").parse_args()
    repeat = 5 if args.quick else 20
    rows = [
        *(row for count in (50, CROWDED, 1_000) for row in planned(count, repeat)),
        *brute_force(10_000),
        *idle(20 if args.quick else 200),
        *looks(60 if args.quick else 600),
    ]
    return finish("planner", rows, args)


def loads(random: Generator, count: int, *, busy: float) -> list[Job]:
    """Loads due within the hour on one device, whose channel they would keep busy for that share of it.

    Half of them read the disk; windows start on the hour's quarters, as people declare them.
    """
    seconds = random.gamma(2.0, 1.0, count)
    seconds *= busy * SPAN / seconds.sum()
    due = random.integers(1, 5, count) * SPAN / 4 - random.choice([60.0, 120.0, 180.0], count)
    return [
        Job(
            f"m{index}",
            "cuda:0",
            float(seconds[index]),
            NOW + float(max(due[index], seconds[index])),
            NOW + float(due[index]) + SPAN,
            float(random.gamma(2.0, 5.0)),
            int(random.integers(GIB // 8, 4 * GIB)),
            variance=float((0.1 * seconds[index]) ** 2),
            disk_seconds=float(seconds[index]) * 0.5 * float(index % 2),
        )
        for index in range(count)
    ]


def cpu(call: Callable[[], object], repeat: int) -> float:
    """Milliseconds of CPU, the median of some calls."""
    spent = []
    for _ in range(repeat):
        began = time.thread_time()
        call()
        spent.append(1e3 * (time.thread_time() - began))
    return float(np.median(spent))


def planned(count: int, repeat: int) -> list[Row]:
    """One plan of so many loads, which want more of the channel than there is; with memory for all, and for most."""
    jobs = loads(np.random.default_rng(count), count, busy=1.2)
    rows = []
    for name, share in ((f"plan of {count:,} loads", 1.0), (f"{count:,} loads, memory for 80 % of them", 0.8)):
        room = int(share * sum(job.bytes for job in jobs))
        spent = cpu(partial(schedule, jobs, now=NOW, capacity={"cuda:0": room}), repeat)
        if count == CROWDED:
            rows.append(Row(name, spent, "ms CPU", target="<= 5", met=spent <= 5))
        else:
            rows.append(Row(name, spent, "ms CPU"))
    return rows


# -- the choice --------------------------------------------------------------------------------------


def brute_force(sets: int) -> list[Row]:
    """Value chosen against the best of all subsets, in random sets of 2 to 9 loads."""
    random = np.random.default_rng(11)
    wrong = 0
    for _ in range(sets):
        count = int(random.integers(2, 10))
        lengths = random.integers(1, 31, count)
        deadlines = random.integers(1, 91, count)
        values = random.integers(1, 31, count)
        taken = np.array(on_time(lengths.tolist(), deadlines.tolist(), values.tolist()))
        order = np.argsort(deadlines, kind="stable")
        kept = _in_time(lengths[order][None], deadlines[order], taken[order][None])[0]
        wrong += not kept or int(values[taken].sum()) != _best(lengths[order], deadlines[order], values[order])
    return [
        Row(f"choices worse than the best of all subsets, of {sets:,}", wrong, "sets", target="= 0", met=wrong == 0),
    ]


def _in_time(lengths: Ints, deadlines: Ints, taken: Bools) -> Bools:
    """Whether each choice `[sets, n]`, done in the order of deadlines, meets all of them."""
    ends = np.cumsum(np.where(taken, lengths, 0), axis=1)
    kept: Bools = np.all(~taken | (ends <= deadlines), axis=1)
    return kept


def _best(lengths: Ints, deadlines: Ints, values: Ints) -> int:
    """The greatest value of any subset that can be done in time; columns in the order of deadlines."""
    subsets = (np.arange(1 << len(lengths))[:, None] >> np.arange(len(lengths))) & 1 == 1
    worth = np.where(subsets, values, 0).sum(axis=1)
    return int(worth[_in_time(lengths[None], deadlines, subsets)].max())


# -- placement ---------------------------------------------------------------------------------------


def idle(sets: int) -> list[Row]:
    """Seconds for which loads are resident before they have to be, placed backward and as soon as possible."""
    random = np.random.default_rng(5)
    waited = {False: 0.0, True: 0.0}
    early = 0
    for _ in range(sets):
        jobs = loads(random, int(random.integers(5, 40)), busy=float(random.uniform(0.05, 0.6)))
        for eager in waited:
            plan = schedule(jobs, now=NOW, capacity={"cuda:0": 1 << 50}, eager=eager)
            waited[eager] += sum(each.job.ready_by - each.ready_by for each in plan.placed)
            early += sum(each.ready_by > each.job.ready_by + 1e-6 for each in plan.placed)
    saved = 100 * (1 - waited[False] / waited[True])
    return [
        Row("idle before the window, placed backward", waited[False] / sets, "s/plan", waited[True] / sets),
        Row("less idle than as soon as possible", saved, "%", target=">= 90", met=saved >= 90),
        Row("placed loads that would be late", early, "loads", target="= 0", met=early == 0),
    ]


# -- one look ----------------------------------------------------------------------------------------


def looks(minutes: int) -> list[Row]:
    """The arithmetic of a minute tick for all models: roll the counts, estimate, tell, choose what to bring."""
    random = np.random.default_rng(3)
    counts = Counts(NOW, 0.0)
    for model in range(MODELS):
        counts.index(f"model-{model}@1")
    fitted, scene, tokens = _fitted(random, counts.keys), _scene(random), Tokens()
    rates = 0.5 * random.pareto(1.2, MODELS)
    spent: dict[str, list[float]] = {"roll": [], "estimate": [], "refill": []}
    for minute in range(1, minutes + 11):
        for index, number in enumerate(random.poisson(rates).tolist()):
            if number:
                counts.add(index, number)
        at = 60.0 * minute
        began = time.thread_time()
        counts.roll(NOW + at, at)
        rolled = time.thread_time()
        guess = estimate(counts, fitted, wall=NOW + at, monotonic=at)
        guess.outlook(counts.keys, at, 60.0)
        estimated = time.thread_time()
        tokens.refill(10.0, 5.0)
        refill(replace(scene, rate=guess.prefetch_rate), free=0.0, tokens=tokens, guards=Guards())
        ended = time.thread_time()
        for part, seconds in (
            ("roll", rolled - began),
            ("estimate", estimated - rolled),
            ("refill", ended - estimated),
        ):
            spent[part].append(1e3 * seconds)
    parts = {part: np.array(each[10:]) for part, each in spent.items()}  # the first ones warm up
    whole = float(np.quantile(sum(parts.values()), 0.99))
    return [
        Row(f"minute tick, {MODELS:,} models", whole, "ms CPU p99", target="<= 2", met=whole <= 2),
        *(Row(f"of it {part}", float(np.quantile(each, 0.99)), "ms CPU p99") for part, each in parts.items()),
    ]


def _fitted(random: Generator, keys: tuple[str, ...]) -> Fitted:
    """A round of fitting with the sizes of a real one; what it says does not matter for what a look costs."""
    sizes = {"n": len(keys)}
    arrays: dict[str, Any] = {}
    for name, (kind, shape, _, most) in SHAPES.items():
        full = tuple(word if isinstance(word, int) else sizes[word] for word in shape)
        arrays[name] = (random.random(full) * min(most + 0.99, 1.99)).astype(kind)
    return Fitted(
        keys=keys, at=NOW, origin=NOW, complete=True, skill=True, schedule=True, slot=int(NOW // 900) % WEEK, **arrays
    )


def _scene(random: Generator) -> Scene:
    """All models with 64 on a full device and 500 on the host; rates are filled in."""
    where = np.full(MODELS, DISK, dtype=np.int8)
    where[:64], where[64:564] = DEVICE, HOST
    size = random.uniform(0.1, 4.0, MODELS) * GIB
    return Scene(
        rate=np.zeros(MODELS),
        size=size,
        host_cost=size / (8 * GIB),
        disk_cost=size / GIB,
        where=where,
        movable=where == DEVICE,
        score=random.random(MODELS),
        forced=np.zeros(MODELS, dtype=np.bool_),
    )


if __name__ == "__main__":
    raise SystemExit(main())
