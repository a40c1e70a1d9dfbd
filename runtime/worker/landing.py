"""Weights on their way to a device, and a module that already runs on those that are there.

Belongs here: which chunk a tensor comes with, and waiting for it at the moment it is reached for. Never: copies.

A forward that starts behind the copies needs each weight a little later than the one before it, so computing hides
most of a transfer (PipeSwitch, OSDI'20, section 4.2). Where a layer's call begins says nothing certain about which
weights it uses; reaching for one does. So while copies run, the dicts that a module keeps its tensors in are replaced
by ones that make the compute stream wait for a tensor when it is taken out. Tensors that a module also holds elsewhere
(an LSTM's own list) are waited for before the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

T = TypeVar("T")
_REGISTRIES = ("_parameters", "_buffers")


class Mark(Protocol):
    """A point in the order of copies; see `lanes.Lanes.mark`."""

    def wait(self) -> None:
        """Let the current compute stream go on only once this point is reached; the caller does not block."""
        ...

    def reached(self) -> bool:
        """Whether all copies up to here are complete."""
        ...

    def synchronize(self) -> None:
        """Block until it is."""
        ...


class Way(Protocol):
    """What gates tell when a tensor is reached for; tensors are named by position."""

    @property
    def landed(self) -> bool:
        """Whether gates are needed no longer."""
        ...

    def reach(self, tensor: int) -> None:
        """It is about to be used."""
        ...

    def reach_all(self) -> None:
        """All are about to be used, in no known order."""
        ...

    def finish(self) -> None:
        """Block until all are there."""
        ...


class FirstUse:
    """Notes the order in which a forward reaches for tensors, for uploads to come in it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._seen: set[int] = set()

    @property
    def landed(self) -> bool:
        """Never: it is lifted by whoever wants to know."""
        return False

    def reach(self, tensor: int) -> None:
        """See `Way`."""
        if tensor not in self._seen:
            self._seen.add(tensor)
            self.order.append(tensor)

    def reach_all(self) -> None:
        """Says nothing about an order."""

    def finish(self) -> None:
        """Nothing to wait for."""


class Landing:
    """Copies under way, in order: `marks` end the chunks, `chunk_of` names the last chunk of each tensor."""

    def __init__(self, marks: Sequence[Mark], chunk_of: Sequence[int]) -> None:
        self._marks = marks
        self._chunk_of = chunk_of
        self._passed = -1

    def __repr__(self) -> str:
        return f"<Landing {self._passed + 1} of {len(self._marks)} chunks waited for>"

    def reordered(self, order: Sequence[int]) -> Landing:
        """The same copies for a caller who numbers the tensors otherwise: our `i` is the caller's `order[i]`."""
        chunk_of = [0] * len(self._chunk_of)
        for chunk, name in zip(self._chunk_of, order, strict=True):
            chunk_of[name] = chunk
        return Landing(self._marks, chunk_of)

    def reach(self, tensor: int) -> None:
        """Let what is computed from now on wait for a tensor. Copies are in order, so one wait serves all before."""
        chunk = self._chunk_of[tensor]
        if chunk > self._passed:
            self._marks[chunk].wait()
            self._passed = chunk

    def reach_all(self) -> None:
        """Let what is computed from now on wait for everything."""
        last = len(self._marks) - 1
        if last > self._passed:
            self._marks[last].wait()
            self._passed = last

    @property
    def landed(self) -> bool:
        """Whether everything is there."""
        return not self._marks or self._marks[-1].reached()

    def finish(self) -> None:
        """Block until everything is there."""
        if self._marks:
            self._marks[-1].synchronize()


class _Gated(dict[str, Any]):
    """A registry of a module whose tensors are waited for as they are taken out."""

    def __init__(self, inner: dict[str, Any], landing: Way, at: dict[int, int]) -> None:
        super().__init__(inner)
        self._landing = landing
        self._at = at

    def __getitem__(self, key: str) -> Any:
        return self._reached(super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._reached(super().get(key, default))

    def values(self) -> dict_values[str, Any]:
        self._landing.reach_all()
        return super().values()

    def items(self) -> dict_items[str, Any]:
        self._landing.reach_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._landing.reach_all()
        return super().copy()

    def _reached(self, value: T) -> T:
        tensor = self._at.get(id(value))
        if tensor is not None:
            self._landing.reach(tensor)
        return value


class Gates:
    """Stands between a module and weights that are still landing, until `lift`.

    `tensors` are those stored in the module, by position as in the landing; `early` are positions that have to be there
    before a forward begins, because the module reaches for them in a way that no registry sees.
    """

    def __init__(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], landing: Way, early: Iterable[int] = ()
    ) -> None:
        self._landing = landing
        self._early = tuple(early)
        self._replaced: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
        self._hooks = (
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        )
        at = {id(tensor): position for position, tensor in enumerate(tensors)}
        for owner in module.modules():
            for name in _REGISTRIES:
                registry = cast("dict[str, Any]", owner.__dict__[name])
                if any(id(value) in at for value in registry.values()):
                    owner.__dict__[name] = _Gated(registry, landing, at)
                    self._replaced.append((owner.__dict__, name, registry))

    def __repr__(self) -> str:
        return f"<Gates at {len(self._replaced)} registries, {self._landing!r}>"

    @property
    def closed(self) -> bool:
        """Whether they still stand."""
        return bool(self._replaced)

    def lift(self) -> None:
        """Block until all weights are there, then leave the module as it was. Nothing to do the second time."""
        self._landing.finish()
        self._open()

    def _begin(self, _module: nn.Module, _inputs: object) -> None:
        for position in self._early:
            self._landing.reach(position)

    def _end(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        if self._landing.landed:
            self._open()

    def _open(self) -> None:
        for place, name, registry in self._replaced:
            gated = cast("_Gated", place[name])
            # What a forward registered or replaced meanwhile went into the stand-in.
            for key in gated:
                registry[key] = dict.__getitem__(gated, key)
            place[name] = registry
        self._replaced = []
        for hook in self._hooks:
            hook.remove()
