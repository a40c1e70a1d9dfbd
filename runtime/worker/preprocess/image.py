"""JPEG and PNG files become arrays: decode, turn, resize, crop, normalise. Pure functions; Pillow and numpy.

Sizes and rounding are torchvision's (`Resize`, `CenterCrop`, `ToTensor`, `Normalize`), which most vision models were
evaluated with. Every size is checked before memory of that size is asked for.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from runtime.worker.preprocess.bad import Undecodable, within
from runtime.worker.preprocess.cast import cast

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.workers.pipelines import ImagePipeline, PreprocessLimits

warnings.filterwarnings("ignore", module="PIL")  # a hostile file shall not write to the worker's log

_MAGIC: Final = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG"}
_SCAN: Final = b"\xff\xda"
_SCANS: Final = 100
_PASSES: Final = 12
"""Scans of a progressive JPEG of the largest size: real ones have about ten, and each costs as much as a picture."""

_FILTERS: Final = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_ORIENTATION: Final = 0x0112
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def image(raw: bytes, pipeline: ImagePipeline, limits: PreprocessLimits) -> NDArray[Any]:
    """One file as an array of `pipeline.element`. Raises `Undecodable`."""
    picture = _decoded(raw, upright=pipeline.upright, most=limits.pixels)
    picture = picture.convert("L" if pipeline.color == "gray" else "RGB")
    picture = _cropped(_resized(picture, pipeline, limits.pixels), pipeline.crop)
    pixels = np.asarray(picture)
    if pixels.ndim < 3:  # noqa: PLR2004 - height and width alone
        pixels = pixels[:, :, None]
    if pipeline.color == "bgr":
        pixels = pixels[:, :, ::-1]
    return _normalised(pixels, pipeline)


def _decoded(raw: bytes, *, upright: bool, most: int) -> Image.Image:
    """The picture with 8 bits a channel, as it is to be looked at."""
    kind = next((kind for magic, kind in _MAGIC.items() if raw.startswith(magic)), None)
    if kind is None:
        raise Undecodable("is neither a JPEG nor a PNG file")
    scans = raw.count(_SCAN) if kind == "JPEG" else 1
    if scans > _SCANS:
        raise Undecodable(f"is a JPEG file of more than {_SCANS} scans")
    try:
        with Image.open(io.BytesIO(raw), formats=(kind,)) as opened:
            within(opened.width * opened.height, most, "has too many pixels")
            within(opened.width * opened.height * scans, most * _PASSES, "has too many pixels in its scans")
            picture = _eight_bits(_still(opened, kind))
            turn = _TURNS.get(_orientation(opened)) if upright else None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Undecodable(f"has too many pixels: at most {most} are allowed") from None
    except (Undecodable, MemoryError):
        raise
    except Exception as fault:  # noqa: BLE001 - its parsers raise whatever a broken file leads them to
        raise Undecodable(f"is a broken or truncated {kind} file ({type(fault).__name__})") from None
    return picture if turn is None else picture.transpose(turn)


def _still(picture: Image.Image, kind: str) -> Image.Image:
    """The picture, decoded. A PNG that moves has no one; the second picture of a camera's JPEG is a preview."""
    if kind == "PNG" and getattr(picture, "is_animated", False):
        raise Undecodable("is an animated PNG file")
    picture.load()
    return picture


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Sixteen bits by their upper half, as Pillow reads colours; its own conversion of greys would cut them off."""
    if picture.mode.startswith("I"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:
        return picture.convert("RGBA")
    return picture


def _orientation(picture: Image.Image) -> int:
    """What EXIF says, 1 where it says nothing or nonsense: a bad tag is no reason to refuse a good picture."""
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - as above
        return 1


def _resized(picture: Image.Image, pipeline: ImagePipeline, most: int) -> Image.Image:
    if not pipeline.resize:
        return picture
    width, height = picture.size
    if pipeline.resize == "shortest":
        (side,) = pipeline.size
        longer = int(side * max(width, height) / min(width, height))
        target = (side, longer) if width <= height else (longer, side)
    elif pipeline.resize == "exact":
        target = (pipeline.size[1], pipeline.size[0])
    else:
        ratio = min(pipeline.size[0] / height, pipeline.size[1] / width)
        target = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    within(target[0] * target[1], most, "is so narrow that it has too many pixels once it is resized")
    if target != picture.size:
        picture = picture.resize(target, _FILTERS[pipeline.filter])
    return _framed(picture, pipeline) if pipeline.resize == "letterbox" else picture


def _framed(picture: Image.Image, pipeline: ImagePipeline) -> Image.Image:
    """The picture in the middle of `size`, with margins; an odd pixel goes to the right and the bottom."""
    height, width = pipeline.size
    whole = Image.new(picture.mode, (width, height), (pipeline.fill,) * len(picture.getbands()))
    whole.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
    return whole


def _cropped(picture: Image.Image, crop: tuple[int, ...]) -> Image.Image:
    if not crop:
        return picture
    height, width = crop
    if picture.width < width or picture.height < height:
        raise Undecodable(f"is {picture.width} by {picture.height} pixels, less than the {width} by {height} needed")
    top, left = round((picture.height - height) / 2), round((picture.width - width) / 2)
    return picture.crop((left, top, left + width, top + height))


def _normalised(pixels: NDArray[np.uint8], pipeline: ImagePipeline) -> NDArray[Any]:
    chw = pipeline.layout == "chw"
    ordered = np.ascontiguousarray(pixels.transpose(2, 0, 1) if chw else pixels)
    if pipeline.datatype == "UINT8":
        return ordered
    values = ordered.astype(np.float32)
    values /= np.float32(255)
    if pipeline.mean:
        values -= _along(pipeline.mean, chw=chw)
    if pipeline.std:
        values /= _along(pipeline.std, chw=chw)
    return cast(values, pipeline.datatype)


def _along(numbers: tuple[float, ...], *, chw: bool) -> NDArray[np.float32]:
    per_channel = np.asarray(numbers, dtype=np.float32)
    return per_channel[:, None, None] if chw else per_channel
