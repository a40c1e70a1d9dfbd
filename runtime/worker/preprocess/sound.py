"""WAV files become arrays: read, mix, resample, cut. Pure functions; numpy alone, sums in double precision."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from runtime.worker.preprocess.bad import Undecodable, within
from runtime.worker.preprocess.cast import cast
from runtime.worker.preprocess.wav import read_wav

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.workers.pipelines import AudioPipeline, PreprocessLimits

_ZEROS: Final = 6
"""Zero crossings of the filter on each side."""
_ROLLOFF: Final = 0.99
_TABLE: Final = 2_000_000
"""Most coefficients of one filter: rates without a common factor need the most, 1.6 million from 48,000 to 44,101."""
_STRETCH: Final = 8_192
"""Outputs computed together, so that what is gathered for them stays in the processor's cache."""


def sound(raw: bytes, pipeline: AudioPipeline, limits: PreprocessLimits) -> NDArray[Any]:
    """One file as an array of `pipeline.element`. Raises `Undecodable`."""
    rate, frames = read_wav(raw, limits.samples)
    samples = _mixed(frames) if pipeline.mono else np.ascontiguousarray(frames.T)
    length = ceil(samples.shape[-1] * pipeline.rate / rate)
    channels = samples.size // samples.shape[-1]
    within(length * channels, limits.samples, f"has too many samples at {pipeline.rate} a second")
    if rate != pipeline.rate:
        samples = np.stack([resampled(row, rate, pipeline.rate) for row in np.atleast_2d(samples)])
        samples = samples[0] if pipeline.mono else samples
    if pipeline.length:
        within(pipeline.length * channels, limits.samples, "has too many samples once it is filled up")
        samples = _filled(samples, pipeline.length)
    if pipeline.window:
        samples = _cut(samples, pipeline, limits)
    return cast(samples, pipeline.datatype)


def _mixed(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    if frames.shape[1] == 1:
        return frames[:, 0]
    return np.asarray(frames.mean(axis=1, dtype=np.float64), dtype=np.float32)


def _filled(samples: NDArray[np.float32], length: int) -> NDArray[np.float32]:
    missing = length - samples.shape[-1]
    if missing <= 0:
        return np.ascontiguousarray(samples[..., :length])
    return np.pad(samples, [(0, 0)] * (samples.ndim - 1) + [(0, missing)])


def _cut(samples: NDArray[np.float32], pipeline: AudioPipeline, limits: PreprocessLimits) -> NDArray[np.float32]:
    """Windows [windows, size] of a mono sound."""
    size, hop = pipeline.window, pipeline.hop
    length = pipeline.lead + len(samples)
    if pipeline.tail == "pad":
        count = max(0, ceil((length - size) / hop)) + 1
    else:
        count = (length - size) // hop + 1 if length >= size else 0
    if not count:
        raise Undecodable(f"has {len(samples)} samples at {pipeline.rate} a second, less than a window needs")
    within(count * size, limits.samples, "has too many samples in its windows")
    end = (count - 1) * hop + size
    whole = np.zeros(max(end, length), np.float32)
    whole[pipeline.lead : length] = samples
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(whole, size)[::hop][:count])


def resampled(samples: NDArray[np.float32], old: int, new: int) -> NDArray[np.float32]:
    """A sound [n] of `old` samples a second at `new`: ceil(n * new / old) samples, time zero kept.

    Band-limited interpolation with a Hann-windowed sinc (J. O. Smith, "Digital Audio Resampling", 2002), with the
    width, roll-off and scale of torchaudio's default, which speech models in torch were mostly trained behind.
    Raises `Undecodable` for a pair of rates whose filter would be too large.
    """
    common = gcd(old, new)
    old, new = old // common, new // common
    taps = 2 * _width(old, new) + 2
    count = ceil(len(samples) * new / old)
    if new * taps > _TABLE:
        raise Undecodable(f"has {old * common} samples a second, which have too little in common with {new * common}")
    table = _filter(old, new)
    padded = np.pad(samples.astype(np.float64), (_width(old, new), taps + old))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    given = np.empty(count, np.float32)
    for start in range(0, count, _STRETCH):
        places = np.arange(start, min(start + _STRETCH, count))
        given[start : start + _STRETCH] = np.einsum("nt,nt->n", windows[places * old // new], table[places % new])
    return given


def _width(old: int, new: int) -> int:
    return ceil(_ZEROS * old / (min(old, new) * _ROLLOFF))


@lru_cache(maxsize=4)
def _filter(old: int, new: int) -> NDArray[np.float64]:
    """Coefficients [phases, taps]: how much each input sample near an output counts."""
    width, band = _width(old, new), min(old, new) * _ROLLOFF
    phases = np.arange(new)[:, None]
    first = phases * old // new - width
    at = (first + np.arange(2 * width + 2)) / old - phases / new
    turns = np.clip(at * band, -_ZEROS, _ZEROS)
    table: NDArray[np.float64] = np.sinc(turns) * np.cos(turns * (np.pi / _ZEROS / 2)) ** 2 * (band / old)
    return table
