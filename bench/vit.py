"""A vision transformer in plain torch, as large as a bench wants it. The bench's models, and nothing else."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Attention and a four times wider feed-forward part, both with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens in, tokens out: (batch, tokens, width)."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        wide: torch.Tensor = self.wide(self.norm2(x))
        narrow: torch.Tensor = self.narrow(nn.functional.gelu(wide))
        return x + narrow


class ViT(nn.Module):
    """Patches of 16 pixels, a class token, `depth` blocks, 1,000 classes."""

    def __init__(self, width: int, depth: int, heads: int, size: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // 16) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (batch, 3, size, size) to logits (batch, 1000)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x[:, 0]))
        return logits
