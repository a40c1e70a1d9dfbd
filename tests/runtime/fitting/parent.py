"""A server that starts a fitting round and is killed in the middle of it; prints the number of the fitting process."""

from __future__ import annotations

import asyncio
import sys

from runtime.fitting.worker import FittingWorker
from tests.forecasting.fleets import counted, daily


async def main() -> None:
    worker = FittingWorker(module="tests.runtime.fitting.hostile", budget=300.0)
    task = asyncio.create_task(worker.fit(counted(daily(1, 1)).snapshot()))
    while not worker.pid:  # noqa: ASYNC110 - the worker tells nobody
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{worker.pid}\n")
    sys.stdout.flush()
    await task


if __name__ == "__main__":
    asyncio.run(main())
