"""Fixtures of the tiers' tests that own something which has to be closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.runtime.tiers.places import Place
from tests.runtime.tiers.web import Web, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path


@pytest.fixture
def web() -> Iterator[Web]:
    """A web server that can misbehave."""
    with serving() as running:
        yield running


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Place]]:
    """Make places on one cache folder; their connections are closed afterwards, and what they hold is let go."""
    made: list[Place] = []

    def build(*records: Any, **changes: Any) -> Place:
        made.append(Place(tmp_path, *records, **changes))
        return made[-1]

    yield build
    for place in made:
        for record in place.records.values():
            await place.host.evict(record.key)
        await place.remote.close()
