"""The shelf keeps the newest few skeletons, and only such as are small and as they were built."""

from __future__ import annotations

import torch
from torch import nn

from runtime.worker.shelf import Shelf, Spare
from runtime.worker.skeleton import Skeleton


class Buffered(nn.Module):
    """A buffer of `count` floats that no file holds, and a parameter."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.work = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(count), persistent=False)


def spare(count: int = 4) -> Spare:
    """A skeleton that just lost its weights."""
    return Spare(Skeleton(lambda: Buffered(count)), {}, warm=True, writes=False)


def test_the_least_recently_used_leave_first_and_a_taken_one_is_gone() -> None:
    """Taking hands over: two mounts must never share a module."""
    shelf = Shelf(kept=2)
    one, two, three = spare(), spare(), spare()
    shelf.put("1", one)
    shelf.put("2", two)
    shelf.put("1", one)
    shelf.put("3", three)
    assert len(shelf) == 2
    assert shelf.take("2") is None
    assert shelf.take("1") is one
    assert shelf.take("1") is None
    assert shelf.take("3") is three


def test_a_heavy_skeleton_is_not_kept() -> None:
    """The weight is that of real tensors; parameters are placeholders."""
    shelf = Shelf(heavy=400)
    assert spare(100).skeleton.weight == 400
    shelf.put("fits", spare(100))
    shelf.put("not", spare(101))
    assert shelf.take("fits") is not None
    assert shelf.take("not") is None


def test_a_module_with_more_tensors_than_it_was_built_with_is_not_kept() -> None:
    """An attribute, an entry of a list, a buffer registered late: each is memory that nobody counts."""
    for grow in (
        lambda module: setattr(module.work, "cache", torch.ones(1)),
        lambda module: setattr(module, "past", [torch.ones(1)]),
        lambda module: module.register_buffer("late", torch.ones(1)),
    ):
        shelf, kept = Shelf(), spare()
        assert not kept.skeleton.grown()
        grow(kept.skeleton.module)
        shelf.put("x", kept)
        assert len(shelf) == 0
