"""The models of one device: load, evict, run. What `main.py` and a thread in the front drive alike.

Belongs here: who is resident, and undoing what fails. Never: transport, processes, how weights are read or run.
`submit` and `step` belong to the device thread; everything else may come from any thread.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec
import torch

from actors.errors import Broken, Conflict, ForeloadError
from runtime.worker.builders import factory_for, sets_default_dtype
from runtime.worker.codec import Codec
from runtime.worker.compiler import Compiler
from runtime.worker.cuda import CudaDevice
from runtime.worker.engine import Engine
from runtime.worker.engines.package import Package
from runtime.worker.faults import load_error
from runtime.worker.mount import Cancelled, Mount, Steps
from runtime.worker.rehearse import rehearse
from runtime.worker.runner import Runner, Served, Submission
from runtime.worker.shelf import Shelf
from runtime.worker.skeleton_store import store_at
from runtime.worker.twin import Twin, compare
from runtime.workers.heap import give_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.worker.artefacts import Entry
    from runtime.workers.pipelines import Prepared, PreprocessLimits
    from runtime.workers.port import Answer, Laid, LoadSpec, Note

__all__ = ["Cancelled", "Core", "Evicted", "Loaded", "Resident", "Submission", "rehearse"]

TRIM_SECONDS = 10.0
"""Between two times that free heap goes back to the system."""


class Loaded(msgspec.Struct, frozen=True):
    """How a load went: bytes measured, phases with seconds, and whether a module that existed was used."""

    resident: int
    steps: tuple[tuple[str, float], ...] = ()
    reused: bool = False
    recipe: bytes = b""
    """What a slab of these weights should look like (`runtime.tiers.recipe`), where there is none yet."""


class Evicted(msgspec.Struct, frozen=True):
    """How an eviction went: bytes that came back, and bytes that something still holds."""

    returned: int
    leaked: int = 0


class Resident(msgspec.Struct, frozen=True):
    """One model that can be called."""

    key: str
    fingerprint: str
    resident: int
    in_flight: int


class _Flight:
    """One load at a time per fingerprint; a class of its own, because a plain lock cannot be referred to weakly."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Core:
    """Everything one device worker holds."""

    def __init__(
        self,
        device: str,
        allow: tuple[str, ...] = (),
        threads: int = 1,
        *,
        pinned: int = 0,
        preprocess: PreprocessLimits | None = None,
        skeletons: str = "",
    ) -> None:
        """`device` is `cpu:0` or `cuda:1`; `allow` names modules that builders may call; `threads` per forward.

        `pinned` bytes of page-locked memory serve uploads to a GPU; `preprocess` limits inputs that come as files.
        `skeletons` is the folder in which skeletons outlive this process; empty for none.
        """
        torch.set_num_threads(threads)
        # Not `cpu:0`: torch takes that for another device than `cpu`, and would copy each input to reach it.
        self._device = torch.device("cpu" if device.startswith("cpu") else device)
        self._cuda = CudaDevice(self._device, pinned) if self._device.type == "cuda" else None
        self._allow = allow
        self._mounts: dict[str, Mount | Package] = {}
        self._served: dict[str, Served] = {}
        self._shelf = Shelf()
        self._store = store_at(skeletons, allow)
        self._flights: WeakValueDictionary[str, _Flight] = WeakValueDictionary()
        self._books = threading.RLock()  # over the four above; held for pointer moves only
        self._turn = threading.Lock()  # one batch, or one build that changes process-wide torch settings
        self._quiet = threading.Lock()  # the same between warm-ups and such builds
        self._next_trim = 0.0
        self._runner = Runner(self._device, self._turn, limits=preprocess)
        self._compiler = Compiler(self._device, allow, self._attach)

    def __repr__(self) -> str:
        return f"<Core {self._device} {len(self._served)} resident {len(self._mounts)} mounted>"

    # -- loading -------------------------------------------------------------------------------------

    def load(self, spec: LoadSpec, cancelled: Callable[[], bool]) -> Loaded:
        """Make a model callable.

        Either returns with it resident, or raises with nothing held: a `ForeloadError`, or `Cancelled` when
        `cancelled()` turns true between two steps. What was mapped for this load alone is unmapped then.
        """
        with self._books:
            flight = self._flights.setdefault(spec.fingerprint, _Flight())
        with flight.lock:
            outcome = self._attempt(spec, Steps(cancelled))
        if isinstance(outcome, Loaded):
            return outcome
        raise outcome  # raised here, where no frame of the attempt keeps its weights alive

    def _attempt(self, spec: LoadSpec, steps: Steps) -> Loaded | ForeloadError | Cancelled:
        with self._books:
            held = self._served.get(spec.key)
            if held is not None and held.spec.fingerprint == spec.fingerprint:
                return Loaded(held.resident, reused=True)
            mount = self._mounts.get(spec.fingerprint)
            if mount is not None:
                mount.users += 1  # claimed before the lock is let go, so that an eviction can't take it away
        reused = mount is not None
        try:
            if mount is None:
                mount = self._mounted(spec, steps)
            served, recipe = self._callable(mount, spec, steps)
        except Cancelled:
            self._unclaim(mount, reused=reused)
            return Cancelled()
        except (Exception, SystemExit) as fault:  # noqa: BLE001  # factories and modules may raise anything
            if mount is not None:
                mount.failed = True
            self._unclaim(mount, reused=reused)
            if self._store is not None:
                self._store.drop(spec)  # the next attempt builds
            return load_error(fault, spec.key)
        self._admit(served)
        self._keep(spec, mount, served)
        return Loaded(served.resident, tuple(steps.taken), reused or mount.spared, recipe)

    def _keep(self, spec: LoadSpec, mount: Mount | Package, served: Served) -> None:
        """See to what a later load, or a later worker, gains by."""
        if isinstance(mount, Mount):
            draft, mount.draft = mount.draft, None
            if draft is not None and self._store is not None:
                self._store.keep(draft, warm=mount.warm, writes=mount.writes)
        if isinstance(mount, Package) and mount.kept is not None:
            self._compiler.note(spec, mount.kept)
        elif spec.compile and not getattr(served.engine, "twin", None):
            self._compiler.want(spec)

    def _mounted(self, spec: LoadSpec, steps: Steps) -> Mount | Package:
        mount = self._built(spec, steps) if spec.engine == "eager" else Package(spec, steps, self._device)
        mount.users = 1
        with self._books:
            self._mounts[spec.fingerprint] = mount
        return mount

    def _built(self, spec: LoadSpec, steps: Steps) -> Mount:
        factory = factory_for(spec.builder, self._allow)
        if sets_default_dtype(spec.builder):
            build = factory

            def factory() -> torch.nn.Module:
                with self._quiet, self._turn:
                    return build()

        with self._books:
            spare = self._shelf.take(spec.fingerprint)
        known = spare is not None
        if spare is None and self._store is not None:
            with steps("restore"):
                spare = self._store.take(spec)
            if spare is not None and self._cuda is not None:
                spare = replace(spare, warm=False)  # a GPU's kernels are loaded by each process' first forward
        try:
            mount = Mount(spec, factory, steps, self._cuda, spare)
        except Cancelled:
            if spare is not None:
                with self._books:
                    self._shelf.put(spec.fingerprint, spare)
            raise
        mount.told = known
        if spare is None and self._store is not None:
            mount.draft = self._store.draft(spec, mount.skeleton)
        return mount

    def _callable(self, mount: Mount | Package, spec: LoadSpec, steps: Steps) -> tuple[Served, bytes]:
        known = mount.engines.get(spec.key)
        if known is None or known[0] != spec:
            known = spec, mount.engine(spec, self._device)
        engine = known[1]
        recipe = b""
        with steps("activate"):
            mount.activate()
        if not mount.warm and spec.warm_up:
            with steps("warm_up"), self._quiet:
                with mount.watched():
                    engine.warm_up()
                mount.warmed()
        if isinstance(mount, Mount) and mount.warm and not mount.told:
            recipe, mount.told = mount.recipe(), True
        steps.check()
        mount.engines[spec.key] = known
        codec = Codec(
            spec.key, spec.inputs, spec.outputs, reject_nonfinite=spec.reject_nonfinite, json_depth=spec.json_depth
        )
        served = Served(spec, engine, codec, mount.resident, self._runner.preparer.steps_of(spec.inputs))
        return served, recipe

    def _admit(self, served: Served) -> None:
        """Serve it from now on. What served that key before goes once its last call is answered."""
        with self._books:
            old = self._served.get(served.spec.key)
            self._served[served.spec.key] = served
            if old is None:
                return
            if old.in_flight:
                old.idle = partial(self._retire, old)
                return
        self._retire(old)

    # -- compiled twins ------------------------------------------------------------------------------

    def listen(self, tell: Callable[[Note], None]) -> None:
        """Hear of compilations, from a background thread."""
        self._compiler.listen(tell)

    def compiled(self, timeout: float) -> bool:
        """Wait until no twin is being made; False when it took longer."""
        return self._compiler.settled(timeout)

    def _attach(self, spec: LoadSpec, entry: Entry) -> bool:
        """Give a resident its twin; False if it is not resident any more. Raises if the twin is no good."""
        with self._books:
            mount = self._mounts.get(spec.fingerprint)
        if mount is None:
            return False
        with mount.calm:  # an eviction waits until this is over
            if not self._resident(spec):
                return False
            engine = mount.current if isinstance(mount, Package) else mount.engines[spec.key][1]
            assert isinstance(engine, Engine)
            mount.settle()
            twin = Twin(entry.folder, entry.facts, engine, self._device, spec.artefacts)
            with self._turn:
                compare(engine, twin, self._device)
            with self._books:
                if not self._resident(spec):
                    return False
                engine.twin = twin
        return True

    def _resident(self, spec: LoadSpec) -> bool:
        with self._books:
            served = self._served.get(spec.key)
            return served is not None and served.spec == spec

    # -- leaving -------------------------------------------------------------------------------------

    def evict(self, key: str) -> Evicted:
        """Let a model go and measure what came back. Its mapping and module stay for a fast return.

        Raises `Conflict` while a call runs on it. A model that is not resident gives zero bytes.
        """
        with self._books:
            served = self._served.get(key)
            if served is None:
                return Evicted(0)
            if served.in_flight:
                raise Conflict(f"{served.in_flight} calls are in flight", model=key)
            del self._served[key]
            mount = self._mounts[served.spec.fingerprint]
        with mount.calm:
            leaked = self._leave(served)[1]
        if leaked is None:
            return Evicted(0)
        leaked += mount.part()
        return Evicted(served.resident - leaked, leaked)

    def release_host(self, fingerprint: str) -> None:
        """Drop mapping and tensors of a fingerprint; if a model still runs on them, when it is evicted.

        The empty skeleton is kept for the next load.
        """
        with self._books:
            mount = self._mounts.get(fingerprint)
            if mount is None:
                return
            mount.doomed = True
            if mount.users:
                return
            self._forget(mount)
        del mount  # unmapped here, outside the lock: it takes milliseconds
        if time.monotonic() >= self._next_trim:  # for minutes of loads, not for each: it holds every heap meanwhile
            self._next_trim = time.monotonic() + TRIM_SECONDS
            give_back()

    def _retire(self, served: Served) -> None:
        self._leave(served)[0].part()

    def _leave(self, served: Served) -> tuple[Mount | Package, int | None]:
        """A resident's mount, and bytes leaked if this was its last user; None while another key runs on it."""
        with self._books:
            mount = self._mounts[served.spec.fingerprint]
            return mount, self._unused(mount)

    def _unused(self, mount: Mount | Package) -> int | None:
        mount.users -= 1
        if mount.users:
            return None
        leaked = mount.deactivate()
        if mount.stale or mount.doomed:
            self._forget(mount)
        return leaked

    def _forget(self, mount: Mount | Package) -> None:
        self._mounts.pop(mount.fingerprint, None)
        mount.untwin()
        if self._cuda is not None:
            self._cuda.forget(mount.fingerprint)
        if not mount.failed and (spare := mount.spare()) is not None:
            self._shelf.put(mount.fingerprint, spare)

    def _unclaim(self, mount: Mount | Package | None, *, reused: bool) -> None:
        """Undo a load's hold on a mount; one that it made itself goes altogether."""
        if mount is None:
            return
        with self._books:
            mount.doomed |= not reused
            self._unused(mount)
        mount.part()

    # -- running -------------------------------------------------------------------------------------

    def inventory(self) -> list[Resident]:
        """What is resident now."""
        with self._books:
            return [
                Resident(key, served.spec.fingerprint, served.resident, served.in_flight)
                for key, served in self._served.items()
            ]

    def submit(
        self,
        key: str,
        body: memoryview,
        json_length: int | None,
        done: Callable[[Answer | Laid | ForeloadError], None],
    ) -> Submission:
        """Queue a call; `done` is told exactly once, from `step` or `cancel`. Raises `Broken` for an unknown key.

        `body` must stay as it is until then: tensors view it.
        """
        with self._books:
            served = self._served.get(key)
            if served is None:
                raise Broken("the model is not resident on this device", model=key)
            return self._runner.submit(served, body, json_length, done)

    def attend(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, when `step` has something to run that no call announced."""
        self._runner.wake = wake

    def prepared(self) -> Prepared:
        """How much work on inputs that come as files was shared."""
        return self._runner.preparer.snapshot()

    @property
    def pending(self) -> bool:
        """Whether `step` has, or will have, something to run."""
        return self._runner.pending

    def due(self) -> float | None:
        """Seconds until `step` has something to run (0 now, more while a batching delay runs), None without calls."""
        return self._runner.due()

    def step(self) -> None:
        """Run one batch and answer each of its calls. Raises `DeviceLost` if the device cannot go on."""
        self._runner.step()
