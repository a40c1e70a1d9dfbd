"""Local weeks, days and dates: which 15-minute slot of the local week an instant lies in, exact across DST.

Belongs here: zones, slots, the first valid instant of a local time, calendars of dates. Instants come in as UTC epoch
seconds. Never: recurring schedules (peaks), counting, reading a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

WEEK: Final = 672
"""Slots of a local week; slot 0 begins on Monday at 00:00."""

SLOT: Final = 900.0
"""Seconds of a slot."""

DAY: Final = 96
"""Slots of a local day."""

_DAY_SECONDS: Final = 86_400
_WEEK_SECONDS: Final = 604_800
_MONDAY: Final = 4 * _DAY_SECONDS  # 1970-01-05, seconds after the epoch
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 2199
_LIMIT: Final = datetime(_LAST_YEAR + 1, 1, 1, tzinfo=UTC).timestamp()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROBE: Final = 6 * 3600  # no zone changes its offset twice within six hours

Kind: TypeAlias = Literal["working_days", "holidays"]


# -- zones -------------------------------------------------------------------------------------------


def zone_of(name: str) -> tzinfo:
    """The zone of an IANA name. `UTC` needs no database.

    Raises ValueError: with the nearest name for one that is unknown, naming the `tzdata` package if there is no
    database at all.
    """
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        known = available_timezones()
        if not known:
            msg = f"no time-zone database for {name!r}: install the package `tzdata`"
            raise ValueError(msg) from error
        raise ValueError(f"unknown time zone {name!r}{_hint(name, known)}") from None


def _hint(name: str, known: Iterable[str]) -> str:
    """A question that names what was probably meant, or nothing."""
    folded = {one.casefold(): one for one in sorted(known)}
    for one in tuple(folded):
        folded.setdefault(one.rpartition("/")[2], folded[one])
    near = get_close_matches(name.strip()[:64].casefold().replace(" ", "_"), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def _offset_at(second: int, zone: tzinfo) -> int:
    """UTC offset in whole seconds at an instant."""
    shift = (_EPOCH + timedelta(seconds=second)).astimezone(zone).utcoffset()
    return 0 if shift is None else round(shift.total_seconds())


@lru_cache(maxsize=2048)
def _year(zone: tzinfo, year: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Instants from which on an offset holds, and the offsets, for one year of UTC. The first is the year's start."""
    begin = round(datetime(year, 1, 1, tzinfo=UTC).timestamp())
    end = round(datetime(year + 1, 1, 1, tzinfo=UTC).timestamp())
    starts, offsets = [begin], [_offset_at(begin, zone)]
    for probe in range(begin + _PROBE, end + _PROBE, _PROBE):
        last = min(probe, end - 1)
        if (offset := _offset_at(last, zone)) != offsets[-1]:
            low, high = max(probe - _PROBE, begin), last
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset_at(middle, zone) == offsets[-1] else (low, middle)
            starts.append(high)
            offsets.append(offset)
    return tuple(starts), tuple(offsets)


def offset_of(utc: float, zone: tzinfo) -> int:
    """Seconds by which local time is ahead of UTC at an instant. Raises ValueError outside 1970..2199."""
    if not 0 <= utc < _LIMIT:
        msg = f"instant must lie in the years {_FIRST_YEAR} to {_LAST_YEAR}, not {utc!r}"
        raise ValueError(msg)
    starts, offsets = _year(zone, (_EPOCH + timedelta(seconds=utc)).year)
    return offsets[bisect_right(starts, utc) - 1]


def offsets_of(utc: NDArray[np.float64], zone: tzinfo) -> NDArray[np.int64]:
    """Offsets in seconds of many instants, any shape, any order. Raises ValueError outside 1970..2199."""
    if not utc.size:
        return np.zeros(utc.shape, np.int64)
    if not bool(np.all((utc >= 0) & (utc < _LIMIT))):
        raise ValueError(f"instants must lie in the years {_FIRST_YEAR} to {_LAST_YEAR}")
    seconds = np.floor(utc).astype(np.int64)
    years = np.unique(seconds.astype("datetime64[s]").astype("datetime64[Y]").astype(np.int64)) + _FIRST_YEAR
    # Years between two that occur need no rows: each year's own start is among the instants.
    tables = [_year(zone, int(year)) for year in years]
    starts = np.array([start for table in tables for start in table[0]], np.int64)
    offsets = np.array([offset for table in tables for offset in table[1]], np.int64)
    return offsets[np.searchsorted(starts, seconds, side="right") - 1]


# -- slots and days ----------------------------------------------------------------------------------


def slot_of(utc: float, zone: tzinfo) -> int:
    """Slot of the local week, 0..671, that an instant lies in. Raises ValueError outside 1970..2199."""
    local = math.floor(utc + offset_of(utc, zone)) - _MONDAY
    return local % _WEEK_SECONDS // int(SLOT)


def slots_of(utc: NDArray[np.float64], zone: tzinfo) -> NDArray[np.int64]:
    """`slot_of` for many instants, any shape and order."""
    offsets = offsets_of(utc, zone)  # first: it refuses what no integer can hold
    local = np.floor(utc).astype(np.int64) + offsets - _MONDAY
    slots: NDArray[np.int64] = local % _WEEK_SECONDS // int(SLOT)
    return slots


def day_of(utc: float, zone: tzinfo) -> date:
    """Local date of an instant."""
    return (_EPOCH + timedelta(seconds=utc + offset_of(utc, zone))).date()


def local_instant(local: datetime, zone: tzinfo) -> datetime:
    """The UTC instant of a naive local time: the first valid instant after a gap, the first of two in an overlap.

    Faults F68. A plain round trip would turn 02:30 in a gap of an hour into 03:30; the promise is 03:00. Raises
    ValueError for an aware time and for one that no instant stands for.
    """
    if local.tzinfo is not None:
        raise ValueError(f"a local time has no zone of its own, unlike {local.isoformat()}")
    local = local.replace(fold=0)
    try:
        instant = local.replace(tzinfo=zone).astimezone(UTC)
        if instant.astimezone(zone).replace(tzinfo=None, fold=0) == local:
            return instant
        early = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    except OverflowError:
        raise ValueError(f"no instant for {local.isoformat()}") from None
    low, high = (math.floor((one - _EPOCH).total_seconds()) for one in (early, instant))
    before = _offset_at(low, zone)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _offset_at(middle, zone) == before else (low, middle)
    return _EPOCH + timedelta(seconds=high)


# -- dates -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calendar:
    """A set of local dates: listed ones, or the working days or holidays of a country or a market.

    `source` is a code of the `holidays` library. Build it with `of_dates`, `of_country` or `of_market`.
    """

    dates: frozenset[date] = frozenset()
    source: str = ""
    subdivision: str = ""
    market: bool = False
    kind: Kind = "holidays"

    def __contains__(self, day: date) -> bool:
        """Whether a date belongs to it."""
        if not self.source:
            return day in self.dates
        holidays, working = _dates_of(self.source, self.subdivision, day.year, market=self.market)
        return day in (holidays if self.kind == "holidays" else working)


def of_dates(dates: Iterable[date]) -> Calendar:
    """A calendar of exactly these dates."""
    return Calendar(frozenset(one.date() if isinstance(one, datetime) else one for one in dates))


def of_country(code: str, *, kind: Kind = "holidays", subdivision: str = "") -> Calendar:
    """The holidays or working days (weekend substitutes honoured) of a country by ISO code.

    Raises ValueError, with the nearest match, for a country or subdivision that the `holidays` library lacks.
    """
    import holidays

    known = holidays.list_supported_countries(include_aliases=True)
    if code not in known:
        raise ValueError(f"unknown country {code!r}{_country_hint(code)}")
    try:  # the library knows aliases that it does not list
        holidays.country_holidays(code, subdiv=subdivision or None)
    except NotImplementedError:
        raise ValueError(f"unknown subdivision {subdivision!r} of {code}{_hint(subdivision, known[code])}") from None
    return Calendar(source=code, subdivision=subdivision, kind=_kind(kind))


def of_market(code: str, *, kind: Kind = "working_days") -> Calendar:
    """The trading days or closed days of a market such as `NYSE`. Raises ValueError with the nearest match."""
    import holidays

    known = holidays.list_supported_financial(include_aliases=True)
    if code not in known:
        raise ValueError(f"unknown market {code!r}{_hint(code, known)}")
    return Calendar(source=code, market=True, kind=_kind(kind))


def _kind(kind: str) -> Kind:
    if kind == "working_days":
        return "working_days"
    if kind == "holidays":
        return "holidays"
    raise ValueError(f"unknown kind of calendar {kind!r}{_hint(kind, ('working_days', 'holidays'))}")


def _country_hint(code: str) -> str:
    """People write names and lower case; the library knows both spellings."""
    from holidays.registry import COUNTRIES

    codes = {name: entry[1] for name, entry in COUNTRIES.items()}
    folded = code.strip()[:64].casefold().replace(" ", "_")
    near = get_close_matches(folded, codes, n=1)
    if near and len(folded) > len("USA"):
        return f"; did you mean {codes[near[0]]!r}?"
    return _hint(code, [one for entry in COUNTRIES.values() for one in entry[1:]])


@lru_cache(maxsize=512)
def _dates_of(source: str, subdivision: str, year: int, *, market: bool) -> tuple[frozenset[date], frozenset[date]]:
    """Holidays and working days of one year."""
    import holidays

    # Neighbouring years are asked for as well: a day off may be made up for across New Year.
    years = range(year - 1, year + 2)
    book = (
        holidays.financial_holidays(source, years=years)
        if market
        else holidays.country_holidays(source, subdiv=subdivision or None, years=years)
    )
    first = date(year, 1, 1)
    span = [first + timedelta(days=day) for day in range((date(year, 12, 31) - first).days + 1)]
    return frozenset(day for day in span if day in book), frozenset(day for day in span if book.is_working_day(day))
