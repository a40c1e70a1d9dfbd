"""What a slab should know of a module: the order of first use, tied names, computed buffers.

Belongs here: reading a skeleton. Never: finding the order (`Mount.watched`), or writing files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.tiers.recipe import BUFFERS_CAP, Computed, Recipe
from runtime.worker.mapping import TORCH_DTYPES

if TYPE_CHECKING:
    from runtime.worker.skeleton import Cell, Skeleton

_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


def recipe_of(skeleton: Skeleton) -> Recipe:
    """What the cells of a skeleton say, in the order in which a forward reached for them."""
    buffers = {cell.names[0]: one for cell in skeleton.cells if (one := _computed(cell)) is not None}
    if sum(len(one.content) for one in buffers.values()) > BUFFERS_CAP:
        buffers = {}
    order = tuple(skeleton.cells[at].names[0] for at in skeleton.order)
    ties = tuple(tuple(cell.names) for cell in skeleton.cells if len(cell.names) > 1)
    return Recipe(order, ties, buffers)


def _computed(cell: Cell) -> Computed | None:
    word = _WORDS.get(cell.like.dtype)
    if cell.persistent or cell.like.is_meta or word is None or cell.like.nbytes > BUFFERS_CAP:
        return None
    # By bytes: numpy has no bfloat16.
    flat = cell.like.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return Computed(word, tuple(cell.like.shape), flat.numpy().tobytes())
