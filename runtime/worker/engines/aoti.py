"""Opens AOTInductor packages, whose loader unpacks them into a folder and forgets it if the process is killed.

Belongs here: that one call. Never: what a package is for (`programs.py`, `twin.py`).
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.worker.artefacts import Artefacts

if TYPE_CHECKING:
    from runtime.workers.port import ArtefactSpec

_alone = threading.Lock()


def open_package(path: str, device: torch.device, artefacts: ArtefactSpec) -> Any:
    """The callable package. It unpacks beside the artefacts, where a later worker clears up after a killed one.

    Raises what torch raises.
    """
    # Read by each package at its first run: without it a wrong extent is read past the end of a tensor.
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    number = -1 if device.type == "cpu" else device.index or 0
    with _alone:
        before = os.environ.get("TMPDIR")
        if artefacts.folder:
            os.environ["TMPDIR"] = str(_nest(artefacts))
        try:
            return torch._inductor.aoti_load_package(path, device_index=number)  # noqa: SLF001 -- its public home
        finally:
            if before is None:
                os.environ.pop("TMPDIR", None)
            else:
                os.environ["TMPDIR"] = before


@cache
def _nest(artefacts: ArtefactSpec) -> Path:
    kept = Artefacts(Path(artefacts.folder), artefacts.size)
    kept.sweep()
    return kept.nest()
