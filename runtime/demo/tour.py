"""`make demo`: prepare real weights, start the server, send real inputs, say what happened, keep serving.

A user of the server like any other: HTTP from outside, and the command line to start it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from actors.errors import ForeloadError
from runtime.commands import show
from runtime.demo.client import Client, Declined, timings
from runtime.demo.itinerary import itinerary
from runtime.demo.weights import MODELS, prepare
from runtime.demo.wheels import default_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "demo.yaml"
WORK = ROOT / "var" / "demo"
REPOSITORY = WORK / "models"
HOST = "127.0.0.1"

EXIT_FAILED, EXIT_SETUP, EXIT_START = 1, 2, 3
"""A request failed; the set-up is wrong; the server did not start."""

_DEFAULT_PORT = 8080
_READY_SECONDS = 120.0
_STOP_SECONDS = 45.0
_SERVE = "import sys; from runtime.cli import main; sys.exit(main())"


class Abort(Exception):  # it ends the tour, with an exit code
    """The tour cannot go on: what to tell, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(port: int | None = None, *, prepare_only: bool = False) -> int:
    """Run the tour and serve until interrupted; give the exit code.

    `port` defaults to `FORELOAD_SERVER__PORT`, then 8080. 0 all well, 1 a request failed, 2 the set-up is wrong,
    3 the server did not start (the port is taken, say); otherwise the server's own exit code.
    """
    try:
        if prepare_only:
            _prepare()
            return 0
        chosen = _port(port)
        _check_libraries()
        _check_free(chosen)  # before a download that would be for nothing
        _prepare()
        with _signals_interrupt(), _server(chosen) as server:
            _wait_ready(server, Client(HOST, chosen, timeout=5))
            failed = _visit_all(Client(HOST, chosen))
            _conclude(Client(HOST, chosen), chosen)
            return _serve_on(server) or (EXIT_FAILED if failed else 0)
    except Abort as abort:
        print(f"demo: {abort}", file=sys.stderr)
        return abort.code
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _prepare() -> None:
    total = sum(model.parts[0].size for model in MODELS)
    print(f"preparing {len(MODELS)} models, {total / 1e6:.0f} MB of weights, in {_shown(REPOSITORY)}")
    try:
        prepare(REPOSITORY, default_cache(), say=lambda line: print(f"  {line}", flush=True))
    except ForeloadError as error:
        raise Abort(error.message, EXIT_SETUP) from error
    except OSError as error:
        msg = f"the models cannot be written: {error}"
        raise Abort(msg, EXIT_SETUP) from error


def _port(given: int | None) -> int:
    text = str(given) if given is not None else os.environ.get("FORELOAD_SERVER__PORT", str(_DEFAULT_PORT))
    if not (text.isascii() and text.isdigit() and len(text) <= len("65535") and 0 < int(text) < 1 << 16):
        msg = f"the port (FORELOAD_SERVER__PORT) is a number between 1 and 65535, not {text[:40]!r}"
        raise Abort(msg, EXIT_SETUP)
    return int(text)


def _check_libraries() -> None:
    missing = [name for name in ("transformers", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        msg = f"{' and '.join(missing)} missing; install the extra: pip install 'foreload[hf]'"
        raise Abort(msg, EXIT_SETUP)
    if not CONFIG.is_file():
        msg = f"{_shown(CONFIG)} is missing; the demo runs from a source checkout"
        raise Abort(msg, EXIT_SETUP)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            msg = f"port {port} cannot be used ({error.strerror}); choose another: FORELOAD_SERVER__PORT=9090 make demo"
            raise Abort(msg, EXIT_START) from error


@contextlib.contextmanager
def _server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `foreload serve configs/demo.yaml`, its log in a file; it is stopped however this block ends.

    It gets a process group of its own: one Ctrl-C must reach it once, through us, not twice.
    """
    command = [sys.executable, "-c", _SERVE, "serve", str(CONFIG)]
    environment = {**os.environ, "FORELOAD_SERVER__HOST": HOST, "FORELOAD_SERVER__PORT": str(port)}
    log = WORK / "server.log"
    with log.open("wb") as sink:
        server = subprocess.Popen(  # noqa: S603  # our own command line
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    print(f"starting foreload serve {_shown(CONFIG)} (log: {_shown(log)})", flush=True)
    try:
        yield server
    finally:
        _stop(server)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Turn a polite kill, or a closed terminal, into what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {name: signal.signal(name, interrupt) for name in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for name, old in before.items():
            signal.signal(name, old)


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        server.kill()
        server.wait()


def _wait_ready(server: subprocess.Popen[bytes], client: Client) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while client.status("/readyz") != 200:  # noqa: PLR2004  # the one good status
        if (code := server.poll()) is not None:
            msg = f"the server ended with code {code} before it was ready:\n{_log_end()}"
            raise Abort(msg, EXIT_START)
        if time.monotonic() > deadline:
            msg = f"the server was not ready after {_READY_SECONDS:.0f} s:\n{_log_end()}"
            raise Abort(msg, EXIT_START)
        time.sleep(0.1)


def _log_end() -> str:
    lines = (WORK / "server.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-20:]) or "  (it said nothing)"


def _visit_all(client: Client) -> int:
    """Send every request of the tour, one row each; give the number that failed."""
    failed = 0
    print(f"\n{'model':<12} {'found on':<9} {'wait ms':>8} {'total ms':>9}  result")
    for visit in itinerary(REPOSITORY / "minilm" / "tokenizer.json"):
        try:
            reply = client.infer(visit.model, visit.inputs, binary=visit.binary)
            found, wait = found_on(reply.headers)
            row = f"{found:<9} {wait:>8.1f} {reply.seconds * 1e3:>9.1f}  {visit.words(reply.outputs)}"
        except Declined as error:
            failed += 1
            row = f"{'-':<9} {'-':>8} {'-':>9}  FAILED {error}"
        print(f"{visit.model:<12} {row}", flush=True)
    if failed:
        print(f"{failed} requests failed; see {_shown(WORK / 'server.log')}")
    return failed


def found_on(headers: Mapping[str, str]) -> tuple[str, float]:
    """Read from an answer's headers the tier that held the model, and milliseconds waited for it.

    Only a cold answer carries `foreload-cold-start: <tier>;wait=<ms>`; without it the model was on the device.
    """
    tier = headers.get("foreload-cold-start", "device").split(";")[0].strip()
    phases = timings(headers.get("server-timing", ""))
    return tier, phases.get("load", 0.0)


def _conclude(client: Client, port: int) -> None:
    base = f"http://{HOST}:{port}"
    print()
    try:
        state = client.read("/api/v1/state")
        print("residency now:")
        for line in show.devices(state):
            print(f"  {line}")
        print("    " + ", ".join(str(row["name"]) for row in show.residents(state)))
    except Declined as error:
        print(f"no residency to show: {error}")
    print("\nopen next:")
    print(f"  {base}/api/v1/state           who is resident where")
    print(f"  {base}/metrics                requests, loads, evictions and bytes, for Prometheus")
    print(f"  {base}/v2/repository/index    every model (POST)")
    print("\nor paste:")
    print(f"  curl -s -X POST {base}/v2/repository/index")


def _serve_on(server: subprocess.Popen[bytes]) -> int:
    """Stay until interrupted or until the server ends by itself; give its exit code.

    A server stopped by our own signal may report that signal; that is a clean stop.
    """
    try:
        # Said inside: from here on Ctrl-C is how it is meant to end.
        print("\nserving until Ctrl-C", flush=True)
        code = server.wait()
        print(f"demo: the server ended by itself:\n{_log_end()}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopping the server", flush=True)
        _stop(server)
        code = 0 if server.returncode == -signal.SIGTERM else server.returncode
    return code if code >= 0 else 128 - code


def _shown(path: Path) -> str:
    """Spell a path short, from here if it is below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runtime.demo.tour", description="A tour with real models.")
    parser.add_argument("--port", type=int, help="where to serve; FORELOAD_SERVER__PORT, else 8080")
    parser.add_argument("--prepare-only", action="store_true", help="lay the models out and stop")
    return parser.parse_args()


if __name__ == "__main__":
    chosen_by_user = _arguments()
    sys.exit(main(chosen_by_user.port, prepare_only=chosen_by_user.prepare_only))
