"""The cache's corners: advice, stale reports, lost places, and messages that come at an odd time."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from actors import events as f
from actors import messages as m
from actors.clock import LoopClock
from actors.errors import ActorStopped, ForeloadError, NeverFits, NotReady
from actors.host_cache import HostCache
from actors.lease import Lease
from actors.ports import EvictReport, Held, LoadReport
from actors.residency.model import Ticket, Tier, Trigger
from actors.residency.states import State
from actors.settings import Settings
from actors.supervisor import Supervisor
from forecasting.outlook import Outlook, Prospect
from runtime.simulation.hardware import Costs, SimulatedPlace
from runtime.simulation.loop import run
from tests.actors.virtual import virtual
from tests.simulation.rig import Rig, model, rig

A, B, C = (model(name) for name in "abc")


async def crash(r: Rig) -> None:
    """End the device cache's life and let the next one take stock."""
    r.device.tell("not a command")  # type: ignore[arg-type]
    await anyio.sleep(0.1)


@virtual
async def test_advice_tells_what_a_tier_has_and_would_refuse() -> None:
    """What readiness and placement read, without a message."""
    async with rig() as r:
        cache = r.cache
        assert (cache.up, cache.holds(A.key), cache.state_of(A.key)) == (True, False, State.ABSENT)
        assert cache.trouble(A) is None
        huge = model("huge", 31)
        trouble = cache.trouble(huge)
        assert trouble == (NeverFits.code, "huge@1 needs 31 bytes on cpu:0, which can hold 30")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, A, 1.0)
            await anyio.sleep(0.01)
            assert (cache.holds(A.key), cache.state_of(A.key)) == (True, State.LOADING)
            await anyio.sleep(0.5)
            assert (cache.holds(A.key), cache.state_of(A.key)) == (True, State.RESIDENT)
        await r.device.ask(m.Unload(A.key))
        assert (cache.holds(A.key), cache.state_of(A.key)) == (False, State.UNLOADING)


@virtual
async def test_a_snapshot_says_everything_that_an_operator_asks() -> None:
    """Residents with age, idleness and expiry; wishes with their obstacle; the sums of the ledger."""
    async with rig(device=10, settings={"fairness": 100.0}) as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, model("a", ttl_idle=1000.0), 5.0)
        await r.settle()
        tasks.start_soon(r.use, B)
        await anyio.sleep(0.5)
        view = r.cache.snapshot()
        (resident,), (wish,) = view.residents, view.wishes
        assert (view.where, view.tier, view.up, view.draining) == ("cpu:0", Tier.DEVICE, True, False)
        assert (view.capacity, view.resident, view.free, view.leases, view.waiting) == (10, 10, 0, 1, 1)
        assert (resident.model, resident.leases, resident.uses, resident.state) == ("a@1", 1, 1, State.RESIDENT)
        assert resident.expires_in is not None
        assert 900 < resident.expires_in < 1100
        assert 1.0 < resident.age < 2.0
        assert (wish.model, wish.trigger, wish.waiters, wish.load, wish.blocked) == (
            "b@1",
            Trigger.DEMAND,
            1,
            "",
            "leased",
        )
        assert repr(r.cache).startswith("<CheckedDevice cpu:0 <Ledger 10/10 B")


REPORT = LoadReport(10, Tier.HOST)
STALE: tuple[m.Command, ...] = (
    m.Loaded("cpu:0/0.1", REPORT),
    m.LoadBroke("cpu:0/0.1", OSError("late")),
    m.LoadStopped("cpu:0/0.1"),
    m.Gone("cpu:0/0.e1", EvictReport(10)),
    m.EvictBroke("cpu:0/0.e1", OSError("late")),
    m.Release(Ticket(-1)),
    m.Upgrade(A.key, Trigger.DEMAND),
    m.Woke(),
)


@pytest.mark.parametrize("message", STALE, ids=lambda each: type(each).__name__)
def test_what_a_former_life_reports_changes_nothing(message: m.Command) -> None:
    """F65: names of loads and evictions carry the incarnation, so a late report finds nothing."""

    async def main() -> None:
        async with rig() as r:
            await r.use(B)
            before = repr(r.cache)
            r.device.tell(message)
            await r.settle()
            assert (repr(r.cache), r.device.incarnation) == (before, 1)

    run(main)


@virtual
async def test_the_host_lease_of_a_former_lifes_load_is_let_go() -> None:
    """Its ticket is known to nobody else, and would keep the host's copy for ever."""
    async with rig() as r:
        ticket = m.new_ticket()
        await r.host.ask(m.Acquire(A, ticket))
        r.device.tell(m.Loaded("cpu:0/0.1", REPORT, ticket))
        await r.settle()
        assert r.host_cache.ledger.leases == 0


@virtual
async def test_a_tier_that_cannot_tell_what_it_holds_is_not_up() -> None:
    """Nothing is decided on unknown books; a restored place is asked again, and waiters are served then."""
    async with rig() as r, anyio.create_task_group() as tasks:
        r.device.tell(m.InventoryFailed("pipe closed"))
        tasks.start_soon(r.use, A)
        await r.settle()
        assert not r.cache.up
        assert r.device_place.loads == 0
        r.device.tell(m.Restored())
        await r.settle()
        assert r.cache.snapshot().up
        assert r.device_place.loads == 1


class SilentPlace(SimulatedPlace):
    """Dies before it can tell what it holds."""

    async def inventory(self) -> tuple[Held, ...]:
        """See `Residence.inventory`."""
        raise NotReady("the worker is gone")


@virtual
async def test_an_inventory_that_raises_is_not_a_crash() -> None:
    """A worker that is just dying answers nothing; the cache waits for its return."""
    clock, events = LoopClock(), list[f.Event]()
    place = SilentPlace(30, Tier.DISK)
    async with Supervisor(emit=events.append, clock=clock) as supervisor:
        ref = supervisor.start(
            "host", lambda: HostCache(Settings(30), residence=place, clock=clock, emit=events.append)
        )
        await anyio.sleep(1)
        assert isinstance(ref.owner, HostCache)
        assert (ref.owner.up, ref.incarnation, events) == (False, 1, [])


@virtual
async def test_only_residents_can_be_pinned() -> None:
    """A pin on what is not there would be forgotten in silence."""
    async with rig() as r:
        with pytest.raises(NotReady, match="a@1 is not resident on cpu:0"):
            await r.device.ask(m.Pin(A.key))


@virtual
async def test_an_explicit_load_of_a_resident_may_pin_and_unpin_it() -> None:
    """`pin=None` leaves it as it is."""
    async with rig() as r:
        pins: list[bool] = []
        for pin in (True, None, False, None):
            await r.ensure(A, pin=pin)
            pins.append(r.cache.snapshot().residents[0].pinned)
        assert pins == [True, True, False, False]
        assert r.device_place.loads == 1


@virtual
async def test_unloading_what_is_not_there_is_no_error() -> None:
    """Idempotent, also while it is loading for somebody who waits."""
    async with rig() as r:
        await r.device.ask(m.Unload(A.key))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, A)
            await anyio.sleep(0.01)
            await r.device.ask(m.Unload(A.key))
        assert r.device_place.loads == 1


@virtual
async def test_newer_weights_replace_the_wish_for_older_ones() -> None:
    """I5: who asked for the old ones is told, and nobody gets weights that were not asked for."""
    newer = model("a", fingerprint="newer")
    async with rig() as r:
        results: list[object] = []

        async def old() -> None:
            try:
                await r.use(A)
            except NotReady as error:
                results.append(error.message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(old)
            await anyio.sleep(0.12)
            await r.use(newer)
        assert results == ["replaced by newer weights"]
        assert [row.fingerprint for row in r.cache.snapshot().residents] == ["newer"]


@virtual
async def test_newer_weights_wait_for_the_last_user_of_the_older_ones() -> None:
    """U14: the running request keeps what it leased; the next one gets the new weights."""
    newer = model("a", fingerprint="newer")
    async with rig() as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 1.0)
        await r.settle(0.5)
        assert (await r.use(newer)).result == "miss"
        assert anyio.current_time() > 1.0


@virtual
async def test_older_weights_that_stay_are_not_granted_for_newer_ones() -> None:
    """I5, F50: an explicit load takes the drain of the old version back while somebody waits for the new one."""
    newer = model("a", fingerprint="newer")
    async with rig() as r:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, A, 1.0)
            await r.settle(0.5)
            tasks.start_soon(r.use, newer)
            await anyio.sleep(0.1)
            await r.ensure(A)
        assert [row.fingerprint for row in r.cache.snapshot().residents] == ["newer"]


@virtual
async def test_a_load_cancelled_too_late_is_taken_away_again() -> None:
    """The model arrived although nobody wanted it any more: for the world it never was there."""
    async with rig(device_costs=Costs(0.05, 1e15, evict=1.0)) as r:
        with anyio.move_on_after(0.12):
            await r.use(A)
        await anyio.sleep(0.01)
        assert r.cache.state_of(A.key) is State.UNLOADING
        # The load's report was already on its way when the cancellation came.
        (load,) = [each.load for each in r.events if isinstance(each, f.LoadStarted) and each.device == "cpu:0"]
        r.device.tell(m.Loaded(load, REPORT))
        await r.settle(5)
        assert r.cache.state_of(A.key) is State.ABSENT
        assert r.story(f.LoadCancelled, f.LoadFinished, f.EvictionStarted, f.Evicted, key=A.key) == [
            "LoadFinished",  # on the host
            "LoadCancelled",
        ]


@virtual
async def test_what_turns_out_too_large_while_it_waits_is_refused() -> None:
    """U9: another version with the same weights was just measured, and can never be here again."""
    first, second = model("first", fingerprint="shared"), model("second", fingerprint="shared")
    async with rig(settings={"parallel": 1}) as r:
        r.device_place.capacity = 100
        r.device_place.measure = lambda _: 31
        refusals: list[object] = []

        async def ask() -> None:
            try:
                await r.use(second)
            except NeverFits as error:
                refusals.append(error.detail["bytes_needed"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, first)
            await anyio.sleep(0.01)
            tasks.start_soon(ask)
        assert refusals == [31]
        assert r.cache.snapshot().wishes == ()


@virtual
async def test_a_place_that_dies_twice_tells_each_load_once() -> None:
    """The second `Lost` finds nothing that the first one did not settle."""
    async with rig(device_costs=Costs(1.0, 1e15, evict=0.5)) as r:
        failures: list[str] = []

        async def ask() -> None:
            try:
                await r.use(A)
            except ForeloadError as error:
                failures.append(error.code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.5)
            r.device_place.lose()
            r.device.tell(m.Lost("first"))
            r.device.tell(m.Lost("second"))
            r.device.tell(m.Restored())
            await anyio.sleep(0.2)
        assert failures == ["worker_died"]
        assert r.count(f.LoadFailed) == 1
        await r.settle(3)
        assert r.cache.snapshot().wishes == ()


@virtual
async def test_a_model_wanted_again_while_its_lost_load_is_being_undone_waits_for_that() -> None:
    """The job of the life before may still touch the model; the new load begins after it."""
    async with rig(device_costs=Costs(1.0, 1e15, evict=0.5)) as r:
        errors: list[str] = []

        async def ask() -> None:
            try:
                await r.use(A)
            except ForeloadError as error:
                errors.append(error.code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.5)
            r.device_place.lose()
            r.device.tell(m.Lost("killed"))
            r.device.tell(m.Restored())
            await anyio.sleep(0.01)
            await r.ensure(A, Trigger.ADMIN)
        assert errors == ["worker_died"]
        assert A.key in r.resident()
        assert r.device.incarnation == 1


@virtual
async def test_a_place_that_dies_while_a_given_up_load_is_undone_ends_that_too() -> None:
    """F57 after F35: cancelled once, stated once, nothing left."""
    async with rig(device_costs=Costs(1.0, 1e15, evict=0.5)) as r:
        with anyio.move_on_after(0.5):
            await r.use(A)
        await anyio.sleep(0.1)
        r.device_place.lose()
        r.device.tell(m.Lost("killed"))
        await r.settle()
        assert r.count(f.LoadCancelled) == 1
        assert r.cache.ledger.used == 0


@virtual
async def test_a_load_that_ran_on_into_the_next_life_is_adopted() -> None:
    """What the place reports to hold after its restart is there, whoever asked for it."""
    async with rig() as r:
        failures: list[str] = []

        async def ask() -> None:
            try:
                await r.use(A)
            except ForeloadError as error:
                failures.append(error.code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.12)
            (load,) = [each.load for each in r.events if isinstance(each, f.LoadStarted) and each.device == "cpu:0"]
            r.device.tell(m.Lost("killed"))
            r.device.tell(m.Loaded(load, REPORT))
            await anyio.sleep(0.0001)
            assert r.cache.state_of(A.key) is State.RESIDENT
            assert r.count(f.Adopted) == 1
        assert failures == ["worker_died"]


@virtual
async def test_a_crashed_host_gets_the_leases_of_the_devices_back() -> None:
    """F65: what a device maps cannot be evicted below it, whoever crashed."""
    async with rig() as r:
        await r.use(A)
        await r.use(B)
        r.host.tell("not a command")  # type: ignore[arg-type]
        await r.settle()
        assert (r.host.incarnation, r.host_cache.ledger.leases) == (2, 2)
        await r.device.ask(m.Unload(A.key))
        await r.settle()
        assert r.host_cache.ledger.leases == 1


@virtual
async def test_a_crashed_device_keeps_its_host_leases_and_forgets_those_of_what_left() -> None:
    """F65: tickets outlive the actor; those of models that are gone are released."""
    async with rig() as r:
        await r.use(A)
        await r.use(B)
        del r.device_place.held[B.key]
        await crash(r)
        assert r.resident() == {A.key}
        assert r.host_cache.ledger.leases == 1
        await crash(r)
        assert r.host_cache.ledger.leases == 1


@virtual
async def test_a_device_with_memory_of_its_own_leases_the_host_only_while_it_copies() -> None:
    """A GPU does not map the host's copy; after the copy that may leave."""
    async with rig(keeps_host=False) as r:
        await r.use(A)
        assert r.host_cache.ledger.leases == 0
        await crash(r)
        assert (r.resident(), r.host_cache.ledger.leases) == ({A.key}, 0)
        await r.device.ask(m.Unload(A.key))
        await r.settle()
        assert r.resident() == set()


@virtual
async def test_a_lease_works_while_its_cache_is_between_two_lives() -> None:
    """The ref survives: the question waits in the mailbox, and the release finds its way."""
    async with rig() as r:
        await r.use(A)
        r.device.tell("not a command")  # type: ignore[arg-type]
        lease = Lease(r.device, m.Acquire(A, m.new_ticket()))
        async with lease as grant:
            assert grant.result in {"hit", "miss"}
        await r.settle()
        assert r.cache.snapshot().leases == 0


@virtual
async def test_the_bottom_tier_needs_nothing_below_it() -> None:
    """The host loads from the disk, is hurried, loses and adopts, all without a tier below."""
    async with rig() as r:
        await together_on_host(r)
        r.host.tell(m.Rehold())
        r.host.tell(m.Lost("unmapped"))
        r.host_place.lose()
        r.host.tell(m.Restored())
        await r.settle()
        assert set(r.host_place.held) == {A.key}
        r.host.tell("not a command")  # type: ignore[arg-type]
        await r.settle()
        assert r.host_cache.snapshot().residents[0].adopted is False


async def together_on_host(r: Rig) -> None:
    """A prefetch and a demand for the same model, straight at the host tier."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(r.host.ask, m.Ensure(A, Trigger.PREFETCH))
        await anyio.sleep(0.01)
        tasks.start_soon(partial(r.host.ask, m.Ensure(A, Trigger.ADMIN)))


@virtual
async def test_what_is_found_without_a_lease_below_gets_one() -> None:
    """A first life finds models that a former process left mapped: their host copies have to stay."""
    async with rig() as r:
        r.device_place.held[A.key] = (A, 10)
        await crash(r)
        await r.settle()
        assert r.count(f.Adopted) == 1
        assert r.host_cache.ledger.leases == 1
        assert set(r.host_place.held) == {A.key}


@virtual
async def test_a_lease_on_a_stopped_cache_is_refused_and_leaves_in_peace() -> None:
    """F74: shutting down answers everybody."""
    async with rig() as r:
        ref = r.device
    lease = Lease(ref, m.Acquire(A, m.new_ticket()))
    with pytest.raises(ActorStopped):
        await lease.__aenter__()
    lease.release()


@virtual
async def test_an_outlook_is_taken_in_without_a_load() -> None:
    """A forecast changes who is worth keeping and nothing else."""
    async with rig() as r:
        await r.use(A)
        before = repr(r.cache)
        r.device.tell(m.Outlooked(Outlook(1.0, {A.key: Prospect(rate=1.0)})))
        await r.settle()
        assert repr(r.cache) == before
