"""Two networks that listen to speech: is someone speaking (Silero VAD), and who is it (GE2E).

State between calls is an explicit input and output, so that a server needs to remember nothing.
Framing, resampling and mel spectra belong to the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64
"""Samples of the chunk before that Silero wants in front of a chunk."""

_WINDOW, _HOP = 256, 128
_FREQUENCIES = _WINDOW // 2 + 1
_HIDDEN = 128

MELS = 40
"""Mel channels that the speaker encoder wants, one spectrum each 10 ms."""

EMBEDDING = 256


class SileroVad(nn.Module):
    """Voice activity at 16 kHz (Silero Team, 2024, https://github.com/snakers4/silero-vad, MIT).

    No paper describes it: layer sizes are those of the weight file, strides and padding those of the TorchScript
    model published beside it, whose numbers the test reproduces. (Its weights are of another training run than the
    safetensors file's, so the two files answer alike but not equally.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * _FREQUENCIES, _WINDOW, stride=_HOP, bias=False)
        self.conv1 = nn.Conv1d(_FREQUENCIES, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, _HIDDEN)
        self.final_conv = nn.Conv1d(_HIDDEN, 1, 1)

    def forward(self, audio: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Take `audio` [N, 64 + 512] in -1..1 (context, then chunk) and `state` [N, 2, 128], zeros at the start.

        Gives `probability` [N, 1] of speech, and `next_state` [N, 2, 128] to send with the next chunk. The published
        model keeps its state as [2, N, 128]; here the batch comes first everywhere, so that calls can share a forward.
        """
        wave = functional.pad(audio[:, None, :], (0, _WINDOW - _HOP - CONTEXT), mode="reflect")
        real, imaginary = self.stft_conv(wave).split(_FREQUENCIES, dim=1)
        x = torch.sqrt(real**2 + imaginary**2)
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = functional.relu(layer(x))
        hidden, cell = self.lstm_cell(x.squeeze(-1), (state[:, 0], state[:, 1]))
        probability = torch.sigmoid(self.final_conv(functional.relu(hidden)[:, :, None]))
        return {"probability": probability.squeeze(-1), "next_state": torch.stack([hidden, cell], dim=1)}


class SpeakerEncoder(nn.Module):
    """A three-layer LSTM whose last state names a speaker.

    Wan, Wang, Papir, Moreno: "Generalized End-to-End Loss for Speaker Verification", ICASSP 2018, section 2.1 and
    equation 4. `similarity_weight` and `similarity_bias` are w and b of equation 5: training alone uses them, the
    published file carries them, and strict loading wants a place for every tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, EMBEDDING, num_layers=3, batch_first=True)
        self.linear = nn.Linear(EMBEDDING, EMBEDDING)
        self.similarity_weight = nn.Parameter(torch.full((1,), 10.0))
        self.similarity_bias = nn.Parameter(torch.full((1,), -5.0))

    def forward(self, mels: Tensor) -> Tensor:
        """Take mel spectra [N, T, 40] (1.6 s is T = 160); give one embedding of length 1 each, [N, 256]."""
        _, (hidden, _) = self.lstm(mels)
        return functional.normalize(functional.relu(self.linear(hidden[-1])), dim=1)
