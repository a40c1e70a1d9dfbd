"""The command line: words, options and exit codes. What they do is in `commands/` and behind `assembly.serve`.

Exit codes: 0 done, 1 the server said no, 2 configuration or usage, 3 cannot start or reach. Every heavy import is
inside the verb that needs it, so that `check` never pays for torch or Starlette.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

# In the order in which `foreload --help` lists them.
from runtime.cli import server, peaks, forecast, clients  # noqa: F401  # isort: skip
from runtime.cli.words import DECLINED, OK, SETUP, UNAVAILABLE, app

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DECLINED", "OK", "SETUP", "UNAVAILABLE", "app", "main"]


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
