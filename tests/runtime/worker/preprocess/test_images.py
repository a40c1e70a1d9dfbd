"""Images come out to the bit as Pillow and torch give them, and whatever a file holds, it harms nobody."""

from __future__ import annotations

import io
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from runtime.worker.preprocess.bad import Undecodable
from runtime.worker.preprocess.image import image
from runtime.workers.pipelines import ImagePipeline, PreprocessLimits
from tests.runtime.worker.preprocess.files import encoded, noise, photo, png_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, which the worker ignores as well

LIMITS = PreprocessLimits(pixels=100_000)
PLAIN = ImagePipeline("UINT8", layout="hwc")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TORCH = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16, "UINT8": torch.uint8}


def reference(raw: bytes, pipeline: ImagePipeline) -> torch.Tensor:
    """The same in plain Pillow and torch, written the way an evaluation script is."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(raw))).convert("L" if pipeline.color == "gray" else "RGB")
    filters = Image.Resampling[pipeline.filter.upper()]
    width, height = picture.size
    if pipeline.resize == "shortest":
        (side,) = pipeline.size
        if width <= height:
            picture = picture.resize((side, int(side * height / width)), filters)
        else:
            picture = picture.resize((int(side * width / height), side), filters)
    elif pipeline.resize == "exact":
        picture = picture.resize((pipeline.size[1], pipeline.size[0]), filters)
    tensor = torch.from_numpy(np.array(picture))
    tensor = tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1)
    if pipeline.color == "bgr":
        tensor = tensor.flip(0)
    if pipeline.crop:
        (high, wide), (_, tall, broad) = pipeline.crop, tensor.shape
        top, left = int(round((tall - high) / 2.0)), int(round((broad - wide) / 2.0))  # noqa: RUF046 - as torchvision
        tensor = tensor[:, top : top + high, left : left + wide]
    if pipeline.datatype != "UINT8":
        tensor = tensor.to(torch.float32).div(255)
        if pipeline.mean:
            tensor = tensor.sub(torch.as_tensor(pipeline.mean)[:, None, None])
        if pipeline.std:
            tensor = tensor.div(torch.as_tensor(pipeline.std)[:, None, None])
    tensor = tensor.to(TORCH[pipeline.datatype])
    return (tensor if pipeline.layout == "chw" else tensor.permute(1, 2, 0)).contiguous()


def as_torch(array: NDArray[Any], datatype: str) -> torch.Tensor:
    """Bit patterns back into a tensor."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    "pipeline",
    [
        PLAIN,
        ImagePipeline("FP32"),
        ImagePipeline("FP32", (32,), "shortest", crop=(28, 24), mean=MEAN, std=STD),
        ImagePipeline("FP16", (32,), "shortest", "bicubic", mean=MEAN, std=STD),
        ImagePipeline("BF16", (20, 31), "exact", "lanczos", mean=(0.5,) * 3, std=(0.5,) * 3),
        ImagePipeline("FP32", (24, 24), "exact", "nearest", crop=(11, 17), color="bgr", mean=MEAN, layout="hwc"),
        ImagePipeline("FP32", (28, 28), "exact", "box", color="gray", mean=(0.1307,), std=(0.3081,)),
        ImagePipeline("UINT8", (64,), "shortest", color="gray", crop=(64, 64)),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one.datatype}-{one.resize or 'as-is'}-{one.color}-{one.layout}",
)
@pytest.mark.parametrize("shape", [(40, 60), (61, 33), (47, 47)])
def test_an_image_comes_out_as_pillow_and_torch_give_it(
    pipeline: ImagePipeline, kind: str, shape: tuple[int, int]
) -> None:
    """Bit for bit, in every datatype, layout and way to resize."""
    if pipeline.crop and min(shape) < 33 and not pipeline.resize:
        pytest.fail("the crop would not fit")
    raw = photo(*shape, kind)
    found = image(raw, pipeline, LIMITS)
    expected = reference(raw, pipeline)
    assert found.shape == tuple(expected.shape)
    assert all(given in (-1, had) for given, had in zip(pipeline.element, found.shape, strict=True))
    assert torch.equal(as_torch(found, pipeline.datatype), expected)
    assert found.flags.c_contiguous


def test_letterbox_keeps_the_picture_whole_in_the_middle() -> None:
    """60 by 40 in 32 by 32: 21 rows of picture between margins of the declared brightness."""
    raw = photo(40, 60)
    found = image(raw, ImagePipeline("UINT8", (32, 32), "letterbox", fill=114, layout="hwc"), LIMITS)
    inner = np.asarray(Image.open(io.BytesIO(raw)).resize((32, 21), Image.Resampling.BILINEAR))
    assert np.array_equal(found[5:26], inner)
    assert (found[:5] == 114).all()
    assert (found[26:] == 114).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("upright", [True, False])
def test_a_picture_is_looked_at_the_way_it_was_taken(orientation: int, *, upright: bool) -> None:
    """EXIF's eight orientations, or none of them where the pipeline says so."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = photo(10, 20, exif=exif.tobytes())
    taken = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))) if upright else noise(10, 20)
    found = image(raw, ImagePipeline("UINT8", layout="hwc", upright=upright), LIMITS)
    assert np.array_equal(found, taken)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_is_none_turns_nothing(orientation: int) -> None:
    """A bad tag is no reason to refuse a good picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(image(photo(10, 20, exif=exif.tobytes()), PLAIN, LIMITS), noise(10, 20))


def test_exif_that_is_rubbish_turns_nothing() -> None:
    """The block is there and holds nothing that can be read."""
    raw = photo(10, 20, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert image(raw, PLAIN, LIMITS).shape == (10, 20, 3)


def test_sixteen_bits_become_their_upper_eight() -> None:
    """Greys of 16 bits are scaled, not cut off at 255."""
    deep = (np.arange(200, dtype=np.uint16) * 320).reshape(10, 20)
    found = image(encoded(Image.fromarray(deep)), ImagePipeline("UINT8", color="gray", layout="hwc"), LIMITS)
    assert np.array_equal(found[:, :, 0], (deep >> 8).astype(np.uint8))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_every_kind_of_colour_becomes_the_declared_one(mode: str) -> None:
    """Palettes, transparency, print colours: three channels of the right size, as Pillow converts them."""
    source = Image.fromarray(noise(10, 20)).convert(mode)
    kind = "JPEG" if mode in {"CMYK", "YCbCr"} else "PNG"
    raw = encoded(source, kind)
    expected = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))
    assert np.array_equal(image(raw, PLAIN, LIMITS), expected)


def test_a_palette_with_transparent_colours_is_no_trouble() -> None:
    """Pillow warns of it, and a warning may be an error."""
    source = Image.fromarray(noise(10, 20)).convert("P")
    raw = encoded(source, transparency=bytes(range(256)))
    assert np.array_equal(image(raw, PLAIN, LIMITS), np.asarray(source.convert("RGB")))


def animated() -> bytes:
    frames = [Image.fromarray(noise(10, 20, seed=seed)) for seed in range(3)]
    return encoded(frames[0], save_all=True, append_images=frames[1:])


WRONG: dict[str, tuple[bytes, str]] = {
    "empty but for its magic": (b"\x89PNG\r\n\x1a\n", "broken or truncated PNG"),
    "another format": (encoded(Image.fromarray(noise(4, 4)), "GIF"), "neither a JPEG nor a PNG"),
    "a TIFF": (encoded(Image.fromarray(noise(4, 4)), "TIFF"), "neither a JPEG nor a PNG"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "neither a JPEG nor a PNG"),
    "a PNG called JPEG inside": (b"\xff\xd8\xff" + photo()[3:], "broken or truncated JPEG"),
    "half a PNG": (photo()[:-200], "broken or truncated PNG"),
    "half a JPEG": (photo(kind="JPEG")[:-300], "broken or truncated JPEG"),
    "a flipped byte": (photo()[:60] + b"\x55" + photo()[61:], "broken or truncated PNG"),
    "no size": (png_of(0, 10), "broken or truncated PNG"),
    "animated": (animated(), "animated PNG"),
    "a bomb": (png_of(60_000, 60_000), "too many pixels"),
    "a small bomb": (png_of(400, 251), "too many pixels: 100400, at most 100000"),
    "a negative size": (png_of(2**32 - 1, 2**32 - 1), "PNG|too many pixels"),
    "too many scans for its size": (
        photo(250, 360, "JPEG") + b"\xff\xda" * 13,
        "too many pixels in its scans: 1260000, at most 1200000",
    ),
    "scans without end": (photo(kind="JPEG") + b"\xff\xda" * 100, "more than 100 scans"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_is_refused_in_words(name: str) -> None:
    """One sentence, no exception of a parser, nothing of the file in it."""
    raw, words = WRONG[name]
    with pytest.raises(Undecodable, match=words):
        image(raw, PLAIN, LIMITS)


def test_a_bomb_is_refused_before_memory_is_asked_for() -> None:
    """40 million pixels would be 120 MB; the header alone is read."""
    raw = png_of(8_000, 5_000)
    image(photo(), PLAIN, LIMITS)
    tracemalloc.start()
    with pytest.raises(Undecodable, match="too many pixels"):
        image(raw, PLAIN, LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_sliver_that_would_grow_without_bound_is_refused() -> None:
    """Its shorter side at 200 would make the longer one two million."""
    with pytest.raises(Undecodable, match="so narrow"):
        image(photo(1, 10_000), ImagePipeline("UINT8", (200,), "shortest"), LIMITS)


def test_a_picture_smaller_than_the_crop_is_refused() -> None:
    """Without a resize nothing else can be done."""
    with pytest.raises(Undecodable, match="20 by 10 pixels, less than the 16 by 16 needed"):
        image(photo(10, 20), ImagePipeline("UINT8", crop=(16, 16)), LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_text_and_profiles_that_unpack_to_gigabytes_are_refused_or_left_packed(kind: str) -> None:
    """A compressed comment of 32 MB of zeros: Pillow stops at its own limit."""
    import zlib
    from struct import pack

    body = b"Comment\0\0" + zlib.compress(bytes(32 << 20))
    text = pack(">I", len(body)) + b"zTXt" + body + pack(">I", zlib.crc32(b"zTXt" + body))
    raw = png_of(4, 4, text) if kind == "PNG" else photo(4, 4, "JPEG", comment=bytes(60_000))
    tracemalloc.start()
    if kind == "PNG":
        with pytest.raises(Undecodable):
            image(raw, PLAIN, LIMITS)
    else:
        assert image(raw, PLAIN, LIMITS).shape == (4, 4, 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


GOOD = [photo(12, 17), photo(12, 17, "JPEG"), photo(12, 17, "JPEG", progressive=True), animated()]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6), st.data())
def test_no_file_leads_to_anything_but_a_picture_or_a_refusal(
    raw: bytes, flips: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Flipped bytes, cut ends, grown ends."""
    changed = bytearray(raw)
    for place, value in flips:
        changed[place % len(changed)] = value
    cut = data.draw(st.integers(0, len(changed)))
    try:
        found = image(bytes(changed[:cut] if cut % 3 else changed), ImagePipeline("FP32", (8,), "shortest"), LIMITS)
    except Undecodable:
        return
    assert min(found.shape[1:]) == 8
    assert np.isfinite(found).all()
