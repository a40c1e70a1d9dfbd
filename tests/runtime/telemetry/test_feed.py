"""The feed's ring, its readers, and what replaying events says of residency (I10, R28)."""

from __future__ import annotations

import anyio
import orjson
import pytest

from actors import events as e
from actors.residency.model import ModelKey, Tier
from runtime.telemetry.fanout import EVENT_TYPES, Fanout
from runtime.telemetry.feed import PER_REQUEST, Feed
from runtime.telemetry.replay import replay
from tests.runtime.telemetry.samples import (
    DEVICE,
    KEY,
    OTHER_KEY,
    arrived,
    deliver,
    epoch,
    evicted,
    eviction_started,
    finished,
    granted,
    load_cancelled,
    load_failed,
    load_finished,
    load_started,
    one_of_each,
    released,
)


def test_every_event_becomes_a_row_that_is_json():
    """Each kind has a row with number, kind, calendar time and its fields, whatever they hold."""
    feed = Feed(epoch(), everything=True)
    deliver(feed.wants(), *one_of_each())
    rows = orjson.loads(orjson.dumps(feed.since(0).rows))
    assert [row["seq"] for row in rows] == list(range(1, len(EVENT_TYPES) + 1))
    assert [row["kind"] for row in rows] == [type(event).__name__ for event in one_of_each()]
    loaded = next(row for row in rows if row["kind"] == "LoadFinished")
    assert loaded["time"] == "2027-01-15T08:00:01.000000Z"
    assert (loaded["tier"], loaded["source"], loaded["steps"][0]) == ("device", "disk", ["read", 0.6])


def test_plain_hits_stay_out_and_what_follows_a_prefetch_stays_in():
    """The ring holds hours of loads and evictions instead of a second of hits."""
    feed = Feed()
    deliver(
        feed.wants(),
        arrived("r1"),
        granted("r1"),
        released(),
        finished("r1"),
        granted("r2", result="prefetch_hit"),
        granted("r3", result="miss", found=Tier.DISK),
    )
    assert [row["request"] for row in feed.since(0).rows] == ["r2", "r3"]
    assert set(PER_REQUEST) <= set(EVENT_TYPES)


def test_a_slow_reader_is_told_what_it_missed_and_costs_nothing():
    """R28: the ring stays bounded with 10,000 events unread, numbers have no gap, and the loss is named."""
    feed = Feed(limit=100)
    for index in range(10_000):
        deliver(feed.wants(), load_started(f"L{index}"))
    late = feed.since(0, limit=10)
    assert (late.missed, late.rows[0]["seq"], late.last) == (9_900, 9_901, 9_910)
    on = feed.since(late.last)
    assert (on.missed, on.rows[0]["seq"], on.rows[-1]["seq"], on.last) == (0, 9_911, 10_000, 10_000)
    assert feed.since(10_000).rows == ()


@pytest.mark.parametrize("seq", [-1, 7, 10**18])
def test_a_number_from_another_life_starts_from_the_beginning(seq: int):
    """A Last-Event-ID of a server that restarted, or nonsense, gets what there is."""
    feed = Feed()
    deliver(feed.wants(), load_started("L1"), load_finished("L1"))
    assert [row["seq"] for row in feed.since(seq).rows] == [1, 2]


def test_one_models_story_reads_in_order():
    """By key or by name; other models stay out, also of a filtered slice, whose `last` still moves on."""
    feed = Feed(everything=True)
    deliver(
        feed.wants(),
        load_started("L1"),
        load_started("L2", model=OTHER_KEY),
        load_finished("L1"),
        granted("r1"),
        load_finished("L2", model=OTHER_KEY),
    )
    by_name, by_key = feed.since(0, model="resnet"), feed.since(0, model=KEY)
    assert by_name == by_key
    assert [row["kind"] for row in by_name.rows] == ["LoadStarted", "LoadFinished", "LeaseGranted"]
    slice_ = feed.since(0, model="bert")
    assert ([row["seq"] for row in slice_.rows], slice_.last) == ([2, 5], 5)


def test_causes_in_rows_carry_no_secret():
    """S10: what a browser shows has no user-info, query or token."""
    feed = Feed()
    deliver(feed.wants(), load_failed("L1", cause="GET https://u:hunter2@host/x?sig=hunter2 token=hunter2"))
    assert b"hunter2" not in orjson.dumps(feed.since(0).rows)


async def test_readers_wake_on_news_and_can_leave():
    """All who wait wake with the next event; a cancelled one disturbs nobody."""
    feed = Feed()
    fanout = Fanout()
    fanout.subscribe("feed", feed.wants())
    woken: list[int] = []

    async def read(number: int) -> None:
        await feed.after(0)
        woken.append(number)

    async with anyio.create_task_group() as leaving, anyio.create_task_group() as staying:
        staying.start_soon(read, 1)
        staying.start_soon(read, 2)
        leaving.start_soon(read, 3)
        await anyio.lowlevel.checkpoint()
        leaving.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            fanout(load_started("L1"))
            await anyio.lowlevel.checkpoint()
    assert 3 not in woken


async def test_a_reader_behind_the_news_does_not_wait():
    """There is something newer already."""
    feed = Feed()
    deliver(feed.wants(), load_started("L1"))
    with anyio.fail_after(1):
        await feed.after(0)


# -- replay ------------------------------------------------------------------------------------------


def test_replaying_a_log_gives_the_resident_set():
    """I10: loads add, evictions take away, what is under way is neither."""
    found = replay(
        (
            load_started("L1"),
            load_finished("L1"),
            granted("r1", 101.0, ticket=1),
            granted("r2", 101.0, ticket=2),
            released(101.5, ticket=1),
            load_started("L2", 102.0, model=OTHER_KEY),
            load_finished("L2", 102.5, model=OTHER_KEY),
            eviction_started("E1", 103.0, model=OTHER_KEY),
            evicted("E1", 103.5, model=OTHER_KEY),
            load_started("L3", 104.0, model=OTHER_KEY),
        )
    )
    assert found.faults == ()
    assert found.resident == {(DEVICE, Tier.DEVICE): {KEY: 900}}
    assert found.leases == {KEY: 1}
    assert found.loading == {"L3": (DEVICE, Tier.DEVICE, OTHER_KEY)}
    assert found.evicting == {}


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ((load_finished("L1"),), "was not under way"),
        ((load_started("L1"), load_started("L2")), "a second time at once"),
        ((load_started("L1"), load_started("L1", model=OTHER_KEY)), "load id L1 twice"),
        ((eviction_started("E1"),), "is not resident"),
        ((evicted("E1"),), "was not under way"),
        ((granted("r1"),), "leases resnet@1, which is not resident"),
        ((released(),), "ticket 1, which is not out"),
        ((load_started("L1"), load_finished("L1"), granted("r1", 101), granted("r2", 101)), "grants ticket 1 twice"),
        ((load_started("L1"), load_finished("L1"), granted("r1", 101), eviction_started("E1")), "is leased"),
        ((load_started("L1", 100.0), load_cancelled("L1", 99.0)), "earlier than the event before it"),
    ],
)
def test_replay_names_what_does_not_add_up(events: tuple[e.LoadStarted, ...], fault: str):
    """A hole or a contradiction in the log is a finding, not a silent repair."""
    (found,) = replay(events).faults
    assert fault in found


def test_a_lost_worker_takes_everything_there_along():
    """Residents, leases, evictions and loads of that process are gone; the host tier keeps its own."""
    found = replay(
        (
            load_started("H1", tier=Tier.HOST, device="host"),
            load_finished("H1", tier=Tier.HOST, device="host"),
            load_started("L1", 101.0),
            load_finished("L1", 102.0),
            granted("r1", 102.0),
            load_started("L2", 102.0, model=OTHER_KEY),
            e.WorkerLost(103.0, DEVICE, 7, "killed by signal 9"),
            e.LoadFailed(103.1, "L2", DEVICE, Tier.DEVICE, OTHER_KEY, "demand", "worker_died", "gone", 1.0, 0.0),
            load_started("L3", 104.0),
        )
    )
    assert found.faults == ()
    assert found.resident == {("host", Tier.HOST): {KEY: 900}}
    assert found.leases == {}
    assert list(found.loading) == ["L3"]


def test_a_load_that_everybody_gave_up_ends_with_its_removal():
    """It is taken away without having been resident, and a second try under one id is one load."""
    found = replay((load_started("L1"), load_started("L1", 100.5), evicted("E1", reason="cancelled")))
    assert (found.faults, found.loading, found.resident) == ((), {}, {})


def test_the_feeds_own_ring_can_be_replayed_without_leases():
    """Plain hits are not in it, so leases are left out of account."""
    feed = Feed()
    deliver(
        feed.wants(),
        load_started("L1"),
        load_finished("L1"),
        granted("r1", 101.0, result="miss", found=Tier.DISK, ticket=1),
        released(101.2, ticket=1),
        granted("r2", 101.3, ticket=2),
        released(101.4, ticket=2),
        eviction_started("E1"),
        evicted("E1"),
        load_started("L2", 103.0, model=ModelKey("third@1")),
    )
    found = replay(feed.events(), whole=False)
    assert found.faults == ()
    assert (found.resident, found.leases) == ({}, {})
