"""Image and sound files for tests, made by the libraries that people make them with, and their headers by hand."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth colours with some noise on top: resizing them shows every mistake."""
    random = np.random.default_rng(seed)
    across = np.linspace(0, 200, width)[None, :, None] * np.ones((height, 1, channels))
    down = np.linspace(0, 40, height)[:, None, None]
    whole = across + down + random.integers(0, 16, (height, width, channels))
    return np.ascontiguousarray(whole.clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


def photo(height: int = 40, width: int = 60, kind: str = "PNG", seed: int = 0, **how: Any) -> bytes:
    """An RGB file."""
    return encoded(Image.fromarray(noise(height, width, seed=seed)), kind, **how)


def png_of(width: int, height: int, *more: bytes) -> bytes:
    """A PNG whose header claims a size, with next to nothing in it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def wav(samples: NDArray[Any], rate: int = 16_000) -> bytes:
    """Samples [frames, channels] of 8, 16 or 32 bits as the standard library writes them."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(samples.dtype.itemsize)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def wav24(samples: NDArray[np.int32], rate: int = 16_000) -> bytes:
    """Samples [frames, channels] within 24 bits, as the standard library writes them."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(3)
        writer.setframerate(rate)
        writer.writeframes(samples.astype("<i4").reshape(-1, 1).view(np.uint8)[:, :3].tobytes())
    return file.getvalue()


def riff(
    data: bytes,
    *,
    tag: int = 1,
    channels: int = 1,
    rate: int = 16_000,
    frame: int | None = None,
    bits: int = 16,
    extra: bytes = b"",
    size: int | None = None,
    whole: int | None = None,
    before: bytes = b"",
) -> bytes:
    """A WAV file by hand, so that it can lie: `size` of its samples, `whole` of itself, anything of its format."""
    frame = channels * bits // 8 if frame is None else frame
    form = struct.pack("<HHIIHH", tag, channels, rate & 0xFFFFFFFF, rate * frame & 0xFFFFFFFF, frame, bits) + extra
    parts = b"fmt " + struct.pack("<I", len(form)) + form + before
    parts += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(parts) + 4 if whole is None else whole) + b"WAVE" + parts
