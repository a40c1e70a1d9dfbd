"""Request logs of the past, read into counts per model and minute, so that a new installation starts with knowledge.

Belongs here: the formats (common/combined access log, JSON lines, CSV `ts,model`, Triton's verbose log; gzip), and
surviving whatever a log holds: bad lines are counted, skipped and the first few kept to be shown. Never: learning.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import IO, TYPE_CHECKING, Final, cast

import numpy as np

from forecasting.log_formats import PARSERS, PATHS, BadLine, Context, Format, Parse, Request, detect

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

MAX_LINE: Final = 65_536
_SHOWN: Final = 5
_SHOWN_CHARS: Final = 80
_CHUNK: Final = 1 << 20
_MINUTE_BITS: Final = 32
_DETECT: Final = 50


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the lines. `shown` holds the first few bad ones with their reason; `problems` concern files."""

    lines: int = 0
    counted: int = 0
    other: int = 0
    """Lines in order that are no inference request."""
    bad: int = 0
    old: int = 0
    """Requests from before the span that is kept."""
    shown: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """Requests per model and minute. Minutes count from the epoch; `start` inclusive, `end` exclusive.

    `cells[key]` is (minutes ascending, requests in each). `known[end - start]` is False where the whole log is silent
    for so long that it was probably not written.
    """

    start: int
    end: int
    known: NDArray[np.bool_]
    cells: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    report: Report = field(default_factory=Report)

    def renamed(self, key_of: Callable[[str], str | None]) -> Imported:
        """The same under other keys: what gets the same key is added up, what gets None is dropped."""
        groups: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
        for name, cell in self.cells.items():
            key = key_of(name)
            if key is not None:
                groups.setdefault(key, []).append(cell)
        return Imported(
            self.start, self.end, self.known, {key: _sum(parts) for key, parts in groups.items()}, self.report
        )

    def before(self, minute: int) -> Imported:
        """What happened before a minute; models that were not seen by then are gone."""
        cells: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for key, (minutes, counts) in self.cells.items():
            kept = int(np.searchsorted(minutes, minute))
            if kept:
                cells[key] = minutes[:kept], counts[:kept]
        end = max(min(self.end, minute), self.start)
        return Imported(self.start, end, self.known[: end - self.start], cells, self.report)


def _sum(parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if len(parts) == 1:
        return parts[0]
    minutes, places = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    counts = np.zeros(minutes.size, np.int64)
    np.add.at(counts, places, np.concatenate([part[1] for part in parts]))
    return minutes, counts


def read_logs(
    paths: Iterable[Path],
    *,
    now: float,
    form: Format = "auto",
    pattern: re.Pattern[str] = PATHS,
    zone: tzinfo = UTC,
    days: int = 90,
    silence: float = 6 * 3600.0,
    limit: int = 65_536,
    max_cells: int = 20_000_000,
    max_bytes: int = 32 << 30,
) -> Imported:
    """Read logs as a stream, in any order. Blocking, seconds per million lines.

    `now` (UTC seconds) bounds the future and, with `days`, the past; `zone` is that of times without one; at most
    `limit` models, `max_cells` pairs of model and minute, and `max_bytes` read after decompression, then it stops and
    says so in the report. Raises ValueError for options that make no sense and for a file that cannot be opened.
    """
    if form not in PARSERS and form != "auto":
        raise ValueError(f"form must be auto or one of {', '.join(sorted(PARSERS))}, not {form!r}")
    if "model" not in pattern.groupindex:
        raise ValueError("pattern must have a group named 'model'")
    if days < 1 or limit < 1 or not silence > 0:
        raise ValueError("days and limit must be at least 1 and silence above 0")
    tally = _Tally(now=now, days=days, limit=limit, max_cells=max_cells, max_bytes=max_bytes)
    context = Context(pattern, zone, now)
    for path in paths:
        try:
            with _opened(path) as stream:
                _read(stream, path.name, form, context, tally)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            tally.problems.append(f"{path.name}: the compressed data is damaged ({error}); read up to there")
        except OSError as error:
            raise ValueError(f"cannot read the log {path.name!r}: {error.strerror or error}") from None
        if tally.full:
            break
    return tally.result(silence)


@contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    """The file, decompressed if its first bytes say gzip, whatever its name says."""
    with path.open("rb") as raw:
        magic = raw.read(2)
        raw.seek(0)
        if magic != b"\x1f\x8b":
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as stream:
            yield cast("IO[bytes]", stream)


def _lines(stream: IO[bytes], tally: _Tally) -> Iterator[str | None]:
    """Lines as text; None for one longer than `MAX_LINE`, which is read past in pieces."""
    while (piece := stream.readline(MAX_LINE)) and not tally.full:
        tally.take(len(piece))
        whole = True
        while len(piece) == MAX_LINE and not piece.endswith(b"\n") and not tally.full:
            whole = False
            piece = stream.readline(MAX_LINE)
            tally.take(len(piece))
        yield piece.decode("utf-8", "replace").strip() if whole else None


def _read(stream: IO[bytes], name: str, form: Format, context: Context, tally: _Tally) -> None:
    parse: Parse | None = None if form == "auto" else PARSERS[form](context)
    for number, line in enumerate(_lines(stream, tally), 1):
        if line == "":
            continue
        tally.lines += 1
        try:
            if line is None:
                raise BadLine(f"longer than {MAX_LINE} bytes")  # noqa: TRY301 - one place counts bad lines
            if parse is None:
                parse = detect(line, context)
                if parse is None:
                    raise BadLine("no known format")  # noqa: TRY301
            tally.count(parse(line))
        except BadLine as error:
            tally.reject(f"{name}:{number}: {error}: {(line or '')[:_SHOWN_CHARS]!a}")
            if number == _DETECT and parse is None:
                tally.problems.append(f"{name}: none of the first {_DETECT} lines is in a known format")
                return


# -- adding up ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """Pairs of model and minute, packed into one integer each and merged a million at a time."""

    now: float
    days: int
    limit: int
    max_cells: int
    max_bytes: int
    lines: int = 0
    counted: int = 0
    other: int = 0
    bad: int = 0
    old: int = 0
    read: int = 0
    full: bool = False
    shown: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    models: dict[str, int] = field(default_factory=dict[str, int])
    fresh: array[int] = field(default_factory=lambda: array("q"))
    codes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, size: int) -> None:
        """So many bytes were read."""
        self.read += size
        if self.read > self.max_bytes:
            self._stop(f"more than {self.max_bytes} bytes")

    def _stop(self, why: str) -> None:
        if not self.full:
            self.problems.append(f"{why}: the rest was not read")
        self.full = True

    def reject(self, line: str) -> None:
        """A bad line."""
        self.bad += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(line)

    def count(self, request: Request | None) -> None:
        """A line in order. Raises BadLine for a time in the future."""
        if request is None:
            self.other += 1
            return
        if request.minute > self.now / 60 + 1:
            raise BadLine("a time in the future")
        if request.minute < self.now / 60 - self.days * 1440:
            self.old += 1
            return
        number = self.models.get(request.model)
        if number is None:
            if len(self.models) >= self.limit:
                raise BadLine(f"more than {self.limit} models")
            number = self.models[request.model] = len(self.models)
        self.counted += 1
        self.fresh.append(number << _MINUTE_BITS | request.minute)
        if len(self.fresh) >= _CHUNK:
            self.merge()

    def merge(self) -> None:
        """Fold what is fresh into the sorted cells."""
        codes, counts = np.unique(np.array(self.fresh, np.int64), return_counts=True)
        self.codes, self.counts = _sum([(self.codes, self.counts), (codes, counts.astype(np.int64))])
        self.fresh = array("q")
        if self.codes.size > self.max_cells:
            self._stop(f"more than {self.max_cells} pairs of model and minute")

    def result(self, silence: float) -> Imported:
        """Everything, sorted by model."""
        self.merge()
        minutes = self.codes & ((1 << _MINUTE_BITS) - 1)
        models = self.codes >> _MINUTE_BITS
        start = int(minutes.min(initial=2**31)) if minutes.size else 0
        end = int(minutes.max(initial=-1)) + 1
        known = np.ones(max(end - start, 0), np.bool_)
        busy = np.unique(minutes)
        for place in np.flatnonzero(np.diff(busy) * 60.0 > silence).tolist():
            known[int(busy[place]) + 1 - start : int(busy[place + 1]) - start] = False
        bounds = np.searchsorted(models, np.arange(len(self.models) + 1))
        cells = {
            key: (minutes[bounds[number] : bounds[number + 1]], self.counts[bounds[number] : bounds[number + 1]])
            for key, number in self.models.items()
        }
        seen = Counter(lines=self.lines, counted=self.counted, other=self.other, bad=self.bad, old=self.old)
        report = Report(**seen, shown=tuple(self.shown), problems=tuple(self.problems))
        return Imported(start, end, known, cells, report)
