"""What a worker found out about a model and a weights file can't know: first use, ties, and computed buffers.

Belongs here: values, and how they are spelled for the control channel. Never: torch; the worker fills them in.
"""

from __future__ import annotations

import msgspec

from actors.errors import CorruptWeights

BUFFERS_CAP = 8 << 20
"""Bytes of computed buffers that travel; beyond it none do, and each worker computes them as before."""


CAP = 12 << 20
"""Bytes of a whole recipe: a frame of the control channel has to hold it."""


class Computed(msgspec.Struct, frozen=True):
    """One non-persistent buffer: safetensors dtype, shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


class Recipe(msgspec.Struct, frozen=True):
    """How to lay a model's slab.

    `order` are names of tensors as a traced forward first used them, `ties` the names that share one tensor in the
    module, in its own order, and `buffers` the non-persistent ones by name.
    """

    order: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    buffers: dict[str, Computed] = {}

    def spelled(self) -> bytes:
        """As MessagePack; empty if it is too long to travel."""
        raw = msgspec.msgpack.encode(self)
        return raw if len(raw) <= CAP else b""


def recipe_from(raw: bytes) -> Recipe:
    """Read what `spelled` gave. Raises `CorruptWeights`: it comes from a process that runs models' code."""
    try:
        return msgspec.msgpack.decode(raw, type=Recipe)
    except (msgspec.DecodeError, RecursionError):
        raise CorruptWeights("the worker's recipe of a slab cannot be read") from None
