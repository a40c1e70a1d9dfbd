"""One worker of the sharing bench: holds a model's weights until standard input ends. Imports what a worker does."""

from __future__ import annotations

import sys

import msgspec
import torch

from runtime.worker.core import Core
from runtime.worker.mount import Mount
from runtime.workers.port import LoadSpec


def main() -> None:
    """Load what argv says, touch every page, say so, and wait."""
    spec = msgspec.json.decode(sys.argv[1], type=LoadSpec)
    core = Core("cpu:0", ("bench.",), threads=1)
    core.load(spec, lambda: False)
    mount = core._mounts[spec.fingerprint]  # noqa: SLF001 - a worker need not show it
    assert isinstance(mount, Mount)
    for tensor in mount.module.parameters():
        torch.sum(tensor)
    print("held", flush=True)
    sys.stdin.read()
