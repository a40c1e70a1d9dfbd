"""The tick that fills memory while the load channel is idle, with its guards (`policy.md` section 6.4).

Pure and vectorised: a scene in, moves out. A prefetch must earn more than what its victims lose, by a margin, and the
channel may be busy with guesses only half of the time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forecasting.decision import break_even, keep, value, worth_it

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEVICE, HOST, DISK = 0, 1, 2
"""Where a model is, as a number: the fastest tier that has it."""


@dataclass(frozen=True, slots=True)
class Scene:
    """All models at one instant, one row each.

    `rate`: expected requests per second (λ_P); `size` bytes; `host_cost`, `disk_cost`: seconds from there to the
    device; `where` DEVICE, HOST or DISK; `movable`: an idle resident that may be evicted; `score`: what keeping it is
    worth, the smallest leaves first; `forced`: a required peak, which need not earn its place; `keep_alive`: seconds
    of idleness after which it leaves by itself (None: nothing does).
    """

    rate: NDArray[np.float64]
    size: NDArray[np.float64]
    host_cost: NDArray[np.float64]
    disk_cost: NDArray[np.float64]
    where: NDArray[np.int8]
    movable: NDArray[np.bool_]
    score: NDArray[np.float64]
    forced: NDArray[np.bool_]
    keep_alive: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        rows = {field.shape for field in (self.rate, self.size, self.host_cost, self.disk_cost, self.score)}
        rows |= {self.where.shape, self.movable.shape, self.forced.shape}
        if len(rows) != 1:
            raise ValueError(f"a scene's columns have different lengths: {sorted(rows)}")


@dataclass(frozen=True, slots=True)
class Guards:
    """`least` chance of a request in `window` seconds; `most` candidates a tick; `margin` over what victims lose."""

    least: float = 0.01
    window: float = 600.0
    most: int = 64
    margin: float = 1.5


@dataclass(frozen=True, slots=True)
class Refill:
    """Bring row `index` to the device, after these rows have left it."""

    index: int
    victims: tuple[int, ...]
    cost: float


class Tokens:
    """Channel seconds that guesses may use: `share` of each second, saved up to one tick or the longest load.

    A full bucket always lets one load go, however long it is.
    """

    def __init__(self, *, share: float = 0.5, tick: float = 10.0) -> None:
        if not 0 < share <= 1 or tick <= 0:
            raise ValueError(f"impossible token bucket: share={share} tick={tick}")
        self._share = share
        self._tick = tick
        self.left = share * tick
        self._full = self.left

    def refill(self, elapsed: float, longest: float) -> None:
        """Time went by (seconds); `longest` is the longest single load there is."""
        self._full = max(self._share * self._tick, longest)
        self.left = min(self.left + self._share * max(elapsed, 0.0), self._full)

    def affords(self, cost: float) -> bool:
        """May a load of so many seconds go now?"""
        return self.left >= min(cost, self._full)

    def spend(self, cost: float) -> None:
        """It went."""
        self.left = max(self.left - cost, 0.0)

    def __repr__(self) -> str:
        return f"<Tokens {self.left:.1f}/{self._full:.1f} s>"


def _affordable(scene: Scene, rows: NDArray[np.int64], guards: Guards) -> NDArray[np.bool_]:
    """Which of these rows are asked for so likely that holding them is worth it, where a keep-alive says what it costs.

    Free memory costs what makes `guards.least` the least chance. Without this rule, what has just left by itself would
    be brought back in the next tick.
    """
    if scene.keep_alive is None:
        return np.ones(rows.size, np.bool_)
    chance = -np.expm1(-scene.rate[rows] * guards.window)
    price = break_even(guards.window, scene.keep_alive[rows])
    return np.asarray(keep(chance, np.ones(rows.size), price) | scene.forced[rows], np.bool_)


def refill(scene: Scene, *, free: float, tokens: Tokens, guards: Guards | None = None) -> list[Refill]:
    """Choose what to bring to the device now, in order; spends the tokens. `free` bytes are free there.

    Call it only when no load is queued or under way.
    """
    guards = guards or Guards()
    # The rate that has the least chance, rather than the chance of every rate.
    least = -np.log1p(-guards.least) / guards.window if guards.least < 1 else np.inf
    candidates = np.flatnonzero((scene.where != DEVICE) & ((scene.rate >= least) | scene.forced))
    candidates = candidates[_affordable(scene, candidates, guards)]
    if candidates.size == 0:
        return []
    on_host = scene.where[candidates] == HOST
    cost = np.where(on_host, scene.host_cost[candidates], scene.disk_cost[candidates])
    worth = value(scene.rate[candidates], cost, scene.size[candidates])
    best = _best(np.where(scene.forced[candidates], np.inf, worth), guards.most)
    asked = candidates[best]
    residents = np.flatnonzero((scene.where == DEVICE) & scene.movable & ~scene.forced)
    queue = residents[np.argsort(scene.score[residents], kind="stable")]
    # What a victim would cost is reckoned from disk: it may fall through the host tier as well.
    lost = (scene.rate[queue] * scene.disk_cost[queue]).tolist()
    below = [0.0, *np.cumsum(scene.size[queue]).tolist()]  # bytes of so many victims, exact as floats
    moves: list[Refill] = []
    used = 0
    columns = (asked, cost[best], scene.size[asked], scene.rate[asked], scene.forced[asked])
    for index, seconds, size, rate, forced in zip(*(column.tolist() for column in columns), strict=True):
        if not tokens.affords(seconds):
            break
        upto = used if size <= free else bisect_left(below, below[used] + (size - free))
        if upto >= len(below):
            continue
        if not forced and not worth_it(rate * seconds, sum(lost[used:upto]), guards.margin):
            continue
        free += below[upto] - below[used] - size
        tokens.spend(seconds)
        moves.append(Refill(index, tuple(queue[used:upto].tolist()), seconds))
        used = upto
    return moves


def _best(worth: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Places of the greatest `most`, greatest first, equal ones in order."""
    among = np.arange(worth.size)
    if worth.size > most:
        among = np.flatnonzero(worth >= np.partition(worth, worth.size - most)[worth.size - most])
    return among[np.argsort(-worth[among], kind="stable")][:most]
