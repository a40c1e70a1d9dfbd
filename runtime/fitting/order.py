"""What the fitting process is told on its command line. Imports nothing heavy: it is read before numpy may be."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """`source` and `answer` are descriptors, `budget` seconds for the fit, `memory` bytes of address space."""

    parent: int
    source: int
    answer: int
    budget: float
    memory: int
    nice: int = 10
    top: int = 50
    specialists: bool = True

    def text(self) -> str:
        """As one argument."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Order:
        """The inverse of `text`."""
        return cls(**json.loads(text))
