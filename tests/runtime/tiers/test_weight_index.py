"""Promises of the header reader: a consistent index, or `CorruptWeights` that says what is wrong."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from actors.errors import CorruptWeights, FetchFailed
from runtime.tiers import index
from runtime.tiers.index import WeightIndex, read_index
from tests.runtime.tiers.headers import blob, tensor, valid, write


def test_offsets_point_at_the_bytes_that_were_saved(tmp_path: Path) -> None:
    """Absolute offsets read back exactly what the reference writer stored, for every dtype numpy shares with it."""
    arrays = {
        kind: np.arange(6).astype(kind).reshape(2, 3)
        for kind in ("bool", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")
    }
    save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    content = (tmp_path / "m.safetensors").read_bytes()
    found = read_index(tmp_path / "m.safetensors")
    assert set(found.entries) == set(arrays)
    for name, array in arrays.items():
        entry = found.entries[name]
        assert entry.shape == (2, 3)
        assert content[entry.start : entry.end] == array.tobytes()
    assert found.metadata == {"format": "np"}
    assert found.total == sum(array.nbytes for array in arrays.values())
    assert found.data + found.total == len(content)


def test_scalars_and_empty_tensors_are_tensors(tmp_path: Path) -> None:
    """A 0-dimensional tensor has one element, a zero dimension means no bytes."""
    save_file({"one": np.array(1.5, np.float32), "none": np.zeros((3, 0), np.float32)}, tmp_path / "m.safetensors")
    found = read_index(tmp_path / "m.safetensors").entries
    assert (found["one"].shape, found["one"].size) == ((), 4)
    assert (found["none"].shape, found["none"].size) == ((3, 0), 0)


def test_tied_tensors_are_there_under_each_name(tmp_path: Path) -> None:
    """Our converter stores a tied tensor once; readers find the same range under every name, and no bytes twice."""
    found = read_index(write(tmp_path, aliased('{"b": "a", "c": "a"}')))
    assert found.entries["a"] is found.entries["b"] is found.entries["c"]
    assert found.aliases == {"b": "a", "c": "a"}
    assert found.total == 8


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    """F1: every proper prefix of a good file is corrupt, never a smaller model."""
    content = valid()
    assert read_index(write(tmp_path, content)).total == 19
    for cut in range(len(content)):
        with pytest.raises(CorruptWeights):
            read_index(write(tmp_path, content[:cut]))


FAULTS = {
    "F3 trailing bytes": (blob({"a": tensor()}, bytes(18)), "10 trailing bytes"),
    "F3 no tensors but data": (blob({}, b"polyglot"), "8 trailing bytes"),
    "F3 hole": (blob({"a": tensor(), "b": tensor(offsets=(12, 20))}, bytes(20)), "'b': leaves a hole"),
    "F3 hole at the start": (blob({"a": tensor(offsets=(4, 12))}, bytes(12)), "'a': leaves a hole"),
    "F4 overlap": (blob({"a": tensor(), "b": tensor(offsets=(4, 12))}, bytes(12)), "'b': overlaps"),
    "F4 same bytes twice": (blob({"a": tensor(), "b": tensor()}, bytes(8)), "overlaps"),
    "F4 out of file": (blob({"a": tensor(shape=[4], offsets=(0, 16))}, bytes(8)), "outside the 8 bytes"),
    "F4 backwards": (blob({"a": tensor(offsets=(8, 0))}, bytes(8)), "'a': data_offsets 8..0"),
    "F4 negative offset": (blob({"a": tensor(offsets=(-8, 0))}, bytes(8)), "data_offsets holds -8"),
    "F4 huge offset": (blob({"a": tensor(offsets=(0, 1 << 64))}, bytes(8)), "data_offsets holds 18446744073709551616"),
    "F4 one offset": (blob({"a": tensor(offsets=(0,))}, bytes(8)), "not a pair"),
    "F4 three offsets": (blob({"a": tensor(offsets=(0, 4, 8))}, bytes(8)), "not a pair"),
    "F4 negative dimension": (blob({"a": tensor(shape=[-2, -1])}, bytes(8)), "shape holds -2"),
    "F4 boolean dimension": (blob({"a": tensor(shape=[True, 2])}, bytes(8)), "shape holds True"),
    "F4 text dimension": (blob({"a": tensor(shape=["2"])}, bytes(8)), "shape holds '2'"),
    "F4 shape is text": (blob({"a": tensor(shape="2")}, bytes(8)), "shape is not a list"),
    "F4 float dimension": (blob({"a": tensor(shape=[2.0])}, bytes(8)), "2.0"),
    "F4 infinite dimension": (blob(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', bytes(8)), "Inf"),
    "F4 overflow": (blob({"a": tensor(shape=[1 << 33, 1 << 33])}, bytes(8)), "overflows"),
    "F4 overflow hidden by a zero": (
        blob({"a": tensor(shape=[1 << 63, 1 << 63, 0], offsets=(0, 0))}),
        "overflows",
    ),
    "F4 too many dimensions": (blob({"a": tensor(shape=[1] * 65, offsets=(0, 4))}, bytes(4)), "65 dimensions"),
    "F4 size": (blob({"a": tensor(shape=[3])}, bytes(8)), "takes 12 bytes, not 8"),
    "F4 dtype": (blob({"a": tensor("F4")}, bytes(8)), "unknown dtype 'F4'"),
    "F4 dtype is a list": (blob({"a": tensor(["F32"])}, bytes(8)), "unknown dtype a list of 1"),
    "F4 missing field": (blob({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'data_offsets' is missing"),
    "F4 extra field": (blob({"a": {**tensor(), "also": 1}}, bytes(8)), "'also' is unknown"),
    "F4 entry is a list": (blob({"a": []}), "'a' is not an object"),
    "F4 metadata number": (blob({"__metadata__": {"n": 1}}), "__metadata__ 'n' is not a string"),
    "F4 metadata nested": (blob({"__metadata__": {"n": {}}}), "__metadata__ 'n' is not a string"),
    "F4 metadata list": (blob({"__metadata__": []}), "__metadata__ is not an object"),
    "F5 duplicate tensor": (
        blob(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2), bytes(8)),
        "duplicate key 'a'",
    ),
    "F5 duplicate field": (
        blob(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "duplicate key 'dtype'",
    ),
    "F5 escaped twin": (
        blob(b'{"a":%b,"\\u0061":%b}' % ((json.dumps(tensor()).encode(),) * 2), bytes(8)),
        "duplicate key 'a'",
    ),
    "F6 nested lists": (blob(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "F6 nested maps": (blob(b'{"a":' * 200_000), "nested too deeply"),
    "F6 a number of a million digits": (blob(b'{"a":' + b"9" * 1_000_000 + b"}"), "number that is too long"),
    "F7 parent": (blob({"../x": tensor()}, bytes(8)), "looks like a path"),
    "F7 parent within": (blob({"a/../x": tensor()}, bytes(8)), "looks like a path"),
    "F7 absolute": (blob({"/etc/passwd": tensor()}, bytes(8)), "looks like a path"),
    "F7 windows": (blob({"..\\x": tensor()}, bytes(8)), "looks like a path"),
    "F7 NUL": (blob({"a\0b": tensor()}, bytes(8)), "control character"),
    "F7 newline": (blob({"a\nb": tensor()}, bytes(8)), "control character"),
    "F7 long": (blob({"x" * 10_240: tensor()}, bytes(8)), "longer than 1024 bytes"),
    "F7 empty": (blob({"": tensor()}, bytes(8)), "empty name"),
    "F7 not UTF-8": (blob(b'{"\xff":1}'), "not UTF-8 at byte 2"),
    "F7 surrogate": (blob({"\ud800": tensor()}, bytes(8)), "not UTF-8"),
    "F7 surrogate in metadata": (blob({"__metadata__": {"k": "\udfff"}}), "not UTF-8"),
    "F2 2^63": (blob(b"{}", length=1 << 63), "over the cap"),
    "F2 100 MB + 1": (blob(b"{}", length=100_000_001), "over the cap"),
    "F2 file size": (blob(b"{}      ", length=16), "beyond the file's 16 bytes"),
    "F2 zero": (blob(b"", bytes(8)), "zeros"),
    "F2 one": (blob(b"{", bytes(8)), "too short"),
    "not JSON": (blob(b"{nonsense}"), "not JSON"),
    "not an object": (blob(b'["a","b"]'), "does not start with"),
    "two objects": (blob(b"{}{}"), "not JSON"),
    "nul padding": (blob(b"{}\0\0\0\0\0\0"), "not JSON"),
}


def aliased(table: str) -> bytes:
    return blob({"__metadata__": {index.ALIASES: table}, "a": tensor()}, bytes(8))


FAULTS |= {
    "alias of nothing": (aliased('{"b": "c"}'), "alias 'b' points at 'c', which is not stored"),
    "alias of an alias": (aliased('{"b": "c", "c": "a"}'), "points at 'c'"),
    "alias over a tensor": (aliased('{"a": "a"}'), "alias 'a' is a tensor as well"),
    "alias of a number": (aliased('{"b": 1}'), "points at 1"),
    "alias with a bad name": (aliased('{"../b": "a"}'), "looks like a path"),
    "alias twice": (aliased('{"b": "a", "b": "a"}'), "duplicate key 'b'"),
    "aliases in a list": (aliased("[]"), "is not an object"),
    "aliases nested": (aliased('{"b": ' * 200_000), "nested too deeply"),
}


@pytest.mark.parametrize(("content", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_bad_header_is_refused_and_the_fault_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """F2-F7: whatever is wrong is said, and the message holds no path."""
    with pytest.raises(CorruptWeights) as caught:
        read_index(write(tmp_path, content))
    assert words in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert len(caught.value.message) < 300


LOOKS = {
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 4,
    "xml": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "zip": b"PK\x03\x04" + bytes(200),
    "pickle": b"\x80\x02}q\x00." + b"abcdefgh",
    "gzip": b"\x1f\x8b\x08" + bytes(50),
    "gguf": b"GGUF\x03" + bytes(50),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
    "json": b'{"error": "Repository not found"}',
    "text": b"Entry not found, try again later",
    "an empty file": b"",
    "zeros": bytes(4096),
}


@pytest.mark.parametrize(("kind", "content"), LOOKS.items(), ids=LOOKS.keys())
def test_a_file_that_is_no_checkpoint_is_called_what_it_is(tmp_path: Path, kind: str, content: bytes) -> None:
    """F14, R40: an error page or another format is named instead of a riddle about lengths."""
    with pytest.raises(CorruptWeights, match=rf"not a safetensors checkpoint \(looks like {kind}\)"):
        read_index(write(tmp_path, content))


def _padded(length: int) -> bytes:
    """A valid file whose header has exactly `length` bytes."""
    empty = json.dumps({"__metadata__": {"pad": ""}, "a": tensor()})
    header = json.dumps({"__metadata__": {"pad": "x" * (length - len(empty))}, "a": tensor()}).encode()
    assert len(header) == length
    return blob(header, bytes(8))


@pytest.mark.parametrize("length", range(99_993, 100_002))
def test_headers_around_100_000_bytes_are_read(tmp_path: Path, length: int) -> None:
    """R36: sizes at which other readers' range logic breaks are nothing special here."""
    assert read_index(write(tmp_path, _padded(length))).total == 8


def test_the_cap_is_exact(tmp_path: Path) -> None:
    """R36: a header of the cap's size is read, one byte more is refused; with the default cap and a small one."""
    for cap in (index.HEADER_CAP, 512):
        assert read_index(write(tmp_path, _padded(cap)), header_cap=cap).total == 8
        with pytest.raises(CorruptWeights, match="over the cap"):
            read_index(write(tmp_path, _padded(cap + 1)), header_cap=cap)


def test_a_lying_length_allocates_nothing(tmp_path: Path) -> None:
    """F2: the length field is compared with the file before a buffer exists."""
    paths = [write(tmp_path, blob(b"{}", length=n), str(n)) for n in (1 << 63, (1 << 64) - 1, index.HEADER_CAP)]
    tracemalloc.start()
    try:
        for path in paths:
            with pytest.raises(CorruptWeights):
                read_index(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_more_than_a_million_tensors_are_refused(tmp_path: Path) -> None:
    """F6: the count is limited even under a cap that lets such a header through."""
    header = "{" + ",".join(f'"{n:x}":0' for n in range(index.TENSOR_CAP + 1)) + "}"
    with pytest.raises(CorruptWeights, match="1000001 tensors are over the limit"):
        read_index(write(tmp_path, blob(header.encode())), header_cap=128 << 20)


def test_names_of_the_allowed_length_and_odd_but_harmless_ones_are_kept(tmp_path: Path) -> None:
    """F7: the limit is on bytes, and a double dot inside a component is not a path."""
    names = ["é" * 512, "model..weight", "a/b", "层.weight", "a b"]
    header = {name: tensor(offsets=(8 * n, 8 * n + 8)) for n, name in enumerate(names)}
    assert list(read_index(write(tmp_path, blob(header, bytes(40)))).entries) == names
    with pytest.raises(CorruptWeights, match="longer than 1024 bytes"):
        read_index(write(tmp_path, blob({"é" * 513: tensor()}, bytes(8))))


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO, a directory or a missing file gives an error at once; nothing hangs, no path is told."""
    os.mkfifo(tmp_path / "fifo")
    for name, kind in (("fifo", CorruptWeights), ("", CorruptWeights), ("absent", FetchFailed), ("\0", FetchFailed)):
        with pytest.raises(kind) as caught:
            read_index(Path(f"{tmp_path}/{name}"))
        assert str(tmp_path) not in caught.value.message


def _consistent(found: WeightIndex, content: bytes) -> bool:
    position = found.data
    for entry in sorted(found.entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position:
            return False
        count = 1
        for dimension in entry.shape:
            count *= dimension
        if count * index.ITEM_BYTES[entry.dtype] != entry.size:
            return False
        position = entry.end
    return position == len(content) == found.data + found.total


def _outcome(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder), content)
        try:
            found = read_index(path)
        except CorruptWeights:
            return
        assert _consistent(found, content)


@given(st.lists(st.tuples(st.integers(0, len(valid()) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_give_a_refusal_or_a_consistent_index(edits: list[tuple[int, int]]) -> None:
    """F1-F7: no mutation of a valid file raises anything but `CorruptWeights`, or yields offsets that do not fit."""
    content = bytearray(valid())
    for position, value in edits:
        content[position] = value
    _outcome(bytes(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 65), 1 << 65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(index.ITEM_BYTES)) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@given(st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), ENTRY | JSON, max_size=3), st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_json_gives_a_refusal_or_a_consistent_index(header: dict[str, object], data: bytes) -> None:
    """F4: the header's grammar is closed, whatever JSON value stands where."""
    _outcome(blob(header, data))


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_refusal(content: bytes) -> None:
    """Noise of any kind is refused in words."""
    _outcome(content)
