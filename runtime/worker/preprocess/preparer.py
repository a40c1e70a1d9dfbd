"""The files of a request become its tensors, on threads beside the device's own.

Belongs here: which files, their number and total size, whose they are. Never: formats, models, forwards.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from actors.errors import BadTensor
from runtime.worker.codec import WireTensor
from runtime.worker.preprocess.bad import Undecodable
from runtime.worker.preprocess.shared import SharedResults
from runtime.workers.pipelines import ImagePipeline, Prepared, PreprocessLimits, identity, own_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from runtime.workers.pipelines import Pipeline
    from runtime.workers.port import TensorSpec


class Steps:
    """One input's pipeline, ready to run: importing what it needs is part of the load, not of the first call."""

    __slots__ = ("_make", "batched", "datatype", "identity", "shape")

    def __init__(self, spec: TensorSpec, pipeline: Pipeline, limits: PreprocessLimits) -> None:
        self.datatype = spec.datatype
        self.batched = len(spec.shape) > len(pipeline.element)
        self.shape = own_shape(pipeline, spec.shape)
        self.identity = identity(pipeline)
        self._make: Callable[[bytes], NDArray[Any]]
        if isinstance(pipeline, ImagePipeline):
            from runtime.worker.preprocess.image import image

            self._make = lambda raw: image(raw, pipeline, limits)
        else:
            from runtime.worker.preprocess.sound import sound

            self._make = lambda raw: sound(raw, pipeline, limits)

    def __call__(self, raw: bytes) -> NDArray[Any]:
        """Decode one file. Raises `Undecodable`."""
        if not raw:
            raise Undecodable("is empty")
        return self._make(raw)


class Preparer:
    """Decodes for all models of a worker. `prepare` runs on any thread, best on those of `start`."""

    def __init__(self, limits: PreprocessLimits) -> None:
        self._limits = limits
        self._results = SharedResults(limits.cache)
        self._pool: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"<Preparer {self._results!r}>"

    def snapshot(self) -> Prepared:
        """How much was shared."""
        return self._results.snapshot()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` on a thread for decoding; device thread only. `work` must not raise."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="decode")
        self._pool.submit(work)

    def steps_of(self, inputs: Sequence[TensorSpec]) -> dict[str, Steps]:
        """The inputs that come as files, by name."""
        return {spec.name: Steps(spec, spec.preprocess, self._limits) for spec in inputs if spec.preprocess is not None}

    def prepare(
        self, inputs: Mapping[str, WireTensor], steps: Mapping[str, Steps], unwanted: Callable[[], bool]
    ) -> dict[str, WireTensor]:
        """The inputs with files replaced by tensors. Raises `BadTensor` naming the input.

        `unwanted` is asked between two files; when it says yes, the rest is left out, and nobody may look at it.
        """
        return {
            name: tensor if name not in steps else self._tensor(tensor, steps[name], unwanted)
            for name, tensor in inputs.items()
        }

    def _tensor(self, files: WireTensor, steps: Steps, unwanted: Callable[[], bool]) -> WireTensor:
        found: list[NDArray[Any]] = []
        size = 0
        for place, raw in enumerate(files.array):
            if unwanted():
                break
            try:
                found.append(self._result(raw, steps))
            except Undecodable as fault:
                which = f"file {place} of input" if len(files.array) > 1 else "input"
                raise BadTensor(f"{which} {files.name!r} {fault}") from None
            size += found[-1].nbytes
            if size > self._limits.result:
                raise BadTensor(f"input {files.name!r} becomes more than {self._limits.result} bytes")
        if not found:
            raise BadTensor(f"input {files.name!r} holds no file")
        return WireTensor(files.name, steps.datatype, self._joined(files.name, found) if steps.batched else found[0])

    def _result(self, raw: bytes, steps: Steps) -> NDArray[Any]:
        found = self._results.get(blake3(raw).digest() + steps.identity, lambda: steps(raw))
        if not all(wanted in (-1, had) for wanted, had in zip(steps.shape, found.shape, strict=True)):
            raise Undecodable(f"comes out in shape {list(found.shape)} where the model takes {list(steps.shape)}")
        return found

    @staticmethod
    def _joined(name: str, found: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """One batch. A single result stays a view of what is shared, which nobody can write to."""
        shapes = {array.shape for array in found}
        if len(shapes) > 1:
            one, other = sorted(shapes)[:2]
            raise BadTensor(f"input {name!r}: its files come out in shapes {list(one)} and {list(other)}")
        return found[0][None] if len(found) == 1 else np.stack(found)
