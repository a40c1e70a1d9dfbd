"""A core whose context takes its time and can't be forked, like a GPU's; each process counts the contexts it made."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.runtime.workers.fake_core import FakeCore, say

CONTEXT_SECONDS = 0.4


class CudaLike(FakeCore):
    """Takes `CONTEXT_SECONDS` to stand; the folder `allow[0]` has a file per context, and a gate that holds them up."""

    def __init__(self, device: str, allow: tuple[str, ...] = (), threads: int = 1, **more: Any) -> None:
        super().__init__(device, allow, threads, **more)
        folder = Path(allow[0])
        (folder / f"context-{os.getpid()}").touch()
        while (folder / "closed").exists() and len(list(folder.glob("context-*"))) > 1:
            time.sleep(0.005)
        if (folder / "broken").exists():
            msg = "no memory for a second context"
            raise RuntimeError(msg)
        time.sleep(CONTEXT_SECONDS)
        self.born = time.monotonic()

    def answer(self, word, rest, call):  # noqa: ANN001 - see FakeCore
        if word == b"born":
            return say(json.dumps([os.getpid(), self.born]).encode())
        return super().answer(word, rest, call)
