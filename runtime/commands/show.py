"""Answers as people read them: tables, and text with nothing in it that a terminal would obey.

Reads what it knows of an answer and leaves out the rest; asks nothing of a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from runtime.config.units import print_seconds, round_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

_WIDE: Final = 240
"""Columns when nobody looks: enough that a table in a pipe is not folded."""


def console(stream: TextIO | None = None) -> Console:
    """Open a console that is plain in a pipe and under NO_COLOR, and never reads markup out of an answer."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=None if stream.isatty() else _WIDE)


def clean(value: object) -> str:
    """Text without control characters, so that a name cannot move the cursor."""
    return "".join(each if each.isprintable() else "\ufffd" for each in str(value))


def as_json(value: object) -> str:
    """Write JSON for a program, stable in order and safe on any terminal."""
    return json.dumps(value, indent=2, ensure_ascii=True, default=str)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """Print rows under column names, or one sentence when there are none."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = list(rows)
    if not found:
        console().print(empty)
        return
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        grid.add_column(column.upper(), overflow="fold", justify="right" if column in _NUMBERS else "left")
    for row in found:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    console().print(grid)


RESIDENTS: Final = ("name", "version", "device", "size", "state", "leases", "idle", "expires")
INDEX: Final = ("name", "version", "state", "reason")
_NUMBERS: Final = frozenset({"size", "leases", "idle", "expires"})


def residents(state: object) -> Iterator[dict[str, Any]]:
    """Take the residents out of `/api/v1/state`: one row per model and device, in the server's order.

    Sizes in bytes, `idle` and `expires` in seconds; None where the server does not say.
    """
    for device in _rows(state, "devices"):
        for row in _rows(device, "residents"):
            name, _, version = str(row.get("model", "")).partition("@")
            yield {
                "name": row.get("name", name),
                "version": row.get("version", version),
                "device": device.get("id", ""),
                "size": row.get("bytes"),
                "state": row.get("state", ""),
                "leases": row.get("leases"),
                "idle": row.get("idle"),
                "expires": "pinned" if row.get("pinned") is True else row.get("expires"),
            }


def resident_cells(row: Mapping[str, Any]) -> list[str]:
    """One resident as the cells of its line."""
    expires = row["expires"]
    return [
        str(row["name"]),
        str(row["version"]),
        str(row["device"]),
        _size(row["size"]),
        str(row["state"]),
        str(row["leases"]) if _number(row["leases"]) else "-",
        _ago(row["idle"]),
        expires if isinstance(expires, str) else _ago(expires),
    ]


def devices(state: object) -> Iterator[str]:
    """One line per device: bytes used of its capacity, and how many models are there."""
    for device in _rows(state, "devices"):
        used, capacity = device.get("used"), device.get("capacity")
        count = sum(1 for _ in _rows(device, "residents"))
        held = f"{count} {'model' if count == 1 else 'models'}"
        yield f"{clean(device.get('id', '?'))}  {_size(used)} of {_size(capacity)}  {held}"


def index_cells(rows: object) -> Iterator[list[str]]:
    """Take the rows of the repository index as cells."""
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping):
            yield [str(row.get(column, "")) for column in INDEX]


def _rows(value: object, key: str) -> Iterator[Mapping[str, Any]]:
    rows = value.get(key) if isinstance(value, Mapping) else None
    yield from (row for row in rows if isinstance(row, Mapping)) if isinstance(rows, list) else ()


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _size(value: object) -> str:
    return round_bytes(value) if isinstance(value, int) and _number(value) else "-"


def _ago(value: object) -> str:
    return print_seconds(round(value)) if isinstance(value, int | float) and _number(value) else "-"
