"""From 32-bit floats to what the model takes, rounded to the nearest value, ties to even, as torch does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def cast(values: NDArray[np.float32], datatype: str) -> NDArray[Any]:
    """Values as FP32, FP16, or BF16 (bit patterns, as everywhere in the worker). They must be finite."""
    if datatype == "FP16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    if datatype == "BF16":
        bits = values.view(np.uint32)
        odd = (bits >> 16) & 1
        return ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)
    return values
