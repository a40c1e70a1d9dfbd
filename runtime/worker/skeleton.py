"""A module without weights that takes them by dict stores: built once, bound once, switched in microseconds.

Belongs here: building without allocating weights, slots, keys. Never: files, devices, forwards.

How it is built: a parameter becomes a meta tensor at the moment it is registered (torch's own registration hook), so
no weight is ever allocated or initialised at random, while buffers and plain tensor attributes are computed for real.
Non-persistent buffers, which no weights file holds, thus have exactly the values that plain PyTorch gives them. A
module whose constructor cannot live with meta parameters is built for real, once, and then stripped.
"""

from __future__ import annotations

import re
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from actors.errors import LoadFailed
from runtime.worker.memory import Watch, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence

    from runtime.worker.landing import Way

Store: TypeAlias = dict[Any, Any] | list[Any]

SMALL = 64 << 10
"""Buffers below this are private copies: models do write batch statistics, counters and caches."""

_SHOWN_KEYS = 20
_OWN = frozenset({"_parameters", "_buffers", "_modules"})


class Extras(NamedTuple):
    """What a slab has and a plain file has not: non-persistent buffers, and names that a filter kept out."""

    buffers: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


_NO_EXTRAS = Extras()


@dataclass(slots=True)
class Cell:
    """One tensor of the module under all its names (tied weights have several) and in all the places that hold it."""

    names: list[str]
    like: torch.Tensor
    parameter: bool
    persistent: bool
    places: list[tuple[Store, Any]] = field(default_factory=list)


# -- building ----------------------------------------------------------------------------------------

_building = threading.local()
_hook_lock = threading.Lock()
_hooked = False


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    seen: MutableMapping[torch.Tensor, nn.Parameter] | None = getattr(_building, "seen", None)
    if seen is None or parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter):
        return None
    if parameter not in seen:  # registered twice (tied): the second time must give the same object
        seen[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return seen[parameter]


def _install_hook() -> None:
    global _hooked  # noqa: PLW0603  # one hook per process; adding and removing it would race with other builds
    with _hook_lock:
        if not _hooked:
            register_module_parameter_registration_hook(cast("Callable[..., None]", _to_meta))
            _hooked = True


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    """Run a factory so that its parameters are meta and everything else is real. Raises what the factory raises."""
    _install_hook()
    _building.seen = WeakTensorKeyDictionary()
    try:
        module = factory()
    except (RuntimeError, TypeError, ValueError):  # what meta tensors raise; the real build tells if it is more
        return _checked(_really(factory))
    finally:
        _building.seen = None
    if any(buffer.is_meta for buffer in _checked(module).buffers()):
        return _really(factory)  # a buffer computed from a parameter
    return module


def _really(factory: Callable[[], nn.Module]) -> nn.Module:
    _building.seen = None
    return factory()


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise LoadFailed(f"the factory gave a {type(module).__name__} instead of a module")
    return module


# -- the skeleton ------------------------------------------------------------------------------------


class Bound:
    """A module's tensors, wrapped and ready to be stored. Made by `Skeleton.bind`; `tensors` follow its cells."""

    def __init__(self, tensors: list[torch.Tensor], stores: list[tuple[Store, Any, torch.Tensor]]) -> None:
        self.tensors = tensors
        self.stores = stores
        self.resident = resident_bytes(tensors)
        self._watch = Watch(tensors)
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001  # torch's own write counter
        self._pristine = {
            at: tensor.clone()
            for at, tensor in enumerate(tensors)
            if _private(isinstance(tensor, nn.Parameter), tensor)
        }

    def __repr__(self) -> str:
        return f"<Bound {len(self.tensors)} tensors {self.resident} B>"

    def references(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        """Weak references to the tensors, with their bytes."""
        return [(weakref.ref(tensor), tensor.nbytes) for tensor in self.tensors]

    def leaked(self) -> int:
        """Bytes that something besides this object holds."""
        return self._watch.leaked()

    def restore(self) -> list[int]:
        """Undo writes to small buffers; return the positions of other tensors that were written."""
        moved = [at for at, tensor in enumerate(self.tensors) if tensor._version != self._versions[at]]  # noqa: SLF001
        for at in moved:
            if at in self._pristine:
                self.tensors[at].copy_(self._pristine[at])
            self._versions[at] = self.tensors[at]._version  # noqa: SLF001
        return [at for at in moved if at not in self._pristine]


class Skeleton:
    """A module in eval mode whose parameters and persistent buffers are placeholders until `activate`."""

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        """Build it. Raises `LoadFailed`, or whatever the factory raises."""
        self.module = build(factory).eval().requires_grad_(requires_grad=False)
        self.cells = _cells(self.module)
        self._strip()
        self._recurrent = [one for one in self.module.modules() if isinstance(one, nn.RNNBase)]
        self._empty = [(store, key, cell.like) for cell in self.cells for store, key in cell.places]
        self._built = _census(self.module)
        self.early = _early(self.module, self.cells)
        self.order = tuple(range(len(self.cells)))

    def used_in(self, order: Sequence[int]) -> None:
        """Remember in which order a forward reaches for cells.

        Small buffers come first: they are copied on the device as soon as they are there. Those never reached for come
        last.
        """
        first = [at for at, cell in enumerate(self.cells) if _private(cell.parameter, cell.like) or at in self.early]
        wanted = dict.fromkeys((*first, *order, *range(len(self.cells))))
        self.order = tuple(wanted)

    @property
    def weight(self) -> int:
        """Bytes of the tensors that no file holds."""
        return resident_bytes(cell.like for cell in self.cells if not cell.like.is_meta)

    def grown(self) -> bool:
        """Whether the module holds tensors in more places than when it was built: a cache that a forward filled."""
        return _census(self.module) != self._built

    def __repr__(self) -> str:
        return f"<Skeleton {type(self.module).__name__} {len(self.cells)} tensors>"

    def _strip(self) -> None:
        """Replace what the weights file will bring by meta placeholders, and let the built values go."""
        for cell in self.cells:
            if cell.persistent and not cell.like.is_meta:
                meta = cell.like.detach().to("meta")
                cell.like = nn.Parameter(meta, requires_grad=False) if cell.parameter else meta
                for store, key in cell.places:
                    store[key] = cell.like

    def bind(
        self,
        names: Collection[str],
        view: Callable[[str], torch.Tensor],
        *,
        cast: bool = False,
        extras: Extras = _NO_EXTRAS,
    ) -> Bound:
        """Match weights with cells, strictly, and wrap each once; tied parameters share the object.

        `names` are the keys of the file and `view` gives one as a tensor; also the buffers of `extras`, which are taken
        where the module has no values of its own. Raises `LoadFailed` listing the keys that are missing, unexpected, or
        of another shape or (unless `cast`) dtype. Nothing is ever left at random values.
        """
        chosen = self._match(names, extras)
        tensors: list[torch.Tensor] = []
        unlike: list[str] = []
        for cell, name in zip(self.cells, chosen, strict=True):
            tensor = _absent(cell) if name is None else view(name)
            if name is not None and tensor.shape != cell.like.shape:
                unlike.append(f"{name} {list(tensor.shape)} where {list(cell.like.shape)} is needed")
            elif tensor.dtype != cell.like.dtype:
                if not cast:
                    unlike.append(f"{name} {_word(tensor)} where {_word(cell.like)} is needed")
                tensor = tensor.to(cell.like.dtype)
            tensors.append(_wrap(cell, tensor))
        if unlike:
            raise LoadFailed(f"{len(unlike)} tensors do not match the module: {_listed(unlike)}")
        return self.stored(tensors)

    def stored(self, tensors: Sequence[torch.Tensor], landing: Way | None = None) -> Bound:
        """Bind tensors that already follow the cells, such as copies on another device, perhaps still on their way."""
        if landing is not None:
            for at, cell in enumerate(self.cells):
                if _private(cell.parameter, tensors[at]):
                    landing.reach(at)  # `Bound` copies these
        wrapped = [
            nn.Parameter(tensor, requires_grad=False)
            if cell.parameter and not isinstance(tensor, nn.Parameter)
            else tensor
            for cell, tensor in zip(self.cells, tensors, strict=True)
        ]
        pairs = zip(self.cells, wrapped, strict=True)
        return Bound(wrapped, [(store, key, tensor) for cell, tensor in pairs for store, key in cell.places])

    def activate(self, bound: Bound) -> None:
        """Make the module callable: one dict store per place."""
        for store, key, tensor in bound.stores:
            store[key] = tensor
        for recurrent in self._recurrent:
            _relink(recurrent)

    def evict(self) -> None:
        """Put the placeholders back; the module then refuses to run instead of running on something stale."""
        for store, key, tensor in self._empty:
            store[key] = tensor
        for recurrent in self._recurrent:
            _relink(recurrent)

    def _match(self, names: Collection[str], extras: Extras) -> list[str | None]:
        """For each cell the key that fills it, None for what the file need not hold."""
        known = {name for cell in self.cells for name in cell.names}
        # Where a file has several names of one tensor, the last one counts, as in `load_state_dict`.
        chosen = [
            next((name for name in reversed(cell.names) if name in (names if cell.persistent else carried)), None)
            for cell, carried in ((cell, extras.buffers if cell.like.is_meta else ()) for cell in self.cells)
        ]
        missing = [
            cell.names[0]
            for cell, name in zip(self.cells, chosen, strict=True)
            if name is None and cell.persistent and not _counter(cell)
        ]
        unexpected = [name for name in sorted(names) if name not in known and not self._ignored(name)]
        if missing or unexpected:
            words = [f"{len(keys)} {word}: {_listed(keys)}" for word, keys in _named(missing, unexpected) if keys]
            if filtered := sum(name in extras.left_out for name in missing):
                words.append(f"the manifest's `tensors` leave out {filtered} of the missing")
            raise LoadFailed(f"the weights do not fit the module; {'; '.join(words)}")
        return chosen

    def _ignored(self, name: str) -> bool:
        """Keys that the architecture's author declares as leftovers of older versions."""
        patterns = getattr(self.module, "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)


# -- cells -------------------------------------------------------------------------------------------


def _cells(module: nn.Module) -> list[Cell]:
    cells: dict[int, Cell] = {}
    seen: set[int] = set()
    # Duplicates stay: a module reachable under two names has its keys under both, as in `state_dict`.
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for store in (owner._parameters, owner._buffers):  # noqa: SLF001  # the slots are the point
            for key, tensor in store.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                persistent = key not in owner._non_persistent_buffers_set  # noqa: SLF001
                cell = cells.setdefault(id(tensor), Cell([], tensor, store is owner._parameters, persistent=False))  # noqa: SLF001
                cell.names.append(name)
                cell.persistent |= persistent
                if id(owner) not in seen:
                    cell.places.append((store, key))
        seen.add(id(owner))
    for owner in module.modules():
        for store, key, tensor in _elsewhere(owner):
            if (found := cells.get(id(tensor))) is not None:
                found.places.append((store, key))
    return list(cells.values())


def _elsewhere(owner: nn.Module) -> Iterator[tuple[Store, Any, torch.Tensor]]:
    """Tensors that a module holds outside its registries, in lists and dicts of its own."""
    for key, value in owner.__dict__.items():
        if key in _OWN:
            continue
        if isinstance(value, torch.Tensor):
            yield owner.__dict__, key, value
        elif isinstance(value, list):
            yield from ((value, at, one) for at, one in enumerate(value) if isinstance(one, torch.Tensor))
        elif isinstance(value, dict):
            yield from ((value, at, one) for at, one in value.items() if isinstance(one, torch.Tensor))


def _early(module: nn.Module, cells: Sequence[Cell]) -> frozenset[int]:
    """Cells that a forward may reach for without asking a registry: in lists, and in an LSTM's own."""
    registries = {id(store) for owner in module.modules() for store in (owner._parameters, owner._buffers)}  # noqa: SLF001
    recurrent = {
        id(store)
        for owner in module.modules()
        if isinstance(owner, nn.RNNBase)
        for store in (owner._parameters,)  # noqa: SLF001
    }
    return frozenset(
        at
        for at, cell in enumerate(cells)
        if any(id(store) not in registries or id(store) in recurrent for store, _ in cell.places)
    )


def _private(parameter: bool, tensor: torch.Tensor) -> bool:  # noqa: FBT001  # a property of the tensor, not a switch
    return not parameter and tensor.nbytes < SMALL


def _census(module: nn.Module) -> int:
    """How many tensors a module holds, registered or not; those deeper than a list or dict are not seen."""
    return sum(
        sum(tensor is not None for store in (owner._parameters, owner._buffers) for tensor in store.values())  # noqa: SLF001
        + sum(1 for _ in _elsewhere(owner))
        for owner in module.modules()
    )


def _relink(recurrent: nn.RNNBase) -> None:
    """Point an LSTM's own list at the weights just stored.

    Left alone, its forward would notice the change and make a new list, which no eviction would know of.
    """
    weights = [getattr(recurrent, name) for name in recurrent._flat_weights_names]  # noqa: SLF001  # no public way
    recurrent._flat_weights = weights  # noqa: SLF001
    recurrent._flat_weight_refs = [weakref.ref(weight) for weight in weights]  # noqa: SLF001


def _counter(cell: Cell) -> bool:
    """Batch counters are unused in eval and absent from old files; torch fills them with zero too."""
    return cell.names[0].endswith("num_batches_tracked")


def _absent(cell: Cell) -> torch.Tensor:
    """A value for what the file does not hold: the built one, or zero for a batch counter."""
    return torch.zeros(cell.like.shape, dtype=cell.like.dtype) if cell.persistent else cell.like


def _wrap(cell: Cell, tensor: torch.Tensor) -> torch.Tensor:
    if cell.parameter:
        return nn.Parameter(tensor, requires_grad=False)
    return tensor.clone() if _private(cell.parameter, tensor) else tensor


def _named(missing: list[str], unexpected: list[str]) -> tuple[tuple[str, list[str]], ...]:
    return ("missing", missing), ("unexpected", unexpected)


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
    return ", ".join(key[:200] for key in keys[:_SHOWN_KEYS]) + more


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
