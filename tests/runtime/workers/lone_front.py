"""A front that starts one worker (`spawn` or `zygote`), says both process ids, and waits to be killed."""

from __future__ import annotations

import asyncio
import os
import sys

from tests.runtime.workers.worker_kit import process_worker


async def main() -> None:
    async with process_worker(start=sys.argv[1]) as rig:
        sys.stdout.write(f"{os.getpid()} {rig.worker.pid}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
