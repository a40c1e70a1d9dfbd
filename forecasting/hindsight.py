"""What was stated of the next ten minutes, held against what came: the forecast's own record, while it serves.

Belongs here: when to state, when to judge, and which outcomes count. Never: scores (`calibration`) or forecasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from forecasting.calibration import Calibration, Docket, Reliability

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forecasting.counts import Counts
    from forecasting.sources import Estimate

SPAN: Final = 600.0
"""Seconds of a window."""
_MINUTES: Final = 10
_LATE: Final = 60.0
"""Seconds after a window's start at which a statement about it is still one about the future."""


class Hindsight:
    """Looked at often, it states P(any request) per model once a window, and judges it once that is over.

    Windows that were not observed from end to end (a gap, a clock that jumped, a model born or masked in between) say
    nothing, and are left out with all their models' outcomes. The record covers a day.
    """

    def __init__(self) -> None:
        self._record = Calibration(period=86_400.0)
        self._docket = Docket()
        self._window = -1

    @property
    def record(self) -> Reliability:
        """The last day's."""
        return self._record.fleet()

    def look(self, counts: Counts, estimate: Estimate | None, wall: float) -> bool:
        """Whether something was judged; `counts` were rolled to `wall` (UTC seconds) before.

        `estimate` None states nothing: a fallback that nobody believed must not be held against the forecast.
        """
        window = int(wall // SPAN)
        if window == self._window:
            return False
        if window < self._window:
            self._docket = Docket()
        self._window = window
        judged = False
        for first, _, keys, stated in self._docket.due(window - 1):
            judged = self._judge(counts, first, keys, stated, wall) or judged
        if estimate is not None and wall - window * SPAN <= _LATE:
            self._docket.file(window, 1, counts.keys, np.clip(estimate.chance(SPAN), 0.0, 1.0))
        return judged

    def _judge(
        self, counts: Counts, first: int, keys: tuple[str, ...], stated: NDArray[np.float64], wall: float
    ) -> bool:
        came, known = counts.came(first * _MINUTES, _MINUTES)
        if keys != counts.keys:
            rows = {key: row for row, key in enumerate(counts.keys)}
            order = np.array([rows.get(key, -1) for key in keys], np.int64)
            # Row -1 is the padding: a model that is gone says nothing.
            known, came = np.append(known, False)[order], np.append(came, False)[order]
        self._record.add(wall, stated[known], came[known])
        return bool(known.any())

    def __repr__(self) -> str:
        return f"<Hindsight {self._record!r}>"
