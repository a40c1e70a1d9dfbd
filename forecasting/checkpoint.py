"""What a checkpoint holds: which rows of which tables a snapshot becomes, and the snapshot that they become again.

Belongs here: contents, written as differences from the last checkpoint. Never: opening files, transactions.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, date, tzinfo
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np

from forecasting.blobs import Damaged, Packed, codes_blob, minute_blob, minute_of, pack_array, row_of, unpack_array
from forecasting.calendar import WEEK, zone_of
from forecasting.snapshot import HALF_LIVES, LIMIT, Snapshot
from forecasting.tiers import FIVES, GAP, MINUTES, QUARTERS, UNSEEN, Row, Tiers
from forecasting.week import QUARTER_MINUTES, Day, Week, narrow

if TYPE_CHECKING:
    import sqlite3

    from numpy.typing import NDArray

    from forecasting.tiers import Minute

_LAST_MINUTE: Final = 121_000_000  # in the year 2200


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, the minutes journalled after it, and the first minute that anything is known of."""

    snapshot: Snapshot
    later: tuple[tuple[int, Minute], ...]
    began: int


def write_slots(connection: sqlite3.Connection, snapshot: Snapshot, last: Snapshot | None) -> None:
    """Columns that were passed, or all if they were changed in any other way."""
    week, size = snapshot.week, len(snapshot.table)
    whole = last is None or last.week.epoch != week.epoch
    rows: list[tuple[int, int, bytes, bytes]] = []
    for slot in range(WEEK):
        if week.at[slot] < 0 or not (whole or last is None or last.week.sums[slot] is not week.sums[slot]):
            continue
        sums, _ = week.column(slot, size)  # level shifts that the column has not seen yet are written into it
        rows.append(
            (slot, int(week.at[slot]), pack_array(sums, Packed.ROUNDED), pack_array(week.exposure[slot], Packed.EXACT))
        )
    connection.executemany("INSERT OR REPLACE INTO slots VALUES(?, ?, ?, ?)", rows)


def write_rows(connection: sqlite3.Connection, tiers: Tiers, last: Tiers | None) -> None:
    """Rows of 5 and 15 minutes that are new, without those that have aged out."""
    again = last is None or last.generation != tiers.generation
    first_five = tiers.end // 5 - len(tiers.fives)
    first_quarter = -(-first_five // 3) - len(tiers.quarters)
    last_fives = 0 if last is None or again else last.end // 5
    last_quarters = 0 if last is None or again else -(-(last.end // 5 - len(last.fives)) // 3)
    for name, rows, first, since in (
        ("fives", tiers.fives, first_five, last_fives),
        ("quarters", tiers.quarters, first_quarter, last_quarters),
    ):
        if again:
            connection.execute(f"DELETE FROM {name}")  # noqa: S608 - one of two literals above
        else:
            connection.execute(f"DELETE FROM {name} WHERE number < ?", (first,))  # noqa: S608
        connection.executemany(
            f"INSERT OR REPLACE INTO {name} VALUES(?, ?, ?)",
            [
                (first + place, row.known, codes_blob(row))
                for place, row in enumerate(rows)
                if first + place >= since and row is not GAP
            ],
        )
    connection.execute("DELETE FROM minutes WHERE minute < ?", (tiers.end - MINUTES,))
    if again:  # minutes that came from elsewhere than the journal
        connection.execute("DELETE FROM minutes WHERE minute < ?", (tiers.end,))
        begin = tiers.end - len(tiers.minutes)
        connection.executemany(
            "INSERT INTO minutes VALUES(?, ?, ?)",
            [
                (begin + place, row.known, minute_blob(row))
                for place, row in enumerate(tiers.minutes)
                if row is not UNSEEN
            ],
        )


def write_state(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    """The few vectors and numbers that are written whole, and the local days that are new."""
    week, tiers = snapshot.week, snapshot.tiers
    arrays: dict[str, NDArray[np.generic]] = {
        "decayed": snapshot.decayed.astype(np.float32).ravel(),
        "seen": snapshot.seen,
        "open_quarter": snapshot.open_counts,
        "open_five": tiers.open_counts,
        "actual": week.actual,
        "expected": week.expected,
        "gain": week.gain,
        "gain_until": week.gain_until,
    }
    state = {
        "at": snapshot.at,
        "end": tiers.end,
        "began": snapshot.began,
        "size": len(snapshot.table),
        "open_quarter_known": snapshot.open_known,
        "open_five_known": tiers.open_known,
        "today": None if week.today is None else week.today.isoformat(),
        "zone": snapshot.zone.key if isinstance(snapshot.zone, ZoneInfo) else "UTC",
    }
    connection.executemany(
        "INSERT OR REPLACE INTO arrays VALUES(?, ?)",
        [(name, pack_array(content, Packed.EXACT)) for name, content in arrays.items()],
    )
    connection.execute("INSERT OR REPLACE INTO state VALUES('state', ?)", (json.dumps(state),))
    kept = [day.date.isoformat() for day in week.days]
    connection.execute("DELETE FROM days WHERE day < ?", (min(kept, default=""),))
    known = {day for (day,) in connection.execute("SELECT day FROM days")}
    connection.executemany(
        "INSERT OR REPLACE INTO days VALUES(?, ?, ?)",
        [
            (day.date.isoformat(), pack_array(day.actual, Packed.ROUNDED), pack_array(day.expected, Packed.ROUNDED))
            for day in week.days
            if day.date.isoformat() not in known or day is week.days[-1]
        ],
    )


def blob_bytes(connection: sqlite3.Connection) -> dict[str, int]:
    """Bytes of what each table holds per bucket, slot or minute."""
    found = {
        "slots": "SELECT SUM(LENGTH(sums) + LENGTH(exposure)) FROM slots",
        "fives": "SELECT SUM(LENGTH(codes)) FROM fives",
        "quarters": "SELECT SUM(LENGTH(codes)) FROM quarters",
        "minutes": "SELECT SUM(LENGTH(counts)) FROM minutes",
    }
    return {table: int(connection.execute(query).fetchone()[0] or 0) for table, query in found.items()}


# -- reading it back ---------------------------------------------------------------------------------


class _State(NamedTuple):
    """The few numbers of a checkpoint."""

    at: float
    end: int
    began: int
    size: int
    open_quarter_known: int
    open_five_known: int
    today: date | None
    zone: tzinfo


def load(connection: sqlite3.Connection) -> Saved | None:
    """What a file holds, None for nothing yet. Raises Damaged."""
    found = connection.execute("SELECT content FROM state WHERE name = 'state'").fetchone()
    if found is None and connection.execute("SELECT 1 FROM models LIMIT 1").fetchone() is None:
        return None
    try:
        return _rebuilt(connection, None if found is None else json.loads(found[0]))
    except Damaged:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Damaged(f"its content makes no sense: {type(error).__name__}: {error}") from error


def _rebuilt(connection: sqlite3.Connection, content: dict[str, Any] | None) -> Saved:
    models = connection.execute("SELECT place, key, born FROM models").fetchall()
    state = _state(connection, content)
    size = max([state.size, *(int(place) + 1 for place, _, _ in models)])
    if size > LIMIT or not 0 <= state.end < _LAST_MINUTE or any(place < 0 for place, _, _ in models):
        raise Damaged("its content makes no sense: models or a minute beyond all years")
    table: list[str | None] = [None] * size
    born = np.zeros(size, np.int64)
    for place, key, since in models:
        table[int(place)], born[int(place)] = str(key), int(since)
    minutes = {
        int(minute): minute_of(blob, known=bool(known))
        for minute, known, blob in connection.execute("SELECT minute, known, counts FROM minutes ORDER BY minute")
    }
    later = tuple((minute, row) for minute, row in minutes.items() if minute >= state.end)
    arrays = dict(connection.execute("SELECT name, content FROM arrays").fetchall())
    tiers = _tiers(connection, state, minutes, arrays)
    week = _week(connection, state, arrays)
    rows = np.array([place for place, key in enumerate(table) if key is not None], np.int64)
    decayed = np.zeros((len(HALF_LIVES), size))
    seen, quarter = np.zeros(size), np.zeros(size, np.int64)
    if content is not None:
        decayed[:, : state.size] = _floats(arrays, "decayed", "f4").reshape(len(HALF_LIVES), state.size)
        seen[: state.size] = _floats(arrays, "seen", "f8")
        quarter[: state.size] = unpack_array(arrays["open_quarter"], "i8")
    keys = tuple(key for key in table if key is not None)
    snapshot = Snapshot(
        keys,
        rows,
        tuple(table),
        born,
        state.at,
        decayed,
        seen,
        tiers,
        week,
        quarter,
        state.open_quarter_known,
        (),
        state.zone,
        state.began,
    )
    # An index that got a new owner after the checkpoint still has the old one's numbers.
    for place in np.flatnonzero(born[: state.size] >= state.end).tolist():
        week.clear(place, -(-int(born[place]) // QUARTER_MINUTES))
        decayed[:, place], seen[place], quarter[place] = 0, 0, 0
    return Saved(snapshot, later, state.began)


def _state(connection: sqlite3.Connection, content: dict[str, Any] | None) -> _State:
    if content is None:  # killed before the first checkpoint: there are minutes and nothing else
        (first,) = connection.execute("SELECT MIN(minute) FROM minutes").fetchone()
        first = 0 if first is None else int(first)
        return _State(60.0 * first, first, first, 0, 0, 0, None, UTC)
    at = float(content["at"])
    if not math.isfinite(at):
        raise Damaged("its content makes no sense: a time that is no number")
    return _State(
        at,
        int(content["end"]),
        int(content["began"]),
        int(content["size"]),
        int(content["open_quarter_known"]),
        int(content["open_five_known"]),
        None if content["today"] is None else date.fromisoformat(content["today"]),
        zone_of(str(content["zone"])),
    )


def _floats(arrays: dict[str, object], name: str, dtype: str) -> NDArray[np.float64]:
    return unpack_array(arrays[name], dtype).astype(np.float64)


def _tiers(
    connection: sqlite3.Connection, state: _State, minutes: dict[int, Minute], arrays: dict[str, object]
) -> Tiers:
    """Rows in their places, gaps between them."""
    tiers = Tiers()
    tiers.start(state.end)
    first = min((minute for minute in minutes if minute < state.end), default=state.end)
    for minute in range(max(first, state.end - MINUTES), state.end):
        tiers.minutes.append(minutes.get(minute, UNSEEN))
    fives = _rows(connection, "SELECT number, known, codes FROM fives")
    quarters = _rows(connection, "SELECT number, known, codes FROM quarters")
    end = state.end // 5
    first_five = max(min((number for number in fives if number < end), default=end), end - FIVES - 5)
    if quarters:  # the coarser rows end where the finer begin
        first_five = min(-(-first_five // 3) * 3, end)
    tiers.fives.extend(fives.get(number, GAP) for number in range(first_five, end))
    last_quarter = -(-first_five // 3)
    first_quarter = max(min((number for number in quarters if number < last_quarter), default=last_quarter), 0)
    first_quarter = max(first_quarter, last_quarter - QUARTERS)
    tiers.quarters.extend(quarters.get(number, GAP) for number in range(first_quarter, last_quarter))
    if "open_five" in arrays:
        tiers.open_counts = unpack_array(arrays["open_five"], "i8").astype(np.int64, copy=True)
        tiers.open_known = state.open_five_known
    return tiers


def _rows(connection: sqlite3.Connection, query: str) -> dict[int, Row]:
    return {int(number): row_of(codes, int(known)) for number, known, codes in connection.execute(query)}


def _week(connection: sqlite3.Connection, state: _State, arrays: dict[str, object]) -> Week:
    week = Week(today=state.today)
    for slot, at, sums, exposure in connection.execute("SELECT slot, at, sums, exposure FROM slots"):
        if not 0 <= slot < WEEK:
            raise Damaged(f"its content makes no sense: slot {slot}")
        week.at[slot] = int(at)
        totals = unpack_array(sums, "f4").astype(np.float32, copy=False)
        passes = unpack_array(exposure, "f2").astype(np.float16, copy=True)
        if bool((totals < 0).any() or (passes < 0).any()):
            raise Damaged(f"its content makes no sense: slot {slot} has negative sums")
        week.sums[slot], week.exposure[slot] = narrow(totals), passes
    week.share()
    for day, actual, expected in connection.execute("SELECT day, actual, expected FROM days ORDER BY day"):
        week.days.append(
            Day(
                date.fromisoformat(day),
                unpack_array(actual, "f4").astype(np.float32, copy=True),
                unpack_array(expected, "f4").astype(np.float32, copy=True),
            )
        )
    if arrays:
        week.actual = unpack_array(arrays["actual"], "f4").astype(np.float32, copy=True)
        week.expected = unpack_array(arrays["expected"], "f4").astype(np.float32, copy=True)
        week.gain = unpack_array(arrays["gain"], "f4").astype(np.float32, copy=True)
        week.gain_until = unpack_array(arrays["gain_until"], "i8").astype(np.int64, copy=True)
    return week
