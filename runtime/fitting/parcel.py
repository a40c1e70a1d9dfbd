"""A snapshot of the counts as plain arrays, and back: what the fitting process is given.

Belongs here: the way in. Minutes are left out: a fit looks at buckets of 5 and 15 minutes and at week sums. Never:
pickles, fitting, processes.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import deque
from datetime import UTC, date
from typing import IO, TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

import numpy as np

from forecasting.calendar import WEEK, zone_of
from forecasting.snapshot import Mask, Snapshot
from forecasting.tiers import GAP, Row, Tiers
from forecasting.week import Day, Week, narrow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

MOST_ARRAYS: Final = 64


class Garbled(ValueError):
    """These bytes are not arrays that were written here."""


# -- arrays in a file --------------------------------------------------------------------------------


def write_arrays(file: IO[bytes], arrays: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Write an npz, uncompressed: the reader is a pipe away. One array after the other, as they come."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """Read an npz of stored (not compressed) members, which cannot be larger than what was sent. Raises `Garbled`."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
        if len(members) <= MOST_ARRAYS and all(each.compress_type == zipfile.ZIP_STORED for each in members):
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                return {name: found[name] for name in found.files}
    except Exception as error:  # noqa: BLE001 - a broken sender makes the two readers raise some twenty kinds
        raise Garbled(f"the archive cannot be read ({type(error).__name__})") from None
    raise Garbled("the archive is not as it was written here")


# -- snapshots ---------------------------------------------------------------------------------------


def packed(snapshot: Snapshot) -> Iterator[tuple[str, NDArray[Any]]]:
    """Plain arrays by name; some 70 MB and tens of milliseconds for 10,000 models, so not on the loop.

    Each is made when it is asked for, and none is needed after that: a server need not have room for all.
    """
    size, tiers, week = len(snapshot.table), snapshot.tiers, snapshot.week
    words = {
        "keys": snapshot.keys,
        "table": snapshot.table,
        "at": snapshot.at,
        "open_known": snapshot.open_known,
        "began": snapshot.began,
        "dates": [day.date.isoformat() for day in snapshot.days()],
        "end": tiers.end,
        "zone": snapshot.zone.key if isinstance(snapshot.zone, ZoneInfo) else "UTC",
        "masks": [[each.start, each.end, None if each.keys is None else sorted(each.keys)] for each in snapshot.masks],
    }
    yield "words", np.frombuffer(json.dumps(words).encode(), np.uint8)
    yield "rows", snapshot.rows
    yield "born", snapshot.born
    yield "decayed", snapshot.decayed
    yield "seen", snapshot.seen
    yield "open_counts", snapshot.open_counts
    yield "at", week.at
    yield "days", _days(snapshot, size)
    yield "sums", np.stack([narrow(week.column(slot, size)[0]) for slot in range(WEEK)])
    yield "exposure", np.stack([week.column(slot, size)[1].astype(np.float16) for slot in range(WEEK)])
    for name, rows in (("fives", tiers.fives), ("quarters", tiers.quarters)):
        yield name, _stacked(rows, size)
        yield f"{name}_known", np.array([row.known for row in rows], np.int64)


def unpacked(arrays: Mapping[str, NDArray[Any]]) -> Snapshot:
    """The snapshot that `packed` was given, as far as a fit looks at it."""
    words = json.loads(arrays["words"].tobytes())
    week = Week(list(arrays["sums"]), list(arrays["exposure"]), arrays["at"])
    dates = map(date.fromisoformat, words["dates"])
    week.days.extend(Day(day, *parts) for day, parts in zip(dates, arrays["days"], strict=True))
    tiers = Tiers(
        end=words["end"],
        fives=deque(_unstacked(arrays["fives"], arrays["fives_known"])),
        quarters=deque(_unstacked(arrays["quarters"], arrays["quarters_known"])),
    )
    return Snapshot(
        keys=tuple(words["keys"]),
        rows=arrays["rows"],
        table=tuple(words["table"]),
        born=arrays["born"],
        at=words["at"],
        decayed=arrays["decayed"],
        seen=arrays["seen"],
        tiers=tiers,
        week=week,
        open_counts=arrays["open_counts"],
        open_known=words["open_known"],
        masks=tuple(Mask(start, end, None if keys is None else frozenset(keys)) for start, end, keys in words["masks"]),
        zone=UTC if words["zone"] == "UTC" else zone_of(words["zone"]),
        began=words["began"],
    )


def _days(snapshot: Snapshot, size: int) -> NDArray[np.float32]:
    """Counted and expected requests of past local days, `[days, 2, size]`; models that came later have zeros."""
    found = np.zeros((len(snapshot.days()), 2, size), np.float32)
    for place, day in enumerate(snapshot.days()):
        found[place, 0, : day.actual.size], found[place, 1, : day.expected.size] = (
            day.actual[:size],
            day.expected[:size],
        )
    return found


def _stacked(rows: Sequence[Row] | deque[Row], size: int) -> NDArray[np.uint8]:
    codes = np.zeros((len(rows), size), np.uint8)
    for place, row in enumerate(rows):
        found = row.codes  # may have to be decompressed
        codes[place, : found.size] = found[:size]
    return codes


def _unstacked(codes: NDArray[np.uint8], known: NDArray[np.int64]) -> Iterable[Row]:
    return (Row(row, minutes) if minutes else GAP for row, minutes in zip(codes, known.tolist(), strict=True))
