"""Promises of what is told while something is fetched: in time, true, not too often, and to the liveness probe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from actors import messages as m
from actors.clock import LoopClock
from actors.events import Event, FetchProgressed
from actors.residency.model import ModelKey
from runtime.tiers.remote import _Teller
from runtime.vitals import Vitals
from tests.actors.virtual import virtual
from tests.simulation.rig import Costs, model, rig

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = ModelKey("m@1")


def teller(events: list[Event], moved: dict[ModelKey, float], total: int = 1000) -> Callable[[int], None]:
    return _Teller(KEY, "s3", total, now=LoopClock().now, emit=events.append, moved=moved)


@virtual
async def test_progress_is_stated_once_a_second_with_what_is_left() -> None:
    """Ten bytes every tenth of a second: one statement per second, its rate and its rest follow from it."""
    events, moved = list[Event](), dict[ModelKey, float]()
    tell = teller(events, moved)
    for done in range(0, 1001, 10):
        tell(done)
        await anyio.sleep(0.1)
    told = [event for event in events if isinstance(event, FetchProgressed)]
    assert 9 <= len(told) <= 10
    for event in told:
        assert event.rate == pytest.approx(100, rel=0.01)
        assert event.left == pytest.approx((1000 - event.done) / 100, rel=0.01)
        assert (event.total, event.model, event.scheme) == (1000, KEY, "s3")


@virtual
async def test_what_was_there_before_is_no_speed() -> None:
    """A resumed fetch starts at 900 of 1000: its rate is that of the last hundred."""
    events, moved = list[Event](), dict[ModelKey, float]()
    tell = teller(events, moved)
    tell(900)
    await anyio.sleep(2)
    tell(910)
    (event,) = events
    assert isinstance(event, FetchProgressed)
    assert (event.rate, event.left) == (pytest.approx(5), pytest.approx(18))


@virtual
async def test_beginning_anew_is_no_negative_speed() -> None:
    """The source was replaced: what counts begins again at zero."""
    events, moved = list[Event](), dict[ModelKey, float]()
    tell = teller(events, moved)
    for done in (0, 500, 0, 10, 400):
        tell(done)
        await anyio.sleep(1.5)
    rates: list[Any] = [event.rate for event in events if isinstance(event, FetchProgressed)]
    assert rates
    assert min(rates) > 0


@virtual
async def test_only_bytes_count_as_movement() -> None:
    """The same number again is no progress."""
    moved = dict[ModelKey, float]()
    tell = teller([], moved)
    start = moved[KEY]
    await anyio.sleep(1)
    tell(10)
    assert moved[KEY] == start + 1
    await anyio.sleep(1)
    tell(10)
    assert moved[KEY] == start + 1


@virtual
async def test_a_load_that_moves_is_not_stuck_and_one_that_stands_is() -> None:
    """Liveness: an hour of download is fine as long as bytes come; silence beyond the limit is not."""
    slow = model("slow")
    moved: dict[ModelKey, float] = {}
    async with rig(host_costs=Costs(fixed=3600.0)) as r, anyio.create_task_group() as tasks:
        vitals = Vitals((r.host,), {}, clock=r.clock, observe=lambda _: None, stuck_load=60.0, moved=moved.get)
        tasks.start_soon(r.host.ask, m.Acquire(slow, m.new_ticket()))
        for _ in range(20):
            await anyio.sleep(50)
            assert vitals.trouble() == ""
            moved[slow.key] = r.clock.now()
        await anyio.sleep(70)
        assert "no progress for 70 s" in vitals.trouble()
        tasks.cancel_scope.cancel()
