"""Stories of the core on virtual time: each replays one fault or public bug report and says how it ends now."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.lowlevel import checkpoint

from actors import events as f
from actors import messages as m
from actors.clock import LoopClock
from actors.errors import (
    Busy,
    Conflict,
    CorruptWeights,
    DeadlineExceeded,
    Draining,
    ForeloadError,
    NeverFits,
    NoEvictableSpace,
    NotReady,
    OutOfMemory,
    Quarantined,
    StillLoading,
    WorkerDied,
)
from actors.ports import EvictReport, MemorySample
from actors.residency.model import Model, ModelKey, Tier, Trigger
from actors.residency.states import State
from actors.settings import Settings
from actors.supervisor import Supervisor
from runtime.simulation.hardware import Costs, SimulatedPlace
from runtime.simulation.loop import run
from tests.actors.virtual import virtual
from tests.simulation.invariants import prove
from tests.simulation.rig import CheckedHost, Rig, model, rig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

A, B, C, D = (model(name) for name in "abcd")
AT_ONCE = Costs(fixed=0.0, bandwidth=1e15, evict=0.0)
FREE_DISK = {"host_costs": AT_ONCE}


async def answer(of: Callable[[], Awaitable[object]], into: list[object]) -> None:
    """Keep what it returned, or the error it raised."""
    try:
        into.append(await of())
    except ForeloadError as error:
        into.append(error)


async def together(*calls: Callable[[], Awaitable[object]]) -> list[object]:
    """Run them at once; results in the order in which they ended."""
    results: list[object] = []
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(answer, call, results)
    return results


def granted(results: list[object]) -> list[str]:
    """How each lease was had."""
    assert all(isinstance(each, m.Grant) for each in results), results
    return sorted(each.result for each in results if isinstance(each, m.Grant))


def kinds(results: list[object]) -> list[str]:
    """The results' class names."""
    return [type(each).__name__ for each in results]


def proven(r: Rig, *, device: int = 30, host: int = 1000, finished: bool = True) -> None:
    """The whole log keeps I1-I4 and I6."""
    prove(r.events, {"cpu:0": device, "host": host}, finished=finished)


# -- single flight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [200, 2000])
def test_concurrent_first_requests_share_one_load(clients: int) -> None:
    """T1, U4: one load on each tier, one miss, everybody else coalesced."""

    async def main() -> None:
        async with rig() as r:
            results = await together(*[lambda: r.use(A)] * clients)
            assert granted(results) == ["coalesced"] * (clients - 1) + ["miss"]
            assert (r.device_place.loads, r.host_place.loads) == (1, 1)
            proven(r)

    run(main)


@virtual
async def test_ten_thousand_waiters_are_answered_and_the_next_one_is_refused() -> None:
    """F38, F66: up to the cap nobody is lost; beyond it `Busy` with a retry time, while the load goes on."""
    before = time.monotonic()
    async with rig(settings={"waiters_per_model": 10_000}) as r:
        results = await together(*[lambda: r.use(A, 0.0)] * 10_050)
        assert kinds(results).count("Grant") == 10_000
        busy = [each for each in results if isinstance(each, Busy)]
        assert len(busy) == 50
        assert busy[0].retry_after == 1.0
        assert busy[0].detail == {"waiting": 10_000, "limit": 10_000}
        assert r.device_place.loads == 1
    assert time.monotonic() - before < 60


@virtual
async def test_the_waiters_of_all_models_together_are_limited_too() -> None:
    """F66: one flooded model does not open the door for a second flood."""
    async with rig(settings={"waiters": 3}) as r:
        results = await together(*[lambda: r.use(A)] * 2, *[lambda: r.use(B)] * 2)
        assert sorted(kinds(results)) == ["Busy", "Grant", "Grant", "Grant"]
        proven(r)


@virtual
async def test_a_load_by_an_operator_a_schedule_and_a_client_is_one_load() -> None:
    """F49, R5, R26: explicit load, warm list, prefetch and five requests: one load, every one of them answered."""
    async with rig() as r:
        results = await together(
            lambda: r.ensure(A, Trigger.PREFETCH),
            lambda: r.ensure(A, Trigger.WARM),
            lambda: r.ensure(A, Trigger.ADMIN),
            lambda: r.ensure(A, Trigger.ADMIN),
            *[lambda: r.use(A)] * 5,
        )
        assert kinds(results).count("NoneType") == 4
        assert kinds(results).count("Grant") == 5
        assert r.device_place.loads == 1


@virtual
async def test_two_cold_models_load_side_by_side() -> None:
    """R1: both are ready after one load's time, not two."""
    costs = Costs(fixed=1.0, bandwidth=1e15, evict=0.0)
    async with rig(device_costs=costs, **FREE_DISK) as r:  # type: ignore[arg-type]
        began = anyio.current_time()
        await together(lambda: r.use(A, 0.0), lambda: r.use(B, 0.0))
        assert anyio.current_time() - began == pytest.approx(1.0, abs=0.01)
        assert r.device_place.most_at_once == 2


@virtual
async def test_the_disk_reads_one_model_at_a_time_and_the_shortest_first() -> None:
    """F64, R16: the peak is one model, and a small one does not wait for a large one that came in the same breath."""
    first, large, small = model("first"), model("large", 15), model("small", 5)
    async with rig() as r:
        await together(*[partial(r.use, each) for each in (first, large, small)])
        order = [each.model for each in r.events if isinstance(each, f.LoadFinished) and each.tier is Tier.HOST]
        assert order == ["first@1", "small@1", "large@1"]
        assert r.host_place.most_at_once == 1


# -- clients that leave ----------------------------------------------------------------------------------


@pytest.mark.parametrize("orphans", [False, True])
def test_the_last_client_that_leaves_takes_the_load_with_it(*, orphans: bool) -> None:
    """F35: the bytes come back at once, unless the operator wants orphaned loads finished."""

    async def main() -> None:
        async with rig(settings={"finish_orphans": orphans}) as r:
            with anyio.move_on_after(0.12):
                await r.use(A)
            await r.settle()
            assert (A.key in r.resident()) is orphans
            assert r.cache.snapshot().loading == 0
            assert ("LoadCancelled" in r.story(key=A.key)) is not orphans
            proven(r)

    run(main)


@virtual
async def test_a_client_that_leaves_cancels_nothing_for_the_others() -> None:
    """F35, finding 11: the load belongs to the cache and not to whoever asked first."""
    async with rig() as r:

        async def impatient() -> object:
            with anyio.move_on_after(0.05):
                return await r.use(A)
            return "left"

        results = await together(impatient, lambda: r.use(A))
        assert sorted(kinds(results)) == ["Grant", "str"]
        assert r.device_place.loads == 1
        proven(r)


@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_cancelled_waiters_and_other_weights_leave_one_load(seed: int) -> None:
    """F36, R19: everybody leaves in the middle, then the same model is asked for with other weights."""

    async def main() -> None:
        other = model("a", fingerprint="fp-other")
        async with rig(seed=seed) as r:
            with anyio.move_on_after(0.1 + seed * 0.005):
                await together(*[lambda: r.use(A)] * 1000)
            assert (await r.use(other)).result == "miss"
            await r.settle()
            assert [(row.fingerprint, row.leases) for row in r.cache.snapshot().residents] == [("fp-other", 0)]
            assert r.device_place.used == 10
            proven(r)

    run(main, seed=seed)


LAST = [0.001 * step for step in range(170)]


@pytest.mark.parametrize("first", range(0, 170, 34))
def test_a_client_may_be_cancelled_at_any_instant(first: int) -> None:
    """Rule 17: before the message is read, in the queue, during the disk read, the copy, the grant, the run."""

    async def main(after: float) -> None:
        async with rig(device=10) as r:
            await r.use(B, 0.0)
            with anyio.move_on_after(after):
                await r.use(A, 0.001)
            await r.settle()
            left = r.cache.snapshot()
            assert (left.leases, left.waiting, left.loading, left.unloading, left.wishes) == (0, 0, 0, 0, ())
            assert (await r.use(A)).result in {"hit", "miss"}
            proven(r, device=10)

    for after in LAST[first : first + 34]:
        run(partial(main, after), seed=first)


@pytest.mark.parametrize("seed", range(200))
def test_a_client_cancelled_at_the_very_instant_of_its_grant_leaves_nothing(seed: int) -> None:
    """F48: the load ends and the client leaves in the same turn, in either order."""

    async def main() -> None:
        async with rig(device_costs=Costs(0.5, 1e15, evict=0.0), **FREE_DISK) as r:  # type: ignore[arg-type]
            began = anyio.current_time()
            await r.use(A, 0.0)
            took = anyio.current_time() - began
            await r.device.ask(m.Unload(A.key))
            await r.settle()
            with anyio.move_on_after(took):
                await r.use(A, 0.001)
            await r.settle()
            assert r.cache.snapshot().leases == 0
            proven(r)

    run(main, seed=seed)


@pytest.mark.parametrize("resident", [False, True])
def test_a_client_cancelled_before_its_question_is_read_gets_nothing(*, resident: bool) -> None:
    """Its release overtakes the question; the question must then neither lease nor load for nobody."""

    async def main() -> None:
        async with rig() as r:
            if resident:
                await r.ensure(A)
            for _ in range(20):
                r.device.tell(m.Woke())  # so that the question has to wait for its turn
            ticket = m.new_ticket()
            task = asyncio.create_task(r.device.ask(m.Acquire(A, ticket)))
            await checkpoint()
            task.cancel()
            r.device.tell(m.Release(ticket))
            await r.settle()
            assert task.cancelled()
            assert (r.cache.snapshot().leases, r.device_place.loads) == (0, int(resident))
            proven(r)

    run(main)


# -- room ------------------------------------------------------------------------------------------------


@virtual
async def test_a_model_that_never_fits_is_refused_with_numbers_and_disturbs_nobody() -> None:
    """T5, F46, U9: on the device, and on the host that it would have to come through."""
    async with rig(device=30, host=60) as r:
        await r.use(A)
        with pytest.raises(NeverFits) as caught:
            await r.use(model("huge", 31))
        assert caught.value.detail == {"bytes_needed": 31, "bytes_available": 30}
        assert r.resident() == {A.key}
        assert r.count(f.EvictionStarted) == 0
    async with rig(device=100, host=20) as r:
        with pytest.raises(NeverFits, match="on host, which can hold 20"):
            await r.use(model("huge", 31))
        assert r.cache.snapshot().wishes == ()


@virtual
async def test_newer_weights_that_can_never_come_do_not_push_the_old_ones_out() -> None:
    """T5, U14: nothing is evicted for a load that is known to be impossible."""
    async with rig() as r:
        await r.use(A)
        with pytest.raises(NeverFits):
            await r.use(model("a", 31, fingerprint="too-large"))
        assert (await r.use(A)).result == "hit"


@virtual
async def test_a_large_resident_makes_room_for_a_small_one() -> None:
    """R10: arena 12, A 9, B 4."""
    async with rig(device=12) as r:
        await r.use(model("big", 9))
        assert (await r.use(model("small", 4))).result == "miss"
        assert r.resident() == {"small@1"}


@virtual
async def test_a_load_waits_for_the_bytes_of_an_unload() -> None:
    """R6, U7: bytes are free when they were observed free, not when the unload was asked for."""
    async with rig(device=10, device_costs=Costs(0.05, 1e15, evict=2.0)) as r:
        await r.use(A)
        began = anyio.current_time()
        await r.device.ask(m.Unload(A.key))
        await r.use(B)
        assert anyio.current_time() - began > 2.0
        assert r.device_place.most <= 10
        proven(r, device=10)


@virtual
async def test_a_count_limit_holds_under_a_rush() -> None:
    """R2: limit 1, twenty requests to five models at once: never more than one, all answered."""
    models = [model(name) for name in "abcde"]
    async with rig(device=1000, settings={"count": 1}) as r:
        results = await together(*[partial(r.use, each) for each in models * 4])
        assert len(granted(results)) == 20
        assert r.device_place.most <= 10
        proven(r)


@virtual
async def test_when_everything_is_leased_a_demand_waits_and_is_then_refused() -> None:
    """F45: 503 with a time to come back, nothing evicted under a lease."""
    async with rig(device=10, settings={"fairness": 100.0}) as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 5.0)
        await r.settle()
        with pytest.raises(NoEvictableSpace, match="what is there is leased") as caught:
            await r.use(B, patience=anyio.current_time() + 1)
        assert caught.value.retry_after == 1.0
        assert caught.value.detail == {"bytes_needed": 10, "bytes_free": 0}
        await r.settle(10)
        assert (await r.use(B)).result == "miss"
        proven(r, device=10)


@virtual
async def test_pinned_residents_stay_and_the_demand_learns_that() -> None:
    """A pin outlasts every demand; lifting it lets the demand through at once."""
    async with rig(device=10) as r:
        await r.ensure(A, pin=True)
        with pytest.raises(NoEvictableSpace, match="pinned"):
            await r.use(B, patience=anyio.current_time() + 5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, B)
            await r.settle()
            assert r.resident() == {A.key}
            await r.device.ask(m.Pin(A.key, on=False))
            await r.settle()
        assert r.resident() == {B.key}


@virtual
async def test_a_newcomer_is_left_alone_for_its_minimum_residency() -> None:
    """F51: the demand is served the moment the newcomer is old enough, without anything else happening."""
    young = model("y", min_residency=3.0)
    async with rig(device=10) as r:
        await r.use(young)
        began = anyio.current_time()
        await r.use(B)
        assert 2.5 < anyio.current_time() - began < 3.5


@virtual
async def test_two_models_that_alternate_in_one_place_take_turns() -> None:
    """F51, R25: the running request finishes, work for the same model is served together, swaps stay bounded."""
    async with rig(device=10, settings={"fairness": 0.5}, host_costs=AT_ONCE) as r:
        ends: list[str] = []

        async def client(wanted: Model) -> None:
            await r.use(wanted, 0.1)
            ends.append(wanted.name)

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                for wanted in (A, B):
                    tasks.start_soon(client, wanted)
                await anyio.sleep(0.05)
        assert len(ends) == 40
        assert r.device_place.loads <= 20
        proven(r, device=10)


@virtual
async def test_a_hot_model_cannot_starve_a_cold_one_for_ever() -> None:
    """F51, U5: after the fairness bound the hot resident drains, although somebody always holds it."""
    async with rig(device=10, settings={"fairness": 1.0}) as r, anyio.create_task_group() as tasks:

        async def busy() -> None:
            while True:
                await r.use(A, 0.3)

        for _ in range(3):
            tasks.start_soon(busy)
            await anyio.sleep(0.1)
        await r.settle()
        began = anyio.current_time()
        await r.use(B)
        assert 1.0 <= anyio.current_time() - began < 2.0
        tasks.cancel_scope.cancel()


@virtual
async def test_a_demand_that_leaves_spares_what_drained_for_it() -> None:
    """Nobody is evicted for a wish that is gone."""
    async with rig(device=10, settings={"fairness": 0.1}) as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 3.0)
        await r.settle()
        with anyio.move_on_after(1.0):
            await r.use(B)
        await r.settle()
        assert r.cache.state_of(A.key) is State.RESIDENT
        assert (await r.use(A)).result == "hit"
        assert r.count(f.EvictionStarted) == 0


@virtual
async def test_a_full_host_is_waited_for_and_then_said() -> None:
    """A device load gives its bytes back when the host has no room for its whole patience."""
    async with rig(device=30, host=20) as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 100.0)
        tasks.start_soon(r.use, B, 100.0)
        await r.settle()
        with pytest.raises(NoEvictableSpace, match="on host"):
            await r.use(C)
        assert r.cache.snapshot().loading == 0
        await r.settle(100)
        await r.device.ask(m.Unload(A.key))
        assert (await r.use(C)).result == "miss"
        proven(r, host=20)


# -- failing loads -----------------------------------------------------------------------------------------


def failing(times: int, error: Callable[[], ForeloadError]) -> Callable[[Model], ForeloadError | None]:
    """A fault that strikes so many loads."""
    left = [times]

    def strike(_: Model) -> ForeloadError | None:
        left[0] -= 1
        return error() if left[0] >= 0 else None

    return strike


@virtual
async def test_every_waiter_of_a_failed_load_gets_the_same_error_and_the_bytes_are_back() -> None:
    """F55, T6, I6: to the byte, on both tiers."""
    async with rig() as r:
        r.device_place.fault = failing(1, lambda: CorruptWeights("bit flip"))
        results = await together(*[lambda: r.use(A)] * 5)
        errors = [each for each in results if isinstance(each, CorruptWeights)]
        assert len(errors) == 5
        assert len({id(each) for each in errors}) == 5
        assert {(each.message, each.model, each.retry_after) for each in errors} == {("bit flip", "a", 1.0)}
        assert (r.device_place.used, r.cache.ledger.used) == (0, 0)
        assert r.cache.trouble(A) == ("corrupt_weights", "bit flip")
        with pytest.raises(Quarantined, match="bit flip") as caught:
            await r.use(A)
        assert caught.value.detail == {"cause": "corrupt_weights", "failures": 1}
        proven(r)


@virtual
async def test_the_back_off_doubles_and_lets_one_probe_through() -> None:
    """F55: 1 s, 2 s, 4 s; no load in between; the probe that succeeds ends it."""
    async with rig(**FREE_DISK) as r:  # type: ignore[arg-type]
        r.device_place.fault = failing(3, lambda: CorruptWeights("bit flip"))
        for tries, pause in ((1, 1.0), (2, 2.0), (3, 4.0)):
            results = await together(*[lambda: r.use(A)] * 3)
            assert {each.retry_after for each in results if isinstance(each, CorruptWeights)} == {pause}
            await anyio.sleep(pause - 0.1)
            assert kinds(await together(lambda: r.use(A))) == ["Quarantined"]
            assert r.device_place.loads == tries
            await anyio.sleep(0.2)
        assert (await r.use(A)).result == "miss"
        assert r.cache.trouble(A) is None


@pytest.mark.parametrize("where", ["device", "host"])
def test_an_explicit_load_does_not_wait_for_the_back_off(where: str) -> None:
    """F55: the operator has repaired the file or the driver and says so; that holds for the tier that failed."""

    async def main() -> None:
        async with rig() as r:
            place = r.device_place if where == "device" else r.host_place
            place.fault = failing(1, lambda: CorruptWeights("bit flip"))
            assert kinds(await together(lambda: r.use(A))) == ["CorruptWeights"]
            await r.ensure(A, Trigger.ADMIN)
            assert A.key in r.resident()

    run(main)


@virtual
async def test_new_weights_are_tried_at_once() -> None:
    """F55: the breaker is the fingerprint's, not the name's."""
    async with rig() as r:
        r.device_place.fault = failing(1, lambda: CorruptWeights("bit flip"))
        assert kinds(await together(lambda: r.use(A))) == ["CorruptWeights"]
        assert (await r.use(model("a", fingerprint="repaired"))).result == "miss"


@virtual
async def test_an_exception_that_is_not_ours_fails_the_load_without_its_text() -> None:
    """Secrets and paths of foreign exceptions stay in the log."""

    def burst(_: Model) -> ForeloadError | None:
        raise OSError("/secret/path")

    async with rig() as r:
        r.device_place.fault = burst
        (error,) = await together(lambda: r.use(A))
        assert isinstance(error, ForeloadError)
        assert error.code == "load_failed"
        assert "secret" not in error.message
        assert r.device.incarnation == 1


@virtual
async def test_a_model_larger_than_declared_is_remembered_as_it_is() -> None:
    """F58, U9: the next load reserves what was measured; what turns out too large for ever is refused from then on."""
    async with rig(device=100) as r:
        r.device_place.measure = lambda _: 25
        await r.use(A)
        assert r.cache.snapshot().resident == 25
        await r.device.ask(m.Unload(A.key))
        await r.use(A)
        assert [each.reserved for each in r.events if isinstance(each, f.LoadStarted) and each.device == "cpu:0"] == [
            10,
            25,
        ]


@virtual
async def test_a_newcomer_that_outgrows_its_reservation_pushes_idle_ones_out() -> None:
    """F58: the books admit the overrun and make room behind it."""
    async with rig(device=40, settings={"headroom": 10}) as r:
        r.device_place.measure = lambda each: 15 if each.name == "c" else 10
        for each in (A, B, C):
            await r.use(each)
        await r.settle()
        assert r.resident() == {B.key, C.key}
        assert r.cache.snapshot().free == 5


@virtual
async def test_out_of_memory_evicts_once_and_tries_once_more() -> None:
    """F58: fragmentation or a wrong estimate costs one more victim, not a failed request."""
    async with rig() as r:
        await r.use(A)
        await r.use(B)
        r.device_place.fault = failing(1, lambda: OutOfMemory("no block"))
        assert (await r.use(C)).result == "miss"
        await r.settle()
        assert r.resident() == {B.key, C.key}
        assert r.cache.trouble(C) is None
        (evicted,) = [each for each in r.events if isinstance(each, f.EvictionStarted)]
        assert (evicted.model, evicted.reason, evicted.for_model) == (A.key, "out_of_memory", C.key)
        proven(r)


@virtual
async def test_out_of_memory_twice_is_an_answer() -> None:
    """F58: no eviction spree; after the second time the callers are told."""
    async with rig() as r:
        await r.use(A)
        await r.use(B)
        r.device_place.fault = failing(9, lambda: OutOfMemory("no block"))
        assert kinds(await together(lambda: r.use(C))) == ["OutOfMemory"]
        assert (r.device_place.evictions, r.device_place.used) == (1, 10)


@virtual
async def test_out_of_memory_with_nobody_to_evict_fails_at_once() -> None:
    """Neither leased, nor pinned, nor young residents are taken for it."""
    async with rig() as r:
        await r.ensure(A, pin=True)
        await r.ensure(model("young", min_residency=100.0))
        r.device_place.fault = failing(1, lambda: OutOfMemory("no block"))
        assert kinds(await together(lambda: r.use(C))) == ["OutOfMemory"]
        assert r.device_place.evictions == 0


# -- leaving ---------------------------------------------------------------------------------------------


class LeakyPlace(SimulatedPlace):
    """Gives back only part of what it held, or breaks while doing so."""

    breaks: Exception | None = None

    async def evict(self, key: ModelKey) -> EvictReport:
        """See `Residence.evict`."""
        report = await SimulatedPlace.evict(self, key)
        if self.breaks is not None:
            raise self.breaks
        return EvictReport(report.returned - 4, 4)


@pytest.mark.parametrize(
    ("breaks", "leaked"), [(None, 4), (OSError("hook"), 10), (WorkerDied("killed"), 0)], ids=["leak", "hook", "died"]
)
def test_what_does_not_come_back_is_no_capacity_any_more(breaks: Exception | None, leaked: int) -> None:
    """F60, F61, U6: what leaked is no budget, all of it if the unload raised, until the place is renewed."""

    async def main() -> None:
        place, events, clock = LeakyPlace(30, Tier.DISK, AT_ONCE), list[f.Event](), LoopClock()
        place.breaks = breaks
        async with Supervisor(emit=events.append, clock=clock) as supervisor:
            ref = supervisor.start(
                "host", lambda: CheckedHost(Settings(30), residence=place, clock=clock, emit=events.append)
            )
            await ref.ask(m.Ensure(A, Trigger.ADMIN))
            await ref.ask(m.Unload(A.key))
            await anyio.sleep(1)
            assert isinstance(ref.owner, CheckedHost)
            after = ref.owner.snapshot()
            assert (after.leaked, after.foreign, after.free) == (leaked, leaked, 30 - leaked)
            assert [each.leaked for each in events if isinstance(each, f.Evicted)] == [leaked]
            ref.tell(m.Lost("recycled"))
            ref.tell(m.Restored())
            await anyio.sleep(1)
            assert ref.owner.snapshot().free == 30

    run(main)


@pytest.mark.parametrize("seed", range(50))
def test_a_request_that_meets_an_eviction_is_served_after_it(seed: int) -> None:
    """F47, R20, R23, R24: it waits for the stop, loads again, and the same request succeeds."""

    async def main() -> None:
        async with rig(device=20, seed=seed, device_costs=Costs(0.05, 1e15, evict=0.2)) as r:
            await r.use(A)
            calls: list[Callable[[], Awaitable[object]]] = [lambda: r.use(A), lambda: r.use(B)] * 4
            calls.insert(seed % 8, lambda: r.device.ask(m.Unload(A.key)))
            results = await together(*calls)
            assert len(granted([each for each in results if each is not None])) == 8
            proven(r, device=20)

    run(main, seed=seed)


@pytest.mark.parametrize("part", range(10))
def test_an_idle_limit_that_ends_as_a_request_arrives_loses_nobody(part: int) -> None:
    """T3, U1: a thousand instants around the end of the idle limit, each with shuffled turns."""

    async def main(offset: float) -> None:
        short = model("a", ttl_idle=1.0)
        async with rig(host_costs=AT_ONCE, device_costs=Costs(0.002, 1e15, evict=0.002)) as r:
            await r.use(short, 0.0)
            expires = r.cache.snapshot().residents[0].expires_in
            assert expires is not None
            await anyio.sleep(expires + offset)
            assert (await r.use(short)).result in {"hit", "miss"}
            await r.settle(3)
            assert r.resident() == set()
            assert r.cache.snapshot().leases == 0
            proven(r)

    for step in range(100):
        offset = (part * 100 + step - 500) * 1e-5
        run(partial(main, offset), seed=part * 100 + step)


@virtual
async def test_idle_and_absolute_limits_are_two_things() -> None:
    """U19: use renews the idle limit and not the absolute one; a pin stops only the former."""
    idle, absolute = model("idle", ttl_idle=2.0), model("absolute", ttl=5.0)
    pinned, both = model("pinned", 5, ttl_idle=2.0, pinned=True), model("both", 5, ttl=5.0, pinned=True)
    async with rig() as r:
        for each in (idle, absolute, pinned, both):
            await r.use(each)
        for _ in range(4):
            await anyio.sleep(1.0)
            await r.use(idle)
            await r.use(absolute)
        assert r.resident() == {each.key for each in (idle, absolute, pinned, both)}
        await anyio.sleep(1.5)
        assert r.resident() == {idle.key, pinned.key}
        await anyio.sleep(1.5)
        assert r.resident() == {pinned.key}
        reasons = {each.model: each.reason for each in r.events if isinstance(each, f.Evicted)}
        assert reasons == {"idle@1": "ttl_idle", "absolute@1": "ttl", "both@1": "ttl"}


@virtual
async def test_a_model_in_use_does_not_expire_until_it_is_given_back() -> None:
    """I3: the idle limit starts anew at the end of the use; the absolute one drains."""
    idle, absolute = model("idle", ttl_idle=1.0), model("absolute", ttl=1.0)
    async with rig() as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, idle, 5.0)
        tasks.start_soon(r.use, absolute, 5.0)
        await r.settle(4)
        assert r.resident() == {idle.key, absolute.key}
        assert r.cache.state_of(absolute.key) is State.DRAINING
        await r.settle(1.5)
        assert r.resident() == {idle.key}
        await r.settle(3)
        assert r.resident() == set()
        proven(r)


@virtual
async def test_an_unpinned_model_has_its_idle_limit_again() -> None:
    """The limit that a pin suspended is watched as soon as the pin is gone."""
    async with rig() as r:
        await r.ensure(model("a", ttl_idle=2.0), pin=True)
        await anyio.sleep(10)
        await r.device.ask(m.Pin(A.key, on=False))
        await anyio.sleep(5)
        assert r.resident() == set()


@virtual
async def test_an_unload_of_a_model_in_use_drains_or_conflicts() -> None:
    """U2: never under a running request; the operator chooses which."""
    async with rig() as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 2.0)
        await r.settle()
        with pytest.raises(Conflict) as caught:
            await r.device.ask(m.Unload(A.key, drain=False))
        assert caught.value.detail == {"leases": 1}
        assert r.cache.state_of(A.key) is State.RESIDENT
        await r.device.ask(m.Unload(A.key))
        assert r.cache.state_of(A.key) is State.DRAINING
        await r.settle(2)
        assert r.resident() == set()
        proven(r)


@virtual
async def test_the_last_of_load_and_unload_decides() -> None:
    """F50: back to back in both orders, while loading, while draining, and while unloading."""
    async with rig() as r:
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, lambda: r.ensure(A), results)
            await anyio.sleep(0.12)
            await r.device.ask(m.Unload(A.key))
        assert kinds(results) == ["NotReady"]
        await r.settle()
        assert r.resident() == set()
        await r.ensure(A)
        await r.device.ask(m.Unload(A.key))
        await r.ensure(A)
        assert r.resident() == {A.key}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, A, 1.0)
            await anyio.sleep(0.5)
            await r.device.ask(m.Unload(A.key))
            await r.ensure(A)
        await r.settle()
        assert r.resident() == {A.key}
        assert r.device.incarnation == 1
        proven(r)


@virtual
async def test_queued_requests_are_answered_before_an_unload_takes_effect() -> None:
    """R11: seven slow requests, an unload that drains, seven answers."""
    async with rig() as r:
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(answer, lambda: r.use(A, 1.0), results)
            await r.settle(0.5)
            await r.device.ask(m.Unload(A.key))
        assert len(granted(results)) == 7
        await r.settle()
        assert r.resident() == set()


@virtual
async def test_a_drain_answers_everybody_and_admits_nobody() -> None:
    """Waiting requests are served, prefetches given up, newcomers refused, and the drain ends with the last lease."""
    async with rig() as r:
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, lambda: r.use(A, 1.0), results)
            tasks.start_soon(answer, lambda: r.ensure(B, Trigger.PREFETCH), results)
            await anyio.sleep(0.01)
            tasks.start_soon(answer, lambda: r.device.ask(m.Drain()), results)
            await anyio.sleep(0.01)
            with pytest.raises(Draining):
                await r.use(C)
            with pytest.raises(Draining):
                await r.ensure(C)
        assert kinds(results) == ["Draining", "Grant", "int"]
        assert results[-1] == 0
        with pytest.raises(Draining):
            await r.use(A)
        assert await r.device.ask(m.Drain()) == 0
        await r.settle()
        proven(r)


# -- time that runs out --------------------------------------------------------------------------------------


@virtual
async def test_the_servers_patience_ends_without_ending_the_load() -> None:
    """R12, F56: 503 with a time to come back; the load goes on, and the next request is a hit."""
    async with rig(device_costs=Costs(3.0, 1e15)) as r:
        with pytest.raises(StillLoading) as caught:
            await r.use(A, patience=anyio.current_time() + 1)
        assert caught.value.retry_after == 1.0
        await r.settle(3)
        assert (await r.use(A)).result == "hit"
        assert r.device_place.loads == 1
        proven(r)


@virtual
async def test_the_callers_deadline_ends_its_wait_and_an_unwanted_load() -> None:
    """504: nobody else wants it, so its bytes come back."""
    async with rig(device_costs=Costs(3.0, 1e15, evict=0.0)) as r:
        with pytest.raises(DeadlineExceeded, match="while a@1 was loading"):
            await r.use(A, deadline=anyio.current_time() + 1)
        await r.settle()
        assert (r.device_place.used, r.cache.snapshot().loading) == (0, 0)
        proven(r)


@virtual
async def test_a_deadline_in_the_queue_says_what_was_waited_for() -> None:
    """The caller learns the obstacle."""
    async with rig(device=10) as r:
        await r.ensure(A, pin=True)
        with pytest.raises(DeadlineExceeded, match=r"waiting for room \(pinned\)"):
            await r.use(B, deadline=anyio.current_time() + 1)


@virtual
async def test_a_better_priority_is_served_first() -> None:
    """Among those who wait for room, 1 goes before 5, and 5 before none."""
    async with rig(device=10, settings={"fairness": 100.0}) as r:
        order: list[str] = []

        async def client(wanted: Model, priority: int) -> None:
            await r.use(wanted, priority=priority)
            order.append(wanted.name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, A, 1.0)
            await r.settle(0.5)
            for wanted, priority in ((B, 0), (C, 5), (D, 1)):
                tasks.start_soon(client, wanted, priority)
                await anyio.sleep(0.01)
        assert order == ["d", "c", "b"]


# -- ahead of demand --------------------------------------------------------------------------------------------


def settled(r: Rig) -> list[tuple[str, str]]:
    """What became of each prefetch, and where."""
    return [(each.device, each.result) for each in r.events if isinstance(each, f.PrefetchSettled)]


@virtual
async def test_a_prefetch_in_time_makes_the_first_request_a_hit() -> None:
    """It is settled once, as used, with its lead; the tier below does not count it again."""
    async with rig() as r:
        await r.ensure(A, Trigger.PREFETCH)
        await anyio.sleep(2)
        assert (await r.use(A)).result == "prefetch_hit"
        assert (await r.use(A)).result == "hit"
        assert settled(r) == [("cpu:0", "used")]
        (event,) = [each for each in r.events if isinstance(each, f.PrefetchSettled)]
        assert event.lead == pytest.approx(2.0)


@virtual
async def test_a_prefetch_that_demand_overtakes_is_late_and_becomes_a_demand() -> None:
    """F54: the load is upgraded on both tiers; it is not begun a second time."""
    async with rig() as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.ensure, A, Trigger.PREFETCH)
        await anyio.sleep(0.02)
        assert (await r.use(A)).result == "miss"
        assert settled(r) == [("cpu:0", "late")]
        assert [each.device for each in r.events if isinstance(each, f.LoadUpgraded)] == ["cpu:0", "host"]
        assert r.device_place.loads == 1


@virtual
async def test_a_prefetch_that_nobody_used_is_wasted() -> None:
    """The budget for guesses is kept by counting them."""
    async with rig(device=10) as r:
        await r.ensure(A, Trigger.PREFETCH)
        await r.use(B)
        assert settled(r) == [("cpu:0", "wasted")]


@virtual
async def test_a_prefetch_that_was_taken_back_is_cancelled_down_to_the_disk() -> None:
    """No tier goes on reading for a load that nobody wants any more."""
    async with rig() as r:
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, lambda: r.ensure(A, Trigger.PREFETCH), results)
            await anyio.sleep(0.02)
            await r.device.ask(m.Unload(A.key))
        await r.settle()
        assert kinds(results) == ["NotReady"]
        assert settled(r) == [("cpu:0", "cancelled")]
        assert (r.host_place.used, r.host_cache.snapshot().wishes) == (0, ())
        proven(r)


@virtual
async def test_a_demand_goes_before_prefetches_that_wait_or_run() -> None:
    """F54, I7: one load at a time; the prefetch under way makes way, those in the queue stay behind."""
    async with rig(device=100, settings={"parallel": 1}) as r:

        async def foresee(each: Model) -> None:
            with suppress(NotReady):
                await r.ensure(each, Trigger.PREFETCH)

        async with anyio.create_task_group() as tasks:
            for each in (A, B, C):
                tasks.start_soon(foresee, each)
            await anyio.sleep(0.02)
            tasks.start_soon(r.use, D)
        order = [each.model for each in r.events if isinstance(each, f.LoadFinished) and each.device == "cpu:0"]
        assert order == ["d@1", "b@1", "c@1"]
        assert r.story(f.LoadCancelled, key="a@1")


@virtual
async def test_a_prefetch_never_drains_what_is_in_use_and_gives_up_in_time() -> None:
    """I7: it waits for idle room, and ends with its window."""
    async with rig(device=10, settings={"fairness": 0.1}) as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 5.0)
        await r.settle()
        with pytest.raises(DeadlineExceeded, match="no room for b@1 in time"):
            await r.ensure(B, Trigger.PREFETCH, expires=anyio.current_time() + 2)
        assert settled(r) == [("cpu:0", "cancelled")]
        assert r.cache.state_of(A.key) is State.RESIDENT


@virtual
async def test_a_prefetch_starts_as_soon_as_the_lease_in_its_way_ends() -> None:
    """Nothing else has to happen for it: no other request, no timer."""
    async with rig(device=10) as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.use, A, 5.0)
        await r.settle()
        tasks.start_soon(r.ensure, B, Trigger.PREFETCH)
        await r.settle(6)
        assert r.resident() == {B.key}


@virtual
async def test_a_prefetch_starts_as_soon_as_the_newcomer_in_its_way_is_old_enough() -> None:
    """The end of a minimum residency wakes whoever waits for it."""
    async with rig(device=10) as r, anyio.create_task_group() as tasks:
        await r.use(model("young", min_residency=3.0))
        tasks.start_soon(r.ensure, B, Trigger.PREFETCH)
        await r.settle(4)
        assert r.resident() == {B.key}


@virtual
async def test_a_warm_load_takes_free_room_or_none() -> None:
    """A warm list never evicts what it loaded a moment before."""
    async with rig(device=20) as r:
        await r.ensure(A, Trigger.WARM)
        await r.ensure(B, Trigger.WARM)
        with pytest.raises(NoEvictableSpace, match="no room for c@1"):
            await r.ensure(C, Trigger.WARM)
        assert r.resident() == {A.key, B.key}
        assert (await r.use(A)).result == "hit"


# -- while others work --------------------------------------------------------------------------------------------


@virtual
async def test_a_load_never_disturbs_hits() -> None:
    """F53, R7, T4, U5: while B loads for thirty seconds every hit on A is given in the same instant, without a turn."""
    async with rig(device_costs=Costs(30.0, 1e15)) as r:
        await r.use(A)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.use, B)
            await r.settle()
            for _ in range(1000):
                depth = r.device.mailbox.depth
                lease = r.lease(A)
                entering = lease.__aenter__()
                with pytest.raises(StopIteration) as granted_at_once:
                    entering.send(None)
                assert granted_at_once.value.value == m.Grant("hit", Tier.DEVICE)
                assert r.device.mailbox.depth == depth
                lease.release()
                await anyio.sleep(0.01)
            assert r.cache.state_of(B.key) is State.LOADING
        proven(r)


@virtual
async def test_memory_pressure_evicts_idle_copies_down_to_the_low_mark_and_no_further() -> None:
    """U25, F63: hysteresis; leased copies stay; the change is stated once each way."""
    async with rig(host=100, keeps_host=False, host_settings={"high": 0.85, "low": 0.50}) as r:
        for each in (A, B, C, D):
            await r.use(each)
        r.host.tell(m.Sampled(MemorySample(100, 20)))
        await r.settle()
        assert len(r.host_place.held) == 4
        r.host.tell(m.Sampled(MemorySample(100, 10)))
        await r.settle()
        assert len(r.host_place.held) == 0
        r.host.tell(m.Sampled(MemorySample(100, 60)))
        await r.settle()
        changes = [each.high for each in r.events if isinstance(each, f.PressureChanged)]
        assert changes == [True, False]
        assert {each.reason for each in r.events if isinstance(each, f.Evicted) and each.device == "host"} == {
            "pressure"
        }
    async with rig(host=100, host_settings={"high": 0.85, "low": 0.50}) as r:
        await r.use(A)
        r.host.tell(m.Sampled(MemorySample(100, 1)))
        await r.settle()
        assert set(r.host_place.held) == {A.key}, "the device still maps it"


# -- crashes and lost places ------------------------------------------------------------------------------------------


@virtual
async def test_a_dead_worker_fails_its_waiters_at_once_and_its_residents_come_back() -> None:
    """F57, R8: bytes are free the moment it died, callers hear why, the models that were there are loaded again."""
    async with rig(device_costs=Costs(1.0, 1e15)) as r:
        await r.use(A)
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, lambda: r.use(B), results)
            await r.settle(0.5)
            r.device_place.lose()
            r.device.tell(m.Lost("killed by SIGKILL"))
            await anyio.sleep(0.001)
            assert kinds(results) == ["WorkerDied"]
            assert (r.cache.ledger.used, r.cache.up) == (0, False)
            await anyio.sleep(0.5)
            r.device.tell(m.Restored())
        await r.settle(3)
        assert r.resident() == {A.key}
        assert (await r.use(A)).result == "hit"
        proven(r)


@virtual
async def test_a_request_waits_for_a_place_that_is_coming_back() -> None:
    """A restart of the worker is a pause, not a failure, for whoever has the patience."""
    async with rig() as r, anyio.create_task_group() as tasks:
        r.device_place.lose()
        r.device.tell(m.Lost("killed"))
        results: list[object] = []
        tasks.start_soon(answer, lambda: r.use(A), results)
        await r.settle()
        assert results == []
        r.device.tell(m.Restored())
        await r.settle()
        assert granted(results) == ["miss"]


@virtual
async def test_a_crashed_cache_adopts_what_it_finds_and_leaves_it_alone_until_idle() -> None:
    """F65: the running request ends in peace; only then is its model evictable again."""
    async with rig(device=10) as r:
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, lambda: r.use(A, 3.0), results)
            await r.settle()
            r.device.tell("not a command")  # type: ignore[arg-type]
            await anyio.sleep(0.1)
            assert (r.device.incarnation, r.cache.snapshot().residents[0].adopted) == (2, True)
            tasks.start_soon(answer, lambda: r.use(B), results)
            await r.settle()
            assert r.resident() == {A.key}
        assert len(granted(results)) == 2
        assert r.resident() == {B.key}
        assert r.count(f.Adopted) == 1


@virtual
async def test_waiters_of_a_crashed_cache_are_told() -> None:
    """F65: with an error, never with silence; and the load that they waited for is undone."""
    async with rig() as r:
        results: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer, lambda: r.use(A), results)
            await anyio.sleep(0.05)
            r.device.tell("not a command")  # type: ignore[arg-type]
        assert kinds(results) == ["ActorStopped"]
        await r.settle()
        assert (r.device_place.used, r.host_cache.ledger.leases) == (0, 0)
        assert (await r.use(A)).result == "miss"


@virtual
async def test_a_request_right_after_a_crash_finds_the_model_that_is_still_there() -> None:
    """F65: asked for before the inventory is in, and not loaded a second time over itself."""
    async with rig() as r:
        await r.use(A)
        r.device.tell("not a command")  # type: ignore[arg-type]
        ticket = m.new_ticket()
        await r.device.ask(m.Acquire(A, ticket))
        r.device.tell(m.Release(ticket))
        assert r.device_place.loads == 1


@virtual
async def test_other_weights_asked_for_right_after_a_crash_are_not_answered_with_the_old_ones() -> None:
    """I5: what a place is found to hold under the same key may be older than what is wanted."""
    async with rig() as r:
        await r.use(A)
        r.device.tell("not a command")  # type: ignore[arg-type]
        await r.use(model("a", fingerprint="newer"))
        assert [row.fingerprint for row in r.cache.snapshot().residents] == ["newer"]


@virtual
async def test_an_adopted_model_expires_like_any_other() -> None:
    """F65, U19: a crash does not make a resident immortal."""
    async with rig() as r:
        await r.use(model("a", ttl_idle=2.0))
        r.device.tell("not a command")  # type: ignore[arg-type]
        await anyio.sleep(10)
        assert r.resident() == set()
