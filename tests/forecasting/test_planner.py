"""The planner against brute force, and what each of its steps promises."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.planner import GRID, Job, Schedule, on_time, schedule

NOW = 1_000.0
EVERYTHING = 10**12


def job(name: str, *, seconds: float = 10.0, due: float = 100.0, value: float = 1.0, **more: object) -> Job:
    """A load due so many seconds from now, of one byte on one device, kept for an hour."""
    fields: dict[str, object] = {"device": "cuda:0", "bytes": 1, "release": NOW + due + 3_600.0, **more}
    return Job(name, seconds=seconds, ready_by=NOW + due, value=value, **fields)  # type: ignore[arg-type]


def planned(*jobs: Job, room: int = EVERYTHING, **options: object) -> Schedule:
    """Plan on one device."""
    return schedule(jobs, now=NOW, capacity={"cuda:0": room, "cuda:1": room}, **options)  # type: ignore[arg-type]


def best_by_brute_force(lengths: list[int], deadlines: list[int], values: list[int]) -> int:
    """Try every subset, earliest deadline first."""
    best = 0
    for mask in range(1 << len(lengths)):
        chosen = sorted((i for i in range(len(lengths)) if mask >> i & 1), key=lambda i: deadlines[i])
        clock = 0
        for index in chosen:
            clock += lengths[index]
            if clock > deadlines[index]:
                break
        else:
            best = max(best, sum(values[index] for index in chosen))
    return best


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8))
@settings(max_examples=10_000, deadline=None)
def test_the_choice_equals_brute_force(rows: list[tuple[int, int, int]]) -> None:
    """Goal 8: the programme finds the greatest value that one channel can finish in time."""
    lengths, deadlines, values = (list(column) for column in zip(*rows, strict=True))
    taken = on_time(lengths, deadlines, values)
    chosen = sorted((i for i, take in enumerate(taken) if take), key=lambda i: deadlines[i])
    clock = 0
    for index in chosen:
        clock += lengths[index]
        assert clock <= deadlines[index]
    assert sum(values[i] for i in chosen) == best_by_brute_force(lengths, deadlines, values)


@given(
    st.lists(
        st.builds(
            lambda n, p, d, v, b, k, disk, need: job(
                f"m{n}",
                seconds=p,
                due=d,
                value=v,
                bytes=b,
                release=NOW + d + k,
                disk_seconds=disk * p,
                require=need,
                device=f"cuda:{n % 2}",
                variance=p / 10,
            ),
            st.integers(0, 99),
            st.floats(0.1, 60),
            st.floats(0, 600),
            st.floats(0, 100),
            st.integers(1, 50),
            st.floats(0, 600),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.integers(0, 120),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_planned_can_be_done(jobs: list[Job], room: int, eager: bool) -> None:  # noqa: FBT001 - generated
    """Nothing is lost or doubled, nothing is late or in the past, no channel does two loads, no memory overflows."""
    plan = planned(*jobs, room=room, eager=eager)
    outcome = [each.job for each in plan.placed] + [each.job for each in plan.dropped]
    assert sorted(map(id, outcome)) == sorted(map(id, jobs))
    for device in ("cuda:0", "cuda:1"):
        here = sorted((p for p in plan.placed if p.job.device == device), key=lambda p: p.start)
        for placed in here:
            assert placed.start >= NOW - 1e-6
            assert placed.ready_by <= placed.job.ready_by + 1e-6
            assert placed.ready_by - placed.start == pytest.approx(placed.job.seconds)
        for first, second in pairwise(here):
            assert second.start >= first.ready_by - 1e-6
        for instant in [p.job.ready_by - p.job.seconds for p in here]:
            held = [p.job for p in here if p.job.ready_by - p.job.seconds <= instant < p.job.release]
            assert sum(each.bytes for each in held) <= room


def test_loads_are_placed_as_late_as_they_may_be() -> None:
    """Backward placement: what is needed at ten does not sit in memory from nine on."""
    plan = planned(job("a", seconds=10, due=100), job("b", seconds=5, due=300))
    assert [(p.job.key, p.start - NOW, p.ready_by - NOW) for p in plan.placed] == [("a", 90, 100), ("b", 295, 300)]


def test_loads_for_one_instant_queue_up_before_it() -> None:
    """A stampede at the full hour becomes a row of loads that ends there."""
    plan = planned(*(job(name, seconds=10, due=100) for name in "abc"))
    assert [(p.start - NOW, p.ready_by - NOW) for p in plan.placed] == [(70, 80), (80, 90), (90, 100)]


def test_what_varies_starts_earlier() -> None:
    """Slack: z times the standard deviation of the whole busy block."""
    certain, varying = planned(job("a")), planned(job("a", variance=25.0))
    assert certain.placed[0].start - varying.placed[0].start == pytest.approx(1.64 * 5)


def test_slack_never_reaches_into_the_past_or_the_block_before() -> None:
    """However uncertain: not before now, and not while another load runs."""
    plan = planned(job("a", seconds=10, due=12, variance=400.0), job("b", seconds=10, due=25, variance=400.0))
    assert [p.start - NOW for p in plan.placed] == [0, 10]


def test_free_memory_pulls_everything_forward() -> None:
    """Work-conserving where holding costs nothing."""
    plan = planned(job("a", due=100), job("b", due=300), eager=True)
    assert [p.start - NOW for p in plan.placed] == [0, 10]


@pytest.mark.parametrize("ahead", [0.25, 0.9, 1.7, 3.0])
def test_short_loads_that_are_due_in_a_moment_are_planned(ahead: float) -> None:
    """A grid of a second would round loads of milliseconds up and their deadline down, and call the plan infeasible."""
    plan = planned(*(job(name, seconds=0.04, due=ahead) for name in "abc"))
    assert not plan.dropped
    assert [p.ready_by - NOW for p in plan.placed] == pytest.approx([ahead - 0.08, ahead - 0.04, ahead])


def test_what_cannot_be_ready_any_more_is_left_to_demand() -> None:
    """A load that takes longer than the time left is not started in vain."""
    plan = planned(job("late", seconds=50, due=20), job("fine"))
    assert [(d.job.key, d.reason) for d in plan.dropped] == [("late", "late")]
    assert [p.job.key for p in plan.placed] == ["fine"]


def test_a_channel_that_is_too_short_drops_the_least_value() -> None:
    """Two loads fit before the deadline, the third and cheapest is announced, with what would help."""
    plan = planned(*(job(name, seconds=10, due=20, value=value) for name, value in (("a", 3), ("b", 1), ("c", 2))))
    assert sorted(p.job.key for p in plan.placed) == ["a", "c"]
    (dropped,) = plan.dropped
    assert (dropped.job.key, dropped.reason) == ("b", "channel")
    assert "earlier" in dropped.remedy


def test_memory_that_is_too_small_drops_the_least_value_per_byte() -> None:
    """The sweep meets the overflow and keeps what is worth most there."""
    big = job("big", value=5, bytes=80)
    small = [job(name, value=1, bytes=10) for name in ("s", "t")]
    plan = planned(big, *small, room=90)
    assert {p.job.key for p in plan.placed} == {"s", "t"}
    assert [(d.job.key, d.reason) for d in plan.dropped] == [("big", "memory")]
    assert "10 more bytes" in plan.dropped[0].remedy


def test_memory_is_used_again_after_a_release() -> None:
    """What leaves at an instant makes room for what begins at it."""
    first = job("a", seconds=10, due=10, bytes=60, release=NOW + 100)
    second = job("b", seconds=10, due=110, bytes=60)
    assert not planned(first, second, room=60).dropped


def test_what_is_required_is_dropped_last() -> None:
    """`require` outweighs value, in memory and on the channel; if it still fails it is called infeasible."""
    required = job("r", seconds=10, due=10, value=0.1, require=True)
    rich = job("x", seconds=10, due=10, value=100)
    assert [p.job.key for p in planned(required, rich).placed] == ["r"]
    assert [p.job.key for p in planned(required, rich, room=1).placed] == ["r"]
    twice = planned(required, job("q", seconds=10, due=10, require=True))
    assert [d.job.key for d in twice.infeasible] == ["r"]


def test_the_disk_serves_one_device_at_a_time() -> None:
    """Two devices can't both read ten seconds from one disk within fifteen."""
    one = job("a", seconds=10, due=15, disk_seconds=10, value=2)
    other = job("b", seconds=10, due=15, disk_seconds=10, value=1, device="cuda:1")
    plan = planned(one, other)
    assert [(d.job.key, d.reason) for d in plan.dropped] == [("b", "disk")]
    assert not planned(one, job("b", seconds=10, due=15, device="cuda:1")).dropped


def test_channels_that_are_taken_count_from_when_they_are_free() -> None:
    """A load under way delays the plan, and so does a disk that reads."""
    assert planned(job("a", seconds=10, due=20), busy_until={"cuda:0": NOW + 15}).dropped[0].reason == "channel"
    assert planned(job("a", due=20, disk_seconds=5), disk_busy_until=NOW + 18).dropped[0].reason == "disk"


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": -1.0},
        {"value": float("nan")},
        {"due": float("inf")},
        {"bytes": -1},
        {"variance": -1.0},
        {"disk_seconds": -0.1},
        {"release": NOW},
    ],
)
def test_a_job_with_impossible_numbers_is_refused(wrong: dict[str, object]) -> None:
    """An absurd forecast stops here, by name."""
    with pytest.raises(ValueError, match="odd"):
        job("odd", **wrong)  # type: ignore[arg-type]


def test_no_jobs_no_plan() -> None:
    """Nothing to do is a plan too."""
    assert planned() == Schedule((), ())
    assert on_time([], [], []) == []
    assert on_time([3.0], [-1.0], [1.0]) == [False]


def test_a_far_horizon_gets_a_coarser_grid_and_stays_sound() -> None:
    """Weeks ahead cost no more memory than a day, and deadlines are still kept."""
    lengths, deadlines = [90_000.0, 90_000.0, 90_000.0], [100_000.0, 200_000.0, 1e7]
    taken = on_time(lengths, deadlines, [1.0, 1.0, 1.0])
    assert sum(taken) >= 2
    assert GRID == 1.0
