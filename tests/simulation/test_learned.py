"""Learned foresight on virtual time: what comes every day is there before it, noise is left alone, nothing can hurt."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from actors import events as e
from actors.errors import Broken
from forecasting.fit import fit
from forecasting.history import Imported
from runtime.simulation.loop import run
from tests.simulation.foresight_rig import Theatre, theatre
from tests.simulation.rig import model

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.ports import Fitting
    from forecasting.fitted import Fitted
    from forecasting.snapshot import Snapshot

A, B, C, D = (model(name, 10, load_seconds=10.0) for name in "abcd")
START = datetime(2026, 12, 14, 8, 0, tzinfo=UTC)
DAYS = 14


class Inline:
    """Fits at once, in the loop: the fitting worker of a simulation."""

    def __init__(self, change: Callable[[Fitted], Fitted] | None = None) -> None:
        self.change = change
        self.rounds = 0

    async def fit(self, snapshot: Snapshot) -> Fitted:
        """See `Fitting.fit`."""
        self.rounds += 1
        fitted = fit(snapshot, now=snapshot.at, deadline=60.0, specialists=False)
        return self.change(fitted) if self.change else fitted


class Unwell:
    """A fitting worker that is dead, slow, or says absurd things."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def fit(self, _snapshot: Snapshot) -> Fitted:
        """See `Fitting.fit`."""
        if self.how == "slow":
            await anyio.sleep_forever()
        if self.how == "bug":
            raise ZeroDivisionError("of its own")
        raise Broken("the fitting worker ended: killed by SIGKILL")


def history(rates: dict[str, Callable[[datetime], float]], *, seed: int = 0) -> Imported:
    """Two weeks of minutes with Poisson counts at `rates` (requests per minute)."""
    rng = np.random.default_rng(seed)
    end = int(START.timestamp() // 60)
    start = end - DAYS * 1_440
    minutes = np.arange(start, end, dtype=np.int64)
    cells = {}
    for key, rate in rates.items():
        expected = np.array([rate(datetime.fromtimestamp(m * 60, UTC)) for m in minutes.tolist()])
        counts = rng.poisson(expected)
        seen = np.flatnonzero(counts)
        cells[key] = minutes[seen], counts[seen].astype(np.int64)
    return Imported(start, end, np.ones(end - start, np.bool_), cells)


def between(first: int, last: int, rate: float) -> Callable[[datetime], float]:
    """So many requests a minute between two hours of each day, none outside."""
    return lambda at: rate if first <= at.hour < last else 0.0


async def learn(t: Theatre, past: Imported) -> None:
    """Give the counts a past, and wait until it was learned from."""
    t.counts.load_history(past)
    await anyio.sleep(150)


REGULAR = {"a@1": between(10, 12, 2.0), "b@1": between(14, 16, 2.0), "c@1": between(20, 22, 2.0)}


def test_what_is_used_every_day_at_ten_is_there_at_ten() -> None:
    """The promise of learning: nobody declared anything, and the first request of the day is a hit."""

    async def main() -> None:
        async with theatre(
            (A, B, C), device=10, start=START, tick=60.0, refit=1e7, fitting=Inline(), fraction=1.0
        ) as t:
            await learn(t, history(REGULAR))
            (fitted,) = t.told(e.ForecastFitted)
            assert fitted.skilled >= 1  # type: ignore[attr-defined]
            await t.until("10:00", day=14)
            assert t.resident() == {"a@1"}
            assert (await t.use(A)).result in {"hit", "prefetch_hit"}

    run(main)


def test_what_was_stated_is_judged_by_what_came() -> None:
    """Online: a day's record is told every ten minutes, beats stating the frequency, and is shown."""

    async def main() -> None:
        async with theatre(
            (A, B, C), device=10, start=START, tick=60.0, refit=1e7, fitting=Inline(), fraction=1.0
        ) as t:
            await learn(t, history(REGULAR))
            for hour in range(8, 13):
                busy = 10 <= hour < 12
                for minute in range(0, 60, 2):
                    await t.until(f"{hour:02}:{minute:02}", day=14)
                    if busy:
                        await t.use(A)
            *_, judged = t.told(e.ForecastJudged)
            assert judged.forecasts >= 3 * 6 * 4  # type: ignore[attr-defined]
            assert judged.brier < judged.climatology  # type: ignore[attr-defined]
            assert t.mind.snapshot().judged.n == judged.forecasts  # type: ignore[attr-defined]

    run(main)


def test_what_a_load_costs_is_learned_from_loads() -> None:
    """The planner of idle channels weighs what loads took here, not what was guessed before the first one."""

    async def main() -> None:
        async with theatre((A, B), device=10, tick=60.0) as t:
            await anyio.sleep(61)
            guess = t.mind._fleet.disk_cost.tolist()
            await t.use(A)
            await anyio.sleep(61)
            seen = t.mind._fleet.disk_cost.tolist()
            assert seen[0] == pytest.approx(t.told(e.LoadFinished)[-1].seconds)  # type: ignore[attr-defined]
            assert seen[0] != guess[0]
            assert seen[1] == guess[1]

    run(main)


def test_a_model_whose_forecast_drifts_is_left_to_recency_until_it_earns_it_back() -> None:
    """Told once when it falls and once when it is back; meanwhile, fit after fit, nothing is loaded for it."""
    verdicts = iter([(True, False), (False, False), (False, True)])

    def judged(fitted: Fitted) -> Fitted:
        falls, earns = next(verdicts, (False, False))
        own = np.array([key == "a@1" for key in fitted.keys])
        return replace(fitted, demoted=own & falls, earned=own & earns)

    async def main() -> None:
        worker = Inline(judged)
        async with theatre(
            (A, B, C), device=10, start=START, tick=60.0, refit=3_600.0, fitting=worker, fraction=1.0
        ) as t:
            await learn(t, history(REGULAR))
            assert t.mind.snapshot().demoted == ("a@1",)
            await t.until("10:00", day=14)
            assert worker.rounds == 2
            assert "a@1" not in t.resident()
            await t.until("10:10", day=14)
            assert t.mind.snapshot().demoted == ()
            told = [(each.demoted, each.models, each.total) for each in t.told(e.ForecastDemoted)]  # type: ignore[attr-defined]
            assert told == [(True, ("a@1",), 1), (False, ("a@1",), 0)]
            assert t.resident() == {"a@1"}

    run(main)


def test_noise_earns_no_load() -> None:
    """T12: on requests without any pattern the gate stays shut, and nothing is ever loaded ahead."""

    async def main() -> None:
        flat = {f"{name}@1": lambda _: 0.02 for name in "abcd"}
        async with theatre((A, B, C, D), device=20, start=START, tick=60.0, refit=1e7, fitting=Inline()) as t:
            await learn(t, history(flat, seed=3))
            await anyio.sleep(2 * 3_600)
            assert t.told(e.ForecastFitted)
            assert not t.told(e.LoadStarted)

    run(main)


def test_the_control_group_is_left_alone_and_counted() -> None:
    """Savings are measured, not claimed: with everybody in the control group nothing is loaded ahead."""

    async def main() -> None:
        async with theatre(
            (A, B, C), device=10, start=START, tick=60.0, refit=1e7, fitting=Inline(), control=0.999999
        ) as t:
            await learn(t, history(REGULAR))
            await t.until("10:05", day=14)
            assert not t.told(e.LoadStarted)
            await t.use(A)
            earned = t.foresight.earned()
            assert (earned.control, earned.cold_control, earned.treated) == (1, 1, 0)

    run(main)


def test_observing_learns_and_reports_and_loads_nothing() -> None:
    """`mode: observe` for learned rates too."""

    async def main() -> None:
        async with theatre(
            (A, B, C), device=10, start=START, tick=60.0, refit=1e7, fitting=Inline(), act=False, fraction=1.0
        ) as t:
            await learn(t, history(REGULAR))
            await t.until("10:05", day=14)
            assert not t.told(e.LoadStarted)
            assert {each.reason for each in t.told(e.PrefetchWithheld)} == {"observe"}  # type: ignore[attr-defined]

    run(main)


def test_a_server_without_learning_never_guesses() -> None:
    """`learned: false`: no round of fitting, no load."""

    async def main() -> None:
        worker = Inline()
        async with theatre((A, B, C), device=10, start=START, tick=60.0, refit=1e7, fitting=worker, learned=False) as t:
            await learn(t, history(REGULAR))
            await t.until("10:05", day=14)
            assert worker.rounds == 0
            assert not t.told(e.LoadStarted)

    run(main)


@pytest.mark.parametrize("how", ["dead", "slow", "bug"])
def test_a_fitter_that_is_unwell_leaves_serving_untouched(how: str) -> None:
    """F72: requests are served, recency decides, and the fallback is told and counted."""

    async def main() -> None:
        fitting: Fitting = Unwell(how)
        async with theatre((A, B), device=10, start=START, tick=60.0, refit=1e7, fitting=fitting) as t:
            await learn(t, history(REGULAR))
            assert (await t.use(A)).result == "miss"
            assert (await t.use(A)).result == "hit"
            await anyio.sleep(2 * 3_600)
            assert (await t.use(B)).result == "miss"
            fell = [each.part for each in t.told(e.ForecastFell)]  # type: ignore[attr-defined]
            assert fell == ([] if how == "slow" else ["fitting"] * len(fell))
            assert bool(fell) == (how != "slow")
            assert t.forecaster.incarnation == 1

    run(main)


def test_what_was_prefetched_is_accounted_for() -> None:
    """Used, or wasted: every prefetch ends in one word, and the day's report adds them up."""

    async def main() -> None:
        async with theatre(
            (A, B, C), device=10, start=START, tick=60.0, refit=1e7, fitting=Inline(), fraction=1.0
        ) as t:
            await learn(t, history(REGULAR))
            await t.until("10:00", day=14)
            await t.use(A)
            await t.until("14:30", day=14)
            settled = [each.result for each in t.told(e.PrefetchSettled) if each.device == "cpu:0"]  # type: ignore[attr-defined]
            assert settled[0] == "used"
            earned = t.foresight.earned()
            assert (earned.used, earned.host_used, earned.host_late, earned.host_wasted) == (1, 0, 0, 0)
            await t.until("00:05", day=15)
            (report,) = t.told(e.ForesightReported)
            assert report.used >= 1  # type: ignore[attr-defined]
            assert t.foresight.earned().used == 0

    run(main)


def test_a_past_that_is_too_short_teaches_nothing() -> None:
    """An hour of history: no skill is claimed."""

    async def main() -> None:
        async with theatre((A, B), device=10, start=START, tick=60.0, refit=1e7, fitting=Inline()) as t:
            for _ in range(60):
                await t.use(A)
                await anyio.sleep(60)
            await anyio.sleep(timedelta(minutes=5).total_seconds())
            assert all(each.skilled == 0 for each in t.told(e.ForecastFitted))  # type: ignore[attr-defined]

    run(main)
