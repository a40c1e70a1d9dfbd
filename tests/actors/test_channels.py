"""Loads from beyond this machine have a channel of their own: minutes of network never stand before a disk read."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from actors import events as f
from actors import messages as m
from actors.clock import LoopClock
from actors.errors import NotReady
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import ModelKey, Tier, Trigger
from actors.settings import Settings
from actors.supervisor import Supervisor
from tests.actors.virtual import virtual
from tests.simulation.rig import CheckedHost, model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.actor import Ref
    from actors.residency.model import Model

FAR = {name: model(f"far-{name}") for name in "abcd"}
NEAR = {name: model(f"near-{name}") for name in "ab"}


class Shelf:
    """A place where a far model takes a minute and a near one a second."""

    def __init__(self) -> None:
        self.under_way: set[ModelKey] = set()
        self.most: dict[bool, int] = {True: 0, False: 0}

    async def load(self, model: Model) -> LoadReport:
        self.under_way.add(model.key)
        far = is_far(model)
        self.most[far] = max(self.most[far], sum(key.startswith("far") is far for key in self.under_way))
        try:
            await anyio.sleep(60.0 if far else 1.0)
        finally:
            self.under_way.discard(model.key)
        return LoadReport(10, Tier.REMOTE if far else Tier.DISK)

    async def evict(self, key: ModelKey) -> EvictReport:
        return EvictReport(10)

    async def inventory(self) -> tuple[Held, ...]:
        return ()


def is_far(model: Model) -> bool:
    return model.name.startswith("far")


@asynccontextmanager
async def host(pulls: int = 2) -> AsyncIterator[tuple[Ref[m.Command], Shelf, list[f.Event]]]:
    """A host cache with one disk channel and so many pulls."""
    shelf, events, clock = Shelf(), list[f.Event](), LoopClock()
    limits = Settings(1000, parallel=1, pulls=pulls, shortest_first=True)
    async with Supervisor(emit=events.append, clock=clock) as supervisor:
        ref = supervisor.start(
            "host", lambda: CheckedHost(limits, residence=shelf, clock=clock, emit=events.append, far=is_far)
        )
        await anyio.sleep(0.001)
        yield ref, shelf, events


@virtual
async def test_a_disk_load_does_not_wait_for_the_network() -> None:
    """Two pulls are under way and two more wait; a model on the disk is there a second later."""
    async with host() as (ref, shelf, _), anyio.create_task_group() as tasks:
        for each in FAR.values():
            tasks.start_soon(ref.ask, m.Ensure(each, Trigger.ADMIN))
        await anyio.sleep(0.5)
        started = anyio.current_time()
        await ref.ask(m.Acquire(NEAR["a"], m.new_ticket()))
        assert anyio.current_time() - started == pytest.approx(1.0)
        assert len(shelf.under_way) == 2
    assert shelf.most == {True: 2, False: 1}


@virtual
async def test_each_channel_keeps_its_own_limit() -> None:
    """However many are wanted, one from disk and three from afar at a time; and all of them come."""
    async with host(pulls=3) as (ref, shelf, events):
        async with anyio.create_task_group() as tasks:
            for each in (*FAR.values(), *NEAR.values()):
                tasks.start_soon(ref.ask, m.Ensure(each, Trigger.ADMIN))
        assert shelf.most == {True: 3, False: 1}
        assert sum(isinstance(each, f.LoadFinished) for each in events) == 6


@virtual
async def test_a_demand_for_one_channel_takes_no_prefetch_from_the_other() -> None:
    """Foresight pulls one; a disk read leaves it alone; a second pull that somebody waits for takes its place."""
    async with host(pulls=1) as (ref, shelf, events), anyio.create_task_group() as tasks:

        async def prefetch() -> None:
            with pytest.raises(NotReady, match="made way"):
                await ref.ask(m.Ensure(FAR["a"], Trigger.PREFETCH))

        tasks.start_soon(prefetch)
        await anyio.sleep(1)
        await ref.ask(m.Acquire(NEAR["a"], m.new_ticket()))
        assert shelf.under_way == {FAR["a"].key}
        started = anyio.current_time()
        await ref.ask(m.Acquire(FAR["b"], m.new_ticket()))
        assert anyio.current_time() - started == pytest.approx(60.0)
        assert [each.model for each in events if isinstance(each, f.LoadCancelled)] == [FAR["a"].key]


@virtual
async def test_everybody_who_wants_a_far_model_waits_for_one_pull() -> None:
    """Single flight, as for any other load."""
    async with host() as (ref, _, events):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(ref.ask, m.Acquire(FAR["a"], m.new_ticket()))
        assert sum(isinstance(each, f.LoadStarted) for each in events) == 1
        granted = [each for each in events if isinstance(each, f.LeaseGranted)]
        assert len(granted) == 50
        assert {each.found for each in granted} == {Tier.REMOTE}
