"""The server's state as JSON, and as the gauges of `/metrics`: read from snapshots, decided on by nobody."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from actors.forecaster import Forecaster
from actors.residency.model import ModelKey
from actors.residency.states import State
from actors.tier_cache import TierCache
from runtime.telemetry.readings import DeviceReading, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.actor import Ref
    from actors.forecaster import ForecastMessage
    from actors.messages import Command
    from actors.ports import Memory
    from actors.residency.model import Tier
    from actors.supervisor import Supervisor
    from actors.views import TierSnapshot
    from runtime.telemetry.feed import Feed
    from runtime.telemetry.readings import HostReading
    from runtime.telemetry.tally import Tally
    from runtime.workers.pipelines import Prepared

SHOWN = 50
"""Demoted models that a state names."""
RECENT = 50
"""Events that a state shows."""


class Worker(Protocol):
    """A device worker as far as it is shown."""

    @property
    def pid(self) -> int:
        """0 while there is none."""
        ...

    @property
    def prepared(self) -> Prepared:
        """What was shared of the work on inputs that come as files."""
        ...


class Readout:
    """`policy` is shown as it is, `weights` reads the host tier's numbers."""

    def __init__(
        self,
        devices: tuple[Ref[Command], ...],
        host: Ref[Command],
        *,
        supervisor: Supervisor,
        memory: Memory,
        policy: Mapping[str, object],
        workers: Mapping[str, Worker],
        forecaster: Ref[ForecastMessage],
        weights: Callable[[], HostReading] | None = None,
    ) -> None:
        self._devices = devices
        self._host = host
        self._supervisor = supervisor
        self._memory = memory
        self._policy = policy
        self._workers = workers
        self._forecaster = forecaster
        self._weights = weights

    def state(self, tally: Tally, feed: Feed) -> dict[str, object]:
        """Size, capacity, TTL, residents, leases, tiers, hit rates and the mean access time that they imply."""
        sample = self._memory.sample()
        total = tally.snapshot().total
        recent = feed.since(0, limit=10**9)
        return {
            "devices": [_tier(view) for view in self._views(self._devices)],
            "host": next((_tier(view) for view in self._views((self._host,))), None),
            "workers": {
                name: {"pid": worker.pid, "preprocess": structs.asdict(worker.prepared)}
                for name, worker in self._workers.items()
            },
            "memory": {"limit": sample.limit, "available": sample.available, "used_ratio": sample.used_ratio},
            "policy": dict(self._policy),
            "access": {
                "five_minutes": asdict(total.five_minutes),
                "hour": asdict(total.hour),
                "lifetime": asdict(total.lifetime),
            },
            "foresight": self._foresight(),
            "actors": self._supervisor.snapshot(),
            "events": {"last": recent.last, "recent": recent.rows[-RECENT:]},
        }

    def _foresight(self) -> dict[str, object] | None:
        """What is loaded ahead, and how good the forecast is; None while its actor restarts."""
        owner = self._forecaster.owner
        if not isinstance(owner, Forecaster):
            return None
        view = owner.snapshot()
        return {
            "mode": "act" if view.acting else "observe",
            "fitted_ago": view.fitted_ago,
            "brier": view.brier,
            "ece": view.ece,
            "judged": {
                "forecasts": int(view.judged.n),
                "brier": view.judged.brier,
                "ece": view.judged.ece,
                "climatology": view.judged.climatology,
            }
            if view.judged.n
            else None,
            "source": view.source,
            "source_costs": dict(view.costs),
            "skilled_models": view.skilled,
            "demoted_models": len(view.demoted),
            "demoted": list(view.demoted[:SHOWN]),
            "fallbacks": view.failures,
            "windows": [
                {
                    "model": each.model.key,
                    "device": each.device,
                    "cause": each.cause,
                    "begin": each.begin,
                    "ready_by": each.ready_by,
                    "start": each.start,
                    "release": each.release,
                    "required": each.require,
                    "due": each.due,
                    "trouble": each.trouble,
                    "remedy": each.remedy,
                }
                for each in view.windows
            ],
        }

    def reading(self) -> Reading:
        """The gauges."""
        residents: Counter[tuple[str, Tier]] = Counter()
        leases: Counter[ModelKey] = Counter()
        devices: list[DeviceReading] = []
        for view in self._views((*self._devices, self._host)):
            for row in view.residents:
                residents[view.where, view.tier] += row.state in {State.RESIDENT, State.DRAINING}
                if view.where != self._host.name and row.leases:
                    leases[ModelKey(row.model)] += row.leases
            if view.where != self._host.name:
                used = view.loading + view.resident + view.unloading
                devices.append(DeviceReading(view.where, view.capacity, used, view.resident, view.foreign))
        mailboxes = {name: int(row["mailbox_depth"]) for name, row in self._supervisor.snapshot().items()}
        prepared = {name: worker.prepared for name, worker in self._workers.items()}
        host = None if self._weights is None else self._weights()
        return Reading(tuple(devices), residents, leases, mailboxes, host=host, prepared=prepared)

    @staticmethod
    def _views(refs: tuple[Ref[Command], ...]) -> list[TierSnapshot]:
        return [ref.owner.snapshot() for ref in refs if isinstance(ref.owner, TierCache)]

    def __repr__(self) -> str:
        return f"<Readout {len(self._devices)} devices>"


def _tier(view: TierSnapshot) -> dict[str, object]:
    return {
        "id": view.where,
        "tier": view.tier,
        "up": view.up,
        "draining": view.draining,
        "capacity": view.capacity,
        "headroom": view.headroom,
        "used": view.loading + view.resident + view.unloading,
        "loading": view.loading,
        "resident": view.resident,
        "unloading": view.unloading,
        "foreign": view.foreign,
        "leaked": view.leaked,
        "free": view.free,
        "leases": view.leases,
        "waiting": view.waiting,
        "under_pressure": view.under_pressure,
        "residents": [
            {
                "model": row.model,
                "fingerprint": row.fingerprint,
                "state": row.state,
                "bytes": row.bytes,
                "leases": row.leases,
                "pinned": row.pinned,
                "age": row.age,
                "idle": row.idle,
                "uses": row.uses,
                "expires": row.expires_in,
            }
            for row in view.residents
        ],
        "wishes": [asdict(wish) for wish in view.wishes],
    }
