"""A core whose import says that it touched a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from tests.runtime.workers.fake_core import FakeCore

__all__ = ["FakeCore"]

torch = ModuleType("torch")
torch.cuda = SimpleNamespace(is_initialized=lambda: True)  # type: ignore[attr-defined]
sys.modules["torch"] = torch
