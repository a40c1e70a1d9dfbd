"""Small networks that a test server's worker builds: quick, slow, leaking. Only torch, and nothing of the project.

Every factory has the same two tensors, `scale` and `shift`, so one writer makes weights for all of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

ALLOW = "tests.e2e.modules"
SLOW = 7.0
"""In the first column: the second one says how many seconds the forward takes."""


class Affine(nn.Module):
    """`x * scale + shift`; a row that starts with `SLOW` takes its time first."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.shift = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and give [N, width]."""
        if float(x[0, 0]) == SLOW:
            time.sleep(float(x[0, 1]))
        return x * self.scale + self.shift


class Hoarding(Affine):
    """Keeps `kept` bytes of every forward for good."""

    hoard: ClassVar[list[bytes]] = []
    """Shared on purpose: a leak outlives the module."""

    def __init__(self, width: int = 3, kept: int = 65_536) -> None:
        super().__init__(width)
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and give [N, width]."""
        self.hoard.append(os.urandom(self.kept))
        return super().forward(x)


def affine(width: int = 3) -> nn.Module:
    """Build the plain one."""
    return Affine(width).eval()


def hoarding(width: int = 3, kept: int = 65_536) -> nn.Module:
    """Build the leaking one."""
    return Hoarding(width, kept).eval()


def late(width: int = 3, seconds: float = 1.0) -> nn.Module:
    """Build the plain one, but take so long about it."""
    time.sleep(seconds)
    return Affine(width).eval()


def absent(width: int = 3, gate: str = "") -> nn.Module:
    """Build the plain one once the file `gate` is there; raise before."""
    if not gate or not Path(gate).exists():
        msg = "the gate is shut"
        raise RuntimeError(msg)
    return Affine(width).eval()
