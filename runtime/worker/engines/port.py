"""What a served model is to the runner, whatever runs it, and the checks that every engine shares.

Belongs here: the port. Never: torch, a library that runs models. One contract suite holds for all implementations:
`tests/contracts/test_engines.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from actors.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from runtime.worker.codec import WireTensor
    from runtime.workers.port import TensorSpec


class Runs(Protocol):
    """One model, callable. Not thread-safe: one forward at a time.

    `answer` raises `InferenceFailed` when the model gives something else than it declared, and whatever the model
    raises; it keeps nothing of its inputs. `warm_up` is one forward with small zero inputs.
    """

    def answer(self, inputs: Mapping[str, WireTensor], wanted: Collection[str]) -> dict[str, WireTensor]:
        """Named tensors in, those of `wanted` that the model has out, in their declared datatypes."""
        ...

    def warm_up(self) -> None:
        """Raise what a forward raises at the last size tried."""
        ...


class Kept(NamedTuple):
    """How a library that compiles what it opens came to its code: `seconds` it took, `saved` if it was kept."""

    reused: bool
    seconds: float
    saved: float = 0.0


class Opened(Protocol):
    """An artefact in its library, holding memory until the last reference is gone; see `package.py`."""

    @property
    def runs(self) -> Runs:
        """What to call."""
        ...

    @property
    def witness(self) -> object:
        """What lives exactly as long as the memory does."""
        ...

    @property
    def weights(self) -> int:
        """Bytes of weights that it surely holds: no reading below them is believed."""
        ...

    @property
    def mapped(self) -> int:
        """Bytes of files that stay mapped, which no allocator counts."""
        ...


WARM_EXTENTS = (8, 64, 1)
"""Sizes tried for variable dimensions.

Deep convolutions need more than a few pixels; a batch that is not the first dimension has to agree with the others'.
"""


def warm_shape(spec: TensorSpec, extent: int) -> tuple[int, ...]:
    """A small shape: one row where the first dimension is variable, `extent` for the other variable ones."""
    return tuple(size if size >= 0 else (extent if axis else 1) for axis, size in enumerate(spec.shape))


def warm_extents(inputs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The sizes worth trying for these inputs."""
    variable = any(extent < 0 for spec in inputs for extent in spec.shape[1:])
    return WARM_EXTENTS if variable else WARM_EXTENTS[:1]


def check_declared(
    kind: str, declared: Sequence[TensorSpec], found: Mapping[str, tuple[str, tuple[int, ...] | None]]
) -> None:
    """Compare tensors of the manifest with those of the file: datatype, rank, extents; `kind` is input or output.

    `found` maps names to datatype and shape (-1 for variable, None for an unknown rank). Raises `LoadFailed`, naming
    the tensor.
    """
    for spec in declared:
        if spec.name not in found:
            known = ", ".join(sorted(found)[:20]) or "none"
            raise LoadFailed(f"{kind} {spec.name!r} is not in the file; it has {known}")
        datatype, shape = found[spec.name]
        if datatype != spec.datatype:
            raise LoadFailed(f"{kind} {spec.name!r} is {datatype} in the file, {spec.datatype} in the manifest")
        if shape is None:
            continue
        fits = len(shape) == len(spec.shape) and all(
            # An output's variable dimension may well be known to the manifest, an input's fixed one may not vary.
            have in {-1, want} or (kind == "output" and want == -1)
            for have, want in zip(shape, spec.shape, strict=True)
        )
        if not fits:
            raise LoadFailed(f"{kind} {spec.name!r} has shape {list(shape)} in the file, {list(spec.shape)} here")


def check_complete(declared: Sequence[TensorSpec], required: Collection[str]) -> None:
    """Raise `LoadFailed` for an input that the file wants and the manifest does not declare."""
    missing = sorted(set(required) - {spec.name for spec in declared})
    if missing:
        raise LoadFailed(f"the file needs input {missing[0]!r}, which the manifest does not declare")
