"""Is a process' memory flat? Proportional set size by the kernel, and a line through the samples.

Nothing here knows a server.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def pss(pid: int) -> int:
    """Kilobytes of memory that a process answers for: its own, and its share of what is shared."""
    found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    assert found, "no Pss in smaps_rollup"
    return int(found[1])


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Growth per step by Theil and Sen: the median of the slopes between all pairs, so one late cache is no leak."""
    steps, sizes = np.array(samples, dtype=float).T
    near, far = np.triu_indices(len(steps), 1)
    return float(np.median((sizes[far] - sizes[near]) / (steps[far] - steps[near])))
