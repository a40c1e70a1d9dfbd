"""The models that the HTTP benches serve; a manifest names these functions as builders.

Nothing but modules: no weights, no measuring.
"""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64
"""Floats that each of the small models answers with."""
IMAGE = (3, 224, 224)


def mlp() -> nn.Module:
    """Two layers, [n, 64] to [n, 64]: about 10 us of forward, so that what surrounds it shows."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Glance(nn.Module):
    """An image, [n, 3, 224, 224], to its first 64 floats: all of the transport of a vision model, none of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return image.flatten(1)[:, :WIDTH] * self.scale


class Bulky(nn.Module):
    """The same work as `mlp`, with `ballast` more bytes of weights that each load has to bring."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.work = mlp()
        self.ballast = nn.Parameter(torch.zeros(ballast // 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.work(x)  # type: ignore[no-any-return]  # torch types modules' results as Any
