"""The command line: words, options and exit codes. What they do is in `commands/` and behind `assembly.serve`.

Exit codes: 0 done, 1 the server said no, 2 configuration or usage, 3 cannot start or reach. Every heavy import is
inside the verb that needs it, so that `check` never pays for torch or Starlette.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from actors.errors import ConfigError, ForeloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.commands.client import Server
    from runtime.commands.peaks import Preview
    from runtime.config.lint import Finding
    from runtime.config.schema import Config

OK, DECLINED, SETUP, UNAVAILABLE = 0, 1, 2, 3
"""Done; the server said no; configuration or usage; cannot start or reach."""

_EPILOG = "Exit codes: 0 done, 1 the server said no, 2 configuration or usage, 3 cannot start or reach."

app = typer.Typer(
    name="foreload",
    help="Serve many PyTorch models from less memory than their sum.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(envvar="FORELOAD_CONFIG", help="The configuration, a YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Url = Annotated[str, typer.Option("--url", envvar="FORELOAD_URL", help="The server. Its key comes from FORELOAD_KEY.")]
Model = Annotated[str, typer.Argument(help="The model's name.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds to wait for an answer.")]

_URL = "http://127.0.0.1:8080"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    code = OK
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has gone: nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        app(args=None if arguments is None else list(arguments), prog_name="foreload")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own ending, with code 1
            raise end.__context__ from None
        return end.code if isinstance(end.code, int) else OK if end.code is None else DECLINED
    return OK


# -- server ------------------------------------------------------------------------------------------


@app.command(epilog=_EPILOG)
def serve(
    file: File,
    host: Annotated[str | None, typer.Option(help="Overrides server.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides server.port.")] = None,
) -> None:
    """Serve the models of a configuration until told to stop (SIGTERM or Ctrl-C)."""
    given = {"server.host": host, "server.port": port}
    try:
        config = _configuration(file, {key: value for key, value in given.items() if value is not None})
    except ConfigError as error:
        _end(error.message, SETUP)
    for finding in _findings(config):
        _tell(_line(finding))
    try:
        from runtime.running import serve as run

        code = run(config)
    except ConfigError as error:
        _end(error.message, SETUP)
    except (ForeloadError, OSError) as error:
        _end(f"cannot start: {_sentence(error)}", UNAVAILABLE)
    raise typer.Exit(code)


@app.command(epilog=_EPILOG)
def check(file: File, *, json: Json = False) -> None:
    """Check a configuration: all errors at once, or what trouble it will have."""
    from runtime.commands.show import as_json

    try:
        config = _configuration(file)
        findings = [*_findings(config), *_peak_findings(config)]
    except ConfigError as error:
        if not json:
            _end(error.message, SETUP)
        print(as_json({"ok": False, "errors": error.message.splitlines(), "findings": []}))
        raise typer.Exit(SETUP) from None
    if json:
        rows = [{"level": str(row.level), "path": row.path, "text": row.text} for row in findings]
        print(as_json({"ok": True, "errors": [], "findings": rows}))
        return
    for finding in findings:
        print(_line(finding))
    print(f"{file}: ok")


@app.command()
def schema() -> None:
    """Print the configuration's JSON Schema, for editors."""
    from runtime.commands.show import as_json
    from runtime.config.load import json_schema

    print(as_json(json_schema()))


@app.command()
def version(*, json: Json = False) -> None:
    """Print the version."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from runtime.commands.show import as_json

    try:
        number = installed("foreload")
    except PackageNotFoundError:
        number = "unknown (not installed)"
    print(as_json({"foreload": number, "python": platform.python_version()}) if json else f"foreload {number}")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="What logs shall call the key.")],
    scope: Annotated[list[str], typer.Option(help="infer, infer:<glob>, read or admin; may be repeated.")] = ["infer"],  # noqa: B006  # typer copies it
    *,
    json: Json = False,
) -> None:
    """Make a bearer key: the key to give away, and its hash for server.keys."""
    from runtime.commands.show import as_json
    from runtime.config.document import Document
    from runtime.config.schema import Key
    from runtime.config.yaml import validate
    from runtime.http.auth import new_token

    token, hashed = new_token()
    row = {"name": name, "hash": hashed, "scopes": scope}
    try:
        validate(Key, Document("command line", row))
    except ConfigError as error:
        _end(error.message, SETUP)
    if json:
        print(as_json({"key": token, **row}))
        return
    _tell("Give this key away; it is shown this once:")
    print(token)
    _tell(f"and add to server.keys:\n  - {{name: {name}, hash: '{hashed}', scopes: [{', '.join(map(repr, scope))}]}}")


@app.command(epilog=_EPILOG)
def describe(
    directory: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A model's folder.")],
    *,
    every: Annotated[bool, typer.Option("--all", help="List every file, not only those listed before.")] = False,
    json: Json = False,
) -> None:
    """Bring a model folder's manifest up to date: its files, their sizes and hashes. Comments in it are lost."""
    from runtime.commands.manifest import update
    from runtime.commands.show import as_json

    try:
        path, files = update(directory, every=every)
    except ForeloadError as error:
        _end(error.message, SETUP)
    except OSError as error:
        _end(f"{directory}: {_sentence(error)}", SETUP)
    print(
        as_json({"written": str(path), "files": files})
        if json
        else f"{path}: {len(files)} {'file' if len(files) == 1 else 'files'}"
    )


@app.command()
def demo(port: Annotated[int | None, typer.Option(help="Where to serve.")] = None) -> None:
    """Fetch small real models, serve them, and show what residency does."""
    from runtime.demo.tour import main as tour

    raise typer.Exit(tour(port))


# -- scheduled peaks ---------------------------------------------------------------------------------

peaks = typer.Typer(help="Look at scheduled peaks before the server acts on them.", no_args_is_help=True)
app.add_typer(peaks, name="peaks")

At = Annotated[str | None, typer.Option("--at", help="Pretend it is this moment, as 2026-12-01T08:00+01:00.")]


@peaks.command("lint", epilog=_EPILOG)
def peaks_lint(file: File, at: At = None, *, json: Json = False) -> None:
    """Check scheduled peaks as of now: what will not fire again, names no model, or does not fit."""
    from runtime.commands.peaks import lint, machine_memory
    from runtime.commands.show import as_json

    now = _moment(at)
    try:
        rows = lint(file, os.environ, now, machine_memory())
    except ConfigError as error:
        if not json:
            _end(error.message, SETUP)
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
                _tell(line)
            else:
                print(line)
        if not bad:
            print(f"{file}: ok")
    raise typer.Exit(SETUP if bad else OK)


@peaks.command("preview", epilog=_EPILOG)
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

    now, length = _moment(at), _span(span)
    try:
        plan = preview(_configuration(file), now, length, tz)
    except ConfigError as error:
        _end(error.message, SETUP)
    except ValueError as error:
        _end(f"--tz: {error}", SETUP)
    found = rows(plan)
    if json:
        print(as_json({"zone": plan.zone_name, "mode": plan.mode, "rows": found}))
    else:
        table(COLUMNS, (cells(row, plan) for row in found), "nothing is scheduled")
        if plan.mode == "observe" and found:
            _tell("mode: observe, so none of this is loaded ahead")
    if plot is not None:
        _draw(plan, plot)


@peaks.command("import-ics", epilog=_EPILOG)
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

    length, since = _span(span), datetime.fromtimestamp(_moment(at), UTC)
    try:
        with file.open("rb") as source:
            rows = entries(source.read(MOST_BYTES + 1), since, length, model, tz)
    except (ConfigError, IcsMissing, OSError) as error:
        _end(f"{file}: {_sentence(error)}", SETUP)
    print(spell(rows), end="")
    _tell(f"{len(rows)} {'entry' if len(rows) == 1 else 'entries'}")


def _span(text: str) -> float:
    from runtime.config.units import parse_seconds

    try:
        length = parse_seconds(text)
    except ValueError as error:
        _end(f"--next: {error}", SETUP)
    if not 0 < length <= _LONGEST_SPAN:
        _end("--next: must be longer than nothing and at most 1830d", SETUP)
    return length


_LONGEST_SPAN = 1830 * 86_400.0


def _draw(plan: Preview, path: Path) -> None:
    from runtime.commands.peaksplot import PlotMissing, draw

    try:
        draw(plan, path)
    except (PlotMissing, OSError, ValueError) as error:
        _end(f"--plot: {_sentence(error)}", SETUP)
    _tell(f"drawn: {path}")


def _moment(text: str | None) -> float:
    """UTC epoch seconds of now, or of a moment somebody pretends; one without an offset is UTC."""
    import time
    from datetime import UTC

    from runtime.config.moments import parse_moment

    if text is None:
        return time.time()
    try:
        moment = parse_moment(text)
    except ValueError as error:
        _end(f"--at: {error}", SETUP)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


# -- learned forecasts -------------------------------------------------------------------------------

forecast = typer.Typer(help="Look at what was learned.", no_args_is_help=True)
app.add_typer(forecast, name="forecast")

Plot = Annotated[Path | None, typer.Option(help="Draw it to this file, as out.png or out.svg.")]


@forecast.command("explain", epilog=_EPILOG)
def forecast_explain(
    model: Model,
    file: Annotated[Path, typer.Option("--config", envvar="FORELOAD_CONFIG", help="The configuration, a YAML file.")],
    at: At = None,
    plot: Plot = None,
    *,
    json: Json = False,
) -> None:
    """Show what is expected of a model in the next 24 hours, and why: rates, chances, next use, weights, peaks."""
    from runtime.commands.foresight import NotKnown, explain
    from runtime.commands.show import as_json

    now = _moment(at)
    try:
        said = explain(_configuration(file), model, now)
    except ConfigError as error:
        _end(error.message, SETUP)
    except NotKnown as error:
        _end(str(error), DECLINED)
    if json:
        print(as_json(said.rows))
    else:
        from runtime.commands.foresightshow import explanation

        for line in explanation(said):
            print(line)
    if plot is not None:
        from runtime.commands.foresightplot import draw_explanation

        _drawn(lambda: draw_explanation(said, plot), plot)


@forecast.command("learn", epilog=_EPILOG)
def forecast_learn(
    logs: Annotated[
        list[Path], typer.Argument(help="Requests of the past: access logs, JSON lines, CSV; may be gzip.")
    ],
    file: Annotated[Path, typer.Option("--config", envvar="FORELOAD_CONFIG", help="The configuration, a YAML file.")],
    *,
    json: Json = False,
) -> None:
    """Give a server that is not running a past to learn from, so that it starts with knowledge."""
    import time

    from forecasting.store import StoreFailed
    from runtime.commands.learning import learn
    from runtime.commands.show import as_json

    try:
        learned = learn(_configuration(file), logs, time.time())
    except ConfigError as error:
        _end(error.message, SETUP)
    except StoreFailed as error:
        _end(f"{error}; stop the server first", DECLINED)
    except (OSError, ValueError) as error:
        _end(_sentence(error), SETUP)
    if json:
        print(as_json(learned.rows()))
        return
    print(f"{learned.requests} requests of {learned.models} models over {learned.days:.1f} days")
    if learned.unknown:
        print(f"not served here: {', '.join(learned.unknown[:10])}{' …' if len(learned.unknown) > 10 else ''}")  # noqa: PLR2004 - enough to see
    if learned.bad_lines:
        print(f"lines that could not be read: {learned.bad_lines}")


@app.command(epilog=_EPILOG)
def backtest(
    log: Annotated[Path, typer.Argument(help="Requests of the past: an access log, JSON lines, CSV; may be gzip.")],
    tz: Annotated[str, typer.Option("--tz", help="Time zone of local weeks, and of times without one.")] = "UTC",
    plot: Plot = None,
    *,
    json: Json = False,
) -> None:
    """Judge the forecasts on a log of past requests: what would have been told, and would loads ahead be allowed?"""
    import time

    from runtime.commands.foresight import NotKnown
    from runtime.commands.foresight import backtest as judge
    from runtime.commands.show import as_json

    try:
        found = judge(log, time.time(), tz)
    except (NotKnown, ValueError) as error:
        _end(str(error), SETUP)
    if json:
        print(as_json(found.rows))
    else:
        from runtime.commands.foresightshow import report

        for line in report(found):
            print(line)
    if plot is not None:
        from runtime.commands.foresightplot import draw_backtest

        _drawn(lambda: draw_backtest(found, plot), plot)


def _drawn(draw: Callable[[], None], path: Path) -> None:
    from runtime.commands.peaksplot import PlotMissing

    try:
        draw()
    except (PlotMissing, OSError, ValueError) as error:
        _end(f"--plot: {_sentence(error)}", SETUP)
    _tell(f"drawn: {path}")


# -- clients of a running server ---------------------------------------------------------------------


@app.command(epilog=_EPILOG)
def ps(url: Url = _URL, timeout: Timeout = 10.0, *, json: Json = False) -> None:
    """List the resident models."""
    from runtime.commands import show

    state = _ask(url, timeout, lambda server: server.get("/api/v1/state"))
    rows = list(show.residents(state))
    if json:
        print(show.as_json(rows))
        return
    show.table(show.RESIDENTS, map(show.resident_cells, rows), "no model is resident")


@app.command(epilog=_EPILOG)
def models(url: Url = _URL, timeout: Timeout = 10.0, *, json: Json = False) -> None:
    """List every model the server knows."""
    from runtime.commands import show

    index = _ask(url, timeout, lambda server: server.post("/v2/repository/index", {}))
    if json:
        print(show.as_json(index))
        return
    show.table(show.INDEX, show.index_cells(index), "no model is known")


@app.command(epilog=_EPILOG)
def load(
    model: Model,
    version: Annotated[str | None, typer.Option("--version", help="Which version; else the server chooses.")] = None,
    url: Url = _URL,
    timeout: Timeout = 600.0,
    *,
    json: Json = False,
) -> None:
    """Make a model resident, and wait until it is."""
    from runtime.commands.client import load_path

    body = {"parameters": {"version": version}} if version is not None else {}
    _ask(url, timeout, lambda server: server.post(load_path(model), body))
    _done(model, "loaded", json=json)


@app.command(epilog=_EPILOG)
def unload(model: Model, url: Url = _URL, timeout: Timeout = 60.0, *, json: Json = False) -> None:
    """Give a model's memory back; requests under way finish first."""
    from runtime.commands.client import unload_path

    _ask(url, timeout, lambda server: server.post(unload_path(model), {}))
    _done(model, "unloaded", json=json)


@app.command(epilog=_EPILOG)
def state(url: Url = _URL, timeout: Timeout = 10.0, *, json: Json = False) -> None:
    """Show what each device holds; with --json, all the server says of itself."""
    from runtime.commands import show

    answer = _ask(url, timeout, lambda server: server.get("/api/v1/state"))
    if json:
        print(show.as_json(answer))
        return
    for line in show.devices(answer):
        print(line)
    show.table(show.RESIDENTS, map(show.resident_cells, show.residents(answer)), "no model is resident")


# -- shared ------------------------------------------------------------------------------------------


def _configuration(file: Path, overrides: dict[str, Any] | None = None) -> Config:
    from runtime.config.load import load as read

    return read(file, os.environ, overrides)


def _findings(config: Config) -> list[Finding]:
    from runtime.config.lint import lint

    return lint(config, machine=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _peak_findings(config: Config) -> list[Finding]:
    """Look at scheduled peaks as of now; whoever has none pays for no calendar."""
    if not config.preload.peaks:
        return []
    from runtime.commands.peaks import findings, machine_memory

    return findings(config, _moment(None), machine_memory())


def _ask(url: str, timeout: float, question: Callable[[Server], Any]) -> Any:
    """Put a question to the server, and end with the right exit code if no good answer comes."""
    from runtime.commands.client import Declined, Server, Unreachable

    try:
        return question(Server(url, key=os.environ.get("FORELOAD_KEY"), timeout=timeout))
    except Declined as error:
        again = f" Try again in {error.retry_after} s." if error.retry_after else ""
        _end(f"{error} ({error.code}).{again}", DECLINED)
    except Unreachable as error:
        _end(str(error), UNAVAILABLE)
    except ValueError as error:
        _end(f"--url: {error}", SETUP)


def _done(model: str, what: str, *, json: bool) -> None:
    from runtime.commands.show import as_json, clean

    print(as_json({"model": model, "done": what}) if json else f"{clean(model)}: {what}")


def _line(finding: Finding) -> str:
    return f"{finding.level}: {finding.path}: {finding.text}"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return str(error) or type(error).__name__


def _tell(text: str) -> None:
    """Say something to the person; answers alone go to standard output."""
    from runtime.commands.show import clean

    print("\n".join(clean(line) for line in text.splitlines()), file=sys.stderr)


def _end(text: str, code: int) -> NoReturn:
    _tell(f"foreload: {text}" if "\n" not in text else text)
    raise typer.Exit(code)


if __name__ == "__main__":
    sys.exit(main())
