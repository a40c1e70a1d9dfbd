"""Sounds come out as torch gives them, at any width and rate, and headers that lie are found out."""

from __future__ import annotations

import io
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import wavfile
from torch.nn import functional

from runtime.worker.preprocess.bad import Undecodable
from runtime.worker.preprocess.sound import resampled, sound
from runtime.worker.preprocess.wav import read_wav
from runtime.workers.pipelines import AudioPipeline, PreprocessLimits
from tests.runtime.worker.preprocess.files import riff, wav, wav24

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIMITS = PreprocessLimits(samples=200_000)
MOST = LIMITS.samples
SAME = AudioPipeline("FP32", 16_000)


def numbers(low: int, high: int, dtype: str, channels: int = 2, count: int = 500) -> NDArray[Any]:
    """Samples over the whole range, its ends included."""
    found = np.random.default_rng(count).integers(low, high + 1, (count, channels)).astype(dtype)
    found[0], found[1] = low, high
    return found


def floats(dtype: str, channels: int = 2, count: int = 500) -> NDArray[Any]:
    """Samples of about -1..1, a little beyond as floats may be."""
    return np.random.default_rng(count).normal(0, 0.5, (count, channels)).astype(dtype)


def float_wav(samples: NDArray[Any], rate: int = 16_000) -> bytes:
    """As scipy writes them."""
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


S8, S16, S24, S32 = (
    numbers(0, 255, "u1"),
    numbers(-(2**15), 2**15 - 1, "<i2"),
    numbers(-(2**23), 2**23 - 1, "<i4"),
    numbers(-(2**31), 2**31 - 1, "<i4"),
)
READ: dict[str, tuple[bytes, torch.Tensor]] = {
    "8 bits": (wav(S8), (torch.from_numpy(S8).float() - 128) / 128),
    "16 bits": (wav(S16), torch.from_numpy(S16).float() / 2**15),
    "24 bits": (wav24(S24), torch.from_numpy(S24).float() / 2**23),
    "32 bits": (wav(S32), torch.from_numpy(S32).float() / 2**31),
    "floats": (float_wav(floats("<f4")), torch.from_numpy(floats("<f4"))),
    "doubles": (float_wav(floats("<f8")), torch.from_numpy(floats("<f8")).float()),
}


@pytest.mark.parametrize("name", READ)
def test_every_width_is_read_to_the_bit(name: str) -> None:
    """Files of the standard library and of scipy, against torch."""
    raw, expected = READ[name]
    rate, found = read_wav(raw, MOST)
    assert rate == 16_000
    assert torch.equal(torch.from_numpy(found), expected)


def test_an_extensible_header_is_read_and_one_of_another_family_refused() -> None:
    """What recorders with many channels write; its last 14 bytes say which numbering the format follows."""
    tail = bytes.fromhex("000000001000800000aa00389b71")
    body = S16.tobytes()
    extra = struct.pack("<HHIH", 22, 16, 3, 1) + tail
    _, found = read_wav(riff(body, tag=0xFFFE, channels=2, extra=extra), MOST)
    assert np.array_equal(found, read_wav(wav(S16), MOST)[1])
    with pytest.raises(Undecodable, match="format 65534"):
        read_wav(riff(body, tag=0xFFFE, channels=2, extra=extra[:-1] + b"!"), MOST)
    with pytest.raises(Undecodable, match="broken format"):
        read_wav(riff(body, tag=0xFFFE, channels=2), MOST)


def test_other_parts_of_a_file_are_passed_over() -> None:
    """A comment of odd length, whose padding counts as nothing, and whatever follows the samples."""
    comment = b"LIST" + struct.pack("<I", 5) + b"hello\0"
    _, found = read_wav(riff(S16.tobytes(), channels=2, before=comment) + b"tail", MOST)
    assert len(found) == len(S16)


TWO = bytes(8)
LIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a WAV"),
    "another file": (b"OggS" + bytes(100), "not a WAV"),
    "big endian": (b"RIFX" + riff(TWO)[4:], "not a WAV"),
    "64 bits": (b"RF64" + riff(TWO)[4:], "not a WAV"),
    "no wave": (riff(TWO)[:8] + b"AVI " + riff(TWO)[12:], "not a WAV"),
    "cut": (riff(bytes(1000))[:-10], "truncated WAV file: its header says 1044 bytes, there are 1034"),
    "more samples than bytes": (riff(TWO, size=4000), "truncated WAV file: a part of 4000 bytes has 8"),
    "a stream's size": (riff(TWO, size=0xFFFFFFFF, whole=0xFFFFFFFF), "truncated WAV"),
    "no samples": (riff(b""), "without samples"),
    "no data": (riff(b"")[:-8][:4] + struct.pack("<I", 28) + riff(b"")[8:-8], "without samples"),
    "data first": (b"RIFF" + struct.pack("<I", 20) + b"WAVEdata" + struct.pack("<I", 8) + TWO, "before their format"),
    "a short format": (b"RIFF" + struct.pack("<I", 14) + b"WAVEfmt \x02\0\0\0\1\0", "broken format"),
    "half a frame": (riff(bytes(7), channels=2), "no multiple of a frame's 4"),
    "no channels": (riff(TWO, channels=0), "0 channels"),
    "many channels": (riff(bytes(130), channels=65), "65 channels; 1 to 64"),
    "all channels": (riff(bytes(65535 * 2), channels=65535, frame=2), "65535 channels"),
    "no rate": (riff(TWO, rate=0), "0 samples a second"),
    "a huge rate": (riff(TWO, rate=2**32 - 1), "4294967295 samples a second"),
    "a wrong frame": (riff(TWO, frame=3), "frames have 3 bytes, and 1 channels of 16 bits"),
    "twelve bits": (riff(TWO, bits=12, frame=2), "format 1 with 12 bits"),
    "no bits": (riff(TWO, bits=0, frame=2), "format 1 with 0 bits"),
    "half floats": (riff(TWO, tag=3), "format 3 with 16 bits"),
    "A-law": (riff(TWO, tag=6, bits=8), "format 6 with 8 bits"),
    "NaN": (float_wav(np.full((4, 1), np.nan, "<f4")), "NaN or infinite"),
    "beyond floats": (float_wav(np.full((4, 1), 1e300, "<f8")), "NaN or infinite"),
    "too long": (riff(bytes(2 * MOST + 2)), "too many samples over all channels: 200001, at most 200000"),
    "parts without end": (riff(TWO, before=(b"junk" + bytes(4)) * 300), "more than 256 parts"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_found_out(name: str) -> None:
    """One sentence with the numbers."""
    raw, words = LIES[name]
    with pytest.raises(Undecodable, match=words):
        sound(raw, SAME, LIMITS)


def sinc_hann(samples: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """Band-limited interpolation as one strided convolution in double precision: torchaudio's default, written out."""
    common = math.gcd(old, new)
    old, new = old // common, new // common
    band = min(old, new) * 0.99
    width = math.ceil(6 * old / band)
    places = torch.arange(-width, width + old, dtype=torch.float64)[None, None] / old
    at = (torch.arange(0, -new, -1, dtype=torch.float64)[:, None, None] / new + places) * band
    at = at.clamp(-6, 6)
    window = torch.cos(at * math.pi / 6 / 2) ** 2
    at = at * math.pi
    kernels = torch.where(at == 0, torch.ones_like(at), at.sin() / at) * window * (band / old)
    padded = functional.pad(samples.double(), (width, width + old))
    found = functional.conv1d(padded[None, None], kernels, stride=old).transpose(1, 2).reshape(-1)
    return found[: math.ceil(new * len(samples) / old)].float()


@pytest.mark.parametrize(
    ("old", "new"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_050, 24_000), (16_016, 16_000)]
)
def test_resampling_is_the_convolution_that_torch_computes(old: int, new: int) -> None:
    """Summed in double precision both ways, so that nothing but rounding to single precision is left: equal bits."""
    samples = np.random.default_rng(old).normal(0, 0.3, 20_000).astype(np.float32)
    found = torch.from_numpy(resampled(samples, old, new))
    expected = sinc_hann(torch.from_numpy(samples), old, new)
    assert found.shape == expected.shape
    # Sums in another order differ in the 16th digit, which the 7th shows once in hundreds of millions.
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("old", "new"), [(44_100, 16_000), (11_025, 16_000), (768_000, 16_000)])
def test_a_tone_stays_a_tone_of_its_own_pitch(old: int, new: int) -> None:
    """A sine at one rate against the same sine at the other, away from the edges."""
    given = np.sin(2 * np.pi * 440 * np.arange(old) / old).astype(np.float32)
    found = resampled(given, old, new)
    expected = np.sin(2 * np.pi * 440 * np.arange(new) / new)
    assert len(found) == new
    assert np.abs(found - expected)[200:-200].max() < 2e-3


def test_any_length_gives_as_many_samples_as_its_time_needs() -> None:
    """Down to one sample, at rates without a common factor."""
    for count in (1, 2, 7, 159, 160, 161):
        for old, new in ((44_100, 16_000), (16_000, 44_100), (8_001, 8_000)):
            found = resampled(np.ones(count, np.float32), old, new)
            assert len(found) == math.ceil(count * new / old)
            assert np.isfinite(found).all()


def test_rates_that_would_need_a_huge_filter_are_refused() -> None:
    """Coprime and far apart: tens of millions of coefficients for one file."""
    with pytest.raises(Undecodable, match="767999 samples a second, which have too little in common"):
        sound(riff(bytes(100), rate=767_999), AudioPipeline("FP32", 16_000), LIMITS)


def test_a_file_that_would_grow_without_bound_at_the_models_rate_is_refused() -> None:
    """1,000 samples a second, 48 times as many after."""
    with pytest.raises(Undecodable, match="too many samples at 48000 a second: 240000, at most 200000"):
        sound(riff(bytes(10_000), rate=1_000), AudioPipeline("FP32", 48_000), LIMITS)


def test_channels_are_mixed_to_their_mean_or_kept_apart() -> None:
    """In double precision, as `mean` of doubles is."""
    expected = torch.from_numpy(read_wav(wav(S16), MOST)[1])
    assert torch.equal(torch.from_numpy(sound(wav(S16), SAME, LIMITS)), expected.double().mean(1).float())
    apart = AudioPipeline("FP32", 16_000, mono=False)
    assert torch.equal(torch.from_numpy(sound(wav(S16), apart, LIMITS)), expected.T)
    lower = AudioPipeline("FP32", 8_000, mono=False)
    assert torch.equal(
        torch.from_numpy(sound(wav(S16), lower, LIMITS)),
        torch.stack([sinc_hann(expected[:, one].contiguous(), 16_000, 8_000) for one in (0, 1)]),
    )


@pytest.mark.parametrize("length", [1, 499, 500, 501, 800])
def test_a_length_cuts_or_fills_up_with_silence(length: int) -> None:
    """The start is kept."""
    whole = sound(wav(S16), SAME, LIMITS)
    found = sound(wav(S16), AudioPipeline("FP32", 16_000, length=length), LIMITS)
    expected = functional.pad(torch.from_numpy(whole), (0, length - len(whole)))  # cuts where it is negative
    assert torch.equal(torch.from_numpy(found), expected)


@pytest.mark.parametrize(
    ("size", "hop", "lead"), [(100, 100, 0), (100, 30, 0), (576, 512, 76), (500, 1, 0), (50, 70, 3)]
)
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_windows_are_what_unfold_gives(size: int, hop: int, lead: int, tail: str) -> None:
    """`lead` of silence in front; the rest that fills no window is dropped, or filled up."""
    whole = torch.from_numpy(sound(wav(S16), SAME, LIMITS))
    padded = functional.pad(whole, (lead, 0))
    if tail == "pad":
        padded = functional.pad(padded, (0, -(len(padded) - size) % hop if len(padded) > size else size - len(padded)))
    found = sound(wav(S16), AudioPipeline("FP32", 16_000, window=size, hop=hop, lead=lead, tail=tail), LIMITS)
    assert torch.equal(torch.from_numpy(found.copy()), padded.unfold(0, size, hop))


def test_a_sound_shorter_than_a_window_is_refused_unless_it_may_be_filled_up() -> None:
    """500 samples where 600 are needed."""
    with pytest.raises(Undecodable, match="500 samples at 16000 a second, less than a window needs"):
        sound(wav(S16), AudioPipeline("FP32", 16_000, window=600, hop=600), LIMITS)
    found = sound(wav(S16), AudioPipeline("FP32", 16_000, window=600, hop=600, tail="pad"), LIMITS)
    assert found.shape == (1, 600)
    assert not found[0, 500:].any()


def test_windows_that_overlap_without_bound_are_refused() -> None:
    """A file of 10,000 samples would become nine million."""
    with pytest.raises(Undecodable, match="too many samples in its windows"):
        sound(riff(bytes(20_000)), AudioPipeline("FP32", 16_000, window=1000, hop=1), LIMITS)


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", torch.float16), ("BF16", torch.bfloat16)])
def test_halves_are_rounded_as_torch_rounds_them(datatype: str, dtype: torch.dtype) -> None:
    """Ties to even; BF16 travels as bit patterns."""
    raw = float_wav(floats("<f4", 1, 20_000))
    found = torch.from_numpy(sound(raw, AudioPipeline(datatype, 16_000), LIMITS))
    found = found.view(torch.bfloat16) if datatype == "BF16" else found
    assert torch.equal(found, torch.from_numpy(sound(raw, SAME, LIMITS)).to(dtype))


GOOD = [wav(S8), wav24(S24), float_wav(floats("<f4")), riff(S16.tobytes(), before=b"LIST\x02\0\0\0hi")]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=4), st.data())
def test_no_file_leads_to_anything_but_a_sound_or_a_refusal(
    raw: bytes, flips: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Headers with flipped bytes, files with cut ends."""
    changed = bytearray(raw)
    for place, value in flips:
        changed[place] = value
    cut = data.draw(st.integers(0, len(changed)))
    pipeline = AudioPipeline("FP32", 16_000, window=64, hop=48, tail="pad")
    try:
        found = sound(bytes(changed[:cut] if cut % 3 else changed), pipeline, LIMITS)
    except Undecodable:
        return
    assert found.shape[1] == 64
    assert np.isfinite(found).all()
