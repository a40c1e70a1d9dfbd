"""MTCNN: the three networks that find, refine and align faces.

Zhang, Zhang, Li, Qiao: "Joint Face Detection and Alignment using Multi-task Cascaded Convolutional Networks",
IEEE Signal Processing Letters 23(10), 2016, section III and figure 2. The cascade between them is the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def _flat(x: Tensor) -> Tensor:
    """Flatten [N, C, H, W] width first, the order in which the published dense layers were trained."""
    return x.permute(0, 3, 2, 1).flatten(1)


def _pool(x: Tensor, kernel: int) -> Tensor:
    """Pool by two, keeping the last partial window."""
    return functional.max_pool2d(x, kernel, stride=2, ceil_mode=True)


class ProposalNet(nn.Module):
    """P-Net: fully convolutional, so one pass proposes faces everywhere in an image of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.conv2, self.prelu2 = nn.Conv2d(10, 16, 3), nn.PReLU(16)
        self.conv3, self.prelu3 = nn.Conv2d(16, 32, 3), nn.PReLU(32)
        self.conv4_1 = nn.Conv2d(32, 2, 1)
        self.conv4_2 = nn.Conv2d(32, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Take RGB [N, 3, H, W] scaled to about -1..1, H and W at least 12.

        Gives, per position, `probability` [N, 2, h, w] of no face and face, and `box` [N, 4, h, w] corrections.
        """
        x = _pool(self.prelu1(self.conv1(image)), 2)
        x = self.prelu3(self.conv3(self.prelu2(self.conv2(x))))
        return {"probability": torch.softmax(self.conv4_1(x), dim=1), "box": self.conv4_2(x)}


class RefineNet(nn.Module):
    """R-Net: rejects most of what P-Net proposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 28, 3), nn.PReLU(28)
        self.conv2, self.prelu2 = nn.Conv2d(28, 48, 3), nn.PReLU(48)
        self.conv3, self.prelu3 = nn.Conv2d(48, 64, 2), nn.PReLU(64)
        self.dense4, self.prelu4 = nn.Linear(64 * 3 * 3, 128), nn.PReLU(128)
        self.dense5_1 = nn.Linear(128, 2)
        self.dense5_2 = nn.Linear(128, 4)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Take crops [N, 3, 24, 24] scaled to about -1..1; give `probability` [N, 2] and `box` [N, 4]."""
        x = _pool(self.prelu1(self.conv1(image)), 3)
        x = _pool(self.prelu2(self.conv2(x)), 3)
        x = self.prelu3(self.conv3(x))
        x = self.prelu4(self.dense4(_flat(x)))
        return {"probability": torch.softmax(self.dense5_1(x), dim=1), "box": self.dense5_2(x)}


class OutputNet(nn.Module):
    """O-Net: the final verdict, with five facial landmarks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 32, 3), nn.PReLU(32)
        self.conv2, self.prelu2 = nn.Conv2d(32, 64, 3), nn.PReLU(64)
        self.conv3, self.prelu3 = nn.Conv2d(64, 64, 3), nn.PReLU(64)
        self.conv4, self.prelu4 = nn.Conv2d(64, 128, 2), nn.PReLU(128)
        self.dense5, self.prelu5 = nn.Linear(128 * 3 * 3, 256), nn.PReLU(256)
        self.dense6_1 = nn.Linear(256, 2)
        self.dense6_2 = nn.Linear(256, 4)
        self.dense6_3 = nn.Linear(256, 10)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Take crops [N, 3, 48, 48] scaled to about -1..1.

        Gives `probability` [N, 2], `box` [N, 4] and `landmarks` [N, 10]: five x, then five y, as fractions of the box.
        """
        x = _pool(self.prelu1(self.conv1(image)), 3)
        x = _pool(self.prelu2(self.conv2(x)), 3)
        x = _pool(self.prelu3(self.conv3(x)), 2)
        x = self.prelu4(self.conv4(x))
        x = self.prelu5(self.dense5(_flat(x)))
        probability = torch.softmax(self.dense6_1(x), dim=1)
        return {"probability": probability, "box": self.dense6_2(x), "landmarks": self.dense6_3(x)}
