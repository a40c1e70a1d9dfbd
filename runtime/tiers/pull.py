"""Brings one file from its origin into a landing: chunks in parallel, written in order, within limits of time.

Connect and stall limits are per request, the total is for all of it; a chunk that fails is asked for again by one
policy (tenacity). Cancelling stops at once; what was written stays, and the next pull goes on from there.
Task group: of one pull's own chunks, ended before it returns (`style.md` rule 16 has the kernel's in mind).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from actors.errors import CorruptWeights, FetchFailed
from runtime.tiers.origin import Passing, RangeIgnored, Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenacity import AsyncRetrying

    from actors.ports import Offload
    from runtime.tiers.landing import Landing
    from runtime.tiers.origin import Answer, Origin

RESTARTS: Final = 2
"""How often a pull begins again because the source was replaced meanwhile."""


@dataclass(frozen=True, slots=True)
class Pace:
    """`parallel` requests of `chunk` bytes; seconds without a byte, seconds in all; tries per chunk.

    `backoff` seconds are the first wait between two tries; it doubles, with jitter, up to `backoff_limit`.
    """

    parallel: int = 8
    chunk: int = 8 << 20
    stall: float = 30.0
    total: float = 3600.0
    attempts: int = 5
    backoff: float = 0.2
    backoff_limit: float = 10.0


@dataclass(slots=True, eq=False)
class _Chunk:
    start: int
    end: int
    pieces: list[memoryview] = field(default_factory=list[memoryview])
    tag: str = ""
    arrived: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None


class Pull:
    """One file of `size` bytes. `told` hears how many bytes are here: at the start, and after each chunk."""

    def __init__(
        self,
        origin: Origin,
        landing: Landing,
        size: int,
        *,
        pace: Pace,
        offload: Offload,
        told: Callable[[int], None],
    ) -> None:
        self._origin = origin
        self._landing = landing
        self._size = size
        self._pace = pace
        self._offload = offload
        self._told = told

    async def run(self) -> None:
        """Fetch what is missing, prove and publish the whole. Raises `FetchFailed`, `CorruptWeights`, `DiskFull`."""
        try:
            with anyio.fail_after(self._pace.total):
                while not await self._offload(self._landing.recover):
                    pass
                await self._fetch()
                await self._offload(self._landing.finish)
        except TimeoutError:
            raise FetchFailed(f"the file was not fetched within {self._pace.total:g} s") from None

    async def _fetch(self) -> None:
        for _ in range(RESTARTS + 1):
            self._told(self._landing.done)
            try:
                await self._ranges()
            except RangeIgnored:
                await self._offload(self._landing.restart)
                await self._whole()
            except Replaced:
                await self._offload(self._landing.restart)
                continue
            return
        raise FetchFailed("the file at the source keeps changing")

    # -- in ranges -----------------------------------------------------------------------------------

    async def _ranges(self) -> None:
        if self._landing.done >= self._size:
            return
        # The first chunk goes alone: it tells the file's version and whether ranges are understood at all.
        first = _Chunk(
            self._landing.done, min(self._landing.done + self._pace.chunk, self._size), tag=self._landing.tag
        )
        await self._bring(first)
        await self._land(first)
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            waiting: deque[_Chunk] = deque()
            asked = first.end
            while asked < self._size or waiting:
                while asked < self._size and len(waiting) < self._pace.parallel:
                    chunk = _Chunk(asked, min(asked + self._pace.chunk, self._size), tag=first.tag)
                    waiting.append(chunk)
                    tasks.start_soon(self._bring, chunk)
                    asked = chunk.end
                chunk = waiting.popleft()
                await chunk.arrived.wait()
                try:
                    await self._land(chunk)
                except Exception as error:  # noqa: BLE001 -- raised again below, without the group around it
                    failure = error
                    tasks.cancel_scope.cancel()
                    break
        if failure is not None:
            raise failure

    async def _land(self, chunk: _Chunk) -> None:
        if chunk.error is not None:
            raise chunk.error
        await self._offload(self._landing.write, chunk.pieces, chunk.tag)
        chunk.pieces.clear()
        self._told(self._landing.done)

    async def _bring(self, chunk: _Chunk) -> None:
        """Get one chunk's bytes, however many tries that takes; what went wrong is in it afterwards."""
        try:
            async for attempt in self._tries():
                with attempt:
                    await self._try(chunk)
        except Passing as error:
            chunk.error = FetchFailed(f"given up after {self._pace.attempts} tries: {error}")
        except Exception as error:  # noqa: BLE001 -- the one who writes in order raises it
            chunk.error = error
        chunk.arrived.set()

    async def _try(self, chunk: _Chunk) -> None:
        have = sum(map(len, chunk.pieces))
        async with self._asked(chunk.start + have, chunk.end, chunk.tag) as answer:
            self._check(answer)
            if chunk.tag and answer.tag != chunk.tag:
                raise Replaced
            chunk.tag = answer.tag
            while (piece := await self._next(answer)) is not None:
                have += len(piece)
                if have > chunk.end - chunk.start:
                    chunk.pieces.clear()
                    raise Passing("the source sends more bytes than it was asked for")
                chunk.pieces.append(piece)
        if have < chunk.end - chunk.start:
            raise Passing("the source sends fewer bytes than it was asked for")

    # -- in one piece --------------------------------------------------------------------------------

    async def _whole(self) -> None:
        """The place knows no ranges: one request, from the first byte; a broken one begins there again."""
        try:
            async for attempt in self._tries():
                with attempt:
                    if self._landing.done:
                        await self._offload(self._landing.restart)
                    await self._try_whole()
        except Passing as error:
            raise FetchFailed(f"given up after {self._pace.attempts} tries: {error}") from None

    async def _try_whole(self) -> None:
        async with self._asked(0, None, "") as answer:
            self._check(answer)
            chunk = _Chunk(0, 0, tag=answer.tag)
            have = held = 0
            while (piece := await self._next(answer)) is not None:
                have, held = have + len(piece), held + len(piece)
                if have > self._size:
                    raise CorruptWeights(f"the source holds more than the manifest's {self._size} bytes")
                chunk.pieces.append(piece)
                if held >= self._pace.chunk:
                    await self._land(chunk)
                    held = 0
            if have < self._size:
                raise Passing("the source sends fewer bytes than the file has")
            if held:
                await self._land(chunk)

    # -- both ----------------------------------------------------------------------------------------

    def _asked(self, start: int, end: int | None, tag: str) -> _Watched:
        return _Watched(self._origin, start, end, tag, self._pace.stall)

    async def _next(self, answer: Answer) -> memoryview | None:
        """The next piece, or None at the end; a source that is silent for too long is given up."""
        try:
            with anyio.fail_after(self._pace.stall):
                return await anext(answer.pieces, None)
        except TimeoutError:
            raise Passing(f"the source sent nothing for {self._pace.stall:g} s") from None

    def _check(self, answer: Answer) -> None:
        if answer.size is not None and answer.size != self._size:
            raise CorruptWeights(f"the source has {answer.size} bytes, the manifest says {self._size}")

    def _tries(self) -> AsyncRetrying:
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        return AsyncRetrying(
            retry=retry_if_exception_type(Passing),
            stop=stop_after_attempt(self._pace.attempts),
            wait=wait_random_exponential(self._pace.backoff, self._pace.backoff_limit),
            sleep=anyio.sleep,
            reraise=True,
        )

    def __repr__(self) -> str:
        return f"<Pull {self._landing!r}>"


class _Watched:
    """Opens an answer within the limit of silence; once it is open, `Pull._next` watches."""

    def __init__(self, origin: Origin, start: int, end: int | None, tag: str, stall: float) -> None:
        self._context = origin.read(start, end, tag)
        self._stall = stall

    async def __aenter__(self) -> Answer:
        try:
            with anyio.fail_after(self._stall):
                return await self._context.__aenter__()
        except TimeoutError:
            raise Passing(f"the source did not answer for {self._stall:g} s") from None

    async def __aexit__(self, *exc: object) -> None:
        await self._context.__aexit__(*exc)  # type: ignore[arg-type]  # passed through
