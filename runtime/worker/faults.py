"""Turns what models, builders and torch raise into our errors, with words that are safe to show a client.

Belongs here: translation only. Never: retries, logging, decisions.
"""

from __future__ import annotations

import re

import torch

from actors.errors import ForeloadError, InferenceFailed, LoadFailed, OutOfMemory, WorkerDied

_PATH = re.compile(r"[\w.~@:-]*(?:[/\\][\w.~@+-]+)+[/\\]?")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_LIMIT = 300
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class DeviceLost(Exception):  # a fact, named like the rest of the tree
    """The device's context is poisoned; only a new process helps."""

    fatal = True


def words(fault: BaseException) -> str:
    """Type and first line of an exception, without paths or addresses."""
    line = next(iter(str(fault).strip().splitlines()), "")
    line = _ADDRESS.sub("<address>", _PATH.sub("<path>", line))[:_LIMIT]
    return f"{type(fault).__name__}: {line}" if line else type(fault).__name__


def out_of_memory(fault: BaseException) -> bool:
    """Whether memory ran out, on whichever device."""
    if isinstance(fault, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(fault, RuntimeError) and any(word in str(fault) for word in _OUT_OF_MEMORY)


def device_lost(fault: BaseException) -> bool:
    """Whether an accelerator reported an error that no later call on it survives."""
    lost: type[BaseException] | None = getattr(torch, "AcceleratorError", None)
    return lost is not None and isinstance(fault, lost) and not out_of_memory(fault)


def load_error(fault: BaseException, key: str) -> ForeloadError:
    """What a failed load tells its waiters: a new object, so no traceback keeps weights alive."""
    return _told(fault, key, LoadFailed, "the model could not be loaded")


def inference_error(fault: BaseException, key: str) -> ForeloadError:
    """What a failed forward tells its caller."""
    if device_lost(fault):
        return WorkerDied("the device failed under this forward", model=key)
    return _told(fault, key, InferenceFailed, "the model raised")


def _told(fault: BaseException, key: str, kind: type[ForeloadError], what: str) -> ForeloadError:
    if isinstance(fault, ForeloadError):
        fresh = fault.again()
        fresh.model = fresh.model or key
        return fresh
    if out_of_memory(fault):
        return OutOfMemory("memory ran out", model=key)
    return kind(f"{what}: {words(fault)}", model=key)
