"""Verbs about what was learned from requests, and what would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actors.errors import ConfigError
from runtime.cli.words import (
    DECLINED,
    EPILOG,
    SETUP,
    At,
    Json,
    Model,
    Plot,
    app,
    configuration,
    drawn,
    end,
    moment,
    sentence,
)

forecast = typer.Typer(help="Look at what was learned.", no_args_is_help=True)
app.add_typer(forecast, name="forecast")


@forecast.command("explain", epilog=EPILOG)
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

    now = moment(at)
    try:
        said = explain(configuration(file), model, now)
    except ConfigError as error:
        end(error.message, SETUP)
    except NotKnown as error:
        end(str(error), DECLINED)
    if json:
        print(as_json(said.rows))
    else:
        from runtime.commands.foresightshow import explanation

        for line in explanation(said):
            print(line)
    if plot is not None:
        from runtime.commands.foresightplot import draw_explanation

        drawn(lambda: draw_explanation(said, plot), plot)


@forecast.command("learn", epilog=EPILOG)
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
        learned = learn(configuration(file), logs, time.time())
    except ConfigError as error:
        end(error.message, SETUP)
    except StoreFailed as error:
        end(f"{error}; stop the server first", DECLINED)
    except (OSError, ValueError) as error:
        end(sentence(error), SETUP)
    if json:
        print(as_json(learned.rows()))
        return
    print(f"{learned.requests} requests of {learned.models} models over {learned.days:.1f} days")
    if learned.unknown:
        print(f"not served here: {', '.join(learned.unknown[:10])}{' …' if len(learned.unknown) > 10 else ''}")  # noqa: PLR2004 - enough to see
    if learned.bad_lines:
        print(f"lines that could not be read: {learned.bad_lines}")


@app.command(epilog=EPILOG)
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
        end(str(error), SETUP)
    if json:
        print(as_json(found.rows))
    else:
        from runtime.commands.foresightshow import report

        for line in report(found):
            print(line)
    if plot is not None:
        from runtime.commands.foresightplot import draw_backtest

        drawn(lambda: draw_backtest(found, plot), plot)
