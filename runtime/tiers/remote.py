"""The remote tier: files of models that are somewhere else, brought to the disk tier when a model is loaded.

Belongs here: which files a record needs, where they come from, one pull each, and what is told of it. Never: ranges and
retries (`pull.py`), files of ours (`landing.py`), or which model may come: that is the host cache's decision.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from actors.errors import FetchFailed, ForeloadError
from actors.events import FetchFinished, FetchProgressed, FetchStarted
from runtime.tiers.origin_object import ObjectOrigin, open_store
from runtime.tiers.origin_web import WebClient, WebOrigin
from runtime.tiers.pull import Pace, Pull
from runtime.tiers.sources import OBJECT_SCHEMES, Permits, Source, parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from actors.clock import Clock
    from actors.ports import Emit, Offload
    from actors.residency.model import Model, ModelKey
    from runtime.catalog.manifest import FileRow
    from runtime.catalog.record import ModelRecord
    from runtime.tiers.disk import DiskStore
    from runtime.tiers.landing import Landing
    from runtime.tiers.origin import Origin

TELL: Final = 1.0
"""Seconds between two statements of progress."""

_GRACE: Final = 0.1
"""Seconds at the end for obstore's threads to drop what was cancelled: an interpreter that ends under them aborts."""


@dataclass(slots=True)
class Fetched:
    """Where a record's files from elsewhere lie now, by their path in the manifest.

    `held` are blobs to let go; `far` says that the weights were not on disk before.
    """

    paths: dict[str, Path] = field(default_factory=dict[str, Path])
    held: list[Path] = field(default_factory=list[Path])
    far: bool = False


class Remote:
    """`permits` is what the configuration allows, `connect` the seconds that a connection may take."""

    def __init__(
        self,
        disk: DiskStore,
        permits: Permits,
        *,
        connect: float,
        pace: Pace,
        offload: Offload,
        clock: Clock,
        emit: Emit,
    ) -> None:
        self._disk = disk
        self._permits = permits
        self._connect = connect
        self._pace = pace
        self._offload = offload
        self._now = clock.now
        self._emit = emit
        self._stores: dict[str, Any] = {}
        self._web: WebClient | None = None
        self._moved: dict[ModelKey, float] = {}
        # What cannot work is told at the start, not at the first load.
        for place in permits.stores:
            self._stores[place.url] = open_store(
                place, connect=connect, stall=pace.stall, allow_http=permits.allow_http
            )
        if permits.hosts:
            self._web = WebClient(permits, connect=connect, stall=pace.stall, connections=pace.parallel)

    def far(self, record: ModelRecord) -> bool:
        """Whether loading it needs the network; advice, without a look at any disk."""
        return record.elsewhere and not self._disk.present(record)

    def moved(self, key: ModelKey) -> float | None:
        """Loop seconds of a running fetch's last progress; None if there is none."""
        return self._moved.get(key)

    async def fetch(self, model: Model, record: ModelRecord) -> Fetched:
        """Bring what the record needs and its directory lacks. Raises `FetchFailed`, `CorruptWeights`, `DiskFull`.

        When it raises or is cancelled nothing stays held; whole chunks stay on disk for the next attempt.
        """
        fetched = Fetched(far=self.far(record))
        weights = record.manifest.weights_row
        try:
            for row in record.manifest.needed:
                text = record.manifest.source_of(row)
                made = record.manifest.pickled or self._disk.laid(record)
                if text is None or (row is weights and not fetched.far and made):
                    continue  # it lies in the directory, or what it was converted to is here
                await self._bring(model, row, parse(text), fetched, weights=row is weights)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._offload(self.let_go, fetched)
            raise
        return fetched

    def let_go(self, fetched: Fetched, *, but: str = "") -> None:
        """Give back the holds of what was fetched, except of one path. Blocking."""
        kept = fetched.paths.get(but)
        for path in fetched.held:
            if path != kept:
                self._disk.let_go(path)
        fetched.held = [path for path in fetched.held if path == kept]

    async def close(self) -> None:
        """Give connections back."""
        if self._web is not None:
            await self._web.close()
        if self._stores:
            await anyio.sleep(_GRACE)

    # -- one file ------------------------------------------------------------------------------------

    async def _bring(self, model: Model, row: FileRow, source: Source, fetched: Fetched, *, weights: bool) -> None:
        if self._permits.refusal(source):  # the catalogue says which and why; this is for every client to read
            raise FetchFailed("the source is not allowed by this server's configuration")
        try:
            local = await self._offload(self._locate, source)
        except FetchFailed:
            if weights and not fetched.far:
                return  # they are on disk, so where they came from is not needed
            raise
        if local is not None:
            fetched.paths[row.path] = local
            return
        checkpoint = weights and row.path.endswith(".safetensors")
        async with self._landing(row, checkpoint=checkpoint) as landing:
            await self._enter(model.key, landing)
            if landing.path is None:
                await self._pull(model, row, source, landing)
            assert landing.path is not None
            # Noted before anything awaits again, so that a cancellation cannot lose the hold.
            fetched.paths[row.path] = landing.path
            fetched.held.append(landing.path)
            landing.path = None

    async def _enter(self, key: ModelKey, landing: Landing) -> None:
        """Wait for whoever else brings the same file; that counts as progress, for as long as a pull may take."""
        try:
            with anyio.fail_after(self._pace.total):
                while not await self._offload(landing.enter):
                    self._moved[key] = self._now()
        except TimeoutError:
            raise FetchFailed("another process fetches this file, and does not end") from None
        finally:
            self._moved.pop(key, None)

    @asynccontextmanager
    async def _landing(self, row: FileRow, *, checkpoint: bool) -> AsyncIterator[Landing]:
        landing = self._disk.landing(row, weights=checkpoint)
        try:
            yield landing
        finally:
            with anyio.CancelScope(shield=True):
                await self._offload(self._end, landing)

    def _end(self, landing: Landing) -> None:
        landing.close()
        if landing.path is not None:  # found or finished, and then nobody was there to take it
            self._disk.let_go(landing.path)

    async def _pull(self, model: Model, row: FileRow, source: Source, landing: Landing) -> None:
        origin = self._origin(source)
        tell = _Teller(model.key, source.scheme, row.size, now=self._now, emit=self._emit, moved=self._moved)
        outcome = "cancelled"
        self._emit(FetchStarted(self._now(), model.key, source.scheme, row.size))
        try:
            pull = Pull(origin, landing, row.size, pace=self._pace, offload=self._offload, told=tell)
            await pull.run()
            outcome = "ok"
        except ForeloadError as error:
            outcome = error.code
            raise
        finally:
            self._moved.pop(model.key, None)
            self._emit(FetchFinished(self._now(), model.key, source.scheme, tell.fetched, tell.seconds, outcome))

    def _origin(self, source: Source) -> Origin:
        if source.scheme in OBJECT_SCHEMES:
            return ObjectOrigin(self._stores[f"{source.scheme}://{source.place}"], source.path)
        hub = self._permits.hub
        if source.scheme == "hf":
            if hub is None or hub.endpoint is None or self._web is None:
                raise FetchFailed("the file is not in the hub's local cache, and remote.hub.endpoint is not set")
            url = f"{hub.endpoint.rstrip('/')}/{source.place}/resolve/{source.commit}/{source.path}"
            return WebOrigin(self._web, url, hub.token)
        assert self._web is not None, "refused by permits"
        entry = self._permits.host_entry(source.host)
        return WebOrigin(self._web, str(source), self._permits.hosts[entry] if entry else "")

    def _locate(self, source: Source) -> Path | None:
        """The file itself, where it is one of this machine. Raises `FetchFailed`, without the path."""
        if source.scheme == "file":
            found, home = Path(source.path), self._permits.folder_of(Path(source.path))
        elif source.scheme == "hf" and self._permits.hub is not None:
            home = self._permits.hub.cache
            cached = _cached(source, home)
            if cached is None:
                return None
            found = cached
        else:
            return None
        try:
            real = found.resolve(strict=True)
            inside = home is not None and real.is_relative_to(home.resolve(strict=True))
        except (OSError, RuntimeError):
            raise FetchFailed("the source's file is not there") from None
        if not inside:
            raise FetchFailed("the source's file is a link out of its folder")
        return real

    def __repr__(self) -> str:
        return f"<Remote {len(self._stores)} stores {len(self._moved)} under way>"


def _cached(source: Source, cache: Path) -> Path | None:
    """A file in huggingface_hub's cache; the library knows the layout, and asks nobody."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        raise FetchFailed("hf:// sources need huggingface_hub: install foreload[remote]") from None
    found = try_to_load_from_cache(source.place, source.path, cache_dir=cache, revision=source.commit)
    return Path(found) if isinstance(found, str) else None


class _Teller:
    """Hears of bytes and states progress, at most once a second: bytes, total, rate and what is left."""

    def __init__(
        self,
        key: ModelKey,
        scheme: str,
        total: int,
        *,
        now: Callable[[], float],
        emit: Emit,
        moved: dict[ModelKey, float],
    ) -> None:
        self._key = key
        self._scheme = scheme
        self._total = total
        self._now = now
        self._emit = emit
        self._moved = moved
        self._started = self._told = self._since = now()
        self._first: int | None = None
        self._done = 0
        moved[key] = self._started

    def __call__(self, done: int) -> None:
        """So many bytes are here."""
        now = self._now()
        if done != self._done or self._first is None:
            self._moved[self._key] = now
        if self._first is None or done < self._first:
            self._first, self._since = done, now
        self._done = done
        if now - self._told >= TELL and now > self._since and done > self._first:
            self._told = now
            rate = (done - self._first) / (now - self._since)
            left = (self._total - done) / rate
            self._emit(FetchProgressed(now, self._key, self._scheme, done, self._total, rate, left))

    @property
    def fetched(self) -> int:
        """Bytes that this attempt brought."""
        return self._done - (self._first or 0)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._now() - self._started


def refusals(permits: Permits) -> Callable[[Mapping[str, str]], str]:
    """A check of a manifest's sources, for the catalogue: the first one that is not allowed, in words."""

    def check(sources: Mapping[str, str]) -> str:
        for path, text in sources.items():
            refusal = permits.refusal(parse(text))
            if refusal:
                return f"{path}: its source is not allowed: {refusal}"
        return ""

    return check
