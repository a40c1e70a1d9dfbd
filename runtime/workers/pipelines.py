"""How an input that comes as a file is made into a tensor: declarations, their identity, and what a client sends.

Shared by both sides of the ring, so values only. The steps themselves are the worker's (`runtime.worker.preprocess`).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from blake3 import blake3

_ALGORITHM = b"1:"
"""Goes up when the same declaration starts to give other numbers."""


class ImagePipeline(msgspec.Struct, frozen=True, tag="image"):
    """A JPEG or PNG becomes `[channels, height, width]` or `[height, width, channels]`.

    `size` is one number for `shortest`, height and width otherwise; `mean` and `std` are per channel, of values 0..1.
    """

    datatype: str
    size: tuple[int, ...] = ()
    resize: str = ""
    filter: str = "bilinear"
    crop: tuple[int, ...] = ()
    fill: int = 0
    color: str = "rgb"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layout: str = "chw"
    upright: bool = True

    @property
    def channels(self) -> int:
        """1 or 3."""
        return 1 if self.color == "gray" else 3

    @property
    def element(self) -> tuple[int, ...]:
        """Shape of one decoded file, -1 where it depends on the file."""
        height, width = self.crop or (self.size if self.resize in {"exact", "letterbox"} else (-1, -1))
        return (self.channels, height, width) if self.layout == "chw" else (height, width, self.channels)


class AudioPipeline(msgspec.Struct, frozen=True, tag="audio"):
    """A WAV becomes samples of about -1..1 at `rate`: `[samples]`, `[channels, samples]` or `[windows, samples]`.

    `length`, `window`, `hop` and `lead` are samples at that rate; 0 leaves the first two out.
    """

    datatype: str
    rate: int
    mono: bool = True
    length: int = 0
    window: int = 0
    hop: int = 0
    lead: int = 0
    tail: str = "drop"

    @property
    def element(self) -> tuple[int, ...]:
        """Shape of one decoded file, -1 where it depends on the file."""
        if self.window:
            return -1, self.window
        samples = self.length or -1
        return (samples,) if self.mono else (-1, samples)


Pipeline: TypeAlias = ImagePipeline | AudioPipeline


class PreprocessLimits(msgspec.Struct, frozen=True):
    """What decoding may cost a worker.

    Bytes of results kept (`cache`) and of one input's tensor (`result`); pixels of an image and samples of a sound,
    over all channels; threads.
    """

    cache: int = 256 << 20
    result: int = 256 << 20
    pixels: int = 50_000_000
    samples: int = 32_000_000
    threads: int = 2


class Prepared(msgspec.Struct, frozen=True):
    """How often a result was there (or on its way), how often it had to be made, and what the kept ones weigh."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0


def identity(pipeline: Pipeline) -> bytes:
    """32 bytes that two declarations share exactly when they do the same to the same file."""
    return blake3(_ALGORITHM + msgspec.json.encode(pipeline)).digest()


def fits(pipeline: Pipeline, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be filled: that of one file, or a batch of such in front of it.

    A number of channels may stand in the shape of a sound that keeps them: files with another are then refused.
    """
    element = pipeline.element
    if len(shape) not in {len(element), len(element) + 1}:
        return False
    own = own_shape(pipeline, shape)
    if isinstance(pipeline, AudioPipeline) and not pipeline.mono:
        element = (own[0], *element[1:])
    return all(wanted in (-1, given) for wanted, given in zip(own, element, strict=True))


def own_shape(pipeline: Pipeline, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a tensor's shape that is one file's."""
    return shape[len(shape) - len(pipeline.element) :]


def files_of(pipeline: Pipeline, shape: tuple[int, ...]) -> tuple[int]:
    """The shape on the wire: how many files, -1 for any number; one where the tensor has no batch dimension."""
    return (1,) if len(shape) == len(pipeline.element) else (shape[0],)
