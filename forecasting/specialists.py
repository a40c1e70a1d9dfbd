"""Per-model forecasts that a few busy models may earn: MSTL with ETS, ARMA errors around Fourier terms, `direct.py`.

Belongs here: fits by statsmodels, imported inside the functions, so only the fitting worker pays for it; forecasts
from their parameters, which need numpy alone. Never: results of statsmodels kept, admission (`choose.py`), clocks.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from forecasting import direct
from forecasting.direct import Direct, bounded
from forecasting.profile import DAY, DAYS, Bools, Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forecasting.candidates import Panel

LEAST_DAYS = 14
MSTL_WEEKS = 8
SARIMAX_BUCKETS = 2016
"""The most that is fitted on: both fits cost about a second per 2,000 buckets."""
_DAILY, _WEEKLY = 6, 4
_WINDOWS = (11, 31)
_ITERATIONS = 50
_PASSES = 2


class Late(TimeoutError):
    """A fit was given up at its deadline; nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a fit must be over, on the caller's clock; asked between iterations."""

    clock: Callable[[], float]
    at: float

    def check(self) -> None:
        """Raise `Late` when the time is over."""
        if self.clock() >= self.at:
            msg = "the fit took longer than its deadline"
            raise Late(msg)


@dataclass(frozen=True, slots=True)
class Seasons:
    """MSTL + ETS(A,N,N) on log1p: the last day and week of the seasons by position, smoothing weight and level.

    `level` stands at bucket `origin`; later counts move it by `alpha`, as the fit itself would.
    """

    origin: int
    alpha: float
    level: float
    most: float
    day: Floats
    week: Floats

    def forecast(self, counts: Floats, known: Bools, position: Ints, origin: int, horizon: int) -> Floats:
        """`[horizon]` requests per bucket from `origin`, given the history `[T]` up to there; see `position`."""
        level = self.level
        for at in range(self.origin, origin):
            if known[at]:
                season = self.day[position[at] % len(self.day)] + self.week[position[at]]
                level += self.alpha * (float(np.log1p(counts[at])) - float(season) - level)
        ahead = position[origin : origin + horizon]
        return bounded(level + self.day[ahead % len(self.day)] + self.week[ahead], self.most)


@dataclass(frozen=True, slots=True)
class Regressed:
    """ARMA(1,1) errors around daily and weekly Fourier terms of log1p counts: coefficients only."""

    beta: Floats
    ar: float
    ma: float
    most: float
    span: int

    def forecast(self, counts: Floats, known: Bools, position: Ints, origin: int, horizon: int) -> Floats:
        """`[horizon]` requests per bucket from `origin`, given the history `[T]` up to there; see `position`."""
        first = max(0, origin - self.span)
        seen = np.log1p(np.where(known[first:origin], counts[first:origin], 0.0))
        off = seen - fourier(position[first:origin], self.span) @ self.beta
        error, guess = 0.0, 0.0
        for value, there in zip(off.tolist(), known[first:origin].tolist(), strict=True):
            error = value - guess if there else 0.0
            guess = self.ar * (value if there else guess) + self.ma * error
        fade = guess * self.ar ** np.arange(horizon)
        return bounded(fourier(position[origin : origin + horizon], self.span) @ self.beta + fade, self.most)


Fitted: TypeAlias = Seasons | Regressed | Direct
_Kind = TypeVar("_Kind", bound=Seasons | Regressed | Direct)
_KINDS: dict[str, type[Fitted]] = {"seasons": Seasons, "regressed": Regressed, "direct": Direct}


def position(panel: Panel) -> Ints:
    """Bucket of the local week for each bucket of a panel, also of those to come, `[T + horizon]`.

    Exact over clock changes when slots are as long as buckets; otherwise counted on, from the first bucket.
    """
    if panel.per_day == panel.day:
        return panel.phase
    first = round(int(panel.phase[0]) * panel.day / panel.per_day) if panel.phase.size else 0
    return (first + np.arange(len(panel.phase), dtype=np.int64)) % (DAYS * panel.day)


def fourier(at: Ints, span: int) -> Floats:
    """Constant, daily and weekly terms at positions in the week, `[len(at), p]`; `span` buckets are a day's seven."""
    angle = 2 * np.pi * at[:, None] / span
    cycles = np.array([*range(1, _WEEKLY + 1), *(DAYS * k for k in range(1, _DAILY + 1))])
    return np.hstack([np.ones((len(at), 1)), np.cos(angle * cycles), np.sin(angle * cycles)])


def fit_seasons(panel: Panel, row: int, origin: int, deadline: Deadline) -> Seasons:
    """MSTL with a day and a week, and ETS on what remains, from at most eight weeks before `origin`.

    Raises `ValueError` with less than two weeks of history, `Late` past the deadline.
    """
    day, place = panel.day, position(panel)
    first = max(0, origin - MSTL_WEEKS * DAYS * day)
    values = _whole(panel, row, first, origin)
    seasons = _mstl(np.log1p(values), (day, DAYS * day))
    deadline.check()
    alpha, level = _ets(np.log1p(values) - seasons.sum(axis=1))
    deadline.check()
    daily, weekly = np.zeros(day), np.zeros(DAYS * day)
    daily[place[origin - day : origin] % day] = seasons[-day:, 0]
    weekly[place[origin - DAYS * day : origin]] = seasons[-DAYS * day :, 1]
    return _sound(Seasons(origin, alpha, level, float(values.max()), daily, weekly))


def fit_regressed(panel: Panel, row: int, origin: int, deadline: Deadline) -> Regressed:
    """SARIMAX(1,0,1) with Fourier terms on log1p, from at most 2,016 buckets before `origin`; gaps stay gaps.

    A seasonal order would need a state as long as the season. Raises as `fit_seasons`.
    """
    _whole(panel, row, max(0, origin - LEAST_DAYS * panel.day), origin)
    first = max(0, origin - max(SARIMAX_BUCKETS, DAYS * panel.day))
    cut = slice(first, origin)
    logs = np.where(panel.known[row, cut], np.log1p(panel.counts[row, cut]), np.nan)
    span = DAYS * panel.day
    beta, ar, ma = _sarimax(logs, fourier(position(panel)[cut], span), deadline)
    return _sound(Regressed(beta, ar, ma, float(np.expm1(np.nanmax(logs))), span))


def fit_direct(panel: Panel, row: int, origin: int, deadline: Deadline) -> Direct:
    """Deviations from the usual week on past ones, from at most sixteen weeks before `origin`; gaps are as usual.

    Raises `ValueError` with less than three weeks of history, `Late` past the deadline.
    """
    _whole(panel, row, max(0, origin - LEAST_DAYS * panel.day), origin)
    cut = slice(max(0, origin - 2 * direct.WEEKS * DAYS * panel.day), origin)
    place = position(panel)[cut]
    return _sound(direct.fitted(panel.counts[row, cut], panel.known[row, cut], place, panel.day, deadline.check))


def _sound(fitted: _Kind) -> _Kind:
    """The same parameters, all finite: an absurd fit is an error here, not a forecast later."""
    for name, value in asdict(fitted).items():
        if not np.isfinite(value).all():
            msg = f"the fit gave a {name} that is not finite"
            raise ValueError(msg)
    return fitted


def _whole(panel: Panel, row: int, first: int, last: int) -> Floats:
    """Counts without gaps: a gap takes the mean of its time of day."""
    if last < LEAST_DAYS * panel.day:
        msg = f"a specialist needs {LEAST_DAYS} days of history, not {last * panel.bucket / DAY:.1f}"
        raise ValueError(msg)
    counts, known = panel.counts[row, first:last], panel.known[row, first:last]
    if known.mean() < 0.5:  # noqa: PLR2004  # more gap than history
        msg = "more than half of the history is missing"
        raise ValueError(msg)
    slot = np.arange(first, last) % panel.day
    passes = np.bincount(slot, known, panel.day)
    mean = np.bincount(slot, np.where(known, counts, 0.0), panel.day) / np.maximum(passes, 1)
    return np.where(known, counts, mean[slot])


# -- the untyped library, one function each -----------------------------------------------------------


def _quietly(call: Callable[[], Any]) -> Any:
    """Run a fit without its complaints: the backtest is what judges it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def _mstl(values: Floats, periods: tuple[int, int]) -> Floats:
    """Seasonal parts `[T, 2]`; a level season window (degree 0) is what makes weekly seasons steady."""
    library: Any = importlib.import_module("statsmodels.tsa.seasonal")
    model = library.MSTL(values, periods=periods, windows=_WINDOWS, stl_kwargs={"seasonal_deg": 0})
    return np.asarray(_quietly(model.fit).seasonal, np.float64)


def _ets(values: Floats) -> tuple[float, float]:
    """Smoothing weight and last level of ETS(A,N,N)."""
    library: Any = importlib.import_module("statsmodels.tsa.exponential_smoothing.ets")
    fitted = _quietly(lambda: library.ETSModel(values, error="add").fit(disp=False, maxiter=_ITERATIONS))
    return float(fitted.alpha), float(np.asarray(fitted.level)[-1])


def _sarimax(values: Floats, terms: Floats, deadline: Deadline) -> tuple[Floats, float, float]:
    """Coefficients of the terms, of the autoregression and of the moving average; NaN values are gaps.

    Feasible generalised least squares: the coefficients on series whitened by the ARMA part, that part on what they
    leave. Two parameters per likelihood instead of two dozen: the same fit as with `exog`, a tenth of the time.
    """
    library: Any = importlib.import_module("statsmodels.tsa.statespace.sarimax")
    there = np.isfinite(values)
    beta, ar, ma = _least(terms[there], values[there]), 0.0, 0.0

    def tick(_: object) -> None:
        deadline.check()

    for _ in range(_PASSES):
        model = library.SARIMAX(values - terms @ beta, order=(1, 0, 1), trend="n", concentrate_scale=True)
        start = [ar, ma] if ar else None
        fitted = _quietly(partial(model.fit, start, disp=False, maxiter=_ITERATIONS, callback=tick, cov_type="none"))
        ar, ma = (float(number) for number in fitted.params[:2])
        deadline.check()
        whole = np.where(there, values, terms @ beta)
        beta = _least(_whitened(terms, ar, ma)[there], _whitened(whole[:, None], ar, ma)[there, 0])
    return beta, ar, ma


def _whitened(columns: Floats, ar: float, ma: float) -> Floats:
    """One-step errors of an ARMA(1,1), column by column."""
    library: Any = importlib.import_module("scipy.signal")
    return np.asarray(library.lfilter([1.0, -ar], [1.0, ma], columns, axis=0), np.float64)


def _least(terms: Floats, values: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(terms, values, rcond=None)[0], np.float64)


# -- persistence ---------------------------------------------------------------------------------------


def parameters(fitted: Fitted) -> dict[str, Any]:
    """Plain numbers and lists, for a store: what `restored` takes."""
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(fitted).items()}
    return {"kind": next(name for name, kind in _KINDS.items() if isinstance(fitted, kind)), **plain}


def restored(stored: Mapping[str, Any]) -> Fitted:
    """The same forecast from its parameters; raises `ValueError` for anything else."""
    kind = stored.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        msg = f"kind must be one of {', '.join(_KINDS)}, not {kind!r}"
        raise ValueError(msg)
    given: dict[str, Any] = {
        k: np.asarray(v, np.float64) if isinstance(v, list) else v for k, v in stored.items() if k != "kind"
    }
    try:
        return _sound(_KINDS[kind](**given))
    except TypeError as error:
        msg = f"these are not the parameters of a {kind} fit"
        raise ValueError(msg) from error
