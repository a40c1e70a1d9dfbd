"""A core that draws random numbers; importing it replaces what a zygote would import for `transformers` models."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.random  # now, so that a copy could share its state

from tests.runtime.workers.fake_core import FakeCore, say

if TYPE_CHECKING:
    from actors.errors import ForeloadError
    from runtime.workers.port import Answer
    from tests.runtime.workers.fake_core import Submission


REHEARSED: list[int] = []
"""Process ids in which `rehearse` ran."""


def rehearse() -> None:
    """What a zygote calls once a first model was loaded."""
    REHEARSED.append(os.getpid())


class Drawing(FakeCore):
    """Answers `draw` with one number of each generator that a copy could share with its parent; `rehearsed`: where."""

    def answer(self, word: bytes, rest: bytes, call: Submission) -> Answer | ForeloadError:
        if word == b"draw":
            return say(json.dumps([random.random(), np.random.random()]).encode())  # noqa: NPY002
        if word == b"rehearsed":
            return say(json.dumps(REHEARSED).encode())
        return super().answer(word, rest, call)


def import_kind(kind: str) -> None:
    """Do what a careless library does."""
    if "waits" in kind:
        time.sleep(0.5)  # an import that takes longer than an end may go untold
    if "thread" in kind:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


stand_in = ModuleType("runtime.worker.builders")
stand_in.import_kind = import_kind  # type: ignore[attr-defined]
sys.modules["runtime.worker.builders"] = stand_in
