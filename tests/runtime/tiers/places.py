"""A host tier over a remote one, over real files and real requests, for tests. No test here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.clock import LoopClock
from actors.residency.model import Footprint, Model
from runtime.catalog.describe import write_manifest
from runtime.catalog.manifest import parse_manifest
from runtime.catalog.record import ModelRecord, record_of
from runtime.tiers.disk import DiskStore
from runtime.tiers.host import HostStore
from runtime.tiers.offload import ThreadOffload
from runtime.tiers.pull import Pace
from runtime.tiers.remote import Remote
from runtime.tiers.sources import Permits
from tests.runtime.catalog.directories import SETTINGS, weights

if TYPE_CHECKING:
    from pathlib import Path

    from actors import events as e

CHUNK = 64 << 10
LOCAL = Permits(hosts={"127.0.0.1": ""}, allow_http=True)


def elsewhere(
    directory: Path, source: str, *, count: int = 1 << 18, seed: int = 0, **settings: Any
) -> tuple[ModelRecord, bytes]:
    """A model directory without its weights, which `source` has: its record, and the weights' bytes (1 MiB)."""
    path = weights(directory / "model.safetensors", seed, count)
    write_manifest(directory, {**SETTINGS, "source": source, **settings})
    content = path.read_bytes()
    path.unlink()
    text = (directory / "foreload.yaml").read_text(encoding="utf-8")
    return record_of(directory, parse_manifest(text)), content


def model_of(record: ModelRecord) -> Model:
    """The model that actors would know."""
    size = record.weights_bytes
    return Model(record.name, record.version, record.fingerprint, Footprint(size, size))


class Place:
    """A cache folder with everything above it. `facts` holds what was stated."""

    def __init__(
        self, folder: Path, *records: ModelRecord, permits: Permits = LOCAL, quota: int = 1 << 30, **pace: Any
    ) -> None:
        self.records = {each.key: each for each in records}
        self.facts: list[e.Event] = []
        self.folder = folder / "cache"
        self.disk = DiskStore(self.folder, quota)
        self.threads = ThreadOffload(8)
        self.remote = Remote(
            self.disk,
            permits,
            connect=2.0,
            pace=Pace(**{"chunk": CHUNK, "parallel": 4, "stall": 5.0, "total": 30.0, "backoff": 0.001, **pace}),
            offload=self.threads,
            clock=LoopClock(),
            emit=self.facts.append,
        )
        self.host = HostStore(
            self.disk, lambda model: self.records[model.key], self.threads, self._release, False, self.remote
        )

    def _release(self, fingerprint: str) -> None:
        """No worker here."""

    def told(self, kind: type[e.Event]) -> list[Any]:
        """Every fact of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    @property
    def blobs(self) -> list[Path]:
        """What is published."""
        return sorted(path for path in (self.folder / "blobs").rglob("*") if path.is_file())

    @property
    def partials(self) -> list[Path]:
        """What is on its way."""
        return sorted(path for path in (self.folder / "partial").iterdir() if path.suffix != ".journal")

    def idle(self) -> bool:
        """Nothing is mapped, held or temporary."""
        shown = self.host.snapshot()
        staging = list((self.folder / "staging").iterdir())
        return (shown.models, self.disk.snapshot().held, staging) == (0, 0, [])
