"""Every metric that is counted: name, help, labels, buckets. The table in `DESIGN.md` lists them, and a test compares.

Definitions only; `metrics.py` decides what is counted where.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# Seconds. A hit's phases are tens of microseconds, a load's tens of seconds; ages go from a second to a week.
PHASES: Final = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30)
LOADS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600)
AGES: Final = (1, 5, 15, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 14_400, 43_200, 86_400, 259_200, 604_800)
LAGS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Families:
    """The counted metrics of one registry."""

    def __init__(self, own: CollectorRegistry) -> None:
        self.requests = Counter("foreload_requests", "Requests answered.", ("model", "outcome"), registry=own)
        self.hits = Counter(
            "foreload_cache_hits", "Leases by the tier that had the model.", ("model", "tier"), registry=own
        )
        self.misses = Counter(
            "foreload_cache_misses", "Requests not found on the device.", ("model", "reason"), registry=own
        )
        self.coalesced = Counter(
            "foreload_waiters_coalesced", "Leases that shared another's load.", ("model",), registry=own
        )
        self.load_duration = Histogram(
            "foreload_load_duration_seconds",
            "Time of finished loads.",
            ("model", "from", "to", "trigger"),
            buckets=LOADS,
            registry=own,
        )
        self.load_failures = Counter(
            "foreload_load_failures", "Loads undone, by error code.", ("model", "reason"), registry=own
        )
        self.fetched = Counter(
            "foreload_fetched_bytes", "Bytes of models that came over the network.", ("scheme",), registry=own
        )
        self.fetching = Gauge(
            "foreload_fetch_remaining_bytes", "Bytes that fetches under way still lack.", ("model",), registry=own
        )
        self.fetches = Counter(
            "foreload_fetches", "Fetches of files that ended, by how.", ("scheme", "outcome"), registry=own
        )
        self.fetch_duration = Histogram(
            "foreload_fetch_duration_seconds", "Time of whole fetches.", ("scheme",), buckets=LOADS, registry=own
        )
        self.evictions = Counter(
            "foreload_evictions", "Residents whose bytes came back.", ("model", "device", "reason"), registry=own
        )
        self.leaked = Counter("foreload_leaked_bytes", "Bytes that did not come back.", ("device",), registry=own)
        self.age = Histogram(
            "foreload_age_at_eviction_seconds", "Time since last use, of device victims.", buckets=AGES, registry=own
        )
        self.residency = Histogram(
            "foreload_residency_seconds", "Time since load, of device victims.", buckets=AGES, registry=own
        )
        self.prefetches = Counter(
            "foreload_prefetches",
            "What prefetches were worth, by the tier they were for.",
            ("model", "tier", "result"),
            registry=own,
        )
        self.lead = Histogram(
            "foreload_prefetch_lead_seconds", "Prefetched this long before first use.", buckets=AGES, registry=own
        )
        self.withheld = Counter(
            "foreload_prefetches_withheld", "Prefetches that were due and not made.", ("reason",), registry=own
        )
        self.infeasible = Counter(
            "foreload_peaks_infeasible", "Declared windows announced as cold.", ("required",), registry=own
        )
        self.fallbacks = Counter(
            "foreload_forecast_fallbacks", "Failures of a part of the forecast.", ("part",), registry=own
        )
        self.brier = Gauge("foreload_forecast_brier_ratio", "Brier score of the last fit.", registry=own)
        self.ece = Gauge("foreload_forecast_calibration_error_ratio", "ECE of the last fit.", registry=own)
        self.demoted = Gauge(
            "foreload_forecast_demoted_models", "Models whose forecast has stopped being right.", registry=own
        )
        self.cost = Gauge(
            "foreload_forecast_cost_ratio",
            "Cost of loading by a source on the last fit's held-out day, against the better of always and never.",
            ("source",),
            registry=own,
        )
        self.judged = Gauge(
            "foreload_forecast_judged_ratio",
            "The next ten minutes as stated against what came, over a day: Brier score, calibration error.",
            ("score",),
            registry=own,
        )
        self.workers_lost = Counter(
            "foreload_workers_lost", "Device workers that ended on their own.", ("device",), registry=own
        )
        self.compiles = Counter(
            "foreload_compilations", "Compiled twins by where they came from.", ("result",), registry=own
        )
        self.compile_seconds = Counter("foreload_compile_seconds", "Time spent compiling.", registry=own)
        self.compile_saved = Counter(
            "foreload_compile_saved_seconds", "Time not spent, for an artefact was kept.", registry=own
        )
        self.restarts = Counter("foreload_actor_restarts", "New incarnations after a crash.", ("actor",), registry=own)
        self.dropped = Counter("foreload_subscribers_dropped", "Consumers of events switched off.", registry=own)
        self.lag = Histogram("foreload_loop_lag_seconds", "Lateness of the event loop.", buckets=LAGS, registry=own)
        self.build = Gauge("foreload_build_info", "The running build.", ("version", "python"), registry=own)
        ProcessCollector(registry=own)
        self.per_model: tuple[Counter | Gauge | Histogram, ...] = (
            self.requests,
            self.hits,
            self.misses,
            self.coalesced,
            self.load_duration,
            self.load_failures,
            self.fetching,
            self.evictions,
            self.prefetches,
        )
