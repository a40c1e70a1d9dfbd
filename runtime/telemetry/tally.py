"""Per model and in total: where it was found, how long that took, and what its inferences cost.

Feeds `/api/v1/state` and the statistics extension of the Open Inference Protocol. No labels, no export.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from actors import events as e
from actors.residency.model import Tier
from runtime.telemetry.places import BELOW
from runtime.telemetry.windows import AT, Ring, Windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from actors.residency.model import ModelKey
    from runtime.telemetry.epoch import Epoch
    from runtime.telemetry.fanout import Wants
    from runtime.workers.port import Timings

_FIELD: Final = {tier: AT[tier.value] for tier in Tier}
_RESULT: Final = {
    "coalesced": AT["coalesced"],
    "miss": AT["misses"],
    "prefetch_hit": AT["prefetch_hits"],
}
_BATCHES: Final = 1_024


@dataclass(frozen=True, slots=True)
class TallySnapshot:
    """Counts in total and by model key."""

    total: Windows
    models: Mapping[ModelKey, Windows]


class _Batch:
    """Calls whose forward was shared by the same number of calls; sums in nanoseconds."""

    __slots__ = ("calls", "decode", "encode", "infer")

    def __init__(self) -> None:
        self.calls = 0
        self.decode = 0
        self.infer = 0
        self.encode = 0


class _Row:
    """One model's counts. Nanoseconds are Python ints, so that years of them stay exact."""

    __slots__ = ("batches", "decode", "encode", "fail", "infer", "last", "memory", "queue", "ring", "success")

    def __init__(self) -> None:
        self.ring = Ring()
        self.success = [0, 0]
        self.fail = [0, 0]
        self.queue = [0, 0]
        self.decode = [0, 0]
        self.infer = [0, 0]
        self.encode = [0, 0]
        self.batches: dict[int, _Batch] = {}
        self.last = 0.0
        self.memory: dict[str, int] = {}


class Tally:
    """Counts how requests found their model and what they cost. At most `limit` models; more count in total only."""

    IGNORED: ClassVar[Mapping[type, str]] = {
        e.PrefetchWithheld: "nothing was leased",
        e.FetchStarted: "a step of a load",
        e.FetchProgressed: "a step of a load",
        e.FetchFinished: "a step of a load",
        e.PeakInfeasible: "told ahead; its requests are counted when they come",
        e.ForecastFitted: "says nothing of leases",
        e.ForecastDemoted: "says nothing of leases",
        e.ForecastJudged: "made from counts, not from leases",
        e.ForecastFell: "says nothing of leases",
        e.ForesightReported: "made from leases already counted",
        e.Adopted: "nobody asked for it then",
        e.RequestArrived: "counted when it is finished",
        e.LeaseReleased: "how long a lease was held says nothing of finding it",
        e.LoadStarted: "only finished loads hold memory that can be used",
        e.LoadUpgraded: "its waiters are counted",
        e.LoadFailed: "its waiters leave with a reason, and are counted",
        e.LoadCancelled: "nobody waited for it",
        e.EvictionStarted: "its bytes count until they are observed free",
        e.PrefetchSettled: "prefetch hits are counted as leases; worth is in the metrics",
        e.PressureChanged: "not about a model",
        e.WarmSettled: "not an access",
        e.WorkerStarted: "holds nothing yet",
        e.CompileStarted: "how a model runs, not whether it was there",
        e.CompileFinished: "how a model runs, not whether it was there",
        e.CompileFailed: "how a model runs, not whether it was there",
        e.ActorRestarted: "not about a model",
        e.SubscriberDropped: "not about a model",
        e.CatalogChanged: "history outlives a change of the catalog; `forget` drops it",
        e.DrainStarted: "not about a model",
        e.DrainFinished: "not about a model",
    }

    def __init__(self, epoch: Epoch, *, limit: int = 10_000) -> None:
        self._epoch = epoch
        self._limit = limit
        self._rows: dict[ModelKey, _Row] = {}
        self._total = Ring()
        self._unlisted = _Row()

    def wants(self) -> Wants:
        """Subscribe with this."""
        return {
            e.LeaseGranted: self._granted,
            e.WaiterJoined: self._joined,
            e.WaiterLeft: self._left,
            e.RequestFinished: self._finished,
            e.LoadFinished: self._loaded,
            e.Evicted: self._evicted,
            e.WorkerLost: self._worker_lost,
        }

    def _row(self, model: ModelKey) -> _Row:
        row = self._rows.get(model)
        if row is None:
            if len(self._rows) >= self._limit:
                return self._unlisted
            row = self._rows[model] = _Row()
        return row

    def forget(self, model: ModelKey) -> None:
        """Drop a model's history; what it added to the total stays."""
        self._rows.pop(model, None)

    def _granted(self, event: e.LeaseGranted) -> None:
        if event.device in BELOW:
            return
        field = _FIELD[event.found]
        ring = self._row(event.model).ring
        ring.found(event.at, field, event.waited)
        self._total.found(event.at, field, event.waited)
        result = _RESULT.get(event.result)
        if result is not None:
            ring.add(event.at, result)
            self._total.add(event.at, result)

    def _joined(self, event: e.WaiterJoined) -> None:
        if event.device in BELOW:
            return
        self._row(event.model).ring.add(event.at, AT["joined"])
        self._total.add(event.at, AT["joined"])

    def _left(self, event: e.WaiterLeft) -> None:
        if event.device in BELOW:
            return
        self._row(event.model).ring.add(event.at, AT["left"])
        self._total.add(event.at, AT["left"])

    def _finished(self, event: e.RequestFinished) -> None:
        row = self._row(event.model)
        pair = row.fail
        if event.outcome == "ok":
            pair = row.success
            row.last = event.at
        pair[0] += 1
        pair[1] += int(event.total * 1e9)

    def record(self, model: ModelKey, timings: Timings, ok: bool) -> None:  # noqa: FBT001  one call site, on the hit path
        """Add what a call cost in the worker; one that failed there took part in no useful forward and is left out."""
        if not ok:
            return
        row = self._row(model)
        for pair, ns in (
            (row.queue, timings.queue),
            (row.decode, timings.decode),
            (row.infer, timings.infer),
            (row.encode, timings.encode),
        ):
            pair[0] += 1
            pair[1] += ns
        size = min(max(timings.batch, 1), _BATCHES)
        batch = row.batches.get(size)
        if batch is None:
            batch = row.batches[size] = _Batch()
        batch.calls += 1
        batch.decode += timings.decode
        batch.infer += timings.infer
        batch.encode += timings.encode

    def _loaded(self, event: e.LoadFinished) -> None:
        if event.tier is Tier.DEVICE:
            self._row(event.model).memory[event.device] = event.resident

    def _evicted(self, event: e.Evicted) -> None:
        if event.tier is Tier.DEVICE:
            self._row(event.model).memory.pop(event.device, None)

    def _worker_lost(self, event: e.WorkerLost) -> None:
        for row in self._rows.values():
            row.memory.pop(event.device, None)

    # -- answers -------------------------------------------------------------------------------------

    def snapshot(self) -> TallySnapshot:
        """Frozen counts as of now."""
        now = self._epoch.now()
        models = {model: row.ring.snapshot(now) for model, row in self._rows.items()}
        return TallySnapshot(self._total.snapshot(now), models)

    def statistics(self, models: Iterable[ModelKey]) -> dict[str, object]:
        """The statistics extension's body for these models, in this order; one without a request has zeros."""
        return {"model_stats": [self._model_stats(model) for model in models]}

    def _model_stats(self, model: ModelKey) -> dict[str, object]:
        row = self._rows.get(model) or _Row()
        name, _, version = model.rpartition("@")
        return {
            "name": name,
            "version": version,
            "last_inference": self._epoch.ns(row.last) // 1_000_000 if row.success[0] else 0,
            "inference_count": row.success[0],
            "execution_count": sum(_executions(size, batch.calls) for size, batch in row.batches.items()),
            "inference_stats": {
                "success": _duration(row.success),
                "fail": _duration(row.fail),
                "queue": _duration(row.queue),
                "compute_input": _duration(row.decode),
                "compute_infer": _duration(row.infer),
                "compute_output": _duration(row.encode),
                "cache_hit": _duration([0, 0]),
                "cache_miss": _duration([0, 0]),
            },
            "batch_stats": [_batch_stats(size, row.batches[size]) for size in sorted(row.batches)],
            "memory_usage": [_memory(device, size) for device, size in sorted(row.memory.items())],
        }

    def __repr__(self) -> str:
        return f"<Tally models={len(self._rows)}>"


def _executions(size: int, calls: int) -> int:
    """Forwards that served `calls` calls in batches of `size`; the last batch may still be half reported."""
    return -(-calls // size)


def _duration(pair: list[int]) -> dict[str, int]:
    return {"count": pair[0], "ns": pair[1]}


def _batch_stats(size: int, batch: _Batch) -> dict[str, object]:
    """Every call reports the whole shared forward, so a forward's time is the sum over its calls divided by them."""
    count = _executions(size, batch.calls)
    return {
        "batch_size": size,
        "compute_input": _duration([count, batch.decode]),
        "compute_infer": _duration([count, batch.infer // size]),
        "compute_output": _duration([count, batch.encode]),
    }


def _memory(device: str, size: int) -> dict[str, object]:
    kind, _, index = device.partition(":")
    number = int(index) if index.isdecimal() else 0
    return {"type": "GPU" if kind == "cuda" else "CPU", "id": number, "byte_size": size}
