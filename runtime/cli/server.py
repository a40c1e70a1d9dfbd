"""Verbs about a configuration and the server it makes; none of them asks a running one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.errors import ConfigError, ForeloadError
from runtime.cli.words import (
    EPILOG,
    SETUP,
    UNAVAILABLE,
    File,
    Json,
    advice,
    app,
    configuration,
    end,
    line,
    peak_advice,
    sentence,
    tell,
)


@app.command(epilog=EPILOG)
def serve(
    file: File,
    host: Annotated[str | None, typer.Option(help="Overrides server.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides server.port.")] = None,
) -> None:
    """Serve the models of a configuration until told to stop (SIGTERM or Ctrl-C)."""
    given = {"server.host": host, "server.port": port}
    try:
        config = configuration(file, {key: value for key, value in given.items() if value is not None})
    except ConfigError as error:
        end(error.message, SETUP)
    for finding in advice(config):
        tell(line(finding))
    try:
        from runtime.running import serve as run

        code = run(config)
    except ConfigError as error:
        end(error.message, SETUP)
    except (ForeloadError, OSError) as error:
        end(f"cannot start: {sentence(error)}", UNAVAILABLE)
    raise typer.Exit(code)


@app.command(epilog=EPILOG)
def check(file: File, *, json: Json = False) -> None:
    """Check a configuration: all errors at once, or what trouble it will have."""
    from runtime.commands.show import as_json

    try:
        config = configuration(file)
        findings = [*advice(config), *peak_advice(config)]
    except ConfigError as error:
        if not json:
            end(error.message, SETUP)
        print(as_json({"ok": False, "errors": error.message.splitlines(), "findings": []}))
        raise typer.Exit(SETUP) from None
    if json:
        rows = [{"level": str(row.level), "path": row.path, "text": row.text} for row in findings]
        print(as_json({"ok": True, "errors": [], "findings": rows}))
        return
    for finding in findings:
        print(line(finding))
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
        end(error.message, SETUP)
    if json:
        print(as_json({"key": token, **row}))
        return
    tell("Give this key away; it is shown this once:")
    print(token)
    tell(f"and add to server.keys:\n  - {{name: {name}, hash: '{hashed}', scopes: [{', '.join(map(repr, scope))}]}}")


@app.command(epilog=EPILOG)
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
        end(error.message, SETUP)
    except OSError as error:
        end(f"{directory}: {sentence(error)}", SETUP)
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
