"""Hold or leave, load or not, who goes first: prices compared, as pure functions over arrays of models.

Costs are in one unit of the caller's choice (request-seconds). What a forecast is worth is decided here and nowhere
else; what may be evicted at all is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


def threshold(cold: Floats, hold: Floats) -> Floats:
    """p* = 1 / (1 + C/h): the chance of a request above which holding a model is cheaper than loading it late.

    `cold` is C, the cost of a request in the window that finds the model absent; `hold` is h, that of a window
    held for nothing. Holding for free gives 0; a cold start that costs nothing gives 1.
    """
    c, h = np.maximum(cold, 0.0), np.maximum(hold, 0.0)
    total = c + h
    return np.asarray(np.where(total > 0, h / np.where(total > 0, total, 1.0), 1.0), np.float64)


def keep(p: Floats, cold: Floats, hold: Floats) -> Bools:
    """Hold, or load, iff p > p*."""
    return p > threshold(cold, hold)


def spent(hold: Bools, came: Bools, cold: Floats, idle: Floats) -> float:
    """What windows cost that were held or not, given what came: idle ones held, and cold starts."""
    return float(idle[hold & ~came].sum() + cold[~hold & came].sum())


def break_even(window: float, keep_alive: Floats) -> Floats:
    """h/C of whoever lets idle models go after `keep_alive` seconds: then a held window costs what it saves.

    A keep-alive without end says that memory costs nothing.
    """
    return np.asarray(window / np.maximum(keep_alive, 1e-9), np.float64)


def value(p: Floats, cold: Floats, size: Floats) -> Floats:
    """Victims leave in ascending order of this, loads go in descending: expected cold cost per byte, p·C / size.

    With rates in place of chances it is per second instead of per window.
    """
    return np.asarray(p * cold / np.maximum(size, 1.0), np.float64)


def worth_it(gained: float, lost: float, margin: float) -> bool:
    """Load under pressure iff p·C of what comes exceeds the victims' by a factor that keeps two from alternating."""
    return gained > margin * lost
