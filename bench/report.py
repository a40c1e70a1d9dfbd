"""What every bench ends with: one table for people, one JSON for programs, one exit code for CI.

Belongs here: rows and how they are shown. Never: measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGES = ("torch", "numpy", "msgspec", "orjson", "starlette", "uvicorn", "uvloop", "anyio")
_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure. `baseline` is what it is compared with, in the same unit, and `ratio` how they relate.

    `target` is the gate in words (`>= 100x`); `met` is None for a figure without one.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every bench has; add others to what this returns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="less than a minute; leaves the largest cases out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser


def finish(bench: str, rows: Sequence[Row], args: argparse.Namespace) -> int:
    """Print the table, write the JSON if asked for, and give the exit code: 1 if `--check` finds a target missed."""
    table = Table(title=f"{bench} (load average {os.getloadavg()[0]:.1f})")
    for heading in ("", "value", "unit", "baseline", "ratio", "target", "met"):
        table.add_column(heading, justify="left" if heading in ("", "unit", "target") else "right")
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[row.met]
        times = "" if row.ratio is None else f"{_short(row.ratio)}x"
        table.add_row(row.name, _short(row.value), row.unit, _short(row.baseline), times, row.target, met)
    # A pipe has no width of its own, and a table must not be cut there.
    console = Console()
    Console(width=max(_WIDTH, console.width)).print(table)
    if args.json is not None:
        content = {"bench": bench, "rows": [asdict(row) for row in rows], "machine": _machine()}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(bool(args.check) and any(row.met is False for row in rows))


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _machine() -> dict[str, object]:
    """Enough to judge a figure by, nothing that names the machine."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": [round(one, 2) for one in os.getloadavg()],
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
