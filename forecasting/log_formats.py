"""What a line of a request log says: which model was asked for, in which minute.

Belongs here: one parser per format and the guess which it is. A parser gives None for a line in order that is no
inference request, and raises BadLine for one that its format cannot hold. Never: files, adding up.
"""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable

Format: TypeAlias = Literal["auto", "access", "json", "csv", "triton"]

PATHS: Final = re.compile(
    r"/v[12]/models/(?P<model>[^/\s?\":]{1,256})(?:/versions/(?P<version>[^/\s?\":]{1,64}))?"
    r"(?:/(?:infer|generate|generate_stream)|:predict)(?![\w/])"
)
"""Request paths that are inference; any pattern with a group `model`, and maybe `version`, can stand in."""

_LONGEST: Final = 65_536
_NAME: Final = 256
_SECONDS_LIMIT: Final = 1e11  # beyond it, epoch numbers are in milli-, micro- or nanoseconds
_ACCESS: Final = re.compile(
    r"\[(\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d):\d\d ([+-]\d{4})\] \"[A-Z]{1,16} (\S+)[^\"]*\" (\d{3})(?!\d)"
)
_TRITON: Final = re.compile(r"^[IWE](\d\d)(\d\d) (\d\d):(\d\d):\d\d\.\d+ .*HTTP request: \d+ (\S+?)\"?$")
_MONTHS: Final[dict[str, int]] = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_TIMES: Final = ("time", "ts", "timestamp", "@timestamp")
_MODELS: Final = ("model", "model_name")
_VERSIONS: Final = ("version", "model_version")
_PLACES: Final = ("path", "url", "uri", "request", "request_uri")


class Request(NamedTuple):
    """One line's request: the minute since the epoch, and `name` or `name@version`."""

    minute: int
    model: str


class BadLine(ValueError):
    """A line that its format cannot hold."""


@dataclass(slots=True)
class Context:
    """What parsers need: the pattern of request paths, the zone of bare times, the present."""

    pattern: re.Pattern[str]
    zone: tzinfo
    now: float
    minutes: dict[str, int] = field(default_factory=dict[str, int])

    def model_of(self, path: str) -> str | None:
        """The model that a request path names."""
        found = self.pattern.search(path)
        if found is None:
            return None
        parts = found.groupdict()
        return _model(unquote(parts["model"] or ""), unquote(parts.get("version") or ""))

    def cached(self, text: str, work: Callable[[str], int]) -> int:
        """Lines of one minute share one text; a log that does not is forgotten now and then."""
        found = self.minutes.get(text)
        if found is None:
            if len(self.minutes) > 4096:  # noqa: PLR2004
                self.minutes.clear()
            found = self.minutes[text] = work(text)
        return found


Parse: TypeAlias = "Callable[[str], Request | None]"


def _model(name: object, version: object = "") -> str:
    if not isinstance(name, str) or not name or len(name) > _NAME or not name.isprintable():
        raise BadLine("no usable model name")
    if isinstance(version, int) and not isinstance(version, bool):
        version = str(version)
    if not isinstance(version, str) or len(version) > _NAME or not version.isprintable():
        raise BadLine("no usable version")
    return f"{name}@{version}" if version and version != "-1" and "@" not in name else name


def _access(context: Context) -> Parse:
    def minute(text: str) -> int:
        try:
            # By hand: strptime follows the locale's names of months and takes ten times as long.
            sign = -1 if text[-5] == "-" else 1
            ahead = sign * (int(text[-4:-2]) * 60 + int(text[-2:]))
            local = datetime(
                int(text[7:11]), _MONTHS[text[3:6]], int(text[:2]), int(text[12:14]), int(text[15:17]), tzinfo=UTC
            )
        except (KeyError, ValueError):
            raise BadLine("no usable time") from None
        return int(local.timestamp()) // 60 - ahead

    def parse(line: str) -> Request | None:
        found = _ACCESS.search(line)
        if found is None:
            raise BadLine("not in the access log format")
        stamp, ahead, path, status = found.groups()
        model = None if status == "404" else context.model_of(path)
        return None if model is None else Request(context.cached(f"{stamp} {ahead}", minute), model)

    return parse


def _json(context: Context) -> Parse:
    def parse(line: str) -> Request | None:
        try:
            loaded = json.loads(line)
        except (ValueError, RecursionError):
            raise BadLine("not JSON") from None
        if not isinstance(loaded, dict):
            raise BadLine("not a JSON object")
        row = cast("dict[str, object]", loaded)
        name = next((row[each] for each in _MODELS if row.get(each) is not None), None)
        if name is not None:
            model = _model(name, next((row[each] for each in _VERSIONS if row.get(each) is not None), ""))
        else:
            place = next((row[each] for each in _PLACES if isinstance(row.get(each), str)), None)
            found = context.model_of(str(place)[:_LONGEST]) if place is not None else None
            if found is None:
                return None
            model = found
        stamp = next((row[each] for each in _TIMES if row.get(each) is not None), None)
        return Request(_minute(stamp, context), model)

    return parse


def _csv(context: Context) -> Parse:
    columns: tuple[int, int] | None = None

    def parse(line: str) -> Request | None:
        nonlocal columns
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except (csv.Error, StopIteration):
            raise BadLine("not CSV") from None
        if columns is None:
            names = [cell.casefold() for cell in cells]
            times = [place for place, name in enumerate(names) if name in _TIMES]
            models = [place for place, name in enumerate(names) if name in _MODELS]
            columns = (times[0], models[0]) if times and models else (0, 1)
            if times and models:
                return None
        if len(cells) <= max(columns):
            raise BadLine("too few columns")
        stamp = cells[columns[0]]
        try:
            number: float | None = float(stamp)
        except ValueError:
            number = None
        return Request(_minute(stamp if number is None else number, context), _model(cells[columns[1]]))

    return parse


def _triton(context: Context) -> Parse:
    latest = datetime.fromtimestamp(context.now, UTC).astimezone(context.zone).replace(tzinfo=None) + timedelta(days=1)

    def parse(line: str) -> Request | None:
        found = _TRITON.match(line)
        if found is None:
            if line[:1] in "IWEV" and line[1:5].isdigit():
                return None  # another line of the same log
            raise BadLine("not in Triton's log format")
        month, day, hour, minute = (int(part) for part in found.groups()[:4])
        model = context.model_of(found[5])
        if model is None:
            return None
        # The format has no year: the last one in which this is not in the future, 29 February included.
        for year in range(latest.year, latest.year - 9, -1):
            try:
                local = datetime(year, month, day, hour, minute)  # noqa: DTZ001 - the zone follows
            except ValueError:
                continue
            if local <= latest:
                return Request(int(local.replace(tzinfo=context.zone).timestamp()) // 60, model)
        raise BadLine("no usable time")

    return parse


PARSERS: Final[dict[str, Callable[[Context], Parse]]] = {
    "access": _access,
    "json": _json,
    "csv": _csv,
    "triton": _triton,
}


def detect(line: str, context: Context) -> Parse | None:
    """The first format that can make sense of a line."""
    for name in ("json", "triton", "access", "csv"):
        parse = PARSERS[name](context)
        try:
            parse(line)
        except BadLine:
            continue
        return PARSERS[name](context)  # a fresh one: a CSV parser takes its first line for the header
    return None


def _minute(stamp: object, context: Context) -> int:
    """Minute of a number (seconds since the epoch, or milli-, micro-, nanoseconds) or an ISO 8601 text."""
    if isinstance(stamp, str):

        def work(text: str) -> int:
            try:
                moment = datetime.fromisoformat(text)
                aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=context.zone)
                return math.floor(aware.timestamp() / 60)
            except (ValueError, OverflowError):
                raise BadLine("no usable time") from None

        return context.cached(stamp[:64], work)
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1e20:  # noqa: PLR2004
        raise BadLine("no usable time")
    while stamp > _SECONDS_LIMIT:
        stamp /= 1000
    return math.floor(stamp / 60)
