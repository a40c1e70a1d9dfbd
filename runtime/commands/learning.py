"""What `forecast learn` does: give a server that is not running yet a past, from logs of requests.

No words of the command line here. The clock is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.errors import UnknownModel
from forecasting.calendar import zone_of
from forecasting.counts import Counts
from forecasting.history import read_logs
from forecasting.store import STORE, Store
from runtime.catalog.repository import Repository, Source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runtime.config.schema import Config


@dataclass(frozen=True, slots=True)
class Learned:
    """What was taken over: models, requests of theirs, and names that no served model has."""

    models: int
    requests: int
    days: float
    unknown: tuple[str, ...]
    bad_lines: int

    def rows(self) -> dict[str, object]:
        """For programs."""
        return {
            "models": self.models,
            "requests": self.requests,
            "days": round(self.days, 2),
            "unknown": list(self.unknown),
            "bad_lines": self.bad_lines,
        }


def learn(config: Config, logs: Sequence[Path], now: float) -> Learned:
    """Add the past of served models to the file of counts beside the cache.

    A name without a version means the highest one. What the file knows already is not counted twice. Raises
    `StoreFailed` while a server uses the file, `OSError` or `ValueError` for a log that can't be read.
    """
    zone = zone_of(config.preload.defaults.timezone or "UTC")
    repository = Repository(
        tuple(config.repository), tuple(Source(each.name, each.source, each.version) for each in config.models)
    )
    repository.refresh()
    unknown: set[str] = set()

    def key_of(name: str) -> str | None:
        named, _, version = name.partition("@")
        try:
            return repository.find(named, version or None).key
        except UnknownModel:
            unknown.add(name)
            return None

    imported = read_logs(logs, now=now, zone=zone)
    known = imported.renamed(key_of)
    store, _ = Store.open(config.disk.path / STORE)
    with store:
        saved, _ = store.load()
        counts = Counts(now, 0.0, zone=zone) if saved is None else Counts.restore(saved, now, 0.0, zone=zone)[0]
        counts.load_history(known)
        store.checkpoint(counts.snapshot())
    return Learned(
        len(known.cells),
        sum(int(cell[1].sum()) for cell in known.cells.values()),
        (known.end - known.start) / 1_440,
        tuple(sorted(unknown)),
        imported.report.bad,
    )
