"""Fitter side: what a round may still spend, and what it has spent, by part. The clocks are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(slots=True)
class Budget:
    """`until` on `clock`; `spent` CPU seconds by part; `complete` until something had to be left out."""

    clock: Callable[[], float]
    cpu: Callable[[], float]
    until: float
    spent: dict[str, float] = field(default_factory=dict[str, float])
    complete: bool = True

    def left(self) -> bool:
        """Is there time for another chunk? If not, the round is incomplete."""
        if self.clock() >= self.until:
            self.complete = False
        return self.complete

    def run(self, part: str, work: Callable[[], T]) -> T:
        """Run it, and add its CPU seconds to a part."""
        began = self.cpu()
        try:
            return work()
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + self.cpu() - began
