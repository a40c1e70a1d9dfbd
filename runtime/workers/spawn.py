"""Starting and ending an operating-system process: exec, filtered environment, own process group, exit in words.

Nothing here knows what the process does.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_METHOD = "exec"
"""Of this process, which has threads: a forked child would inherit locks that nobody releases. A zygote has none."""

ALLOWED_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_*",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHON*",
    "COVERAGE_*",
    "OMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "CUDA_*",
    "NVIDIA_*",
    "HF_*_OFFLINE",
)
"""Patterns of the variables a worker sees. Whatever else the front was given (keys, tokens) stays there."""


def filtered(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep the allowed variables, and make the child import what this process would."""
    kept = {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED_ENVIRONMENT)
    }
    # With -P the working directory is not on the path: a folder named `runtime` there must not stand in for ours.
    kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100 - '' means the working directory here
    return kept


def spawn(module: str, arguments: Sequence[str], *, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Exec this interpreter on a module, in a session and process group of its own. Raises `OSError`.

    Call it from the thread that lives as long as the child should: a parent-death signal follows the thread.
    """
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        close_fds=True,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        env=filtered(os.environ),
    )


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal every process of a group; nothing happens if none is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def reap_group(group: int, *, patience: float = 1.0) -> None:
    """Collect members of a killed group that became our children (this process being init or a subreaper)."""
    with anyio.move_on_after(patience):
        while True:
            try:
                pid, _ = os.waitpid(-group, os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not block
            except ChildProcessError:
                return
            if not pid:
                await anyio.sleep(0.01)


def words(returncode: int) -> str:
    """Say how a process ended, for people."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"killed by {name} (out of memory?)" if name == "SIGKILL" else f"killed by {name}"
