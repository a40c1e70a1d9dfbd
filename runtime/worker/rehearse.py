"""What the first load of a process would do for all later ones: imports of torch, decoders of headers.

Belongs here: work that leaves nothing but imported modules and caches. Never: a model, a thread, OpenMP, CUDA: a zygote
runs it, and every worker that is copied from it starts where this ended.
"""

from __future__ import annotations

from torch import nn

from runtime.worker import document
from runtime.worker.datatypes import DATATYPES
from runtime.worker.skeleton import build


def rehearse() -> None:
    """Build something small on meta, and the decoder of every datatype's headers."""
    build(lambda: nn.Embedding(1, 1))
    for datatype in DATATYPES.values():
        document.reader_of(datatype.json)
