"""Are occurrence forecasts calibrated, do they transfer, and what do they save? On ServeGen clients, past-only.

Train on days 0 to 8, test on days 9 to 13 of 162 clients in 10-minute windows. `FORELOAD_SHARED` names the folder
that holds `traces/` (default: `../shared` beside the checkout). Run alone, or as part of `bench.forecast`.
"""

from __future__ import annotations

import csv
import gzip
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.report import Row, arguments, finish
from forecasting.activity import Activity, Horizon
from forecasting.calibration import judge
from forecasting.cells import cells, fit_blend
from forecasting.decision import keep, spent
from forecasting.glm import binomial
from forecasting.launch import fleet_shape, launch_features
from forecasting.nextuse import expected, next_use
from forecasting.occurrence import Occurrence, features
from forecasting.odds import expit
from forecasting.rates import seasonal
from forecasting.training import ROWS, Windows, fit, launch_sample, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

WINDOW = 600.0
DAY = 144
DAYS = 14
CUT = 9 * DAY
WARM = DAY
"""Windows before the first training row: a profile of nothing teaches nothing."""
LEADS = {"0": 0, "1 h": 6, "3 h": 18, "6 h": 36, "12 h": 72}
SPANS = {"10 min": 1, "1 h": 6}
SOON, NEXT = Horizon(0, 1), Horizon(0, 6)
FAR = Horizon(72, 6)


@dataclass(frozen=True, slots=True)
class Test:
    """Forecasts for the test windows: `p[horizon][n, M]`, what came, and whether the model was idle just before."""

    p: Mapping[Horizon, Floats]
    came: Mapping[Horizon, Bools]
    idle: Bools

    def of(self, horizon: Horizon) -> tuple[Floats, Bools]:
        """Forecasts and outcomes of those questions that the trace answers."""
        came = self.came[horizon]
        return self.p[horizon][:, : came.shape[1]], came


def shared() -> Path:
    """Where the traces lie."""
    return Path(os.environ.get("FORELOAD_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def servegen() -> Floats:
    """Requests per client and 10-minute window, `[162, 2016]`."""
    path = shared() / "traces" / "servegen_mlarge_10min_counts.csv.gz"
    with gzip.open(path, "rt", newline="") as file:
        busy = [(line["key"], int(line["window"]), float(line["count"])) for line in csv.DictReader(file)]
    rows = {key: row for row, key in enumerate(dict.fromkeys(key for key, _, _ in busy))}
    counts = np.zeros((len(rows), DAYS * DAY))
    for key, window, count in busy:
        counts[rows[key], window] = count
    return counts


def windows(counts: Floats) -> Windows:
    """The trace as training input; its first window is taken for the start of a week."""
    return Windows(counts, np.ones(counts.shape, np.bool_), np.arange(counts.shape[1]) % (7 * DAY), WINDOW)


def train(counts: Floats, horizons: Sequence[Horizon], until: int = CUT) -> Occurrence:
    """One regression per horizon, from windows before `until`."""
    return fit(sample(windows(counts[:, :until]), horizons, since=WARM), binomial)


def forecast(counts: Floats, horizons: Sequence[Horizon], model: Callable[[int], Occurrence]) -> Test:
    """Roll through the trace; in the test days ask every horizon before every window."""
    active = counts > 0
    state = Activity(len(counts), WINDOW, [h.span for h in horizons])
    stated: dict[Horizon, list[Floats]] = {h: [] for h in horizons}
    idle: list[Bools] = []
    for now in range(counts.shape[1]):
        slot = now % (7 * DAY)
        if now >= CUT:
            idle.append(~state.last)
            for horizon, found in stated.items():
                found.append(model(now).chance(state, horizon, slot))
        state.roll(slot, counts[:, now])
    came: dict[Horizon, Bools] = {}
    for h in horizons:
        length = counts.shape[1] - CUT - h.lead - h.span + 1
        first = CUT + h.lead
        came[h] = np.any([active[:, first + k : first + k + length] for k in range(h.span)], axis=0)
    return Test({h: np.stack(found, axis=1) for h, found in stated.items()}, came, np.stack(idle, axis=1))


def rows(quick: bool) -> list[Row]:  # noqa: FBT001  # called by `bench.forecast` too, by position
    """Every figure. `quick` leaves out the leads between, and the nightly refits."""
    counts = servegen()
    leads = {"0": 0, "12 h": 72} if quick else LEADS
    horizons = {
        f"{name}, lead {ahead}": Horizon(lead, span) for name, span in SPANS.items() for ahead, lead in leads.items()
    }
    began = time.process_time()
    samples = sample(windows(counts[:, :CUT]), tuple(horizons.values()), since=WARM)
    sampled = time.process_time()
    model = fit(samples, binomial)
    each = (time.process_time() - sampled) / len(horizons)
    print(f"training rows {sampled - began:.1f} CPU s, fit {each:.2f} CPU s per horizon", file=sys.stderr)
    test = forecast(counts, tuple(horizons.values()), lambda _: model)
    found = [Row(f"fit one horizon, {ROWS:,} rows", each, "CPU s", 3.0, each / 3.0, "a few s", each <= 3.0)]
    found += [row for name, horizon in horizons.items() for row in _calibrated(name, horizon, test)]
    if not quick:
        found += _nightly(counts, horizons)
    return [*found, *_onsets(test), *_unseen(counts, model), *_launch(counts), *_cost(test), *_short(test), *_speed()]


def _gate(name: str, value: float, unit: str, limit: float, *, least: bool = False) -> Row:
    met = value >= limit if least else value <= limit
    return Row(name, value, unit, limit, value / limit, f"{'>=' if least else '<='} {limit:g}", bool(met))


def _calibrated(name: str, horizon: Horizon, test: Test) -> list[Row]:
    verdict = judge(*test.of(horizon))
    bar = {SOON: 0.030, NEXT: 0.050}.get(horizon)
    if bar is None:
        brier = Row(f"{name}: Brier", verdict.brier, "Brier", verdict.climatology, verdict.brier / verdict.climatology)
    else:
        brier = _gate(f"{name}: Brier", verdict.brier, "Brier", bar)
    return [brier, _gate(f"{name}: ECE", verdict.ece, "ECE", 0.015)]


def _nightly(counts: Floats, horizons: Mapping[str, Horizon]) -> list[Row]:
    """As the product does it: refitted each midnight on everything before."""
    models = {day: train(counts, tuple(horizons.values()), day * DAY) for day in range(CUT // DAY, DAYS)}
    test = forecast(counts, tuple(horizons.values()), lambda now: models[now // DAY])
    errors = {name: judge(*test.of(horizon)).ece for name, horizon in horizons.items()}
    worst = max(errors, key=lambda name: errors[name])
    return [_gate(f"refitted nightly, worst ({worst}): ECE", errors[worst], "ECE", 0.015)]


def _onsets(test: Test) -> list[Row]:
    """Idle models whose next window is active: those called with p >= .2."""
    p, came = test.of(SOON)
    idle = test.idle[:, : came.shape[1]]
    called = idle & (p >= 0.2)
    hit = float((called & came).sum())
    base = float(came[idle].mean())
    return [
        _gate("idle now, 10 min, p >= .2: precision", hit / max(float(called.sum()), 1.0), "share", 0.38, least=True),
        _gate(
            "idle now, 10 min, p >= .2: recall", hit / max(float((idle & came).sum()), 1.0), "share", 0.50, least=True
        ),
        Row("idle now, 10 min: Brier", judge(p[idle], came[idle]).brier, "Brier", base * (1 - base)),
    ]


def _unseen(counts: Floats, seen: Occurrence) -> list[Row]:
    """Fitted on even clients and tested on odd ones, against the fit on all."""
    asked = (SOON, NEXT, FAR)
    strange = train(counts[::2], asked)
    odd = counts[1::2]
    apart, together = forecast(odd, asked, lambda _: strange), forecast(odd, asked, lambda _: seen)
    found: list[Row] = []
    for name, horizon in (("10 min", SOON), ("1 h", NEXT), ("1 h, lead 12 h", FAR)):
        new, old = judge(*apart.of(horizon)).brier, judge(*together.of(horizon)).brier
        found.append(
            Row(f"unseen half, {name}: Brier", new, "Brier", old, new / old, "<= 1.03x of seen", new / old <= 1.03)
        )
    return found


def _launch(counts: Floats) -> list[Row]:
    """First days of odd clients, by a regression on the first days of even ones and the fleet shape of those."""
    fleet = Activity(len(counts[::2]), WINDOW, [1])
    for now in range(CUT):
        fleet.roll(now % (7 * DAY), counts[::2, now])
    shape = fleet_shape(fleet)
    weights = fit({}, binomial, young=launch_sample(windows(counts[::2, :DAY]), [SOON], shape)).young[SOON]
    odd = counts[1::2]
    state = Activity(len(odd), WINDOW, [1])
    everyone = np.arange(len(odd))
    stated: list[Floats] = []
    kept: list[Bools] = []
    for now in range(DAY):
        stated.append(expit(launch_features(state, SOON, now, shape, everyone) @ weights))
        kept.append(state.last.copy())
        state.roll(now, odd[:, now])
    p, before, came = np.stack(stated, axis=1), np.stack(kept, axis=1), odd[:, :DAY] > 0
    found: list[Row] = []
    for name, low, high in (("hours 2-6", 6, 36), ("rest of day 1", 36, DAY)):
        verdict = judge(p[:, low:high], came[:, low:high])
        persistence = float((before[:, low:high] != came[:, low:high]).mean())
        found.append(Row(f"launch, {name}: Brier against persistence", verdict.brier, "Brier", persistence))
        found.append(Row(f"launch, {name}: ECE", verdict.ece, "ECE"))
    found.append(_gate("launch, after 1 h: ECE", judge(p[:, 6:], came[:, 6:]).ece, "ECE", 0.02))
    return found


def _cost(test: Test) -> list[Row]:
    """Hold or load by p > p*, against the keep-alive that is best in hindsight. One held idle window costs 1."""
    p, came = test.of(SOON)
    since = _since(came, test.idle)
    held = [(since < ttl) for ttl in (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 18, 24, 30, 36, 48, 60, 72, 108, 144, 288, 10**6)]
    found: list[Row] = []
    for ratio in (5.0, 10.0, 20.0, 50.0, 100.0):
        mine = _price(keep(p, np.full(p.shape, ratio), np.ones(p.shape)), came, ratio)
        best = min(_price(hold, came, ratio) for hold in held)
        saved = 1 - mine / best
        found.append(
            Row(f"hold/load cost under best TTL, C/h = {ratio:g}", saved, "share", 0.08, None, ">= .08", saved >= 0.08)
        )
        fixed = 1 - mine / _price(since < 3, came, ratio)
        found.append(Row(f"hold/load cost under TTL 30 min, C/h = {ratio:g}", fixed, "share"))
    return found


def _price(hold: Bools, came: Bools, ratio: float) -> float:
    return spent(hold, came, np.full(came.shape, ratio), np.ones(came.shape))


def _since(came: Bools, idle: Bools) -> NDArray[np.int64]:
    """Idle windows before each test window; a model idle at the start of the test counts as long idle."""
    since = np.empty(came.shape, np.int64)
    now = np.where(idle[:, 0], 10**5, 0)
    for window in range(came.shape[1]):
        since[:, window] = now
        now = np.where(came[:, window], 0, now + 1)
    return since


def _short(test: Test) -> list[Row]:
    """Equal slots, victims by least p(next 1 h) or least recently used: windows that found their model cold."""
    _, came = test.of(SOON)
    key = test.p[NEXT][:, : came.shape[1]]
    mean = float(came.sum(axis=0).mean())
    found: list[Row] = []
    for share in (0.90, 1.0, 1.15, 1.3, 1.5):
        slots = round(mean * share)
        lru, mine = _cold(came, None, slots), _cold(came, key, slots)
        bar = (0.5, "<= .5x of LRU") if share <= 1.15 else (1.02, "<= 1.02x of LRU")
        found.append(
            Row(f"cold windows, {slots} slots ({share:.0%} of active)", mine, "windows", lru, mine / lru, bar[1],
                mine / lru <= bar[0])
        )  # fmt: skip
    return found


def _cold(came: Bools, key: Floats | None, slots: int) -> float:
    rng = np.random.default_rng(0)
    models, length = came.shape
    inside = np.zeros(models, np.bool_)
    used = np.zeros(models)
    served = np.full(models, -1)
    clock, cold = 0, 0
    for window in range(length):
        # Whoever was served in this window is known to be active: its next forecast says what that makes of it.
        after = None if key is None else key[:, min(window + 1, length - 1)]
        order = rng.permutation(np.flatnonzero(came[:, window]))
        for row in order.tolist():
            clock += 1
            if not inside[row]:
                cold += 1
                if inside.sum() >= slots:
                    worth = used
                    if key is not None and after is not None:
                        worth = np.where(served == window, after, key[:, window])
                    inside[np.argmin(np.where(inside, worth, np.inf))] = False
                inside[row] = True
            used[row] = clock
            served[row] = window
    return float(cold)


def _speed() -> list[Row]:
    """CPU seconds of the daily refit of the value rates, and of the tick."""
    rng = np.random.default_rng(0)
    busy = rng.gamma(0.3, 1.0, (1000, 1, 1)) * rng.gamma(0.5, 1.0, (1000, 1, 288))
    days = rng.poisson(busy, (1000, 14, 288)).astype(np.float64)
    began = time.process_time()
    next_use(expected(days), 300.0)
    seasonal(days, 300.0)
    fit_blend(*cells(days, 300.0))
    refit = time.process_time() - began
    state = Activity(10_000, WINDOW)
    counts = rng.poisson(0.3, (200, 10_000)).astype(np.float64)
    took: list[float] = []
    for now in range(200):
        began = time.perf_counter()
        state.roll(now, counts[now])
        took.append(time.perf_counter() - began)
    weights = np.zeros(25)
    began = time.process_time()
    for _ in range(5):
        expit(features(state, SOON, 200) @ weights)
    predict = (time.process_time() - began) / 5
    return [
        _gate("refit TTN + profiles + blend, 1,000 models", refit, "CPU s", 1.0),
        Row("roll one window, 10,000 models, median", float(np.median(took)) * 1e3, "ms"),
        Row("roll one window, 10,000 models, p99", float(np.percentile(took, 99)) * 1e3, "ms"),
        Row("features and p of one horizon, 10,000 models", predict * 1e3, "CPU ms"),
    ]


def main() -> int:
    """Print the table."""
    args = arguments("occurrence forecasts on ServeGen").parse_args()
    return finish("forecast_occurrence", rows(args.quick), args)


if __name__ == "__main__":
    sys.exit(main())
