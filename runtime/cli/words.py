"""What all verbs share: the application, options, exit codes, and how a command speaks and ends.

Belongs here: words and small helpers. Never: a verb. Every heavy import is inside the function that needs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.commands.client import Server
    from runtime.config.lint import Finding
    from runtime.config.schema import Config

OK, DECLINED, SETUP, UNAVAILABLE = 0, 1, 2, 3
"""Done; the server said no; configuration or usage; cannot start or reach."""

EPILOG = "Exit codes: 0 done, 1 the server said no, 2 configuration or usage, 3 cannot start or reach."

app = typer.Typer(
    name="foreload",
    help="Serve many PyTorch models from less memory than their sum.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(envvar="FORELOAD_CONFIG", help="The configuration, a YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Url = Annotated[str, typer.Option("--url", envvar="FORELOAD_URL", help="The server. Its key comes from FORELOAD_KEY.")]
Model = Annotated[str, typer.Argument(help="The model's name.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds to wait for an answer.")]

URL = "http://127.0.0.1:8080"
At = Annotated[str | None, typer.Option("--at", help="Pretend it is this moment, as 2026-12-01T08:00+01:00.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it to this file, as out.png or out.svg.")]


def configuration(file: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a configuration; `overrides` by dotted key win. Raises `ConfigError`."""
    from runtime.config.load import load as read

    return read(file, os.environ, overrides)


def advice(config: Config) -> list[Finding]:
    """What is legal in a configuration, and likely to be trouble."""
    from runtime.config.lint import lint

    return lint(config, machine=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def peak_advice(config: Config) -> list[Finding]:
    """Look at scheduled peaks as of now; whoever has none pays for no calendar."""
    if not config.preload.peaks:
        return []
    from runtime.commands.peaks import findings, machine_memory

    return findings(config, moment(None), machine_memory())


def ask(url: str, timeout: float, question: Callable[[Server], Any]) -> Any:
    """Put a question to the server, and end with the right exit code if no good answer comes."""
    from runtime.commands.client import Declined, Server, Unreachable

    try:
        return question(Server(url, key=os.environ.get("FORELOAD_KEY"), timeout=timeout))
    except Declined as error:
        again = f" Try again in {error.retry_after} s." if error.retry_after else ""
        end(f"{error} ({error.code}).{again}", DECLINED)
    except Unreachable as error:
        end(str(error), UNAVAILABLE)
    except ValueError as error:
        end(f"--url: {error}", SETUP)


def done(model: str, what: str, *, json: bool) -> None:
    """Say that the server did it."""
    from runtime.commands.show import as_json, clean

    print(as_json({"model": model, "done": what}) if json else f"{clean(model)}: {what}")


def line(finding: Finding) -> str:
    """One finding for people."""
    return f"{finding.level}: {finding.path}: {finding.text}"


def sentence(error: Exception) -> str:
    """An error in words."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return str(error) or type(error).__name__


def tell(text: str) -> None:
    """Say something to the person; answers alone go to standard output."""
    from runtime.commands.show import clean

    print("\n".join(clean(line) for line in text.splitlines()), file=sys.stderr)


def end(text: str, code: int) -> NoReturn:
    """Say why, and end with an exit code."""
    tell(f"foreload: {text}" if "\n" not in text else text)
    raise typer.Exit(code)


def moment(text: str | None) -> float:
    """UTC epoch seconds of now, or of a moment somebody pretends; one without an offset is UTC."""
    import time
    from datetime import UTC

    from runtime.config.moments import parse_moment

    if text is None:
        return time.time()
    try:
        moment = parse_moment(text)
    except ValueError as error:
        end(f"--at: {error}", SETUP)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def drawn(draw: Callable[[], None], path: Path) -> None:
    """Draw to a file and say so, or end with what is missing."""
    from runtime.commands.peaksplot import PlotMissing

    try:
        draw()
    except (PlotMissing, OSError, ValueError) as error:
        end(f"--plot: {sentence(error)}", SETUP)
    tell(f"drawn: {path}")
