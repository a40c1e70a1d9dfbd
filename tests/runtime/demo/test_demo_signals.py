"""The demo's synthetic inputs and the reading of outputs, without any model."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.demo import signals


def test_frames_overlap_and_drop_the_rest() -> None:
    """Frames start each `hop` samples; a tail too short for a frame is left out."""
    cut = signals.frames(np.arange(10, dtype=np.float32), 4, 3)
    assert cut.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_pitch_reads_the_mean_around_the_peak() -> None:
    """A single active bin is its own pitch; two equal neighbours lie half a bin, 10 cents, higher."""
    activation = np.zeros((2, 360), np.float32)
    activation[:, 228] = 1
    activation[1, 229] = 1
    low, high = signals.pitch(activation)
    assert low == pytest.approx(10 * 2 ** ((1997.3794084376191 + 20 * 228) / 1200), rel=1e-5)
    assert high / low == pytest.approx(2 ** (10 / 1200), rel=1e-5)


def test_mel_spectra_put_a_tone_into_its_channel() -> None:
    """1.6 s give 161 spectra; a tone lights the channel that covers it, and a higher tone a higher channel."""
    low, high = (signals.mel_spectra(signals.sine(hertz, 1.6)) for hertz in (300, 3000))
    assert low.shape == (161, 40)
    assert low[80].argmax() < high[80].argmax()
    assert low[80].max() > 100 * np.median(low[80])


def test_mel_channels_cover_the_range_without_a_hole() -> None:
    """Each channel hears something, channels start at 0 Hz and end at half the rate, and peaks rise."""
    triangles = signals._triangles()
    assert triangles.shape == (40, 201)
    assert (triangles.sum(axis=1) > 0).all()
    assert (np.diff(triangles.argmax(axis=1)) >= 0).all()
    assert triangles[:, 0].max() == triangles[:, -1].max() == 0


def test_pooling_ignores_what_the_mask_leaves_out() -> None:
    """Padding does not change a sentence's vector."""
    hidden = np.array([[[3.0, 4.0], [3.0, 4.0], [90.0, -7.0]]], np.float32)
    assert signals.pooled(hidden, np.array([[1, 1, 0]])).tolist() == [pytest.approx([0.6, 0.8])]


def test_a_voice_is_the_same_each_time() -> None:
    """Sounds are seeded: golden values may rest on them."""
    assert np.array_equal(signals.voiced(120, 0.1), signals.voiced(120, 0.1))
    assert not np.array_equal(signals.voiced(120, 0.1), signals.voiced(120, 0.1, seed=2))
    assert np.abs(signals.voiced(120, 1.0)).max() < 0.5
