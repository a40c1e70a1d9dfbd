"""In CI a skipped test marked `real` is a failed one: what needs real weights must not pass by not running.

Belongs here: that rule alone. `tests/gpu` is exempt, because no CI machine has to have a GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

EXEMPT = ("tests", "gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the report of a skip into one of a failure, with the skip's reason."""
    report = yield
    # An expected failure is reported as a skip as well; it did run.
    if report.skipped and not hasattr(report, "wasxfail") and must_run(item):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"CI runs every test marked `real`, and this one was not: {reason}"
    return report


def must_run(item: pytest.Item) -> bool:
    """Tell whether skipping this test hides something."""
    exempt = item.path.parent.relative_to(item.config.rootpath).parts[:2] == EXEMPT
    return bool(os.environ.get("CI")) and item.get_closest_marker("real") is not None and not exempt
