"""What the front process asks of a device worker, and the values that cross the boundary.

Shared by both sides of the ring, so: no torch, no Starlette, msgspec structs only (MessagePack on the wire,
never pickle).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from runtime.workers.pipelines import Pipeline, files_of

if TYPE_CHECKING:
    from actors.ports import EvictReport, Held, LoadReport
    from actors.residency.model import Model, ModelKey

Parts: TypeAlias = tuple[bytes | memoryview, ...]
"""A body in pieces that follow one another; memoryviews of single bytes."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output: Open Inference Protocol datatype, shape with -1 for a variable dimension.

    `preprocess` says how the worker makes it out of a file; the client then sends `wire`.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    preprocess: Pipeline | None = None

    @property
    def wire(self) -> TensorSpec:
        """What a client sends: the tensor itself, or as many files as it is made of."""
        if self.preprocess is None:
            return self
        return TensorSpec(self.name, "BYTES", files_of(self.preprocess, self.shape))


class BuilderSpec(msgspec.Struct, frozen=True):
    """How to build the module. `kind` is `transformers` or `python`.

    For `transformers`: `config` is the parsed config.json, `target` an optional architecture class name.
    For `python`: `target` is `package.module:factory`, `config` its keyword arguments.
    `dtype` (`fp32`, `fp16`, `bf16`) converts the module and the floating inputs of its forward; empty leaves both.
    """

    kind: str
    target: str = ""
    config: dict[str, object] = {}
    dtype: str = ""


class BatchSpec(msgspec.Struct, frozen=True):
    """Micro-batching. `max_size` 1 means off (also for models without a batch dimension); `delay` in seconds."""

    max_size: int = 1
    delay: float = 0.0


class ArtefactSpec(msgspec.Struct, frozen=True):
    """Where compiled artefacts are kept between lives: a folder of ours, at most `size` bytes in it."""

    folder: str = ""
    size: int = 0


class LoadSpec(msgspec.Struct, frozen=True):
    """All that a worker needs to make a model callable. `weights` is an immutable, checked file in our own cache.

    `engine` says what it is: safetensors for `eager`, else a file that holds the graph as well (but OpenVINO's, which
    is in `graph`). `trusted`: manifest and operator both said that the file may run code. `compile` asks for a compiled
    twin that takes over when it is ready; without a folder in `artefacts` nothing is kept for the next worker.
    """

    key: str
    fingerprint: str
    weights: str
    weights_bytes: int
    builder: BuilderSpec
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch: BatchSpec = BatchSpec()
    cast: bool = False
    reject_nonfinite: bool = False
    warm_up: bool = True
    json_depth: int = 64
    engine: str = "eager"
    graph: bytes = b""
    trusted: bool = False
    compile: bool = False
    artefacts: ArtefactSpec = ArtefactSpec()


class Note(msgspec.Struct, frozen=True, tag=True):
    """What became of compiling a resident: `phase` is started, finished, reused (an artefact was kept) or failed.

    `seconds` it took, `saved` seconds that making it anew would have taken on top, `cause` in words.
    """

    key: str
    fingerprint: str
    phase: str
    seconds: float = 0.0
    saved: float = 0.0
    cause: str = ""


class Call(msgspec.Struct, frozen=True):
    """One inference. `body` is the HTTP body as it came, decompressed.

    `json_length`: None when the whole body is JSON; 0 for a raw binary request; else the length of the JSON part.
    """

    key: str
    body: bytes
    json_length: int | None = None


class Timings(msgspec.Struct, frozen=True):
    """Where a call spent its time in the worker, nanoseconds; `batch` calls shared the forward."""

    queue: int = 0
    decode: int = 0
    infer: int = 0
    encode: int = 0
    batch: int = 1


class Answer(msgspec.Struct, frozen=True):
    """One result: a V2 body. `json_length` is None for a pure JSON body, else the length of its JSON part."""

    body: bytes
    json_length: int | None
    timings: Timings


class Laid(msgspec.Struct, frozen=True):
    """An `Answer` inside the worker whose body is still in pieces.

    They view what the forward gave, which may view the caller's body: copy them before the caller is told.
    """

    body: Parts
    json_length: int | None
    timings: Timings


class DeviceWorker(Protocol):
    """A device worker as the front sees it: `actors.ports.Residence` plus inference.

    `infer` may only be called under a lease. It raises `Invalid` for the caller's mistakes, `InferenceFailed` for
    the model's, `WorkerDied` when the worker ends meanwhile (within a second of its exit). Cancelling it leaves the
    slot to the worker until the work is done, so memory is never reused under a running forward.
    """

    @property
    def device(self) -> str:
        """`cpu:0`, `cuda:1`."""
        ...

    async def load(self, model: Model) -> LoadReport:
        """See `Residence.load`."""
        ...

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        ...

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        ...

    def release_host(self, fingerprint: str) -> None:
        """Have the worker drop its mapping and bound views of weights that left the host tier.

        It does so before any order given later, and at the latest a few milliseconds from now. Never raises: what
        goes wrong is in the worker's log, and nothing happens where no worker is.
        """
        ...

    async def infer(self, call: Call) -> Answer:
        """Run one inference."""
        ...
