"""The dispatcher: which model a name means, where it is served, and what unknown names may cost."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import pytest

from actors.actor import Ref
from actors.clock import LoopClock
from actors.dispatcher import Dispatcher, Order, Refresh, Resolve
from actors.errors import ConfigError, FetchFailed, UnknownModel
from actors.host_cache import HostCache
from actors.messages import Command, Ensure, Lost, Unload
from actors.residency.model import Model, Tier, Trigger
from actors.settings import Settings
from actors.supervisor import Supervisor
from runtime.simulation.hardware import SimulatedPlace
from tests.actors.books import model
from tests.actors.virtual import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

A, B = model("a"), model("b")
A2 = Model("a", "2", "fp-a2", A.footprint)


@dataclass
class ScriptedCatalog:
    """A catalogue whose content, slowness and failure a test decides."""

    models: dict[str, tuple[Model, ...]] = field(default_factory=dict)
    fails: Exception | None = None
    seconds: float = 0.1
    looks: int = 0

    async def refresh(self) -> Mapping[str, tuple[Model, ...]]:
        """See `Catalog.refresh`."""
        self.looks += 1
        await anyio.sleep(self.seconds)
        if self.fails is not None:
            raise self.fails
        return dict(self.models)


@dataclass
class Desk:
    """A dispatcher over two tiers that can hold models."""

    ref: Ref[Order]
    catalog: ScriptedCatalog
    devices: tuple[Ref[Command], ...]

    @property
    def dispatcher(self) -> Dispatcher:
        """The living one."""
        assert isinstance(self.ref.owner, Dispatcher)
        return self.ref.owner

    def cache(self, number: int) -> HostCache:
        """A device's cache."""
        owner = self.devices[number].owner
        assert isinstance(owner, HostCache)
        return owner


@asynccontextmanager
async def desk(*capacities: int, unknown_size: int = 1024) -> AsyncIterator[Desk]:
    """Run a dispatcher with two models over places of these capacities."""
    clock, catalog = LoopClock(), ScriptedCatalog({"a": (A, A2), "b": (B,)})

    def cache(capacity: int) -> HostCache:
        place = SimulatedPlace(capacity, Tier.DISK)
        return HostCache(Settings(capacity), residence=place, clock=clock, emit=lambda _: None)

    async with Supervisor(emit=lambda _: None, clock=clock) as supervisor:
        devices = tuple(
            supervisor.start(f"cpu:{number}", lambda capacity=capacity: cache(capacity))  # type: ignore[misc]
            for number, capacity in enumerate(capacities or (30, 30))
        )
        ref = supervisor.start(
            "dispatcher",
            lambda: Dispatcher(devices, catalog=catalog, clock=clock, unknown_size=unknown_size),
        )
        await anyio.sleep(1)
        yield Desk(ref, catalog, devices)


@virtual
async def test_names_and_versions_are_found_without_a_message() -> None:
    """No version means the highest."""
    async with desk() as d:
        found = d.dispatcher
        assert found.find("a") is A2
        assert found.find("a", "1") is A
        assert found.find("a", "9") is None
        assert found.find("x") is None
        assert found.versions("a") == (A, A2)
        assert found.versions("x") == ()
        assert found.models() == (A, A2, B)
        assert repr(found) == "<Dispatcher 3 models on 2 devices, 0 unknown>"
        assert await d.ref.ask(Resolve("a", "1")) is A
        assert d.catalog.looks == 1


@virtual
async def test_an_unknown_name_is_looked_for_once_and_then_refused_for_a_while() -> None:
    """F40: endless bad names do not read the disk for each request."""
    async with desk() as d:
        for _ in range(100):
            with pytest.raises(UnknownModel, match="model 'x' is not known"):
                await d.ref.ask(Resolve("x"))
        with pytest.raises(UnknownModel, match="model 'a' has no version '9'"):
            await d.ref.ask(Resolve("a", "9"))
        assert d.catalog.looks == 3
        d.catalog.models["x"] = (model("x"),)
        await anyio.sleep(3)
        assert (await d.ref.ask(Resolve("x"))).name == "x"


@virtual
async def test_a_thousand_questions_at_once_share_one_look() -> None:
    """Single flight, also for the catalogue."""
    async with desk() as d:
        d.catalog.models["new"] = (model("new"),)
        async with anyio.create_task_group() as tasks:
            for _ in range(1000):
                tasks.start_soon(d.ref.ask, Resolve("new"))
        assert d.catalog.looks == 2


@pytest.mark.parametrize(("size", "remembered"), [(0, 0), (3, 3)])
def test_the_memory_for_unknown_names_is_bounded(size: int, remembered: int) -> None:
    """F40: 1e5 random names do not grow the server."""

    async def main() -> None:
        async with desk(unknown_size=size) as d:
            for number in range(10):
                with pytest.raises(UnknownModel):
                    await d.ref.ask(Resolve(f"x{number}"))
            assert repr(d.dispatcher).endswith(f"{remembered} unknown>")

    virtual(main)()


@virtual
async def test_a_refresh_is_answered_when_it_is_done_and_retires_what_is_gone() -> None:
    """What is served no more leaves every device, once nobody uses it."""
    async with desk() as d:
        await d.devices[1].ask(Ensure(B, Trigger.ADMIN))
        del d.catalog.models["b"]
        await d.ref.ask(Refresh())
        await anyio.sleep(1)
        assert d.dispatcher.find("b") is None
        assert not d.cache(1).holds(B.key)


@pytest.mark.parametrize(
    ("fault", "heard"), [(ConfigError("bad manifest"), ConfigError), (OSError("/secret/path"), FetchFailed)]
)
def test_a_catalogue_that_breaks_leaves_the_last_table(fault: Exception, heard: type[Exception]) -> None:
    """F73: the refresh is refused, foreign texts stay inside, and what was served is served on."""

    async def main() -> None:
        async with desk() as d:
            d.catalog.fails = fault
            with pytest.raises(heard) as caught:
                await d.ref.ask(Refresh())
            assert "secret" not in str(caught.value)
            for _ in range(2):  # not remembered as unknown: nobody can say so now
                with pytest.raises(heard):
                    await d.ref.ask(Resolve("x"))
            assert d.dispatcher.find("a") is A2

    virtual(main)()


@virtual
async def test_a_model_is_served_where_it_is_else_where_most_room_is() -> None:
    """Affinity first, then the roomiest place that it fits in at all and that answers."""
    large = model("large", 40)
    async with desk(30, 50, 45) as d:
        first, roomiest, third = d.devices
        assert d.dispatcher.whereabouts(A.key) is None
        assert d.dispatcher.place(A) is roomiest
        assert d.dispatcher.place(large) is roomiest
        await first.ask(Ensure(A, Trigger.ADMIN))
        assert d.dispatcher.place(A) is first
        assert d.dispatcher.whereabouts(A.key) is first
        roomiest.tell(Lost("killed"))
        await anyio.sleep(0.1)
        assert d.dispatcher.place(large) is third
        await first.ask(Unload(A.key))
        await anyio.sleep(1)
        assert d.dispatcher.place(A) is third


@virtual
async def test_with_no_device_alive_the_first_is_asked_and_its_mailbox_waits() -> None:
    """Between two incarnations a request is queued, not lost."""
    devices: tuple[Ref[Command], ...] = (Ref("cpu:0"), Ref("cpu:1"))
    lonely = Dispatcher(devices, catalog=ScriptedCatalog(), clock=LoopClock())
    assert lonely.place(A) is devices[0]
    assert lonely.whereabouts(A.key) is None
    for ref in devices:
        ref.mailbox.close(UnknownModel("the end"))
