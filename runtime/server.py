"""The server as HTTP sees it: `runtime.http.port.Backend` over the actors. Translates; decides nothing itself."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Final

from actors.dispatcher import Dispatcher, Refresh, Resolve
from actors.errors import BadRequest, Conflict, Draining, NotReady, UnknownModel
from actors.messages import Ensure, Unload
from actors.residency.model import Tier, Trigger
from actors.residency.states import State
from actors.tier_cache import TierCache
from actors.warm_list import WarmList
from runtime.catalog.record import input_specs
from runtime.catalog.repository import State as Shelf
from runtime.http.port import IndexRow, Metadata, Verdict
from runtime.workers.port import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from actors.actor import Ref
    from actors.dispatcher import Order
    from actors.messages import Command
    from actors.ports import Offload
    from actors.residency.model import Model
    from actors.warm_list import WarmMessage
    from runtime.catalog.manifest import Manifest
    from runtime.catalog.repository import Repository
    from runtime.history import History
    from runtime.http.port import Json
    from runtime.inference import Inference
    from runtime.readout import Readout
    from runtime.telemetry.wiring import Views
    from runtime.vitals import Vitals

VERSION: Final = installed("foreload")
EXTENSIONS: Final = ("binary_tensor_data", "model_repository", "model_repository(unload_dependents)", "statistics")
_LOAD: Final = frozenset({"version", "tier", "priority", "pin", "fingerprint"})
_UNLOAD: Final = frozenset({"version", "drain", "unload_dependents"})
_INDEX: Final = {
    State.LOADING: "LOADING",
    State.RESIDENT: "READY",
    State.DRAINING: "UNLOADING",
    State.UNLOADING: "UNLOADING",
}

_PLATFORMS: Final = {
    "export": "pytorch_export",
    "aot": "pytorch_aot",
    "torchscript": "pytorch_torchscript",
    "onnx": "onnx_onnxv1",
    "openvino": "openvino_model",
}


class ServingBackend:
    """`strict_ready` is the setting `model_ready: resident`; `warm_said` whether the file has a warm list at all.

    `far` advises whether a model that is not in memory is not on this machine's disk either.
    """

    def __init__(
        self,
        *,
        dispatcher: Ref[Order],
        devices: tuple[Ref[Command], ...],
        host: Ref[Command],
        warm: Ref[WarmMessage],
        warm_said: bool,
        inference: Inference,
        repository: Repository,
        history: History,
        vitals: Vitals,
        readout: Readout,
        views: Views,
        offload: Offload,
        strict_ready: bool,
        far: Callable[[Model], bool] = lambda _: False,
    ) -> None:
        self._dispatcher = dispatcher
        self._devices = devices
        self._host = host
        self._warm = warm
        self._warm_said = warm_said
        self._inference = inference
        self._repository = repository
        self._history = history
        self._vitals = vitals
        self._readout = readout
        self._views = views
        self._offload = offload
        self._strict_ready = strict_ready
        self._far = far
        self.draining = False
        self.infer = inference.run

    # -- health --------------------------------------------------------------------------------------

    def live(self) -> Verdict:
        """See `Backend.live`."""
        trouble = self._vitals.trouble()
        return Verdict(not trouble, trouble)

    def ready(self) -> Verdict:
        """See `Backend.ready`."""
        return _verdict(self._unready())

    def _unready(self) -> Iterator[tuple[str, float | None]]:
        """What keeps traffic away, the most telling first, with when to ask again."""
        if self.draining:
            yield "draining", 5.0
        caches = [ref.owner for ref in (*self._devices, self._host)]
        if not all(isinstance(cache, TierCache) for cache in caches) or self._dispatcher.owner is None:
            yield "an actor is restarting", 1.0
        if not any(isinstance(ref.owner, TierCache) and ref.owner.up for ref in self._devices):
            yield "no device worker is up", 1.0
        if not self._warm_said:
            yield "the configuration names no warm list; write `warm: []` if none is wanted", None
        warm = self._warm.owner
        if not isinstance(warm, WarmList):
            yield "the warm list is restarting", 1.0
        elif not (state := warm.snapshot()).done:
            waits = ", ".join(f"{name} ({cause})" for name, cause in zip(state.missing, state.causes, strict=True))
            yield f"warm models are not resident yet: {waits}", 1.0

    def model_ready(self, name: str, version: str | None, *, strict: bool | None) -> Verdict:
        """See `Backend.model_ready`."""
        model = self._known(name, version)
        owner = self._dispatcher.owner
        ref = owner.place(model) if isinstance(owner, Dispatcher) else None
        cache = ref.owner if ref is not None else None
        if ref is None or not isinstance(cache, TierCache):
            return Verdict(ok=False, reason="an actor is restarting", retry_after=1.0)
        state, tier = self._where(model, cache)
        strictly = self._strict_ready if strict is None else strict
        verdict = _verdict(self._unserved(model, ref.name, cache, state, strict=strictly))
        return replace(verdict, extra={"state": state, "tier": tier})

    def _unserved(
        self, model: Model, device: str, cache: TierCache, state: str, *, strict: bool
    ) -> Iterator[tuple[str, float | None]]:
        """Why an infer sent now would not be expected to succeed."""
        if self.draining:
            yield "draining", 5.0
        if not cache.up or not self._vitals.answers(device):
            yield f"the worker of {device} is not up", 1.0
        if state == "READY":
            return
        trouble = cache.trouble(model)
        if trouble is not None:
            yield f"{trouble[0]}: {trouble[1]}", 1.0
        if strict:
            yield f"not resident: {state}", 1.0

    def _where(self, model: Model, cache: TierCache) -> tuple[str, str]:
        state = cache.state_of(model.key)
        if state is State.ABSENT and cache.wishes.of(model.key) is not None:
            state = State.LOADING
        if state is State.RESIDENT:
            return "READY", Tier.DEVICE
        host = self._host.owner
        below = isinstance(host, TierCache) and host.state_of(model.key) is State.RESIDENT
        if below:
            return _INDEX.get(state, "UNAVAILABLE"), Tier.HOST
        return _INDEX.get(state, "UNAVAILABLE"), Tier.REMOTE if self._far(model) else Tier.DISK

    # -- what there is -------------------------------------------------------------------------------

    def server_metadata(self) -> Json:
        """See `Backend.server_metadata`."""
        return {"name": "foreload", "version": VERSION, "extensions": list(EXTENSIONS)}

    def metadata(self, name: str, version: str | None) -> Metadata:
        """See `Backend.metadata`."""
        model = self._known(name, version)
        record = self._repository.find(model.name, model.version)
        owner = self._dispatcher.owner
        versions = [each.version for each in owner.versions(name)] if isinstance(owner, Dispatcher) else []
        spec = record.manifest
        return Metadata(
            model.name,
            versions if version is None else [model.version],
            _platform(spec),
            [each.wire for each in input_specs(spec)],
            [TensorSpec(each.name, each.datatype, each.shape) for each in spec.outputs],
        )

    def index(self, *, ready: bool) -> Sequence[IndexRow]:
        """See `Backend.index`."""
        rows: dict[tuple[str, str], IndexRow] = {}
        for model in self._models():
            row = self._index_row(model)
            if not ready or row.state == "READY":
                rows[row.name, row.version] = row
        if not ready:
            for shelf in self._repository.listing():
                if shelf.state in {Shelf.PENDING, Shelf.REJECTED} and shelf.record is None:
                    name, _, version = shelf.label.partition("@")
                    rows.setdefault((name, version), IndexRow(name, version, "UNAVAILABLE", shelf.reason))
        return [rows[key] for key in sorted(rows)]

    def _index_row(self, model: Model) -> IndexRow:
        reason = self._history.reason(model.key)
        owner = self._dispatcher.owner
        ref = owner.whereabouts(model.key) if isinstance(owner, Dispatcher) else None
        cache = ref.owner if ref is not None else None
        if isinstance(cache, TierCache):
            state, _ = self._where(model, cache)
            return IndexRow(model.name, model.version, state)
        if reason is None:
            return IndexRow(model.name)  # found, and never loaded
        return IndexRow(model.name, model.version, "UNAVAILABLE", reason)

    def statistics(self, name: str | None, version: str | None) -> Json:
        """See `Backend.statistics`."""
        models = self._models() if name is None else self._versions(name, version)
        return self._views.tally.statistics([model.key for model in models])

    def state(self) -> Json:
        """See `Backend.state`."""
        return self._readout.state(self._views.tally, self._views.feed)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """See `Backend.metrics`."""
        return await self._views.metrics.page(accept, self._offload)

    # -- load and unload -----------------------------------------------------------------------------

    async def load(self, name: str, parameters: Json) -> None:
        """See `Backend.load`."""
        self._admit()
        _only(parameters, _LOAD)
        version = _version(parameters)
        tier = parameters.get("tier", Tier.DEVICE.value)
        if tier not in {Tier.DEVICE.value, Tier.HOST.value}:
            raise BadRequest("parameter 'tier' is 'device' or 'host'")
        pin = parameters.get("pin")
        if pin is not None and not isinstance(pin, bool):
            raise BadRequest("parameter 'pin' is a boolean")
        priority = parameters.get("priority", 0)
        if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
            raise BadRequest("parameter 'priority' is an integer, 0 or greater")
        await self._dispatcher.ask(Refresh())  # what was copied in since then counts
        model = await self._dispatcher.ask(Resolve(name, version))
        wanted = parameters.get("fingerprint")
        if wanted is not None and wanted != model.fingerprint:
            raise Conflict(f"'{name}' has another fingerprint", model=name, detail={"fingerprint": model.fingerprint})
        owner = self._dispatcher.owner
        if not isinstance(owner, Dispatcher):
            raise NotReady("the dispatcher is restarting", retry_after=1.0)
        cache = owner.place(model) if tier == Tier.DEVICE.value else self._host
        await cache.ask(Ensure(model, Trigger.ADMIN, pin, priority=priority))

    async def unload(self, name: str, parameters: Json) -> None:
        """See `Backend.unload`."""
        self._admit()
        _only(parameters, _UNLOAD)
        version = _version(parameters)
        for flag in ("drain", "unload_dependents"):
            if not isinstance(parameters.get(flag, False), bool):
                raise BadRequest(f"parameter '{flag}' is a boolean")
        for model in self._versions(name, version):
            for ref in self._devices:
                await ref.ask(Unload(model.key, drain=parameters.get("drain", True) is True))

    # -- inside --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self.draining:
            raise Draining("the server is stopping", retry_after=5.0)

    def _models(self) -> Sequence[Model]:
        owner = self._dispatcher.owner
        return owner.models() if isinstance(owner, Dispatcher) else ()

    def _versions(self, name: str, version: str | None) -> Sequence[Model]:
        if version is not None:
            return [self._known(name, version)]
        owner = self._dispatcher.owner
        found = owner.versions(name) if isinstance(owner, Dispatcher) else ()
        if not found:
            raise UnknownModel(f"model '{name}' is not known", model=name)
        return found

    def _known(self, name: str, version: str | None) -> Model:
        owner = self._dispatcher.owner
        model = owner.find(name, version) if isinstance(owner, Dispatcher) else None
        if model is None:
            what = f"model '{name}' is not known" if version is None else f"model '{name}' has no version '{version}'"
            raise UnknownModel(what, model=name)
        return model

    def __repr__(self) -> str:
        return f"<ServingBackend {len(self._models())} models{' draining' if self.draining else ''}>"


def _platform(manifest: Manifest) -> str:
    """What the protocol calls the kind of model; free text, in the spelling that Triton made usual."""
    if manifest.builder is not None:
        return f"pytorch_{manifest.builder.kind}"
    return _PLATFORMS[manifest.engine]


def _verdict(obstacles: Iterator[tuple[str, float | None]]) -> Verdict:
    """Ready if nothing is in the way; else the first obstacle says why."""
    reason, retry_after = next(obstacles, ("", None))
    return Verdict(ok=not reason, reason=reason, retry_after=retry_after)


def _only(parameters: Mapping[str, object], known: frozenset[str]) -> None:
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise BadRequest(f"unknown parameter '{unknown[0]}'; known are {', '.join(sorted(known))}")


def _version(parameters: Mapping[str, object]) -> str | None:
    version = parameters.get("version")
    if version is None:
        return None
    if isinstance(version, bool) or not isinstance(version, str | int):
        raise BadRequest("parameter 'version' is a string or an integer")
    return str(version)
