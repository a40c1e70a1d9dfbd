"""Counts on disk: nothing but the open minute is lost to kill -9, and no file can stop the server."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import zlib
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasting.blobs import Damaged, Packed, minute_blob, minute_of, pack_array, unpack_array
from forecasting.counts import Counts, CountsRestored, OutageSeen, StoreSetAside
from forecasting.store import Store, StoreFailed
from forecasting.tiers import pack

if TYPE_CHECKING:
    from pathlib import Path

START = datetime(2026, 3, 2, tzinfo=UTC).timestamp()


def counted(minutes: int = 50, models: int = 3, start: float = START, **options: object) -> Counts:
    """Counts that ran for so many minutes, model i getting i + minute % 3 requests a minute."""
    counts = Counts(start, 0.0, **options)  # type: ignore[arg-type]
    counts._partial = False
    run(counts, minutes, models, start)
    return counts


def run(counts: Counts, minutes: int, models: int = 3, start: float = START, first: int = 0) -> None:
    """Go on counting from minute `first`."""
    for minute in range(first, first + minutes):
        for model in range(models):
            counts._hits[counts.index(f"m{model}@1")] += model + minute % 3
        counts.roll(start + 60.0 * (minute + 1), 60.0 * (minute + 1))


def saved(path: Path, counts: Counts) -> None:
    """A checkpoint of it, and the file closed."""
    store, facts = Store.open(path)
    assert facts == ()
    with store:
        store.load()
        store.checkpoint(counts.snapshot())


def loaded(path: Path, wall: float, **options: object) -> tuple[Counts, tuple[object, ...]]:
    """Counts that go on from the file."""
    store, facts = Store.open(path)
    with store:
        found, more = store.load()
    assert facts == more == ()
    assert found is not None
    counts, told = Counts.restore(found, wall, 1000.0, **options)  # type: ignore[arg-type]
    return counts, told


# -- round trips -------------------------------------------------------------------------------------


def test_what_was_counted_comes_back(tmp_path: Path):
    """Minutes exactly, sums within 1.6 %, exposure, counters, births and the rows of every grain."""
    counts = counted(200)
    saved(tmp_path / "counts.db", counts)
    again, facts = loaded(tmp_path / "counts.db", START + 200 * 60)
    assert facts == (CountsRestored(START + 200 * 60, 3, 0.0),)
    old, new = counts.snapshot(), again.snapshot()
    assert new.keys == old.keys
    for one, other in ((old.recent(1440), new.recent(1440)), (old.history(300), new.history(300))):
        assert np.array_equal(one.counts, other.counts)
        assert np.array_equal(one.known, other.known)
        assert one.start == other.start
    for one, other in zip(old.sums(), new.sums(), strict=True):
        assert other == pytest.approx(one, rel=0.016)
    assert new.rates() == pytest.approx(old.rates(), rel=1e-5)
    assert np.array_equal(old.seen, new.seen)
    assert new.began == old.began


def test_a_restored_counter_goes_on_in_the_middle_of_a_quarter(tmp_path: Path):
    """20 minutes, a restart without a pause, 25 more: the same slots and rows as one run of 45 minutes."""
    saved(tmp_path / "counts.db", counted(20))
    again, _ = loaded(tmp_path / "counts.db", START + 20 * 60)
    again._partial = False
    again._anchor = START + 20 * 60 - 1200.0
    again._rolled = 1200.0
    run(again, 25, first=20)
    whole = counted(45)
    for one, other in zip(whole.snapshot().sums(), again.snapshot().sums(), strict=True):
        assert other == pytest.approx(one, rel=0.016)
    assert np.array_equal(whole.recent(45).counts, again.recent(45).counts)
    assert again.snapshot().history(900).counts == pytest.approx(whole.snapshot().history(900).counts)


def test_downtime_is_a_gap_and_counters_fade(tmp_path: Path):
    """An hour down: minutes unknown, an outage as a fact, the 1-hour counter halved, slot exposure not touched."""
    counts = counted(60)
    saved(tmp_path / "counts.db", counts)
    again, facts = loaded(tmp_path / "counts.db", START + 7200)
    assert facts == (OutageSeen(START + 3600, START + 7200), CountsRestored(START + 7200, 3, 3600.0))
    recent = again.recent(120)
    assert recent.known[0].tolist() == [True] * 60 + [False] * 60
    assert again.rates(1000.0)[:, 1] == pytest.approx(counts.rates(3600.0)[:, 1] / 2, rel=1e-4)
    assert again.snapshot().sums()[1] == pytest.approx(counts.snapshot().sums()[1], rel=0.01)


def test_a_clock_that_was_set_back_while_down_does_not_count_again(tmp_path: Path):
    """Ten minutes back: nothing is written until time has caught up. Two days back: the later rows are dropped."""
    saved(tmp_path / "counts.db", counted(60))
    again, _ = loaded(tmp_path / "counts.db", START + 3000)
    for minute in range(1, 12):
        again.hit(0)
        again.roll(START + 3000 + 60 * minute, 1000.0 + 60 * minute)
    assert again.recent(61).counts[0, :60].sum() == 60
    assert again.recent(61).known[0].tolist() == [True] * 60 + [False]
    early, _ = loaded(tmp_path / "counts.db", START - 2 * 86_400)
    early.roll(START - 2 * 86_400 + 120, 1120.0)
    assert early.recent(1440).start < START


def test_minutes_after_the_checkpoint_come_from_the_journal(tmp_path: Path):
    """A checkpoint at minute 20, a journal to minute 47, then nothing was closed: all 47 minutes are there."""
    counts = Counts(START, 0.0)
    counts._partial = False
    store, _ = Store.open(tmp_path / "counts.db")
    store.load()
    for minute in range(47):
        run(counts, 1, models=2 + (minute > 30), first=minute)
        snapshot = counts.snapshot()
        store.append(snapshot.table, snapshot.born, counts.closed(int(START // 60) + minute - 1))
        if minute == 19:
            store.checkpoint(snapshot)
    store._connection.close()
    again, _ = loaded(tmp_path / "counts.db", START + 47 * 60)
    assert again.keys == ("m0@1", "m1@1", "m2@1")
    assert np.array_equal(again.recent(47).counts, counts.recent(47).counts)
    for one, other in zip(counts.snapshot().sums(), again.snapshot().sums(), strict=True):
        assert other == pytest.approx(one, rel=0.016)
    assert again.rates(1000.0) == pytest.approx(counts.rates(47 * 60.0), rel=1e-3)


def test_a_journal_without_any_checkpoint_is_enough(tmp_path: Path):
    """Killed within the first five minutes."""
    counts = counted(4)
    store, _ = Store.open(tmp_path / "counts.db")
    store.append(counts.snapshot().table, counts.snapshot().born, counts.closed(0))
    store._connection.close()
    again, _ = loaded(tmp_path / "counts.db", START + 240)
    assert np.array_equal(again.recent(4).counts, counts.recent(4).counts)


def test_an_index_with_a_new_owner_after_the_checkpoint_starts_from_nothing(tmp_path: Path):
    """The former owner's sums are still in the file; they are not handed on."""
    counts = counted(30, models=1)
    store, _ = Store.open(tmp_path / "counts.db")
    store.load()
    store.checkpoint(counts.snapshot())
    counts.forget("m0@1")
    assert counts.index("new@1") == 0
    counts.roll(START + 31 * 60, 31 * 60.0)
    store.append(counts.snapshot().table, counts.snapshot().born, counts.closed(int(START // 60) + 29))
    store.close()
    again, _ = loaded(tmp_path / "counts.db", START + 31 * 60)
    assert again.keys == ("new@1",)
    assert again.snapshot().sums()[0].sum() == 0
    assert again.recent(31).counts.sum() == 0


def test_only_what_changed_is_written_again(tmp_path: Path):
    """A checkpoint five minutes later writes at most one slot; unchanged models are not rewritten."""
    counts = counted(100)
    store, _ = Store.open(tmp_path / "counts.db")
    store.load()
    store.checkpoint(counts.snapshot())
    written: list[str] = []
    store._connection.set_trace_callback(written.append)
    run(counts, 5, first=100)
    store.checkpoint(counts.snapshot())
    store._connection.set_trace_callback(None)
    store.close()
    assert sum("INTO slots" in one for one in written) <= 1
    assert sum("INTO fives" in one for one in written) == 1
    assert not any("INTO models" in one for one in written)
    again, _ = loaded(tmp_path / "counts.db", START + 105 * 60)
    assert again.snapshot().sums()[0] == pytest.approx(counts.snapshot().sums()[0], rel=0.016)


def test_another_zone_moves_slots_to_their_new_local_place(tmp_path: Path):
    """Learned in UTC, restored in Shanghai: 08:00 UTC is 16:00 there, in slots as in instants."""
    saved(tmp_path / "counts.db", counted(30))
    again, _ = loaded(tmp_path / "counts.db", START + 1800, zone=ZoneInfo("Asia/Shanghai"))
    old = counted(30).snapshot().sums()[0]
    assert again.snapshot().sums()[0][:, 32:34] == pytest.approx(old[:, 0:2], rel=0.016)


# -- kill -9 -----------------------------------------------------------------------------------------

CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from forecasting.counts import Counts
    from forecasting.store import Store

    start = float(sys.argv[2])
    store, _ = Store.open(Path(sys.argv[1]))
    store.load()
    counts = Counts(start, 0.0)
    counts._partial = False
    after = int(start // 60) - 1
    for minute in range(100_000):
        for model in range(5):
            counts._hits[counts.index(f"m{model}@1")] += model + 1
        counts.roll(start + 60.0 * (minute + 1), 60.0 * (minute + 1))
        snapshot = counts.snapshot()
        store.append(snapshot.table, snapshot.born, counts.closed(after))
        after = counts.tiers.end - 1
        print(minute, flush=True)
        if minute % 5 == 4:
            store.checkpoint(snapshot)
    """
)


@pytest.mark.parametrize("lines", [1, 4, 5, 23, 64])
def test_a_killed_process_loses_no_minute_that_it_had_closed(tmp_path: Path, lines: int):
    """Goal 7: kill -9 at any point, checkpoints included, loses less than one minute. A real process, really killed."""
    path = tmp_path / "counts.db"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(START)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = -1
    for _ in range(lines):
        told = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().split()  # what it said between our last line and its end
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    told = max([told, *map(int, rest)])
    store, facts = Store.open(path)
    assert facts == ()
    with store:
        found, facts = store.load()
    assert facts == ()
    assert found is not None
    end = max([found.snapshot.tiers.end, *(minute + 1 for minute, _ in found.later)])
    assert 0 <= end - int(START // 60) - (told + 1) <= 1  # the last one may be written and not yet told
    counts, _ = Counts.restore(found, 60.0 * end, 0.0)
    recent = counts.recent(1440)
    assert recent.known.all()
    assert recent.counts.sum(1).tolist() == [(model + 1) * recent.counts.shape[1] for model in range(5)]


# -- files that cannot be used -----------------------------------------------------------------------


def _expect_set_aside(path: Path, reason: str) -> None:
    """It is renamed with a fact, and counting starts anew in a working file."""
    content = path.read_bytes()
    store, facts = Store.open(path)
    with store:
        found, more = store.load()
        assert found is None
        (fact,) = (*facts, *more)
        assert isinstance(fact, StoreSetAside)
        assert reason in fact.reason
        aside = path.with_name(path.name + ".aside-1")
        assert fact.path == str(aside)
        assert aside.exists()
        assert len(content) == 0 or aside.stat().st_size > 0
        store.checkpoint(counted(20).snapshot())
    loaded(path, START + 1200)


@pytest.mark.parametrize(
    "content", [b"hello", b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 4096, bytes(range(256)) * 64]
)
def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path, content: bytes):
    """Never fatal, never overwritten."""
    path = tmp_path / "counts.db"
    path.write_bytes(content)
    _expect_set_aside(path, "")


def test_a_newer_file_is_set_aside_for_the_newer_release(tmp_path: Path):
    """A rollback keeps what the newer release had learned, under another name."""
    path = tmp_path / "counts.db"
    saved(path, counted())
    _sql(path, "PRAGMA user_version=99")
    _expect_set_aside(path, "schema 99")


def test_another_programs_database_is_set_aside(tmp_path: Path):
    """It is not ours to write into."""
    path = tmp_path / "counts.db"
    _sql(path, "CREATE TABLE models(something TEXT)")
    _expect_set_aside(path, "another program")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE slots SET sums = x'00'",
        "UPDATE slots SET sums = substr(sums, 1, 9)",
        "UPDATE slots SET slot = 5000 WHERE slot = 0",
        "UPDATE slots SET at = 'x'",
        "UPDATE state SET content = '{'",
        "UPDATE state SET content = '[]'",
        "UPDATE state SET content = replace(content, '\"end\":', '\"end\": 99999')",
        "UPDATE state SET content = replace(content, '\"UTC\"', '\"Mars/Base\"')",
        "UPDATE state SET content = replace(content, '\"size\": 3', '\"size\": 999999999')",
        "UPDATE models SET place = 1000000000 WHERE place = 0",
        "UPDATE models SET place = -1 WHERE place = 0",
        "DELETE FROM arrays WHERE name = 'seen'",
        "UPDATE arrays SET content = (SELECT content FROM arrays WHERE name = 'gain') WHERE name = 'decayed'",
        "UPDATE minutes SET counts = x'ffffffffffffffffffffffff'",
        "UPDATE minutes SET counts = 7",
        "UPDATE fives SET codes = zeroblob(100)",
        "DROP TABLE days",
        "UPDATE days SET day = 'someday'",
    ],
)
def test_damage_inside_is_noticed_and_set_aside(tmp_path: Path, change: str):
    """Every table, cut, swapped or absurd: one fact, no crash, no absurd memory."""
    path = tmp_path / "counts.db"
    saved(path, counted(1600))
    _sql(path, change)
    if change.startswith("DROP"):  # the schema is made whole again on opening, the days are lost
        assert loaded(path, START + 1600 * 60)[0].snapshot().days() == ()
        return
    _expect_set_aside(path, "")


def _sql(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


@given(st.integers(0, 2**31), st.binary(min_size=1, max_size=64))
@settings(max_examples=25, deadline=None)
def test_random_damage_to_pages_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes
):
    """A file with junk written into it opens, or is set aside; it never ends in another error."""
    path = tmp_path_factory.mktemp("store") / "counts.db"
    saved(path, counted(30))
    content = bytearray(path.read_bytes())
    place = at % len(content)
    content[place : place + len(junk)] = junk
    path.write_bytes(content)
    store, facts = Store.open(path)
    with store:
        found, more = store.load()
        if found is not None:
            Counts.restore(found, START + 3600, 0.0)
        else:
            assert len(facts) + len(more) == 1


def test_a_second_process_is_refused_and_the_file_stays(tmp_path: Path):
    """Two servers on one file would mix their counts: the second gets StoreFailed, nothing is renamed."""
    path = tmp_path / "counts.db"
    store, _ = Store.open(path)
    with store:
        store.checkpoint(counted().snapshot())
        code = f"from pathlib import Path; from forecasting.store import Store; Store.open(Path({str(path)!r}))"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "StoreFailed: cannot use the file of counts: database is locked" in ended.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["counts.db"]


def test_a_place_that_cannot_be_written_is_a_store_failed(tmp_path: Path):
    """A folder in the way, or a file where the folder should be: a clear error that the caller can survive."""
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StoreFailed, match="file of counts"):
        Store.open(tmp_path / "folder.db")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreFailed, match="file of counts"):
        Store.open(tmp_path / "file" / "counts.db")


def test_writing_to_a_full_disk_fails_without_harm(tmp_path: Path):
    """SQLite's limit of pages stands for a full disk: StoreFailed, the last checkpoint stays, the next try works."""
    path = tmp_path / "counts.db"
    store, _ = Store.open(path)
    with store:
        store.checkpoint(counted(20).snapshot())
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreFailed, match="full"):
            store.checkpoint(counted(2000, models=40).snapshot())
        store._connection.execute("PRAGMA max_page_count=1000000")
        found, _ = store.load()
        assert found is not None
        assert len(found.snapshot.keys) == 3
        store.checkpoint(counted(30, models=40).snapshot())
    assert len(loaded(path, START + 1800)[0].keys) == 40


def test_threads_may_share_a_store(tmp_path: Path):
    """The journal and a checkpoint may be written by different threads at the same time."""
    counts = counted(100)
    snapshot = counts.snapshot()
    store, _ = Store.open(tmp_path / "counts.db")
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(5):
                if number % 2:
                    store.checkpoint(snapshot)
                else:
                    store.append(snapshot.table, snapshot.born, counts.closed(0))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert failures == []
    assert np.array_equal(loaded(tmp_path / "counts.db", START + 6000)[0].recent(100).counts, counts.recent(100).counts)


# -- blobs -------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e9, width=32), max_size=50))
def test_rounded_numbers_keep_to_1_6_percent(values: list[float]):
    """And zero stays zero."""
    array = np.array(values, np.float32)
    found = unpack_array(pack_array(array, Packed.ROUNDED), "f4")
    assert found == pytest.approx(array, rel=1 / 64, abs=1e-37)


@given(st.lists(st.integers(0, 2**50), max_size=40), st.booleans(), st.integers(0, 2**20), st.binary(max_size=9))
def test_minutes_come_back_exactly_and_cut_ones_are_refused(counts: list[int], known: bool, cut: int, junk: bytes):  # noqa: FBT001 - drawn
    """A blob cut anywhere, junk behind it, is Damaged or reads as some minute; nothing else is raised."""
    row = pack(np.array(counts, np.int64), known=known)
    blob = minute_blob(row)
    found = minute_of(blob, known=known)
    assert found.counts(len(counts)).tolist() == counts
    assert found.known is known
    place = cut % (len(blob) + 1)
    with suppress(Damaged):
        minute_of(blob[:place] + junk, known=known).counts(len(counts))


def test_a_blob_that_would_grow_without_end_is_stopped():
    """A small blob of a gigabyte of zeros, or a head that claims one, is refused before it is unpacked."""
    head = pack_array(np.zeros(10), Packed.EXACT)[:6]
    with pytest.raises(Damaged, match="length"):
        unpack_array(head + zlib.compress(bytes(10_000_000)), "f8")
    with pytest.raises(Damaged, match="head"):
        unpack_array(b"\x06\x00\xff\xff\xff\xff" + zlib.compress(b""), "f8")
    with pytest.raises(Damaged, match="no number"):
        unpack_array(pack_array(np.array([np.nan]), Packed.EXACT), "f8")
    with pytest.raises(ValueError, match="cannot pack"):
        pack_array(np.zeros((2, 2)), Packed.EXACT)


def test_the_store_names_its_file_and_no_folder(tmp_path: Path):
    """Style rule 22."""
    store, _ = Store.open(tmp_path / "counts.db")
    with store:
        assert repr(store) == "<Store counts.db>"
