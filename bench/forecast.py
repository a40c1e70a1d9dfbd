"""How good are count and occurrence forecasts on public series, and what does a refit of ten thousand models cost?

Errors are relative to repeating yesterday (geometric mean over a panel's series, 24 h ahead, test origins fixed in
`bench.forecast_panels`). `FORELOAD_SHARED` names the folder of the data; BLAS should run on one thread.
"""

from __future__ import annotations

import importlib
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import forecast_occurrence
from bench.forecast_panels import Case, cases, merged
from bench.report import Row, arguments, finish
from forecasting import harmonic, specialists
from forecasting.backtest import (
    QUANTILES,
    SPECIALISTS,
    Specialist,
    activity_class,
    coverage,
    geometric,
    past_origins,
    pinball,
    residuals,
    roll,
    score,
    weighed,
)
from forecasting.candidates import NAIVE_DAY, Panel
from forecasting.choose import past_centres
from forecasting.drift import noise_gate, poisson_loss
from forecasting.intervals import around, chances, grids, hurdle
from forecasting.profile import HOUR, Floats, hier

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {
    "Taylor": 0.12,
    "NYC": 0.40,
    "Twitter 15 min": 0.76,
    "Twitter 5 min": 1.0,
    "ServeGen 10 min": 0.77,
    "ELB 5 min": 1.0,
    "Crane 5 min": 1.0,
    "Crane 1 min": 1.0,
}
SPECIAL = ("Taylor", "NYC")
"""The panels whose targets are set for specialists; elsewhere fitting them would take an hour."""
SLOW = ("Crane 1 min", "Crane 5 min", "Twitter 5 min")
MODELS = 10_000
BUDGET = 10.0
_ADMISSION = (7, 25.0)
"""Origins by which specialists are admitted: a week of them, on all weekdays."""
_BANDS = ("<= 1 h", "1-6 h", "6-24 h")
_KINDS = ("dense", "intermittent", "sparse")
_DAYS = 5


def rows(*, quick: bool) -> list[Row]:
    """The count part: refit, accuracy, coverage, noise gate, anchor."""
    found = [*refit(MODELS), *noise(), *covered()]
    names = {name for name in TARGETS if not (quick and name in SLOW)}
    groups: dict[str, list[Case]] = {}
    for case in cases(names):
        groups.setdefault(case.group, []).append(case)
    for group, some in groups.items():
        found += accuracy(group, some, special=not quick and group in SPECIAL)
    return found + anchor([some[0] for group, some in groups.items() if group in SPECIAL], quick=quick)


# -- accuracy ----------------------------------------------------------------------------------------


def accuracy(group: str, some: list[Case], *, special: bool) -> list[Row]:
    """Relative errors of the mixture over all series of a group, against the group's target."""
    began = time.process_time()
    parts = [_judged(case, special=special) for case in some]
    spent = time.process_time() - began
    ratio = geometric(np.concatenate([part.relative for part in parts]))
    target = TARGETS[group]
    count = sum(len(case.panel.counts) for case in some)
    # A target that needs specialists is not judged without them: that would be neither a hit nor a miss.
    met = None if group in SPECIAL and not special else ratio <= target
    name = f"{group}, n={count}: relative MAE" + (", specialists" if special else "")
    found = [Row(name, ratio, "of naive day", target=f"<= {target}", met=met)]
    found += [
        Row(f"{group}: {word}", geometric(np.concatenate([part.bands[:, b] for part in parts])), "of naive day")
        for b, word in enumerate(_BANDS)
    ]
    loss = geometric(np.concatenate([part.quantile for part in parts]))
    origins = sum(len(case.panel.counts) * len(case.origins) for case in some)
    return [
        *found,
        Row(f"{group}: relative quantile loss", loss, "of naive day"),
        Row(f"{group}: mixture of means", geometric(np.concatenate([part.mean for part in parts])), "of naive day"),
        Row(f"{group}: backtest and forecast", 1000 * spent / origins, "ms CPU/series"),
    ]


class _Judged:
    """Per series of one case: ratios of the centre, of each band, of the quantile loss and of the mixed mean."""

    def __init__(self, relative: Floats, bands: Floats, quantile: Floats, mean: Floats) -> None:
        self.relative, self.bands, self.quantile, self.mean = relative, bands, quantile, mean


def _judged(case: Case, *, special: bool) -> _Judged:
    panel, horizon = case.panel, case.panel.day
    stride = round(_ADMISSION[1] * HOUR / panel.bucket)
    past = {o: past_origins(o, panel.bucket) for o in case.origins}
    proof = {o: tuple(o - k * stride for k in range(1, _ADMISSION[0] + 1)) if special else () for o in case.origins}
    wanted = {*case.origins, *(p for o in case.origins for p in (*past[o], *proof[o]))}
    own = _specialists(panel) if special else {}
    rolled = roll(panel, sorted(wanted), horizon, own)
    centre: dict[int, Floats] = {}
    mean: dict[int, Floats] = {}
    naive: dict[int, Floats] = {}
    loss = np.zeros((2, len(panel.counts)))
    for origin in case.origins:
        mixed = weighed(rolled, origin, past=past[origin], admission=proof[origin])
        now = rolled.at[origin]
        centre[origin], mean[origin] = mixed.centre(now, panel.bucket), mixed.of(now, panel.bucket)
        naive[origin] = np.where(np.isnan(now.of(NAIVE_DAY)), centre[origin], now.of(NAIVE_DAY))
        trials = rolled.trials(origin, past[origin])
        kinds = activity_class(panel.active(origin))
        before = np.nan_to_num(trials.said[:, :, trials.names.index(NAIVE_DAY)])
        truth = panel.counts[:, origin : origin + horizon]
        known = panel.known[:, origin : origin + horizon]
        for row, (said, point) in enumerate(
            ((past_centres(trials, mixed.weights, mixed.averaged), centre[origin]), (before, naive[origin]))
        ):
            bounds = around(point, grids(residuals(trials, said), kinds), QUANTILES)
            loss[row] += (pinball(truth, bounds, QUANTILES) * known).sum(axis=1)
    result, other = score(panel, centre, naive), score(panel, mean, naive)
    return _Judged(
        result.relative,
        _divided(result.band_error, result.band_naive),
        _divided(loss[0], loss[1]),
        other.relative,
    )


def _divided(above: Floats, below: Floats) -> Floats:
    return np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)


def _specialists(panel: Panel) -> dict[str, Specialist]:
    """The specialists, refitted nightly: an origin uses the fit of the last midnight of the grid."""
    place, never = specialists.position(panel), specialists.Deadline(lambda: 0.0, 1.0)
    fits: dict[str, Callable[[Panel, int, int, specialists.Deadline], specialists.Fitted]] = {
        SPECIALISTS[0]: specialists.fit_seasons,
        SPECIALISTS[1]: specialists.fit_regressed,
        SPECIALISTS[2]: specialists.fit_direct,
    }

    def made(name: str) -> Specialist:
        kept: dict[tuple[int, int], specialists.Fitted] = {}

        def forecast(origin: int, horizon: int) -> Floats:
            night = origin // panel.day * panel.day
            result = np.full((len(panel.counts), horizon), np.nan)
            for row in range(len(panel.counts)):
                if (row, night) not in kept:
                    kept[row, night] = fits[name](panel, row, night, never)
                result[row] = kept[row, night].forecast(panel.counts[row], panel.known[row], place, origin, horizon)
            return result

        return forecast

    return {name: made(name) for name in SPECIALISTS}


def anchor(some: list[Case], *, quick: bool) -> list[Row]:
    """The same origins by statsforecast's MSTL, when it is installed."""
    try:
        release = version("statsforecast")
    except PackageNotFoundError:
        print("statsforecast is not installed (`pip install --group bench -c constraints.txt`): no anchor in this run")
        return []
    models: Any = importlib.import_module("statsforecast.models")
    found: list[Row] = []
    for case in some:
        panel, horizon = case.panel, case.panel.day
        model = models.MSTL(season_length=[horizon, 7 * horizon])
        errors = np.zeros(2)
        for origin in case.origins[:2] if quick else case.origins:
            history = panel.counts[0, max(0, origin - 56 * horizon) : origin]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = np.asarray(model.forecast(y=history, h=horizon)["mean"])
            truth = panel.counts[0, origin : origin + horizon]
            errors += [np.abs(said - truth).mean(), np.abs(history[-horizon:] - truth).mean()]
        found.append(Row(f"{case.group}: statsforecast {release} MSTL", float(errors[0] / errors[1]), "of naive day"))
    return found


# -- intervals, cost, noise --------------------------------------------------------------------------


def covered() -> list[Row]:
    """Coverage of the hurdle's intervals on ServeGen: hourly, a day ahead, the last five days."""
    panel = next(cases({"ServeGen 10 min"})).panel
    counts = merged(panel.counts, 6)
    known = np.ones(counts.shape, np.bool_)
    inside: dict[tuple[int, int], list[Floats]] = {}
    for back in range(1, _DAYS + 1):
        origin = counts.shape[1] - 24 * back
        kinds = activity_class((counts[:, :origin] > 0).mean(axis=1))
        chance = chances(counts > 0, known, origin, 24, 24)
        made = hurdle(counts, known, origin=origin, chance=chance, day=24, kinds=kinds)
        bounds, truth = made.quantiles(QUANTILES), counts[:, origin : origin + 24]
        for kind in range(len(_KINDS)):
            rows_ = kinds == kind
            for share, first, last in ((80, 1, 3), (95, 0, 4)):
                hit = coverage(truth[rows_], bounds[rows_][:, :, first], bounds[rows_][:, :, last])
                inside.setdefault((kind, share), []).append(np.array([hit, rows_.sum()]))
    found: list[Row] = []
    for (kind, share), parts in inside.items():
        table = np.array(parts)
        value = float((table[:, 0] * table[:, 1]).sum() / table[:, 1].sum())
        low, high = {80: (0.76, 0.90), 95: (0.92, 0.99)}[share]
        met = value >= low and (value <= high or kind == len(_KINDS) - 1)
        limit = f">= {low}" if kind == len(_KINDS) - 1 else f"{low} .. {high}"
        found.append(Row(f"ServeGen hourly, {_KINDS[kind]}: coverage {share} %", value, "", target=limit, met=met))
    return found


def refit(models: int) -> list[Row]:
    """CPU of both batched fits on quarter-hour slots, and memory of what they leave."""
    draw = np.random.default_rng(7)
    level = np.exp(draw.normal(0, 2, (models, 1)))
    day = np.sin(np.arange(672) / 96 * 2 * np.pi)[None, :] * draw.random((models, 1))
    sums = draw.poisson(level * np.exp(day) * 2.9).astype(np.float32)
    passes = np.full(sums.shape, 2.9, np.float32)
    began = time.process_time()
    profile = hier(sums, passes)
    middle = time.process_time()
    fitted = harmonic.fit(sums, passes).rates()
    ended = time.process_time()
    assert np.isfinite(profile).all()
    assert np.isfinite(fitted).all()
    total = ended - began
    return [
        Row(f"refit of {models:,} models: profile", middle - began, "s CPU"),
        Row(f"refit of {models:,} models: harmonic", ended - middle, "s CPU"),
        Row(f"refit of {models:,} models", total, "s CPU", target=f"<= {BUDGET:.0f}", met=total <= BUDGET),
        Row("one weekly profile per model, float32", profile.nbytes / 1e6, "MB"),
    ]


def noise() -> list[Row]:
    """Pure Poisson noise at many rates: the gate must find no skill in any of it."""
    draw = np.random.default_rng(11)
    rate = np.exp(draw.uniform(np.log(0.02), np.log(200), 300))
    counts = draw.poisson(rate[:, None], (300, 96 * 21)).astype(np.float64)
    phase = np.arange(96 * 22, dtype=np.int64) % 672
    panel = Panel(counts, np.ones(counts.shape, np.bool_), phase, 900.0, 96)
    origins = [counts.shape[1] - 96 - k * 28 for k in range(12)]
    rolled = roll(panel, origins, 96)
    losses, constant = np.zeros((300, 12)), np.zeros((300, 12))
    for k, origin in enumerate(origins):
        truth = counts[:, origin : origin + 96]
        losses[:, k] = poisson_loss(truth, rolled.at[origin].of("hier+lvl/1h")).mean(axis=1)
        flat = counts[:, origin - 672 : origin].mean(axis=1, keepdims=True)
        constant[:, k] = poisson_loss(truth, np.broadcast_to(flat, truth.shape)).mean(axis=1)
    gate = noise_gate(losses, constant)
    wrong = int(gate.skilled.sum())
    return [Row("models of 300 with skill on Poisson noise", wrong, "", target="0", met=wrong == 0)]


def main() -> int:
    """Both parts, one table."""
    args = arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    found = [*rows(quick=args.quick), *forecast_occurrence.rows(args.quick)]
    return finish("forecast", found, args)


if __name__ == "__main__":
    raise SystemExit(main())
