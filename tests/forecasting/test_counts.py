"""Counting requests: minutes, coarser rows, week slots, clocks that misbehave, shifts, masks."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.calendar import slot_of
from forecasting.counts import HALF_LIVES, ClockJumped, Counts, Fact, Full, LevelShifted, OutageSeen
from forecasting.tiers import decode, encode, pack
from forecasting.week import Week

START = datetime(2026, 3, 2, tzinfo=UTC).timestamp()  # a Monday
DAY = 86_400
BERLIN = ZoneInfo("Europe/Berlin")


def near(value: float) -> Any:
    """Equal but for a few minutes of decay."""
    return pytest.approx(value, rel=0.01)


class Drive:
    """Counts and the two clocks that drive them, a minute a step unless told otherwise."""

    def __init__(self, start: float = START, **options: object) -> None:
        self.wall, self.monotonic = start, 50.0
        self.counts = Counts(self.wall, self.monotonic, **options)  # type: ignore[arg-type]
        self.facts: list[Fact] = []

    def roll(self, seconds: float = 60.0, jump: float = 0.0) -> tuple[Fact, ...]:
        """Let time pass, and the wall clock move by itself."""
        self.wall += seconds + jump
        self.monotonic += seconds
        facts = self.counts.roll(self.wall, self.monotonic)
        self.facts.extend(facts)
        return facts

    def minute(self, **hits: int) -> None:
        """So many requests each, then a roll."""
        for key, number in hits.items():
            index = self.counts.index(key)
            self.counts._hits[index] += number
        self.roll()

    def quarter(self, **hits: int) -> None:
        """Fifteen minutes; the requests fall into the fifth of them."""
        for step in range(15):
            self.minute(**(hits if step == 4 else {}))

    def slot(self, key: str, slot: int) -> tuple[float, float]:
        """Sum and exposure of one model's slot."""
        snapshot = self.counts.snapshot()
        sums, exposure = snapshot.sums()
        place = snapshot.keys.index(key)
        return float(sums[place, slot]), float(exposure[place, slot])


# -- minutes -----------------------------------------------------------------------------------------


def test_requests_are_counted_in_the_minute_they_came_in():
    """Exact counts per minute and model; the first minute was seen in part and is unknown."""
    drive = Drive(START + 20)
    drive.counts.index("a@1")
    drive.minute()
    for number in (3, 0, 70_000, 300):
        drive.minute(**{"a@1": number, "b@1": 1})
    recent = drive.counts.recent(10)
    assert drive.counts.keys == ("a@1", "b@1")
    assert recent.counts[0].tolist() == [0, 3, 0, 70_000, 300]
    assert recent.known[0].tolist() == [False, True, True, True, True]
    assert recent.known[1].tolist() == [False, True, True, True, True]
    assert recent.start == START


def test_a_hit_adds_one_and_is_seen_before_the_roll():
    """`hit` is one increment; rates and last use see it at once."""
    drive = Drive()
    index = drive.counts.index("a@1")
    for _ in range(3):
        drive.counts.hit(index)
    rates = drive.counts.rates(drive.monotonic)
    assert rates[0] == pytest.approx(3 * math.log(2) / np.array(HALF_LIVES))
    assert drive.counts.last_seen(drive.wall + 5).tolist() == [drive.wall + 5]


def test_decayed_counters_forget_by_half_lives_whatever_the_wall_clock_does():
    """Policy 6.1: n halves in each half-life of monotonic time; a jump of the wall clock changes nothing."""
    drive = Drive()
    drive.minute(**{"a@1": 1000})
    before = drive.counts.rates(drive.monotonic)[0]
    drive.roll(600.0, jump=7200.0)
    after = drive.counts.rates(drive.monotonic)[0]
    assert after == pytest.approx(before * 2 ** (-600 / np.array(HALF_LIVES)))


def test_the_request_path_takes_any_order_of_adding_and_forgetting():
    """A forgotten index is reused with nothing left of its former owner."""
    drive = Drive()
    drive.quarter(**{"a@1": 9, "b@1": 5})
    drive.counts.forget("a@1")
    drive.counts.forget("never seen")
    assert drive.counts.keys == ("b@1",)
    assert drive.counts.index("c@1") == 0
    drive.minute(**{"c@1": 2})
    assert drive.counts.keys == ("c@1", "b@1")
    assert drive.slot("c@1", 0) == (0.0, 0.0)
    recent = drive.counts.recent(30)
    assert recent.counts.sum(1).tolist() == [2.0, 5.0]
    assert recent.known.sum(1).tolist() == [1, 12]  # from the minute in which each was first asked for
    assert drive.counts.rates(drive.monotonic)[0, 0] < drive.counts.rates(drive.monotonic)[1, 0]


def test_no_more_models_than_the_limit_are_counted():
    """A flood of names ends in Full, and forgetting makes room."""
    counts = Counts(START, 0.0, limit=2)
    counts.index("a")
    assert counts.index("b") == counts.index("b") == 1
    with pytest.raises(Full, match="2 models"):
        counts.index("c")
    counts.forget("a")
    assert counts.index("c") == 0
    with pytest.raises(ValueError, match="limit"):
        Counts(START, 0.0, limit=0)


def test_a_late_roll_spreads_what_it_cannot_tell_apart_and_an_absent_one_is_an_outage():
    """Three minutes late: shared evenly, all known. Twenty: unknown, and a fact says so."""
    drive = Drive()
    drive.minute()
    index = drive.counts.index("a@1")
    drive.counts._hits[index] += 7
    assert drive.roll(180.0) == ()
    assert drive.counts.recent(3).counts[0].tolist() == [3, 2, 2]
    drive.counts._hits[index] += 9
    (fact,) = drive.roll(1200.0)
    assert isinstance(fact, OutageSeen)
    assert fact.end - fact.start == 19 * 60
    assert not drive.counts.recent(20).known.any()


def test_rolls_within_a_minute_change_nothing_but_rates():
    """A caller may roll as often as it likes."""
    drive = Drive()
    for _ in range(6):
        drive.counts.hit(drive.counts.index("a@1"))
        drive.roll(20.0)
    assert drive.counts.recent(5).counts[0].tolist() == [0.0, 3.0]


# -- coarser rows ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**26), min_size=1, max_size=50))
def test_one_byte_holds_a_count_to_three_and_a_half_percent(counts: list[int]):
    """Exact to 32, then within 3.4 %."""
    found = decode(encode(np.array(counts, np.int64)))
    for count, value in zip(counts, found.tolist(), strict=True):
        assert value == count if count <= 32 else abs(value - count) <= 0.034 * count + 0.5


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=60), st.booleans())
def test_a_minute_is_exact_however_hot(counts: list[int], known: bool):  # noqa: FBT001 - drawn
    """Packing loses nothing, for none, few or many hot models, and later models read as zero."""
    row = pack(np.array(counts, np.int64), known=known)
    assert row.counts(len(counts) + 2).tolist() == [*counts, 0, 0]
    assert row.counts(1).tolist() == counts[:1]


def test_the_past_is_kept_for_a_day_eight_days_and_28_days():
    """Each grain reaches as far as promised, and no farther."""
    drive = Drive()
    counts = drive.counts
    counts.index("a@1")
    minutes = 31 * 1440
    row = pack(np.array([2]), known=True)
    counts.tiers.end = int(START) // 60
    for _ in range(minutes):
        counts.tiers.push(row, np.array([2]))
    snapshot = counts.snapshot()
    assert snapshot.recent(10_000).counts.shape == (1, 1440)
    five, quarter = snapshot.history(300), snapshot.history(900)
    assert 8 * 288 <= five.counts.shape[1] <= 8 * 288 + 3
    assert 28 * 96 + 4 <= quarter.counts.shape[1] <= 28 * 96 + 12
    assert set(five.counts.ravel()) == {10.0}
    assert set(quarter.counts.ravel()) == {30.0}
    assert quarter.start + quarter.counts.shape[1] * 900 == START + minutes * 60
    with pytest.raises(ValueError, match="bucket"):
        snapshot.history(60)


@given(st.integers(0, 14), st.integers(1, 40), st.integers(0, 30), st.integers(1, 40))
@settings(deadline=None)
def test_rows_of_every_grain_agree_wherever_counting_starts_and_stops(offset: int, first: int, gap: int, more: int):
    """Minutes, fives and quarters tell the same story: same sums where all is known, unknown in the gap."""
    drive = Drive(START + 60 * offset)
    drive.counts._partial = False
    for _ in range(first):
        drive.minute(**{"a@1": 2})
    drive.counts._skip(drive.counts.tiers.end + gap, [])
    drive.counts._anchor += 60 * gap
    drive.wall += 60 * gap
    for _ in range(more):
        drive.minute(**{"a@1": 2})
    snapshot = drive.counts.snapshot()
    recent = snapshot.recent(1440)
    by_minute = {int(recent.start // 60) + step: bool(known) for step, known in enumerate(recent.known[0])}
    for bucket in (300, 900):
        found = snapshot.history(bucket)
        per = bucket // 60
        for step, (value, known) in enumerate(zip(found.counts[0], found.known[0], strict=True)):
            begin = int(found.start // 60) + step * per
            seen = sum(by_minute.get(minute, False) for minute in range(begin, begin + per))
            assert known == (seen >= per / 2 and begin >= snapshot.born[0])
            assert value == (pytest.approx(2 * per, rel=0.1) if known else 0)


# -- week slots --------------------------------------------------------------------------------------


def test_a_quarter_teaches_its_local_slot_and_halves_in_two_weeks():
    """Monday 00:15 local is slot 1; after 14 days of nothing known, half of sum and exposure are left."""
    drive = Drive(datetime(2026, 3, 2, 0, 0, tzinfo=BERLIN).timestamp(), zone=BERLIN)
    drive.counts.index("a@1")
    drive.quarter()
    drive.quarter(**{"a@1": 12})
    assert drive.slot("a@1", 1) == (near(12), near(1))
    drive.roll(14 * DAY)
    assert drive.slot("a@1", 1) == (near(6), near(0.5))


def test_missing_minutes_are_unknown_not_zero():
    """Half a quarter unseen: half the exposure, so that the rate stays what it was."""
    drive = Drive()
    drive.counts.index("a@1")
    for _ in range(8):
        drive.minute()
    drive.wall += 60 * 3
    drive.counts._skip(drive.counts.tiers.end + 3, [])
    drive.counts._anchor += 60 * 3
    for _ in range(4):
        drive.minute(**{"a@1": 2})
    total, exposure = drive.slot("a@1", 0)
    assert total == near(8)
    assert exposure == near(11 / 15)  # 15 less the first, partial minute and the three missing


def test_a_model_is_exposed_from_its_first_minute_on():
    """A model born in the middle of a quarter is not taken for idle before."""
    drive = Drive()
    for _ in range(10):
        drive.minute()
    drive.counts.index("late@1")
    for _ in range(5):
        drive.minute(**{"late@1": 3})
    assert drive.slot("late@1", 0) == (near(15), near(1 / 3))


def test_the_repeated_hour_counts_twice_and_the_missing_one_not_at_all():
    """Goal 7, DST 0 % loss: fall back gives its slots exposure 2, spring forward 0, and the rate stays."""
    for begin, factor in ((datetime(2026, 10, 25, tzinfo=BERLIN), 2), (datetime(2027, 3, 28, tzinfo=BERLIN), 0)):
        drive = Drive(begin.timestamp(), zone=BERLIN)
        drive.counts._partial = False
        for _ in range(4 * 5):
            drive.quarter(**{"a@1": 4})
        slot = 6 * 96 + 2 * 4 + 1  # Sunday 02:15
        total, exposure = drive.slot("a@1", slot)
        assert exposure == near(factor)
        assert total == near(4 * factor)
        assert drive.slot("a@1", 6 * 96 + 4)[1] == near(1)


def _weeks(drive: Drive, weeks: int, slot_hits: dict[int, int]) -> None:
    """Whole weeks at 15-minute steps, with requests in some slots; minutes are written, clocks do not run."""
    counts = drive.counts
    size = len(counts._table)
    for _ in range(weeks * 672):
        quarter = counts.tiers.end // 15
        total = np.full(size, slot_hits.get(slot_of(quarter * 900.0, counts.zone), slot_hits.get(-1, 0)), np.int64)
        for step in range(15):
            row = total if step == 0 else np.zeros(size, np.int64)
            counts._minute[:size] = row
            counts._write(known=True, counts=None, facts=drive.facts)


def test_a_burst_does_not_become_a_habit():
    """Winsorising: 20 times the usual adds 4 x the median of that slot + 10; the raw count stays."""
    drive = Drive()
    drive.counts.index("a@1")
    _weeks(drive, 4, {-1: 10})
    clean = drive.slot("a@1", 0)[0]
    _weeks(drive, 1, {0: 200, -1: 10})
    decay = 2 ** (-0.5)
    total, _ = drive.slot("a@1", 0)
    assert total == pytest.approx(clean * decay + 50 * 2 ** (-671 / 1344), rel=0.02)
    history = drive.counts.snapshot().history(900)
    assert history.counts[0, -672] == pytest.approx(200, rel=0.05)


def test_without_two_such_slots_there_is_nothing_to_clip_by():
    """The second week may be anything: one earlier pass is no habit yet."""
    drive = Drive()
    drive.counts.index("a@1")
    _weeks(drive, 1, {-1: 1})
    _weeks(drive, 1, {671: 100, -1: 1})
    assert drive.slot("a@1", 671)[0] == near(100 + 2**-0.5)


def test_a_new_owner_of_an_index_is_not_clipped_by_the_habits_of_the_old_one():
    """Four weeks of next to nothing belonged to somebody else."""
    drive = Drive()
    drive.counts.index("a@1")
    _weeks(drive, 4, {-1: 1})
    drive.counts.forget("a@1")
    assert drive.counts.index("b@1") == 0
    _weeks(drive, 1, {-1: 100})
    assert drive.slot("b@1", 671) == (near(100), near(1))
    assert drive.slot("b@1", 100)[0] > 70


def test_a_level_shift_is_learned_in_two_days():
    """Goal 7: x3 for two days rescales the sums, so that the whole profile is within 1.25 of the new level at once."""
    drive = Drive()
    drive.counts.index("a@1")
    drive.counts.index("b@1")
    shape = {slot: 20 + 10 * (slot % 96 >= 36) for slot in range(672)}
    _weeks(drive, 4, shape)
    assert not drive.facts
    tripled = {slot: 3 * hits for slot, hits in shape.items()}
    _days(drive, 2, tripled, shape)
    (fact,) = drive.facts
    assert isinstance(fact, LevelShifted)
    assert (fact.key, fact.factor) == ("a@1", pytest.approx(3, rel=0.05))
    sums, exposure = drive.counts.snapshot().sums()
    rate = sums / np.maximum(exposure, 1e-6)
    wanted = np.array([tripled[slot] for slot in range(672)])
    assert np.all(rate[0] < 1.25 * wanted)
    assert np.all(rate[0] > wanted / 1.25)
    assert rate[1] == pytest.approx(wanted / 3, rel=0.05)


def _days(drive: Drive, days: int, first: dict[int, int], others: dict[int, int]) -> None:
    """Whole days and one quarter more, the first model apart from the others."""
    counts = drive.counts
    for _ in range(days * 96 + 1):
        slot = slot_of(counts.tiers.end * 60.0, counts.zone)
        counts._minute[:2] = (first[slot], others[slot])
        for _step in range(15):
            counts._write(known=True, counts=None, facts=drive.facts)


def test_shifts_down_and_back_again_end_where_they_began():
    """A holiday of two days at a third, then the old level: two shifts, and the profile is the old one again."""
    drive = Drive()
    drive.counts.index("a@1")
    drive.counts.index("b@1")
    usual = dict.fromkeys(range(672), 30)
    _weeks(drive, 4, usual)
    _days(drive, 2, dict.fromkeys(range(672), 10), usual)
    _days(drive, 3, usual, usual)
    assert [round(fact.factor, 1) for fact in drive.facts if isinstance(fact, LevelShifted)] == [0.3, 3.0]
    sums, exposure = drive.counts.snapshot().sums()
    assert (sums / exposure)[0] == pytest.approx(30, rel=0.25)


def test_chance_and_weekends_are_no_shift():
    """Poisson noise at ten requests a day, and a model that rests at weekends: no false alarm."""
    drive = Drive()
    for key in ("a@1", "b@1"):
        drive.counts.index(key)
    random = np.random.default_rng(1)
    counts = drive.counts
    for _ in range(6 * 672):
        slot = slot_of(counts.tiers.end * 60.0, counts.zone)
        counts._minute[:2] = (random.poisson(10 / 96), random.poisson(0 if slot >= 480 else 5))
        for _step in range(15):
            counts._write(known=True, counts=None, facts=drive.facts)
    assert drive.facts == []


def test_a_promotion_is_masked_out_of_what_is_learned():
    """`once` windows teach no profile: for the models named, in the quarters touched; raw minutes stay."""
    drive = Drive()
    drive.counts._partial = False
    for key in ("a@1", "b@1"):
        drive.counts.index(key)
    drive.counts.mask(START + 900, START + 1000, ["a@1", "unknown@1"])
    for _ in range(3):
        drive.quarter(**{"a@1": 50, "b@1": 1})
    assert drive.slot("a@1", 0)[0] == near(50)
    assert drive.slot("a@1", 1) == (0.0, 0.0)
    assert drive.slot("b@1", 1)[0] == near(1)
    assert drive.counts.recent(45).counts[0].sum() == 150
    assert drive.counts.snapshot().history(900).known.tolist() == [[True, False, True], [True, True, True]]
    drive.counts.mask(0, 2 * START)
    drive.quarter(**{"b@1": 1})
    assert drive.slot("b@1", 3) == (0.0, 0.0)
    for window in ((5, 5), (5, math.inf), (math.nan, 5)):
        with pytest.raises(ValueError, match="window"):
            drive.counts.mask(*window)


# -- clocks ------------------------------------------------------------------------------------------


def test_a_jump_closes_the_minute_and_makes_gaps_of_both_slots():
    """Fault F67: one hour forward. Neither the slot before nor the one after learns anything; one fact each."""
    drive = Drive()
    drive.quarter(**{"a@1": 5})
    for _ in range(5):
        drive.minute(**{"a@1": 5})
    jumped, outage = sorted(drive.roll(60.0, jump=3600.0), key=lambda fact: type(fact).__name__)
    assert isinstance(jumped, ClockJumped)
    assert jumped.seconds == 3600
    assert isinstance(outage, OutageSeen)
    for _ in range(30):
        drive.minute(**{"a@1": 5})
    assert drive.slot("a@1", 1) == (0.0, 0.0)
    assert drive.slot("a@1", 5) == (0.0, 0.0)
    assert drive.slot("a@1", 6)[1] == near(1)


def test_a_small_jump_is_told_but_is_no_outage_and_slow_drift_is_followed():
    """2 s is the border; a clock that drifts by 50 ppm for a month never jumps."""
    drive = Drive()
    assert drive.roll(60.0, jump=1.9) == ()
    for _ in range(5):
        assert drive.roll(60.0) == ()
    (fact,) = drive.roll(60.0, jump=-2.5)
    assert isinstance(fact, ClockJumped)
    for _ in range(30 * 24):
        assert drive.roll(3600.0 / 60, jump=50e-6 * 60) == ()


def test_an_hour_that_comes_again_is_not_counted_again():
    """Fault F67: after one hour back, minutes already closed stay as they are; the slot's exposure is not doubled."""
    drive = Drive()
    for _ in range(8):
        drive.quarter(**{"a@1": 5})
    before = drive.counts.recent(120).counts.copy()
    (fact,) = drive.roll(60.0, jump=-3600.0)
    assert isinstance(fact, ClockJumped)
    for _ in range(50):
        drive.minute(**{"a@1": 1})
    assert np.array_equal(drive.counts.recent(120).counts, before)
    assert drive.slot("a@1", 5)[1] == near(1)
    for _ in range(40):
        drive.minute(**{"a@1": 1})
    total, exposure = drive.slot("a@1", 8)
    assert (total, exposure) == (0.0, 0.0)  # the slot after the jump is a gap, what piled up there included
    assert drive.slot("a@1", 9)[1] == near(1)


def test_a_clock_that_was_years_ahead_does_not_stop_counting():
    """More than a day backwards means that the earlier time was wrong: rows dated later are dropped."""
    drive = Drive(START + 400 * DAY)
    drive.quarter(**{"a@1": 5})
    drive.roll(60.0, jump=-400.0 * DAY)
    for _ in range(3):
        drive.quarter(**{"a@1": 5})
    recent = drive.counts.recent(30)
    assert recent.known[0].all()
    assert recent.counts[0].sum() == 10
    assert recent.start < START + DAY


def test_a_clock_set_forward_by_years_leaves_only_gaps():
    """Booted in 1970, then corrected: a fact, nothing learned from between, and no long pause."""
    drive = Drive(90_000.0)
    drive.quarter(**{"a@1": 5})
    facts = drive.roll(60.0, jump=START)
    assert {type(fact) for fact in facts} == {ClockJumped, OutageSeen}
    drive.quarter(**{"a@1": 5})
    assert drive.counts.recent(10).known.all()


@pytest.mark.parametrize("wall", [-1.0, math.nan, math.inf, 1e12])
def test_a_wall_clock_beyond_all_years_is_refused(wall: float):
    """Garbage time is a ValueError that changes nothing."""
    drive = Drive()
    with pytest.raises(ValueError, match="wall time"):
        drive.counts.roll(wall, 60.0)
    assert drive.roll() == ()


@given(
    st.lists(
        st.tuples(st.floats(0.0, 2000.0), st.sampled_from([0.0, 0.0, 0.0, 1.0, -1.5, 30.0, -700.0, 5000.0, -2e5, 3e5]))
    ),
    st.integers(0, 3600),
)
@settings(deadline=None, max_examples=100)
def test_whatever_clocks_do_rows_stay_aligned_and_no_request_is_counted_twice(
    steps: list[tuple[float, float]], offset: int
):
    """Random rolls and jumps: known requests never exceed those made, and grains end where the minutes end."""
    drive = Drive(START + offset)
    index = drive.counts.index("a@1")
    for seconds, jump in steps:
        drive.counts.hit(index)
        drive.roll(seconds, jump)
        tiers = drive.counts.tiers
        assert len(tiers.minutes) <= 1440
        found = drive.counts.snapshot()
        assert found.recent(1440).counts.sum() <= len(steps)
        for bucket in (300, 900):
            history = found.history(bucket)
            assert history.start + bucket * history.counts.shape[1] <= tiers.end * 60
            assert history.start % bucket == 0
        sums, exposure = found.sums()
        assert sums.sum() <= len(steps)
        assert np.all(exposure >= 0)


def test_a_week_can_be_made_of_what_its_matrix_said():
    """Columns that are given as wider numbers are narrowed, and say the same again."""
    drive = Drive()
    for hits in (3, 1000, 7):
        drive.quarter(**{"a@1": hits, "b@1": 1})
    week, quarter = drive.counts.week, drive.counts.tiers.end // 15
    sums, exposure = week.matrix(quarter, 2)
    columns = [np.ascontiguousarray(sums[:, slot]) for slot in range(672)]
    halves = [exposure[:, slot].astype(np.float16) for slot in range(672)]
    at = np.where(week.at >= 0, quarter, -1)
    again = Week(columns, halves, at)  # type: ignore[arg-type]
    for one, other in zip(again.matrix(quarter, 2), (sums, exposure), strict=True):
        assert one == pytest.approx(other, rel=0.005)


# -- snapshots ---------------------------------------------------------------------------------------


def test_a_snapshot_stays_as_it_was():
    """What is counted, shifted or masked later does not show in a snapshot taken before."""
    drive = Drive()
    drive.quarter(**{"a@1": 5})
    snapshot = drive.counts.snapshot()
    before = [snapshot.sums(), snapshot.recent(60), snapshot.history(300), snapshot.rates()]
    sums = before[0][0].copy()
    for _ in range(672 + 3):
        drive.quarter(**{"a@1": 50, "b@1": 1})
    assert np.array_equal(snapshot.sums()[0], sums)
    assert snapshot.recent(60).counts.shape == (1, 15)
    assert snapshot.history(300).counts.shape == (1, 3)
    assert snapshot.keys == ("a@1",)


def test_rates_of_a_snapshot_fade_with_the_time_since():
    """Evaluation on demand between rolls."""
    drive = Drive()
    drive.minute(**{"a@1": 100})
    snapshot = drive.counts.snapshot()
    assert snapshot.rates(600.0)[0, 0] == pytest.approx(snapshot.rates()[0, 0] / 2)


def test_the_counter_says_what_it_is():
    """Style rule 22."""
    drive = Drive()
    drive.counts.index("a@1")
    assert repr(drive.counts) == f"<Counts of 1 models to minute {int(START) // 60}>"
