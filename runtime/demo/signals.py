"""Inputs that the demo makes itself, and how its outputs are read: sound, spectra, pitch, sentence vectors.

Numpy only, everything seeded: the same call gives the same numbers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Whole: TypeAlias = NDArray[np.int64]

RATE = 16_000
"""Samples a second of every sound here."""

_MELS, _FFT, _HOP = 40, 400, 160
_CREPE_FIRST_CENTS = 1997.3794084376191
_CREPE_CENTS_PER_BIN = 20.0
_CREPE_NEAR_PEAK = 4
_BREAK_HERTZ, _BREAK_MEL = 1000.0, 15.0
_STEPS, _FACTOR = 27.0, 6.4


def sine(hertz: float, seconds: float) -> Floats:
    """A pure tone at half of full scale."""
    time = np.arange(round(seconds * RATE)) / RATE
    return (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def voiced(hertz: float, seconds: float, *, formants: tuple[float, ...] = (700, 1220, 2600), seed: int = 1) -> Floats:
    """A noisy vowel: a glottal pulse train through resonances, in syllables.

    Source and filter after Fant, "Acoustic Theory of Speech Production", 1960; good enough for a voice detector.
    """
    random = np.random.default_rng(seed)
    count = round(seconds * RATE)
    time = np.arange(count) / RATE
    pitch = hertz * (1 + 0.03 * np.sin(2 * np.pi * 5 * time) + 0.1 * np.sin(2 * np.pi * 0.7 * time))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    sound = np.zeros(count)
    for harmonic in range(1, int(0.5 * RATE / (1.2 * hertz))):
        frequency = harmonic * hertz
        gain = sum(1 / (1 + ((frequency - formant) / 90) ** 2) for formant in formants) + 0.02
        sound += gain / harmonic**0.5 * np.sin(harmonic * phase)
    syllables = np.clip(np.sin(2 * np.pi * 3 * time), 0.05, 1) ** 0.5
    sound = sound * syllables / np.abs(sound).max()
    return np.asarray(0.4 * sound + 0.004 * random.standard_normal(count), dtype=np.float32)


def frames(sound: Floats, size: int, hop: int) -> Floats:
    """Cut overlapping frames [N, size] out of a sound; the rest that fills no frame is dropped."""
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(sound, size)[::hop])


def pitch(activation: Floats) -> Floats:
    """Read CREPE's bins [N, 360] as hertz [N]: the mean around the peak, weighted (CREPE, equations 1 and 2)."""
    cents = _CREPE_FIRST_CENTS + _CREPE_CENTS_PER_BIN * np.arange(activation.shape[1])
    near = np.abs(np.arange(activation.shape[1]) - activation.argmax(axis=1)[:, None]) <= _CREPE_NEAR_PEAK
    weight = np.where(near, activation, 0)
    mean = (weight * cents).sum(axis=1) / weight.sum(axis=1)
    return np.asarray(10 * 2 ** (mean / 1200), dtype=np.float32)


def mel_spectra(sound: Floats) -> Floats:
    """Power spectra on 40 mel channels, one each 10 ms over 25 ms of sound: [T, 40].

    Triangles of equal area on Slaney's scale (Auditory Toolbox, 1998), as the speaker encoder was trained with.
    """
    padded = np.pad(sound, _FFT // 2)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)
    power = np.abs(np.fft.rfft(frames(padded, _FFT, _HOP) * window, axis=1)) ** 2
    return (power @ _triangles().T).astype(np.float32)


def _triangles() -> NDArray[np.float64]:
    """Weights [40, 201] from FFT bins to mel channels."""
    edges = _to_hertz(np.linspace(0, _to_mel(RATE / 2), _MELS + 2))
    bins = np.fft.rfftfreq(_FFT, 1 / RATE)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    area = 2 / (edges[2:] - edges[:-2])
    return np.maximum(0, np.minimum(rising, falling)) * area[:, None]


def _to_mel(hertz: float) -> float:
    """Slaney's scale: linear below 1 kHz (15 mel), then 27 steps for each factor of 6.4."""
    if hertz < _BREAK_HERTZ:
        return hertz * _BREAK_MEL / _BREAK_HERTZ
    return _BREAK_MEL + _STEPS * float(np.log(hertz / _BREAK_HERTZ) / np.log(_FACTOR))


def _to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _BREAK_HERTZ * _FACTOR ** ((mel - _BREAK_MEL) / _STEPS)
    return np.where(mel < _BREAK_MEL, mel * _BREAK_HERTZ / _BREAK_MEL, above)


def pooled(hidden: Floats, mask: Whole) -> Floats:
    """Mean of the token vectors [N, T, D] that the mask [N, T] keeps, at length 1: [N, D]."""
    kept = mask[:, :, None].astype(np.float32)
    mean = (hidden * kept).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
    return np.asarray(mean / np.linalg.norm(mean, axis=1, keepdims=True), dtype=np.float32)


def likeness(left: Floats, right: Floats) -> float:
    """Cosine of the angle between two vectors."""
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
