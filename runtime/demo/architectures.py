"""The factories that the demo's manifests name: networks whose published weights load into them strictly.

Networks are in `pitch.py`, `faces.py` and `voice.py`, written from their papers in plain torch under the published
parameter names. No weights and no I/O here; a module returned from here is in eval mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.demo.faces import OutputNet, ProposalNet, RefineNet
from runtime.demo.pitch import FILTERS, Crepe
from runtime.demo.voice import SileroVad, SpeakerEncoder

if TYPE_CHECKING:
    from torch import nn


def crepe(capacity: str = "full") -> nn.Module:
    """Build CREPE. `capacity` is `full` (89 MB) or `tiny` (2 MB); anything else raises ValueError."""
    if capacity not in FILTERS:
        msg = f"capacity is {' or '.join(sorted(FILTERS))}, not {capacity!r}"
        raise ValueError(msg)
    return Crepe(FILTERS[capacity]).eval()


def mtcnn_pnet() -> nn.Module:
    """Build MTCNN's proposal network."""
    return ProposalNet().eval()


def mtcnn_rnet() -> nn.Module:
    """Build MTCNN's refinement network."""
    return RefineNet().eval()


def mtcnn_onet() -> nn.Module:
    """Build MTCNN's output network."""
    return OutputNet().eval()


def silero_vad() -> nn.Module:
    """Build Silero VAD for 16 kHz."""
    return SileroVad().eval()


def speaker_encoder() -> nn.Module:
    """Build the GE2E speaker encoder."""
    return SpeakerEncoder().eval()
