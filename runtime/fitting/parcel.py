"""A snapshot of the counts as plain arrays, and back: what the fitting process is given.

Belongs here: the way in. Minutes are left out: a fit looks at buckets of 5 and 15 minutes and at week sums. Never:
pickles, fitting, processes.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections import deque
from datetime import UTC
from typing import IO, TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

import numpy as np

from forecasting.calendar import zone_of
from forecasting.snapshot import Mask, Snapshot
from forecasting.tiers import GAP, Row, Tiers
from forecasting.week import QUARTER_MINUTES, Week

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

MOST_ARRAYS: Final = 64


class Garbled(ValueError):
    """These bytes are not arrays that were written here."""


# -- arrays in a file --------------------------------------------------------------------------------


def write_arrays(file: IO[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an npz, uncompressed: the reader is a pipe away."""
    np.savez(file, allow_pickle=False, **arrays)


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


def packed(snapshot: Snapshot) -> dict[str, NDArray[Any]]:
    """Plain arrays; some 80 MB and tens of milliseconds for 10,000 models, so not on the loop."""
    size, tiers = len(snapshot.table), snapshot.tiers
    sums, exposure = snapshot.week.matrix(tiers.end // QUARTER_MINUTES, size)
    words = {
        "keys": snapshot.keys,
        "table": snapshot.table,
        "at": snapshot.at,
        "open_known": snapshot.open_known,
        "began": snapshot.began,
        "end": tiers.end,
        "zone": snapshot.zone.key if isinstance(snapshot.zone, ZoneInfo) else "UTC",
        "masks": [[each.start, each.end, None if each.keys is None else sorted(each.keys)] for each in snapshot.masks],
    }
    fives, fives_known = _stacked(tiers.fives, size)
    quarters, quarters_known = _stacked(tiers.quarters, size)
    return {
        "words": np.frombuffer(json.dumps(words).encode(), np.uint8),
        "rows": snapshot.rows,
        "born": snapshot.born,
        "decayed": snapshot.decayed,
        "seen": snapshot.seen,
        "open_counts": snapshot.open_counts,
        "passed": snapshot.week.at >= 0,
        "sums": sums,
        "exposure": exposure.astype(np.float16),
        "fives": fives,
        "fives_known": fives_known,
        "quarters": quarters,
        "quarters_known": quarters_known,
    }


def unpacked(arrays: Mapping[str, NDArray[Any]]) -> Snapshot:
    """The snapshot that `packed` was given, as far as a fit looks at it."""
    words = json.loads(arrays["words"].tobytes())
    # The sums came as they stand at this quarter.
    week = Week.standing(arrays["sums"], arrays["exposure"], arrays["passed"], words["end"] // QUARTER_MINUTES)
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


def _stacked(rows: Sequence[Row] | deque[Row], size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    codes = np.zeros((len(rows), size), np.uint8)
    for place, row in enumerate(rows):
        found = row.codes  # may have to be decompressed
        codes[place, : found.size] = found[:size]
    return codes, np.array([row.known for row in rows], np.int64)


def _unstacked(codes: NDArray[np.uint8], known: NDArray[np.int64]) -> Iterable[Row]:
    return (Row(row, minutes) if minutes else GAP for row, minutes in zip(codes, known.tolist(), strict=True))
