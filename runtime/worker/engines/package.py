"""An artefact on this device: opened when it becomes resident, gone when it leaves, measured both times.

Belongs here: the life of one opened file, with the same verbs as `mount.Mount`. Never: how a library opens or runs it.
Nothing of it survives an eviction but the file's pages, which the host tier keeps; it is opened anew the next time.
"""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from actors.errors import Broken, LoadFailed
from runtime.tiers.formats import check_file
from runtime.worker.memory import Meter
from runtime.workers.heap import give_back

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

    from runtime.worker.codec import WireTensor
    from runtime.worker.engines.port import Kept, Opened, Runs
    from runtime.worker.mount import Steps
    from runtime.workers.port import LoadSpec

_OPENERS: Final = {
    "export": "runtime.worker.engines.programs:Exported",
    "aot": "runtime.worker.engines.programs:Precompiled",
    "torchscript": "runtime.worker.engines.programs:Scripted",
    "onnx": "runtime.worker.engines.onnx:OnnxModel",
    "openvino": "runtime.worker.engines.openvino:OpenVinoModel",
}
"""Imported when first needed: each library costs its import once."""

_TRUSTED: Final = frozenset({"export", "aot", "torchscript"})


_ALONE: Final = threading.Lock()
"""Held while a file is opened and measured: two at once would be counted as part of each other."""


class _Opener(Protocol):
    def __call__(self, spec: LoadSpec, device: torch.device) -> Opened:
        """Open the file. Raises `ForeloadError`, or whatever the library does."""
        ...


def opener_of(spec: LoadSpec) -> _Opener:
    """What opens a spec's file. Raises `LoadFailed` if it may not, or is not installed."""
    where = _OPENERS.get(spec.engine)
    if where is None:
        raise LoadFailed(f"engine {spec.engine[:32]!r} is unknown; known are eager, {', '.join(_OPENERS)}")
    if spec.engine in _TRUSTED and not spec.trusted:
        raise LoadFailed(f"a file for engine {spec.engine} can run code, which nobody allowed (`trust`)")
    module, _, name = where.partition(":")
    return cast("_Opener", getattr(importlib.import_module(module), name))


class Package:
    """One fingerprint's artefact. Any number of keys may use it; `users` counts them. See `Mount` for the verbs."""

    def __init__(self, spec: LoadSpec, steps: Steps, device: torch.device) -> None:
        """Check the file. Raises `ForeloadError` or `Cancelled`."""
        self.fingerprint = spec.fingerprint
        self.users = 0
        self.warm = False
        self.stale = False
        self.doomed = False
        self.failed = False
        self.spared = False
        self.engines: dict[str, tuple[LoadSpec, Runs]] = {}
        self.calm = threading.Lock()
        self._spec = spec
        self._device = device
        self._open = opener_of(spec)
        self._meter = Meter(device)
        self._opened: Opened | None = None
        self._parting: list[tuple[Opened, int]] = []
        self._resident = 0
        with steps("check"):
            # Again, after the disk tier's: these bytes may have come in under another engine's name.
            check_file(Path(spec.weights), spec.engine)

    def __repr__(self) -> str:
        return f"<Package {self._spec.engine} {self.fingerprint[:8]} {self._resident} B {self.users} users>"

    @property
    def resident(self) -> int:
        """Bytes measured while it was opened and warmed up; 0 while it is not open."""
        return self._resident if self._opened is not None else 0

    def engine(self, spec: LoadSpec, device: torch.device) -> Runs:
        """What calls run on; it stays the same over evictions."""
        del spec, device
        return Current(self)

    def settle(self) -> None:
        """Everything is there once it is open."""

    def untwin(self) -> None:
        """A twin goes with what it was attached to."""

    def spare(self) -> None:
        """Nothing outlives the file's stay on the host."""

    @property
    def kept(self) -> Kept | None:
        """What the library compiled at the last opening, or was spared; None if it does not compile."""
        return getattr(self._opened, "kept", None)

    @property
    def current(self) -> Runs:
        """The opened model. Raises `Broken` while it is not resident."""
        if self._opened is None:
            raise Broken("the model is not open")
        return self._opened.runs

    def activate(self) -> None:
        """Open the file, unless it is open."""
        if self._opened is not None:
            return
        with _ALONE:
            self._meter.start()
            self._opened = self._open(self._spec, self._device)
            # Beside other work the reading is rough.
            self._resident = max(self._meter.grown() + self._opened.mapped, self._opened.weights, 1)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a first forward: count the workspace that the library keeps as well."""
        with _ALONE:
            self._meter.start()
            yield
            self._resident += self._meter.grown()

    def warmed(self) -> None:
        """After the first forward."""
        self.warm = True

    def deactivate(self) -> int:
        """Take it out of service. Its memory goes with `part`, since closing takes longer than a lock may be held."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._parting.append((opened, self._resident))
        self.warm = False
        return 0

    def part(self) -> int:
        """Close what was taken out of service; bytes that something still holds."""
        leaked = 0
        while self._parting:
            opened, resident = self._parting.pop()
            gone = weakref.ref(opened.witness)
            del opened
            if gone() is not None:
                gc.collect()
            leaked += resident if gone() is not None else 0
            give_back()  # unlike mapped weights these came from the heap, which would keep them
        return leaked


class Current:
    """Forwards each call to what is open now."""

    __slots__ = ("_package",)

    def __init__(self, package: Package) -> None:
        self._package = package

    def __repr__(self) -> str:
        return f"<Current of {self._package!r}>"

    def answer(self, inputs: Mapping[str, WireTensor], wanted: Collection[str]) -> dict[str, WireTensor]:
        """See `Runs.answer`."""
        return self._package.current.answer(inputs, wanted)

    def warm_up(self) -> None:
        """See `Runs.warm_up`."""
        self._package.current.warm_up()
