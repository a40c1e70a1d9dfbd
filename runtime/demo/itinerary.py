"""What the tour asks of each model, and how it puts the answer into words.

Real inputs: sentences, synthesised sound, a random crop. Nothing here knows the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from runtime.demo import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from runtime.demo.client import Array

SENTENCES = (
    "A cat is asleep on the warm windowsill.",
    "The kitten naps by the sunny window.",
    "Quarterly revenue grew by nine percent.",
)
TONE = 440.0
ROUNDS = 2
_LIKELY = 0.7
_CHUNK, _CONTEXT = 512, 64


@dataclass(frozen=True, slots=True)
class Visit:
    """One request. `words` reads the outputs; `binary` picks the tensor encoding."""

    model: str
    inputs: Mapping[str, Array]
    words: Callable[[Mapping[str, Array]], str]
    binary: bool = True


def itinerary(tokenizer: Path) -> Iterator[Visit]:
    """Give the visits of the whole tour in order; a visit may depend on the answer to the one before.

    `tokenizer` is MiniLM's tokenizer.json. Two large models per round are more than the device holds, so the second
    round finds models it has met in a lower tier.
    """
    listener = Listener()
    for _ in range(ROUNDS):
        yield sentences(tokenizer)
        yield tone("crepe-full")
        yield speakers()
        yield listener.listen()
        yield listener.listen()
        yield proposals()
        yield crop("mtcnn-rnet", 24)
        yield crop("mtcnn-onet", 48)
        yield tone("crepe-tiny")


def sentences(tokenizer: Path) -> Visit:
    """Three sentences, of which two mean about the same."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.enable_padding()
    encodings = encoder.encode_batch(list(SENTENCES))
    mask = np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64)
    ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)

    def words(outputs: Mapping[str, Array]) -> str:
        vectors = signals.pooled(outputs["last_hidden_state"], mask)
        pairs = {pair: signals.likeness(vectors[pair[0]], vectors[pair[1]]) for pair in combinations(range(3), 2)}
        first, second = max(pairs, key=pairs.__getitem__)
        scores = ", ".join(f"{score:.2f}" for score in pairs.values())
        return f"sentences {first + 1} and {second + 1} mean the same ({scores})"

    return Visit("minilm", {"input_ids": ids, "attention_mask": mask}, words)


def tone(model: str) -> Visit:
    """A pure tone of 440 Hz."""
    frames = signals.frames(signals.sine(TONE, 0.2), 1024, 320)

    def words(outputs: Mapping[str, Array]) -> str:
        hertz = float(np.median(signals.pitch(outputs["activation"])))
        return f"a {TONE:.0f} Hz tone sounds like {hertz:.1f} Hz"

    return Visit(model, {"frames": frames}, words)


def speakers() -> Visit:
    """Three voices, of which the first two are one speaker's."""
    low, high = (700.0, 1220.0, 2600.0), (850.0, 1600.0, 2900.0)
    sounds = [
        signals.voiced(120, 1.6, formants=low, seed=1),
        signals.voiced(120, 1.6, formants=low, seed=2),
        signals.voiced(210, 1.6, formants=high, seed=3),
    ]
    mels = np.stack([signals.mel_spectra(sound)[:160] for sound in sounds])

    def words(outputs: Mapping[str, Array]) -> str:
        one, again, other = outputs["embedding"]
        same, different = signals.likeness(one, again), signals.likeness(one, other)
        return f"same voice {same:.2f}, another voice {different:.2f}"

    return Visit("speaker", {"mels": mels}, words)


class Listener:
    """Silence and a voice, chunk by chunk; the network's state travels with the requests."""

    def __init__(self) -> None:
        sounds = np.stack([np.zeros(signals.RATE, np.float32), signals.voiced(120, 1.0)])
        self._sounds = np.pad(sounds, ((0, 0), (_CONTEXT, 0)))
        self._state: Array = np.zeros((2, 2, 128), np.float32)
        self._at = 0

    def listen(self) -> Visit:
        """Give the next chunk of both, with the state as the last answer left it."""
        chunk = self._sounds[:, self._at : self._at + _CONTEXT + _CHUNK]
        self._at += _CHUNK

        def words(outputs: Mapping[str, Array]) -> str:
            self._state = outputs["next_state"]
            silence, voice = outputs["probability"][:, 0]
            return f"speech in silence {silence:.0%}, in a voice {voice:.0%}"

        return Visit("silero-vad", {"audio": np.ascontiguousarray(chunk), "state": self._state}, words)


def proposals() -> Visit:
    """A random image, searched everywhere at once."""
    image = np.random.default_rng(7).uniform(-1, 1, (1, 3, 48, 64)).astype(np.float32)

    def words(outputs: Mapping[str, Array]) -> str:
        likely = outputs["probability"][0, 1] > _LIKELY
        return f"{int(likely.sum())} of {likely.size} places in noise look like a face"

    return Visit("mtcnn-pnet", {"image": image}, words)


def crop(model: str, side: int) -> Visit:
    """A random crop of the size the network wants, as JSON."""
    image = np.random.default_rng(side).uniform(-1, 1, (1, 3, side, side)).astype(np.float32)

    def words(outputs: Mapping[str, Array]) -> str:
        return f"a random crop is a face: {outputs['probability'][0, 1]:.1%}"

    return Visit(model, {"image": image}, words, binary=False)
