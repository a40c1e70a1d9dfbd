"""Verbs about scheduled peaks: what they mean, before the server acts on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from actors.errors import ConfigError
from runtime.cli.words import EPILOG, OK, SETUP, At, File, Json, app, configuration, drawn, end, moment, sentence, tell

peaks = typer.Typer(help="Look at scheduled peaks before the server acts on them.", no_args_is_help=True)
app.add_typer(peaks, name="peaks")


@peaks.command("lint", epilog=EPILOG)
def peaks_lint(file: File, at: At = None, *, json: Json = False) -> None:
    """Check scheduled peaks as of now: what will not fire again, names no model, or does not fit."""
    from runtime.commands.peaks import lint, machine_memory
    from runtime.commands.show import as_json

    now = moment(at)
    try:
        rows = lint(file, os.environ, now, machine_memory())
    except ConfigError as error:
        if not json:
            end(error.message, SETUP)
        print(as_json({"ok": False, "errors": error.message.splitlines(), "findings": []}))
        raise typer.Exit(SETUP) from None
    bad = any(row["level"] == "error" for row in rows)
    if json:
        print(as_json({"ok": not bad, "errors": [], "findings": rows}))
    else:
        for row in rows:
            hint = f" ({row['hint']})" if row["hint"] else ""
            line = f"{row['place']}: {row['level']}: {row['path']}: {row['text']}{hint}"
            if row["level"] == "error":
                tell(line)
            else:
                print(line)
        if not bad:
            print(f"{file}: ok")
    raise typer.Exit(SETUP if bad else OK)


@peaks.command("preview", epilog=EPILOG)
def peaks_preview(
    file: File,
    span: Annotated[str, typer.Option("--next", help="How far to look, as 14d or 36h.")] = "14d",
    tz: Annotated[str | None, typer.Option("--tz", help="Zone to show; else preload.defaults.timezone.")] = None,
    at: At = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this file, as out.png or out.svg.")] = None,
    *,
    json: Json = False,
) -> None:
    """Show when which models would be made ready, in local time and UTC; the planner acts on the same windows."""
    from runtime.commands.peaks import COLUMNS, cells, preview, rows
    from runtime.commands.show import as_json, table

    now, length = moment(at), _span(span)
    try:
        plan = preview(configuration(file), now, length, tz)
    except ConfigError as error:
        end(error.message, SETUP)
    except ValueError as error:
        end(f"--tz: {error}", SETUP)
    found = rows(plan)
    if json:
        print(as_json({"zone": plan.zone_name, "mode": plan.mode, "rows": found}))
    else:
        table(COLUMNS, (cells(row, plan) for row in found), "nothing is scheduled")
        if plan.mode == "observe" and found:
            tell("mode: observe, so none of this is loaded ahead")
    if plot is not None:
        from runtime.commands.peaksplot import draw

        drawn(lambda: draw(plan, plot), plot)


@peaks.command("import-ics", epilog=EPILOG)
def peaks_import(
    file: Annotated[Path, typer.Argument(help="A calendar, an .ics file.")],
    model: Annotated[list[str], typer.Option(help="Models of events that name none; may be repeated.")] = [],  # noqa: B006  # typer copies it
    span: Annotated[str, typer.Option("--next", help="How far to write out events that no rule covers.")] = "366d",
    tz: Annotated[str | None, typer.Option("--tz", help="Zone of times that have none.")] = None,
    at: At = None,
) -> None:
    """Print the events of a calendar as scheduled peaks, in YAML. An event's categories are its models."""
    from datetime import UTC, datetime

    from runtime.commands.ics import MOST_BYTES, IcsMissing, entries, spell

    length, since = _span(span), datetime.fromtimestamp(moment(at), UTC)
    try:
        with file.open("rb") as source:
            rows = entries(source.read(MOST_BYTES + 1), since, length, model, tz)
    except (ConfigError, IcsMissing, OSError) as error:
        end(f"{file}: {sentence(error)}", SETUP)
    print(spell(rows), end="")
    tell(f"{len(rows)} {'entry' if len(rows) == 1 else 'entries'}")


def _span(text: str) -> float:
    from runtime.config.units import parse_seconds

    try:
        length = parse_seconds(text)
    except ValueError as error:
        end(f"--next: {error}", SETUP)
    if not 0 < length <= _LONGEST_SPAN:
        end("--next: must be longer than nothing and at most 1830d", SETUP)
    return length


_LONGEST_SPAN = 1830 * 86_400.0
