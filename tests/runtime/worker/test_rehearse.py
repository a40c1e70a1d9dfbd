"""What a zygote rehearses is what a first load would otherwise do, and it leaves no thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import json, os, sys
from runtime.worker.core import rehearse
rehearse()
before = set(sys.modules)
from torch import nn
from runtime.worker import document
from runtime.worker.datatypes import DATATYPES
from runtime.worker.skeleton import Skeleton
Skeleton(lambda: nn.Sequential(nn.Embedding(5, 4), nn.TransformerEncoderLayer(4, 2), nn.LSTM(4, 4), nn.LayerNorm(4)))
found = document.reader_of.cache_info().misses
for datatype in ("FP32", "INT64", "UINT8", "BOOL"):
    document.reader_of(DATATYPES[datatype].json)
print(json.dumps({
    "imported": sorted(set(sys.modules) - before),
    "decoders": document.reader_of.cache_info().misses - found,
    "threads": len(os.listdir("/proc/self/task")),
}))
"""


def test_after_a_rehearsal_building_imports_nothing() -> None:
    """In a process of its own, as in a zygote: no module, no decoder and no thread is left for the first load."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert json.loads(done.stdout) == {"imported": [], "decoders": 0, "threads": 1}
