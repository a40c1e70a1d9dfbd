"""What is expected of every model now: live counters and the last fit, put together at decision time on the loop.

Belongs here: vectors over all models, under 2 ms for 10,000 of them. Never: fitting, histories, loops over models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from forecasting.fitted import BUCKET, DAY, MOST_RATE, USE_BUCKET, WORDS
from forecasting.ladder import Confidence
from forecasting.odds import SURE
from forecasting.rates import AGE, COLUMNS, HALF_LIVES, R_1H, R_6H
from forecasting.scenarios import ACTIVE, HORIZONS, IDLE, QUIET, SCENARIOS, WINDOW
from forecasting.sources import ENOUGH, SURELY, Estimate, from_hazards, from_rates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forecasting.counts import Counts
    from forecasting.fitted import Fitted

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

Way: TypeAlias = Literal["auto", "blend", "occurrence", "rate"]

STALE: Final = 12 * 3600.0
"""Seconds after which a fit says nothing about the present any more."""
_TRUST: Final = np.array([word.value01 for word in WORDS])
_GUESS: Final = Confidence.PRIOR.value01
_HALVES: Final = np.arange(0x3C01, dtype=np.uint16).view(np.float16).astype(np.float64)
_HAZARDS: Final = (-np.log1p(-np.minimum(_HALVES, SURE))).astype(np.float32)
"""Requests expected where a half-precision probability is stated, by its bits: a table holds no other numbers."""
_NONE: Final = np.zeros(0)
_TTN, _AGE = COLUMNS.index("ttn"), COLUMNS.index("age")


def estimate(counts: Counts, fitted: Fitted | None, *, wall: float, monotonic: float, mode: Way = "auto") -> Estimate:
    """Rates, next use and confidence of `counts.keys`, as of `wall` (UTC) and `monotonic` seconds.

    Without a fit, with one over twelve hours old, and in mode `rate`: the 1-hour rate for both value rates, with
    little confidence. With one: λ_E is half the 6-hour rate and half that of the next use where seasons rule the
    fleet, else the 1-hour rate; λ_P is the pooled blend for models that passed the gate, else the 1-hour rate. Models
    that were not fitted follow the fleet's prior, demoted ones the 1-hour rate. In mode `occurrence` all others come
    from the chances that the fit worked out, as long as they reach; in mode `auto` if that is the fit's own choice.
    Only `allowed` models may be loaded ahead.
    """
    if fitted is None or mode == "rate" or not _current(fitted, wall):
        return _recent(_rate(counts, R_1H, monotonic))
    ours = _ours(fitted, counts.keys)
    if not ours.known.any():
        return _recent(_rate(counts, R_1H, monotonic))
    look = _Look(fitted, ours, counts, wall, monotonic)
    way = fitted.source if mode == "auto" else mode
    found = _by_chance(look) if way == "occurrence" else None
    return _blended(look) if found is None else found


def allowed(counts: Counts, fitted: Fitted | None, *, wall: float) -> Bools:
    """Which of `counts.keys` may be loaded ahead by what was learned: the gate is open, and theirs is too.

    The array is shared between calls, and cannot be written to.
    """
    if fitted is None or not fitted.skill or not _current(fitted, wall):
        return np.zeros(len(counts.keys), np.bool_)
    return _ours(fitted, counts.keys).skilled


def _current(fitted: Fitted, wall: float) -> bool:
    # A clock set back by a little must not discard the fit; by half a day, it does.
    return abs(wall - fitted.at) <= STALE


def _rate(counts: Counts, half_life: int, monotonic: float) -> Floats:
    """Live rates `[n]` by one half-life, whatever is in the counters; a NaN counts as none."""
    rate = np.fmax(counts.rate(half_life, monotonic), 0.0)
    return np.minimum(rate, MOST_RATE, out=rate)


def _recent(now: Floats) -> Estimate:
    """Recency alone, from the 1-hour rate."""
    return from_rates(
        "rate",
        evict_rate=now,
        prefetch_rate=now,
        next_use=_wait(now),
        confidence=np.full(len(now), _GUESS),
    )


def _wait(rate: Floats) -> Floats:
    """Seconds until so many requests are expected that one counts as certain; infinite at rate 0."""
    return np.where(rate > 0, ENOUGH / np.maximum(rate, 1e-300), np.inf)


# -- what a fit says of these models: looked up once, as long as neither changes ----------------------


@dataclass(slots=True)
class _Ours:
    """Rows of a fit for some keys (0 where none), whose they are, and vectors in the order of the keys.

    `day` is the part of the blend that changes with the time of day: `column` of both tables, seconds to the next
    use, its rate, and the seasonal part of λ_P with the next use's.
    """

    rows: Ints
    known: Bools
    skilled: Bools
    demoted: Bools
    trust: Floats
    whole: bool
    """Every model was fitted, and the fit has them in this order."""
    column: tuple[int, int] = (-1, -1)
    day: tuple[Floats, Floats, Floats] = (_NONE, _NONE, _NONE)
    told: tuple[int, NDArray[np.int8], Estimate] | None = None
    """The last look at the chances: windows since the fit, how long each model was idle then, what came of it."""


def _ours(fitted: Fitted, keys: tuple[str, ...]) -> _Ours:
    rows = fitted.rows(keys)
    found = fitted.memo.get("ours")
    if not isinstance(found, _Ours) or fitted.memo["ours_of"] is not rows:
        known = rows >= 0
        mine = np.where(known, rows, 0)
        skilled = known & fitted.skilled[mine] if len(fitted.keys) else np.zeros(len(rows), np.bool_)
        demoted = known & fitted.demoted[mine] if len(fitted.keys) else np.zeros(len(rows), np.bool_)
        trust = np.where(known, _TRUST[fitted.confidence[mine]], _GUESS) if known.any() else np.full(len(rows), _GUESS)
        skilled.flags.writeable = demoted.flags.writeable = trust.flags.writeable = False
        whole = len(rows) == len(fitted.keys) and bool((rows == np.arange(len(rows))).all())
        found = _Ours(mine, known, skilled, demoted, trust, whole)
        fitted.memo["ours"], fitted.memo["ours_of"] = found, rows
    return found


def _of_day(fitted: Fitted, ours: _Ours, wall: float) -> tuple[Floats, Floats, Floats]:
    """`_Ours.day` at an instant."""
    elapsed = (wall - fitted.origin) % DAY
    column = (
        min(int(elapsed // USE_BUCKET), fitted.use.shape[1] - 1),
        min(int(elapsed // BUCKET), fitted.season.shape[1] - 1),
    )
    if ours.column != column:
        use = fitted.use[:, column[0]][ours.rows].astype(np.float64)
        season = fitted.season[:, column[1]][ours.rows].astype(np.float64)
        if not ours.known.all():
            # A model without a fit of its own follows the fleet; its prior moves with the quarters of an hour too.
            use[~ours.known], season[~ours.known] = _wait(np.array([fitted.prior_rate(wall)]))[0], 0.0
        ttn = ENOUGH / np.maximum(use, USE_BUCKET / 4)
        use.flags.writeable = False
        ours.column, ours.day = column, (use, ttn, season + fitted.weights[_TTN] * ttn)
    return ours.day


# -- the two sources ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Look:
    """What is asked, of whom, and when."""

    fitted: Fitted
    ours: _Ours
    counts: Counts
    wall: float
    monotonic: float

    def rate(self, half_life: int) -> Floats:
        """Live rates by one half-life."""
        return _rate(self.counts, half_life, self.monotonic)


def _blended(look: _Look) -> Estimate:
    fitted, ours, wall = look.fitted, look.ours, look.wall
    use, ttn, seasonal = _of_day(fitted, ours, wall)
    rates = [look.rate(half_life) for half_life in range(len(HALF_LIVES))]
    recent = prefetch = rates[R_1H]
    if fitted.skill:
        learned = fitted.weights[_AGE] / (np.maximum(wall - look.counts.last_seen(wall), 0.0) + AGE)
        learned += seasonal
        for weight, rate in zip(fitted.weights.tolist(), rates, strict=False):
            if weight:
                learned += weight * rate
        prefetch = np.minimum(np.where(ours.skilled, learned, recent), MOST_RATE)
    keep = 0.5 * rates[R_6H] + 0.5 * ttn if fitted.schedule else recent
    if ours.demoted.any():
        keep = np.where(ours.demoted, recent, keep)
    return from_rates("blend", evict_rate=keep, prefetch_rate=prefetch, next_use=use, confidence=ours.trust)


def _by_chance(look: _Look) -> Estimate | None:
    """Looked up in the tables of the fit; None without tables, or when they are over."""
    ours, wall, table = look.ours, look.wall, look.fitted.tables.get("chances")
    first = int(look.fitted.at // 300 // 2)  # the first window that the fit did not see
    ahead = int(wall // WINDOW) - first
    if table is None or not 0 <= ahead < table.shape[2] or table.shape[:2] != (len(HORIZONS), SCENARIOS):
        return None
    # Windows between the last request and the one under way; -1 and 0 mean active. A later request counts as now.
    gone: Floats = (wall // WINDOW - 1) - np.floor(look.counts.last_seen(wall) / WINDOW)
    idle: NDArray[np.int8] = np.asarray(np.clip(gone, -1, ahead, out=gone), np.int8)
    told, everyone = ours.told, np.arange(idle.size)
    # Within a window little changes; whoever has no row in the tables goes with the time.
    rows = everyone
    if told is not None and told[0] == ahead:
        rows = np.flatnonzero((idle != told[1]) | ~ours.known | ours.demoted)
    if told is None or told[0] != ahead or 2 * rows.size > idle.size:
        found = _looked_up(look, table, idle, ahead, everyone)
    elif rows.size:
        found = told[2].patched(rows, _looked_up(look, table, idle, ahead, rows))
    else:
        found = told[2]
    ours.told = ahead, idle, found
    return found


def _looked_up(look: _Look, table: NDArray[np.float16], idle: NDArray[np.int8], ahead: int, rows: Ints) -> Estimate:
    """The estimate of some rows, so many windows after the fit, after so many idle ones."""
    fitted, ours = look.fitted, look.ours
    # One flat place per model, the same for every horizon.
    place = ((_cases(ahead) * table.shape[2] + ahead) * table.shape[3]).take(idle[rows] + np.int8(1))
    place += ours.rows[rows]
    codes = table.reshape(len(HORIZONS), -1).view(np.uint16)
    said: list[NDArray[np.float32]] = [
        np.asarray(_HAZARDS.take(codes[horizon].take(place)), np.float32) for horizon in range(len(HORIZONS))
    ]
    known = ours.known[rows]
    certain = known & ~ours.demoted[rows]
    if not certain.all():
        recent = look.rate(R_1H)[rows]
        rate = np.where(known, recent, np.maximum(recent, fitted.prior_rate(look.wall)))
        for index, horizon in enumerate(HORIZONS):
            guess = np.minimum(rate * (horizon.span * WINDOW), SURELY)
            said[index] = np.where(certain, said[index], guess).astype(np.float32)
    return from_hazards("occurrence", dict(zip(HORIZONS, said, strict=True)), WINDOW, ours.trust[rows])


def _cases(ahead: int) -> Ints:
    """Scenario by idle windows since the last request, from -1 to `ahead`; more of them began before the fit."""
    idle = np.arange(-1, ahead + 1)
    since = np.clip(np.rint(np.log2(np.maximum(idle, 1))), 0, len(IDLE) - 1)
    return np.where(idle > ahead - 1, QUIET, np.where(idle <= 0, ACTIVE, 2 + since)).astype(np.int64)
