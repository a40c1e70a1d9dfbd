"""A detector's graph like YOLOv8's at a width of choice: many small tensors. The bench's model, and nothing else."""

from __future__ import annotations

import torch
from torch import nn


class Conv(nn.Sequential):
    """Convolution, batch statistics, SiLU."""

    def __init__(self, inside: int, outside: int, size: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, size, stride, size // 2, bias=False), nn.BatchNorm2d(outside), nn.SiLU()
        )


class Split(nn.Module):
    """Half of the channels pass, half go through `depth` pairs of convolutions; all are joined."""

    def __init__(self, inside: int, outside: int, depth: int) -> None:
        super().__init__()
        half = outside // 2
        self.enter = Conv(inside, outside)
        self.steps = nn.ModuleList(nn.Sequential(Conv(half, half, 3), Conv(half, half, 3)) for _ in range(depth))
        self.leave = Conv((2 + depth) * half, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inside, h, w] to [n, outside, h, w]."""
        parts = list(self.enter(x).chunk(2, 1))
        for step in self.steps:
            parts.append(parts[-1] + step(parts[-1]))
        joined: torch.Tensor = self.leave(torch.cat(parts, 1))
        return joined


class Yolo(nn.Module):
    """Backbone of four stages, a path up and one down, three heads; `width` channels after the first convolution."""

    def __init__(self, width: int = 12, classes: int = 80) -> None:
        super().__init__()
        w = [width * times for times in (1, 2, 4, 8, 16)]
        self.stem = Conv(3, w[0], 3, 2)
        self.down = nn.ModuleList(Conv(w[at], w[at + 1], 3, 2) for at in range(4))
        self.stages = nn.ModuleList(Split(w[at + 1], w[at + 1], depth) for at, depth in enumerate((1, 2, 2, 1)))
        self.pool = nn.ModuleList((Conv(w[4], w[3]), Conv(4 * w[3], w[4])))
        self.up = nn.ModuleList((Split(w[4] + w[3], w[3], 1), Split(w[3] + w[2], w[2], 1)))
        self.again = nn.ModuleList((Conv(w[2], w[2], 3, 2), Conv(w[3], w[3], 3, 2)))
        self.out = nn.ModuleList((Split(w[2] + w[3], w[3], 1), Split(w[3] + w[4], w[4], 1)))
        hidden = max(w[2], 16)
        self.heads = nn.ModuleList(
            nn.Sequential(Conv(each, hidden, 3), Conv(hidden, hidden, 3), nn.Conv2d(hidden, 4 * 16 + classes, 1))
            for each in w[2:]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [n, 3, size, size] to one row per place, [n, 64 + classes, places]."""
        x = self.stem(x)
        kept: list[torch.Tensor] = []
        for down, stage in zip(self.down, self.stages, strict=True):
            x = stage(down(x))
            kept.append(x)
        y = [self.pool[0](x)]
        for _ in range(3):
            y.append(nn.functional.max_pool2d(y[-1], 5, 1, 2))
        deep = self.pool[1](torch.cat(y, 1))
        middle = self.up[0](torch.cat([nn.functional.interpolate(deep, scale_factor=2.0), kept[2]], 1))
        fine = self.up[1](torch.cat([nn.functional.interpolate(middle, scale_factor=2.0), kept[1]], 1))
        middle = self.out[0](torch.cat([self.again[0](fine), middle], 1))
        deep = self.out[1](torch.cat([self.again[1](middle), deep], 1))
        levels = zip(self.heads, (fine, middle, deep), strict=True)
        return torch.cat([head(level).flatten(2) for head, level in levels], 2)
