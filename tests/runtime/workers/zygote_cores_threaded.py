"""A core whose import starts a thread."""

from __future__ import annotations

import threading

from tests.runtime.workers.fake_core import FakeCore

__all__ = ["FakeCore"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
