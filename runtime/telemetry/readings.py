"""What is read at scrape time instead of being counted: bytes, residents, leases, mailboxes, losses.

Frozen values, and the collector that spells them out. Whoever knows the actors fills them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from actors.residency.model import ModelKey, Tier
    from runtime.telemetry.buckets import Buckets
    from runtime.workers.pipelines import Prepared

_log = logging.getLogger("foreload.telemetry")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device's memory in bytes; None for a number that this kind of device does not have."""

    device: str
    capacity: int
    reserved: int
    allocated: int | None = None
    foreign: int | None = None
    largest_free_block: int | None = None


@dataclass(frozen=True, slots=True)
class HostReading:
    """The host tier: bytes mapped and locked, locks refused, slabs laid and given up, and bytes per second.

    `populate` is what the last load reached, `floor` what the machine did at the start; 0 where not measured.
    """

    mapped: int
    locked: int
    refused_locks: int
    slabs: int
    slabs_failed: int
    populate: float
    floor: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the server. Advisory: nothing is decided on it."""

    devices: tuple[DeviceReading, ...] = ()
    residents: Mapping[tuple[str, Tier], int] = field(default_factory=dict)
    leases: Mapping[ModelKey, int] = field(default_factory=dict)
    mailboxes: Mapping[str, int] = field(default_factory=dict)
    host: HostReading | None = None
    lost: Mapping[str, int] = field(default_factory=dict)
    """By channel (`spans`, `logs`, …): how much telemetry was dropped since the start."""
    prepared: Mapping[str, Prepared] = field(default_factory=dict)
    """By device: work on inputs that come as files."""


class Counted(Protocol):
    """The part of `Metrics` that counts by itself and is spelled out here."""

    def label(self, model: ModelKey) -> str:
        """Its key, or what stands for models without a label."""
        ...

    def loads_in_progress(self) -> Mapping[str, int]:
        """By device."""
        ...

    def phases(self) -> Iterable[tuple[str, str, Buckets]]:
        """Model, phase, buckets."""
        ...

    @property
    def reuse_gaps(self) -> Buckets:
        """Seconds between two uses."""
        ...


class Readings(Collector):
    """Spells out, at scrape time, what is read rather than counted."""

    def __init__(self, reading: Callable[[], Reading], counted: Counted) -> None:
        self._reading = reading
        self._latest = Reading()
        self._counted = counted

    def describe(self) -> Iterator[Metric]:
        """The families, without asking the server: it is not there yet when this is registered."""
        return self._families(Reading())

    def look(self) -> None:
        """Take the reading that the next pages show; should it fail, they come without it, and the log says so."""
        try:
            self._latest = self._reading()
        except Exception:  # noqa: BLE001  a scrape that fails hides every other metric too
            _log.exception("the reading for /metrics failed")
            self._latest = Reading()

    def collect(self) -> Iterator[Metric]:
        """The families as of the last look; safe away from the loop, since nobody else is asked."""
        return self._families(self._latest)

    def _counters_of_the_hit_path(self) -> Iterator[Metric]:
        about = "Time of answered requests by phase; load_wait only where one waited."
        phases = HistogramMetricFamily("foreload_request_duration_seconds", about, labels=("model", "phase"))
        for model, phase, buckets in self._counted.phases():
            buckets.spell(phases, (model, phase))
        yield phases
        gaps = HistogramMetricFamily(
            "foreload_reuse_gap_seconds", "Time between two uses of a device resident.", labels=()
        )
        self._counted.reuse_gaps.spell(gaps, ())
        yield gaps

    def _families(self, reading: Reading) -> Iterator[Metric]:
        yield from self._counters_of_the_hit_path()
        loads = GaugeMetricFamily("foreload_loads_in_progress", "Loads under way.", labels=("device",))
        for device, count in self._counted.loads_in_progress().items():
            loads.add_metric((device,), count)
        yield loads
        sizes = GaugeMetricFamily("foreload_device_bytes", "Memory of a device.", labels=("device", "kind"))
        for row in reading.devices:
            for kind in ("capacity", "reserved", "allocated", "foreign", "largest_free_block"):
                value: int | None = getattr(row, kind)
                if value is not None:
                    sizes.add_metric((row.device, kind), value)
        yield sizes
        residents = GaugeMetricFamily("foreload_resident_models", "Models held.", labels=("device", "tier"))
        for (device, tier), count in reading.residents.items():
            residents.add_metric((device, tier.value), count)
        yield residents
        leases = GaugeMetricFamily("foreload_leases", "Leases held now.", labels=("model",))
        for label, count in _summed(reading.leases, self._counted.label).items():
            leases.add_metric((label,), count)
        yield leases
        depths = GaugeMetricFamily("foreload_actor_mailbox_depth", "Messages waiting.", labels=("actor",))
        for actor, count in reading.mailboxes.items():
            depths.add_metric((actor,), count)
        yield depths
        yield from _preprocess(reading.prepared)
        yield from _host(reading.host)
        lost = CounterMetricFamily("foreload_telemetry_lost", "Telemetry dropped.", labels=("channel",))
        for channel, count in reading.lost.items():
            lost.add_metric((channel,), count)
        yield lost


def _preprocess(prepared: Mapping[str, Prepared]) -> Iterator[Metric]:
    hits = CounterMetricFamily(
        "foreload_preprocess_hits", "Files whose tensor was there or on its way.", labels=("device",)
    )
    misses = CounterMetricFamily("foreload_preprocess_misses", "Files that were decoded.", labels=("device",))
    kept = GaugeMetricFamily("foreload_preprocess_cache_bytes", "Tensors of files, kept.", labels=("device",))
    for device, counts in prepared.items():
        hits.add_metric((device,), counts.hits)
        misses.add_metric((device,), counts.misses)
        kept.add_metric((device,), counts.bytes)
    yield from (hits, misses, kept)


def _host(row: HostReading | None) -> Iterator[Metric]:
    sizes = GaugeMetricFamily("foreload_host_bytes", "Weights in the host's memory.", labels=("kind",))
    refused = CounterMetricFamily("foreload_host_locks_refused", "Weights that could not be locked into memory.")
    slabs = CounterMetricFamily("foreload_slabs", "Slabs laid, and given up.", labels=("outcome",))
    speed = GaugeMetricFamily("foreload_host_populate_bytes_per_second", "Filling of mappings.", labels=("kind",))
    if row is not None:
        sizes.add_metric(("mapped",), row.mapped)
        sizes.add_metric(("locked",), row.locked)
        refused.add_metric((), row.refused_locks)
        slabs.add_metric(("laid",), row.slabs)
        slabs.add_metric(("failed",), row.slabs_failed)
        speed.add_metric(("last",), row.populate)
        speed.add_metric(("floor",), row.floor)
    yield from (sizes, refused, slabs, speed)


def _summed(counts: Mapping[ModelKey, int], label: Callable[[ModelKey], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for model, count in counts.items():
        found[label(model)] = found.get(label(model), 0) + count
    return found
