"""Verbs that ask a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from runtime.cli.words import EPILOG, URL, Json, Model, Timeout, Url, app, ask, done


@app.command(epilog=EPILOG)
def ps(url: Url = URL, timeout: Timeout = 10.0, *, json: Json = False) -> None:
    """List the resident models."""
    from runtime.commands import show

    state = ask(url, timeout, lambda server: server.get("/api/v1/state"))
    rows = list(show.residents(state))
    if json:
        print(show.as_json(rows))
        return
    show.table(show.RESIDENTS, map(show.resident_cells, rows), "no model is resident")


@app.command(epilog=EPILOG)
def models(url: Url = URL, timeout: Timeout = 10.0, *, json: Json = False) -> None:
    """List every model the server knows."""
    from runtime.commands import show

    index = ask(url, timeout, lambda server: server.post("/v2/repository/index", {}))
    if json:
        print(show.as_json(index))
        return
    show.table(show.INDEX, show.index_cells(index), "no model is known")


@app.command(epilog=EPILOG)
def load(
    model: Model,
    version: Annotated[str | None, typer.Option("--version", help="Which version; else the server chooses.")] = None,
    url: Url = URL,
    timeout: Timeout = 600.0,
    *,
    json: Json = False,
) -> None:
    """Make a model resident, and wait until it is."""
    from runtime.commands.client import load_path

    body = {"parameters": {"version": version}} if version is not None else {}
    ask(url, timeout, lambda server: server.post(load_path(model), body))
    done(model, "loaded", json=json)


@app.command(epilog=EPILOG)
def unload(model: Model, url: Url = URL, timeout: Timeout = 60.0, *, json: Json = False) -> None:
    """Give a model's memory back; requests under way finish first."""
    from runtime.commands.client import unload_path

    ask(url, timeout, lambda server: server.post(unload_path(model), {}))
    done(model, "unloaded", json=json)


@app.command(epilog=EPILOG)
def state(url: Url = URL, timeout: Timeout = 10.0, *, json: Json = False) -> None:
    """Show what each device holds; with --json, all the server says of itself."""
    from runtime.commands import show

    answer = ask(url, timeout, lambda server: server.get("/api/v1/state"))
    if json:
        print(show.as_json(answer))
        return
    for line in show.devices(answer):
        print(line)
    show.table(show.RESIDENTS, map(show.resident_cells, show.residents(answer)), "no model is resident")
