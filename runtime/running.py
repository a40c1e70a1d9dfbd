"""Running a server: sockets, signals, and the order of a stop (`faults.md` section 4).

What a server consists of is `assembly.py`'s business.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING

import anyio
import structlog
import uvloop

from actors.events import DrainFinished, DrainStarted
from actors.messages import Drain
from actors.tier_cache import TierCache
from runtime.assembly import assemble, limits_of
from runtime.http.serve import make_server
from runtime.server import VERSION
from runtime.telemetry.logs import configure
from runtime.workers.heap import keep_pages, spare_collections
from runtime.workers.turns import short_slice, short_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.assembly import Assembly
    from runtime.config.schema import Config
    from runtime.http.serve import Server
    from runtime.telemetry.logs import Logs


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError` or `OSError` before it listens."""
    with (
        configure(config.telemetry.log.level, config.telemetry.log.format) as logs,
        socket.create_server(
            (config.server.host, config.server.port),
            family=socket.AF_INET6 if ":" in config.server.host else socket.AF_INET,
            backlog=2048,
        ) as listener,
    ):
        keep_pages()
        short_turns()
        short_slice()
        uvloop.run(_serve(config, logs, listener))
    return 0


async def _serve(config: Config, logs: Logs, listener: socket.socket) -> None:
    log = structlog.get_logger("foreload")
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with assemble(config, logs) as parts:
            server = make_server(
                parts.app, host=config.server.host, port=config.server.port, limits=limits_of(config), graceful=2.0
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_listen, server, listener, tasks.cancel_scope.cancel)
                address, port = listener.getsockname()[:2]
                spare_collections()
                log.info("listening", address=address, port=port, version=VERSION, python=sys.version.split()[0])
                async for number in signals:
                    if number == signal.SIGHUP:
                        continue  # the model directories are looked at anyway; the configuration needs a restart
                    break
                name = signal.Signals(number).name
                tasks.start_soon(_stop, config, parts, server, name)
                async for number in signals:
                    if number != signal.SIGHUP:
                        break
                    continue
                # Only a second signal comes here: the end of `_listen` cancels this scope.
                log.warning("second signal: stopping now")
                tasks.cancel_scope.cancel()


async def _listen(server: Server, listener: socket.socket, over: Callable[[], None]) -> None:
    """Serve until told to stop, then end whoever still waits for signals."""
    await server.serve(sockets=[listener])
    over()


async def _stop(config: Config, parts: Assembly, server: Server, why: str) -> None:
    """The order of a stop: tell balancers, take no more work, finish what is leased, close."""
    began = parts.clock.now()
    parts.backend.draining = True
    parts.views.emit(DrainStarted(began, why))
    await anyio.sleep(config.server.drain.delay)
    with anyio.move_on_after(config.server.drain.timeout):
        async with anyio.create_task_group() as waiting:
            for ref in parts.devices:
                waiting.start_soon(ref.ask, Drain())
    left = sum(ref.owner.ledger.leases for ref in parts.devices if isinstance(ref.owner, TierCache))
    parts.views.emit(DrainFinished(parts.clock.now(), left, parts.clock.now() - began))
    server.should_exit = True
