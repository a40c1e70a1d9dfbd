"""Promises of the reader: the right bytes into memory that is there, each block checked, whatever the file system."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import CorruptWeights, FetchFailed
from runtime.tiers import reader
from runtime.tiers.blocks import BLOCK, Blocks, BlockTable, checksum
from runtime.tiers.disk import DiskStore
from runtime.tiers.reader import ALIGN, checking, read_into
from tests.runtime.catalog.directories import record

if TYPE_CHECKING:
    from pathlib import Path

SIZES = (0, 1, ALIGN - 1, ALIGN, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 12_345, 5 * BLOCK)


def file(folder: Path, size: int) -> tuple[Path, bytes, BlockTable]:
    """A file of random bytes and its checksums."""
    content = np.random.default_rng(size).bytes(size)
    path = folder / f"{size}.bin"
    path.write_bytes(content)
    blocks = Blocks()
    blocks.feed(content)
    return path, content, blocks.table()


def room(size: int) -> memoryview:
    """Memory on a page boundary, rounded up to whole pages."""
    return memoryview(mmap.mmap(-1, max(ALIGN, -(-size // ALIGN) * ALIGN)))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_read_whole_whatever_its_size(tmp_path: Path, size: int, threads: int) -> None:
    """Every edge of page and block; the report says how much that was."""
    path, content, table = file(tmp_path, size)
    target = room(size)
    reading = read_into(path, target, table, threads=threads)
    assert bytes(target[:size]) == content
    assert reading.size == size
    assert reading.seconds > 0


def test_the_page_cache_is_left_alone_where_the_file_system_allows_it(tmp_path: Path) -> None:
    """O_DIRECT is really used: `direct` says so, and no page of the file is in memory afterwards."""
    path, content, table = file(tmp_path, 3 * BLOCK)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    target = room(len(content))
    if not read_into(path, target, table).direct:
        pytest.skip("this file system refuses O_DIRECT")
    assert bytes(target) == content
    assert cached(path) == 0


def cached(path: Path) -> int:
    """Pages of a file that are in memory."""
    import ctypes

    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        pages = -(-len(mapping) // ALIGN)
        held = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapping)), held) == 0
        return sum(each & 1 for each in held)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refused_o_direct_falls_back_to_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """At the opening, as old file systems do, or at the first read, as others do; the bytes are right either way."""
    path, content, table = file(tmp_path, 2 * BLOCK + 5)

    def refuse(*_: object) -> bool:
        raise OSError(number, "refused")

    target = room(len(content))
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_fill_direct", refuse)
        reading = read_into(path, target, table)
    assert (bytes(target[: len(content)]), reading.direct) == (content, False)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_open_direct", lambda *_: -1)
        reading = read_into(path, target, table)
    assert (bytes(target[: len(content)]), reading.direct) == (content, False)


def test_memory_off_a_page_boundary_is_read_through_the_page_cache(tmp_path: Path) -> None:
    """The kernel refuses such an address; the caller gets its bytes all the same."""
    path, content, table = file(tmp_path, BLOCK + 100)
    whole = room(len(content) + ALIGN)
    target = whole[8 : 8 + len(content)]
    assert not read_into(path, target, table).direct
    assert bytes(target) == content


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_flipped_bit_is_found_in_whatever_block(tmp_path: Path, block: int, threads: int) -> None:
    """F16, after publication: told with the block's number; both ways of reading find it."""
    path, content, table = file(tmp_path, 2 * BLOCK + 777)
    at = block * BLOCK + 700
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(CorruptWeights, match="not what was written") as caught:
        read_into(path, room(len(content)), table, threads=threads)
    assert caught.value.detail == {"block": block}
    with path.open("rb") as opened:
        assert not whole(opened.fileno(), table)


def whole(descriptor: int, table: BlockTable) -> bool:
    """Run `checking` to its verdict."""
    steps = checking(descriptor, table)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)


@pytest.mark.parametrize("size", SIZES)
def test_checking_accepts_what_was_written_and_nothing_else(tmp_path: Path, size: int) -> None:
    """Also not a shorter or a longer file."""
    path, content, table = file(tmp_path, size)
    for written, sound in ((content, True), (content + b"x", False), (content[:-1], size == 0)):
        path.write_bytes(written)
        with path.open("rb") as opened:
            assert whole(opened.fileno(), table) is sound


def test_a_file_of_another_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """With both numbers, by table or by what the caller knows; too little memory is the caller's mistake."""
    path, content, table = file(tmp_path, 1000)
    path.write_bytes(content[:-1])
    with pytest.raises(CorruptWeights, match="999 bytes where 1000"):
        read_into(path, room(1000), table)
    with pytest.raises(CorruptWeights, match="999 bytes where 1000"):
        read_into(path, room(1000), size=1000)
    with pytest.raises(ValueError, match="10 bytes of memory"):
        read_into(path, room(1000)[:10])
    with pytest.raises(FetchFailed):
        read_into(tmp_path / "nothing", room(1))


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 2 * BLOCK + 99), max_size=6))
def test_checksums_do_not_depend_on_how_the_bytes_came(cuts: list[int]) -> None:
    """Pieces of any length, empty ones too, make the table of the whole."""
    content = bytes(range(256)) * ((2 * BLOCK + 99) // 256 + 1)
    content = content[: 2 * BLOCK + 99]
    blocks = Blocks()
    places = [0, *sorted(cuts), len(content)]
    for start, end in itertools.pairwise(places):
        blocks.feed(memoryview(content)[start:end])
    table = blocks.table()
    assert table == BlockTable(
        len(content), b"".join(checksum(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK))
    )
    assert BlockTable.from_bytes(table.to_bytes()) == table


def test_a_table_that_is_not_whole_is_none(tmp_path: Path) -> None:
    """Cut, flipped or of another length than its file: read as no table at all."""
    raw = file(tmp_path, BLOCK + 1)[2].to_bytes()
    for bad in (
        b"",
        raw[:-1],
        raw[:20],
        raw + b"x",
        bytes([raw[0] ^ 1]) + raw[1:],
        raw[:30] + bytes([raw[30] ^ 1]) + raw[31:],
    ):
        assert BlockTable.from_bytes(bad) is None
    body = b"FLBLOCK1" + (BLOCK * 3).to_bytes(8, "little") + bytes(16)
    assert BlockTable.from_bytes(body + checksum(body)) is None


# -- in the store ------------------------------------------------------------------------------------


def rot(path: Path) -> None:
    """Flip a bit of a published blob, as a disk does it."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_blob_that_rotted_is_set_aside_and_made_again(tmp_path: Path) -> None:
    """F16: same size, other bytes, found at the first load of the next life; the original heals it."""
    model = record(tmp_path / "m", count=BLOCK)
    path = DiskStore(tmp_path / "cache", 1 << 30).admit(model)
    rot(path)
    assert DiskStore(tmp_path / "cache", 1 << 30).admit(model).read_bytes() == model.weights.read_bytes()
    assert (tmp_path / "cache" / "quarantine" / path.name).exists()


@pytest.mark.parametrize("table", [None, b"", b"nonsense"])
def test_without_its_checksums_a_blob_is_proven_by_its_name(tmp_path: Path, table: bytes | None) -> None:
    """A cache of an older version, or a damaged table: the sha256 decides, and the table is made anew."""
    model = record(tmp_path / "m")
    path = DiskStore(tmp_path / "cache", 1 << 30).admit(model)
    beside = tmp_path / "cache" / "blocks" / path.name
    whole_table = beside.read_bytes()
    beside.unlink()
    if table is not None:
        beside.write_bytes(table)
    assert DiskStore(tmp_path / "cache", 1 << 30).admit(model) == path
    assert beside.read_bytes() == whole_table
    beside.unlink()
    rot(path)
    assert DiskStore(tmp_path / "cache", 1 << 30).admit(model).read_bytes() == model.weights.read_bytes()


def test_a_blob_is_proven_once_per_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written or proven in this life is not read again for as long as it does not change."""
    model = record(tmp_path / "m")
    store = DiskStore(tmp_path / "cache", 1 << 30)
    path = store.admit(model)
    proofs: list[int] = []

    def counted(descriptor: int, table: BlockTable):
        proofs.append(descriptor)
        return checking(descriptor, table)

    monkeypatch.setattr("runtime.tiers.disk.checking", counted)
    store.admit(model)
    assert not proofs
    again = DiskStore(tmp_path / "cache", 1 << 30)
    again.admit(model)
    again.admit(model)
    assert len(proofs) == 1
    os.utime(path)
    again.admit(model)
    assert len(proofs) == 2


def test_an_evicted_blob_takes_its_checksums_along(tmp_path: Path) -> None:
    """Nothing is left of it."""
    models = [record(tmp_path / str(seed), seed=seed) for seed in range(2)]
    store = DiskStore(tmp_path / "cache", models[0].weights_bytes)
    first = store.admit(models[0])
    second = store.admit(models[1])
    assert not first.exists()
    assert [path.name for path in (tmp_path / "cache" / "blocks").iterdir()] == [second.name]


def test_what_was_set_aside_counts_and_leaves_first(tmp_path: Path) -> None:
    """The quota holds for damaged files too; they make room before anything that can be served."""
    models = [record(tmp_path / str(seed), seed=seed) for seed in range(3)]
    size = models[0].weights_bytes
    first = DiskStore(tmp_path / "cache", 3 * size).admit(models[0])
    rot(first)
    store = DiskStore(tmp_path / "cache", 3 * size)
    kept = store.admit(models[0])
    aside = tmp_path / "cache" / "quarantine" / first.name
    assert aside.exists()
    store.admit(models[1])
    assert aside.exists()
    store.admit(models[2])
    assert not aside.exists()
    assert kept.exists()
    assert store.snapshot().used == 3 * size
