"""RIFF WAVE files become samples: PCM of 8, 16, 24 and 32 bits, floats of 32 and 64. Numpy alone.

A reader of its own because a server wants what the libraries at hand do not give: the standard library's `wave` knows
no floats, and libsndfile and scipy take a file whose header promises more than there is for a shorter one.
Format: Microsoft and IBM, "Multimedia Programming Interface and Data Specifications 1.0", 1991, and its
WAVE_FORMAT_EXTENSIBLE.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from runtime.worker.preprocess.bad import Undecodable, within

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RIFF: Final = struct.Struct("<4sI4s")
_CHUNK: Final = struct.Struct("<4sI")
_FORMAT: Final = struct.Struct("<HHIIHH")
_EXTENSION: Final = struct.Struct("<HHIH14s")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL: Final = bytes.fromhex("000000001000800000aa00389b71")
_KINDS: Final = {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}
_CHUNKS: Final = 256
_CHANNELS: Final = 64
_RATES: Final = range(1_000, 768_001)


class _Format(NamedTuple):
    kind: tuple[int, int]
    channels: int
    rate: int
    frame: int


def read_wav(raw: bytes, most: int) -> tuple[int, NDArray[np.float32]]:
    """Samples a second, and samples `[frames, channels]`: whole numbers scaled to -1..1, floats as they are.

    Raises `Undecodable`; also for more than `most` samples, and for floats that are not finite.
    """
    form, data = _chunks(raw)
    if not len(data):
        raise Undecodable("is a WAV file without samples")
    if len(data) % form.frame:
        raise Undecodable(f"is a WAV file whose {len(data)} bytes of samples are no multiple of a frame's {form.frame}")
    count = len(data) // form.frame * form.channels
    within(count, most, "has too many samples over all channels")
    return form.rate, _scaled(data, form.kind).reshape(-1, form.channels)


def _chunks(raw: bytes) -> tuple[_Format, memoryview]:
    """The format and the bytes of the samples."""
    if len(raw) < _RIFF.size or raw[:4] != b"RIFF" or raw[8:12] != b"WAVE":
        raise Undecodable("is not a WAV file (RIFF WAVE)")
    end = _RIFF.unpack_from(raw)[1] + 8
    if end > len(raw):
        raise Undecodable(f"is a truncated WAV file: its header says {end} bytes, there are {len(raw)}")
    form: _Format | None = None
    at = _RIFF.size
    for _ in range(_CHUNKS):
        if at + _CHUNK.size > end:
            raise Undecodable("is a WAV file without samples")
        name, size = _CHUNK.unpack_from(raw, at)
        start = at + _CHUNK.size
        if size > end - start:
            raise Undecodable(f"is a truncated WAV file: a part of {size} bytes has {end - start}")
        body = memoryview(raw)[start : start + size]
        if name == b"fmt " and form is None:
            form = _format(body)
        elif name == b"data":
            if form is None:
                raise Undecodable("is a WAV file whose samples come before their format")
            return form, body
        at = start + size + (size & 1)
    raise Undecodable(f"is a WAV file of more than {_CHUNKS} parts")


def _format(body: memoryview) -> _Format:
    if len(body) < _FORMAT.size:
        raise Undecodable("is a WAV file with a broken format")
    tag, channels, rate, _, frame, bits = _FORMAT.unpack_from(body)
    if tag == _EXTENSIBLE:
        if len(body) < _FORMAT.size + _EXTENSION.size:
            raise Undecodable("is a WAV file with a broken format")
        *_, tag, tail = _EXTENSION.unpack_from(body, _FORMAT.size)
        tag = tag if tail == _GUID_TAIL else _EXTENSIBLE
    if (tag, bits) not in _KINDS:
        raise Undecodable(f"is a WAV file of format {tag} with {bits} bits; PCM of 8 to 32 and floats are read")
    if not 1 <= channels <= _CHANNELS:
        raise Undecodable(f"is a WAV file of {channels} channels; 1 to {_CHANNELS} are read")
    if rate not in _RATES:
        raise Undecodable(f"is a WAV file of {rate} samples a second; {_RATES[0]} to {_RATES[-1]} are read")
    if frame != channels * bits // 8:
        raise Undecodable(f"is a WAV file whose frames have {frame} bytes, and {channels} channels of {bits} bits")
    return _Format((tag, bits), channels, rate, frame)


def _scaled(data: memoryview, kind: tuple[int, int]) -> NDArray[np.float32]:
    match kind:
        case (1, 8):
            return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
        case (1, 16):
            return _whole(np.frombuffer(data, "<i2"), 15)
        case (1, 24):
            wide = np.zeros((len(data) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            return _whole(wide.view("<i4").reshape(-1), 31)
        case (1, _):
            return _whole(np.frombuffer(data, "<i4"), 31)
        case (_, bits):
            with np.errstate(over="ignore"):
                values = np.frombuffer(data, f"<f{bits // 8}").astype(np.float32)
    if not np.isfinite(values).all():
        raise Undecodable("is a WAV file with samples that are NaN or infinite")
    return values


def _whole(numbers: NDArray[Any], bits: int) -> NDArray[np.float32]:
    values = numbers.astype(np.float32)
    values /= np.float32(1 << bits)
    return values
