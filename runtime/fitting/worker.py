"""Placeholder while the process is being written; see `actors.ports.Fitting`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.errors import Broken

if TYPE_CHECKING:
    from forecasting.fitted import Fitted
    from forecasting.snapshot import Snapshot


class FittingWorker:
    """Not there yet."""

    def __init__(self, *, deadline: float) -> None:
        self._deadline = deadline

    async def fit(self, snapshot: Snapshot) -> Fitted:
        """Refuse."""
        raise Broken("there is no fitting worker yet")
