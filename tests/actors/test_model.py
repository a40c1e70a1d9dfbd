"""Identity, size, the ports' values, and where time comes from."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from actors.clock import LoopClock
from actors.messages import new_ticket
from actors.residency.model import Footprint, Tier, key_of
from tests.actors.books import model
from tests.actors.virtual import virtual


def test_a_key_is_name_and_version() -> None:
    """One spelling for the whole system."""
    assert model("m").key == key_of("m", "1") == "m@1"
    assert repr(model("m", 5, fingerprint="0123456789abcdef")) == "<Model m@1 01234567 5 B>"


def test_a_footprint_says_what_each_tier_needs() -> None:
    """Disk and remote hold what the host does."""
    footprint = Footprint(device=7, host=9)
    assert [footprint.on(tier) for tier in Tier] == [7, 9, 9, 9]


@pytest.mark.parametrize(("device", "host"), [(-1, 0), (0, -1)])
def test_a_negative_footprint_is_refused(device: int, host: int) -> None:
    """F4: a wrong size must not turn into free room."""
    with pytest.raises(ValueError, match="not negative"):
        Footprint(device, host)


def test_tickets_are_never_given_twice() -> None:
    """The holder names the lease, so two holders must not share a name."""
    assert len({new_ticket() for _ in range(1000)}) == 1000


@virtual
async def test_durations_are_the_loops_own() -> None:
    """F67: virtual seconds pass only when the loop says so, whatever the machine's clock does."""
    clock = LoopClock()
    assert clock.now() == 0.0
    await asyncio.sleep(1000)
    assert clock.now() == 1000.0
    assert repr(clock) == "<LoopClock 1000.000s>"


async def test_on_a_real_loop_durations_are_monotonic_seconds() -> None:
    """F67: the wall clock may jump; durations do not notice."""
    clock = LoopClock()
    assert abs(clock.now() - time.monotonic()) < 1.0
    assert clock.now() <= clock.now()


async def test_calendar_time_is_utc() -> None:
    """Instants for people carry their zone."""
    wall = LoopClock().wall()
    assert wall.utcoffset() == timedelta(0)
    assert abs(wall - datetime.now(UTC)) < timedelta(minutes=1)
