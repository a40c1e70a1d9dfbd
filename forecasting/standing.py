"""Who is demoted, from fit to fit: a model that fell stays on the simpler estimate until it has earned the other back.

Belongs here: what one round says of the models, added to what was known of them. Never: losses, or how they are judged
(`drift.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forecasting.fitted import Fitted


class Change(NamedTuple):
    """Keys of models that fell, and of those that came back."""

    fell: tuple[str, ...]
    rose: tuple[str, ...]


class Standing:
    """Outlives fits and the actor that asks for them. A model that a round left out stays as it was."""

    def __init__(self) -> None:
        self._demoted: frozenset[str] = frozenset()

    @property
    def demoted(self) -> frozenset[str]:
        """Keys of those that follow the simpler estimate now."""
        return self._demoted

    def after(self, fitted: Fitted) -> tuple[Fitted, Change]:
        """The fit to serve with, and who changed."""
        falls = {key for key, falls in zip(fitted.keys, fitted.demoted.tolist(), strict=True) if falls}
        rises = {key for key, rises in zip(fitted.keys, fitted.earned.tolist(), strict=True) if rises} - falls
        before, self._demoted = self._demoted, (self._demoted - rises) | falls
        change = Change(tuple(sorted(self._demoted - before)), tuple(sorted(before - self._demoted)))
        return fitted.demoting(self._demoted) if self._demoted else fitted, change

    def forget(self, key: str) -> None:
        """The model is served no more."""
        self._demoted -= {key}

    def __repr__(self) -> str:
        return f"<Standing {len(self._demoted)} demoted>"
