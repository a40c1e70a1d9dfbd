"""Watermarks with hysteresis: pressure begins above the high mark and ends below the low one.

Pure state; who samples and who evicts is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.ports import MemorySample


@dataclass(slots=True)
class Watermarks:
    """Ratios of the memory limit, `low < high <= 1`."""

    high: float = 0.85
    low: float = 0.80
    under_pressure: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"watermarks need 0 < low < high <= 1, not low={self.low} high={self.high}")

    def feed(self, sample: MemorySample) -> bool:
        """Take a reading; True when pressure just began or ended."""
        before = self.under_pressure
        ratio = sample.used_ratio
        self.under_pressure = ratio >= self.high or (before and ratio > self.low)
        return before != self.under_pressure

    def excess(self, sample: MemorySample) -> int:
        """Bytes to give back to reach the low mark; zero without pressure."""
        if not self.under_pressure:
            return 0
        return max(int((sample.used_ratio - self.low) * sample.limit), 0)
