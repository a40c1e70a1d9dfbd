"""The warm list: in order, within free room, and never wedged by a broken entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from actors.clock import LoopClock
from actors.events import WarmSettled
from actors.supervisor import Supervisor
from actors.warm_list import WarmEntry, WarmList, WarmState
from tests.actors.books import model
from tests.actors.test_dispatcher import desk
from tests.actors.virtual import virtual

if TYPE_CHECKING:
    from actors.events import Event


def settled(events: list[Event]) -> list[tuple[str, bool, str]]:
    """What was told of the entries, in order."""
    return [(each.model, each.ready, each.cause.partition(":")[0]) for each in events if isinstance(each, WarmSettled)]


@virtual
async def test_every_entry_becomes_resident_in_order() -> None:
    """R18: the first request is a hit; versions may be named or left to the highest."""
    events: list[Event] = []
    entries = (WarmEntry("b"), WarmEntry("a", "1"), WarmEntry("a", required=False))
    async with desk() as d, Supervisor(emit=events.append, clock=LoopClock()) as supervisor:
        clock = LoopClock()
        ref = supervisor.start("warm", lambda: WarmList(entries, dispatcher=d.ref, clock=clock, emit=events.append))
        await anyio.sleep(5)
        assert isinstance(ref.owner, WarmList)
        assert settled(events) == [("b@1", True, ""), ("a@1", True, ""), ("a@2", True, "")]
        assert ref.owner.snapshot() == WarmState(True, (), ())
        assert repr(ref.owner) == "<WarmList 3/3 resident>"


@virtual
async def test_a_broken_entry_is_told_once_tried_again_and_holds_nobody_up() -> None:
    """R14, R34: those behind it come at once; readiness turns true when it comes at last."""
    events: list[Event] = []
    entries = (WarmEntry("late"), WarmEntry("b"))
    async with desk() as d, Supervisor(emit=events.append, clock=LoopClock()) as supervisor:
        clock = LoopClock()
        ref = supervisor.start("warm", lambda: WarmList(entries, dispatcher=d.ref, clock=clock, emit=events.append))
        await anyio.sleep(20)
        assert isinstance(ref.owner, WarmList)
        assert settled(events) == [("late", False, "unknown_model"), ("b@1", True, "")]
        assert ref.owner.snapshot() == WarmState(False, ("late",), ("unknown_model",))
        d.catalog.models["late"] = (model("late"),)
        await anyio.sleep(10)
        assert settled(events)[-1] == ("late@1", True, "")
        assert ref.owner.snapshot().done


@virtual
async def test_what_has_no_free_room_is_missing_unless_it_is_optional() -> None:
    """A warm list larger than the device: what was loaded first stays, and the cause is named."""
    events: list[Event] = []
    entries = (WarmEntry("a"), WarmEntry("b"), WarmEntry("a", "1", required=False))
    async with desk(10) as d, Supervisor(emit=events.append, clock=LoopClock()) as supervisor:
        clock = LoopClock()
        ref = supervisor.start("warm", lambda: WarmList(entries, dispatcher=d.ref, clock=clock, emit=events.append))
        await anyio.sleep(3)
        assert isinstance(ref.owner, WarmList)
        assert ref.owner.snapshot() == WarmState(False, ("b",), ("no_evictable_space",))
        assert ("b@1", False, "no_evictable_space") in settled(events)
        assert d.cache(0).holds(model("a").key) is False


@virtual
async def test_an_empty_list_is_done_at_once() -> None:
    """Nothing to wait for."""
    async with desk() as d, Supervisor(emit=lambda _: None, clock=LoopClock()) as supervisor:
        clock = LoopClock()
        ref = supervisor.start("warm", lambda: WarmList((), dispatcher=d.ref, clock=clock, emit=lambda _: None))
        await anyio.sleep(1)
        assert isinstance(ref.owner, WarmList)
        assert ref.owner.snapshot() == WarmState(True, (), ())


@virtual
async def test_a_dispatcher_that_is_down_is_asked_again() -> None:
    """A restart of it costs a pause, not an entry."""
    events: list[Event] = []
    async with desk() as d, Supervisor(emit=events.append, clock=LoopClock()) as supervisor:
        clock = LoopClock()
        d.ref.tell("not an order")  # type: ignore[arg-type]
        ref = supervisor.start(
            "warm", lambda: WarmList((WarmEntry("b"),), dispatcher=d.ref, clock=clock, emit=events.append)
        )
        await anyio.sleep(10)
        assert isinstance(ref.owner, WarmList)
        assert ref.owner.snapshot().done
