"""What a manifest may say about inputs that come as files, `preprocess:`; its grammar and its rules.

Belongs here: the declaration. Never: decoding anything (`runtime.worker.preprocess`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, Strict, model_validator

from runtime.config.units import Flag
from runtime.config.yaml import Fault, Frozen, refuse
from runtime.workers.pipelines import AudioPipeline, ImagePipeline, Pipeline, fits

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_SIDE: Final = 16_384
_MOST_SAMPLES: Final = 1 << 26
_IMAGE: Final = ("size", "resize", "filter", "crop", "fill", "color", "mean", "std", "layout", "upright")
_AUDIO: Final = ("rate", "mono", "length", "window")
_FLOATS: Final = ("BF16", "FP16", "FP32")


def _listed(value: Any) -> Any:
    """Let one number stand for a list of one."""
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


Side: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=_MOST_SIDE)]
Sides: TypeAlias = Annotated[tuple[Side, ...], BeforeValidator(_listed), Field(min_length=1, max_length=2)]
Number: TypeAlias = Annotated[float, Strict(), Field(ge=-1e6, le=1e6)]
Numbers: TypeAlias = Annotated[tuple[Number, ...], BeforeValidator(_listed), Field(min_length=1, max_length=3)]
Samples: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=_MOST_SAMPLES)]


class Window(Frozen):
    """Cuts a sound into windows that may overlap."""

    size: Samples
    """Samples of a window."""
    hop: Samples
    """Samples from the start of one window to the start of the next."""
    lead: Annotated[int, Strict(), Field(ge=0, le=_MOST_SAMPLES)] = 0
    """Samples of silence put in front."""
    tail: Literal["drop", "pad"] = "drop"
    """What becomes of samples that do not fill a window: left out, or filled up with silence."""


class Preprocess(Frozen):
    """How an input that comes as a file becomes the tensor that the model takes."""

    kind: Literal["image", "audio"]
    """JPEG and PNG files, or WAV files."""
    size: Sides | None = None
    """For images: the size after `resize`; one number for `shortest`, or for a square, or [height, width]."""
    resize: Literal["shortest", "exact", "letterbox"] | None = None
    """For images: shorter side to `size`, both sides to `size`, or whole into `size` with margins; null for none."""
    filter: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """For images: how `resize` mixes pixels; all but `nearest` look at every pixel when they make smaller."""
    crop: Sides | None = None
    """For images: what is cut out of the middle after `resize`, one number or [height, width]."""
    fill: Annotated[int, Strict(), Field(ge=0, le=255)] = 0
    """For images: the margins' brightness under `letterbox`."""
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    """For images: channels and their order; transparency is dropped."""
    mean: Numbers | None = None
    """For images: subtracted from values of 0..1, one number or one per channel."""
    std: Numbers | None = None
    """For images: divides what is left then, one number or one per channel."""
    layout: Literal["chw", "hwc"] = "chw"
    """For images: channels first or last."""
    upright: Flag = True
    """For images: turned as their EXIF orientation says."""
    rate: Annotated[int, Strict(), Field(ge=1_000, le=384_000)] | None = None
    """For audio: samples a second that the model wants; other rates are converted."""
    mono: Flag = True
    """For audio: the mean of all channels; else channels come first."""
    length: Samples | None = None
    """For audio: cut or filled up with silence to so many samples; null keeps all."""
    window: Window | None = None
    """For audio: cuts into windows."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        strange = [key for key in (_AUDIO if self.kind == "image" else _IMAGE) if key in self.model_fields_set]
        faults = [Fault((key,), f"does not belong to kind: {self.kind}") for key in strange]
        refuse([*faults, *(_image_faults(self) if self.kind == "image" else _audio_faults(self))])
        return self

    def pipeline(self, datatype: str) -> Pipeline:
        """The declaration as workers take it, for a tensor of this datatype."""
        if self.kind == "audio":
            window = self.window
            cut = (window.size, window.hop, window.lead, window.tail) if window else ()
            return AudioPipeline(datatype, self.rate or 0, self.mono, self.length or 0, *cut)
        return ImagePipeline(
            datatype,
            (self.size or ()) if self.resize == "shortest" else _square(self.size),
            self.resize or "",
            self.filter,
            _square(self.crop),
            self.fill,
            self.color,
            _each(self.mean, self.color),
            _each(self.std, self.color),
            self.layout,
            self.upright,
        )


def tensor_faults(preprocess: Preprocess, datatype: str, shape: tuple[int, ...]) -> Iterator[Fault]:
    """What keeps a declaration from filling the tensor it belongs to."""
    whole = preprocess.kind == "image" and preprocess.mean is None and preprocess.std is None
    allowed = (*_FLOATS, "UINT8") if whole else _FLOATS
    if datatype not in allowed:
        yield Fault(("datatype",), "is not what preprocess can give", f"it gives {', '.join(allowed)}")
    pipeline = preprocess.pipeline(datatype)
    if not fits(pipeline, shape):
        given = list(pipeline.element)
        yield Fault(("shape",), f"does not fit preprocess, which gives {given}", f"write {[-1, *given]} or {given}")


def _square(sides: tuple[int, ...] | None) -> tuple[int, ...]:
    return (sides or ()) * 2 if sides is None or len(sides) == 1 else sides


def _each(numbers: tuple[float, ...] | None, color: str) -> tuple[float, ...]:
    if numbers is None:
        return ()
    return numbers * 3 if len(numbers) == 1 and color != "gray" else numbers


def _image_faults(declared: Preprocess) -> Iterator[Fault]:
    if (declared.size is None) != (declared.resize is None):
        missing = "size" if declared.size is None else "resize"
        yield Fault((missing,), "is missing", "size and resize belong together")
    if declared.resize == "shortest" and len(declared.size or ()) > 1:
        yield Fault(("size",), "is two numbers", "resize: shortest takes one")
    if declared.size and declared.crop:
        most, crop = _square(declared.size), _square(declared.crop)
        if crop[0] > most[0] or crop[1] > most[1]:
            yield Fault(("crop",), "is larger than size")
    for key in ("mean", "std"):
        numbers = getattr(declared, key)
        if numbers is not None and len(numbers) not in {1, 1 if declared.color == "gray" else 3}:
            yield Fault((key,), f"has {len(numbers)} numbers", "one, or one per channel")
    if declared.std is not None and min(declared.std) <= 0:
        yield Fault(("std",), "must be above zero")


def _audio_faults(declared: Preprocess) -> Iterator[Fault]:
    if declared.rate is None:
        yield Fault(("rate",), "is missing", "as in rate: 16000")
    if declared.window is not None and not declared.mono:
        yield Fault(("window",), "needs mono: true")
