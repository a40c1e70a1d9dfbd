"""CREPE: pitch of a monophonic sound, from its waveform.

Kim, Salamon, Li, Bello: "CREPE: A Convolutional Representation for Pitch Estimation", ICASSP 2018, section 2.
Audio framing and the reading of the 360 pitch bins belong to the caller.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

FRAME = 1024
"""Samples of one frame at 16 kHz."""

BINS = 360
"""Pitch classes, 20 cents apart, from C1 to B7."""

FILTERS: Final = {
    "full": (1024, 128, 128, 128, 256, 512),
    "tiny": (128, 16, 16, 16, 32, 64),
}
"""Filters of the six blocks, by capacity."""

_FIRST_KERNEL, _FIRST_STRIDE = 512, 4
_KERNEL = 64
_LEFT_IN_TIME = FRAME // _FIRST_STRIDE // 2**6
_BATCH_NORM_EPS = 1e-3  # the weights were trained in Keras, whose default is not torch's


class Crepe(nn.Module):
    """Six blocks of convolution, ReLU, batch norm and pooling over time, then one dense layer (figure 1)."""

    def __init__(self, filters: tuple[int, ...]) -> None:
        super().__init__()
        first, *_, last = filters
        self.conv1 = nn.Conv2d(1, first, (_FIRST_KERNEL, 1), stride=(_FIRST_STRIDE, 1))
        self.conv1_BN = nn.BatchNorm2d(first, eps=_BATCH_NORM_EPS)
        for place, (taken, given) in enumerate(pairwise(filters), start=2):
            self.add_module(f"conv{place}", nn.Conv2d(taken, given, (_KERNEL, 1)))
            self.add_module(f"conv{place}_BN", nn.BatchNorm2d(given, eps=_BATCH_NORM_EPS))
        self.classifier = nn.Linear(last * _LEFT_IN_TIME, BINS)
        self._depth = len(filters)

    def forward(self, frames: Tensor) -> Tensor:
        """Turn frames [N, 1024] into the activation of each pitch bin [N, 360], each between 0 and 1.

        Frames are brought to zero mean and unit variance first; a silent frame stays zero.
        """
        frames = frames - frames.mean(dim=1, keepdim=True)
        frames = frames / frames.std(dim=1, keepdim=True).clamp_min(1e-8)
        x = frames[:, None, :, None]
        for place in range(1, self._depth + 1):
            kernel, stride = (_FIRST_KERNEL, _FIRST_STRIDE) if place == 1 else (_KERNEL, 1)
            missing = kernel - stride  # "same" padding as Keras does it: the odd sample goes behind
            x = functional.pad(x, (0, 0, missing // 2, missing - missing // 2))
            convolution = cast("nn.Conv2d", self.get_submodule(f"conv{place}"))
            norm = cast("nn.BatchNorm2d", self.get_submodule(f"conv{place}_BN"))
            x = functional.max_pool2d(norm(functional.relu(convolution(x))), (2, 1))
        features = x.permute(0, 2, 1, 3).flatten(1)  # time before channel, as the dense layer was trained
        return torch.sigmoid(self.classifier(features))
