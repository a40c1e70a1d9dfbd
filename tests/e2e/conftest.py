"""Fixtures of the whole-server tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk tier that servers with the demo's models use one after another: converting their pickles takes seconds.

    Its files are immutable, and one server finds them there as it would find its own of yesterday.
    """
    return tmp_path_factory.mktemp("cache")
