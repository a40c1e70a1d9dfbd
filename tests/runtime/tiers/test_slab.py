"""Promises of the slab: what is laid reads back to the byte, and a bad one is refused with the field's name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from actors.errors import CorruptWeights, DiskFull, FetchFailed, LoadFailed
from runtime.tiers import slab as slab_module
from runtime.tiers.index import read_index
from runtime.tiers.lay import laying, plan
from runtime.tiers.recipe import Computed, Recipe, recipe_from
from runtime.tiers.slab import ALIGN, BLOCK, MAGIC, PAGE, read_slab, read_weights
from runtime.tiers.slabread import check_block, check_root, open_direct, read_data, scratch
from runtime.tiers.variant import Variant
from runtime.tiers.verify import finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.tiers.slab import Slab

FINGERPRINT = "ab" * 32
SOURCE = "cd" * 32
EVERYTHING = Variant()


def source(folder: Path, **tensors: np.ndarray[Any, Any]) -> Path:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return path


def laid(path: Path, recipe: Recipe | None = None, variant: Variant = EVERYTHING) -> Path:
    """Lay a slab of a safetensors file beside it."""
    layout = plan(read_index(path), recipe or Recipe(), variant, fingerprint=FINGERPRINT, source=SOURCE)
    target = path.with_suffix(".slab")
    reading = os.open(path, os.O_RDONLY)
    writing = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        finish(laying(layout, reading, writing))
    finally:
        os.close(reading)
        os.close(writing)
    assert target.stat().st_size == layout.size
    return target


def three(folder: Path) -> Path:
    return source(
        folder,
        a=np.arange(100, dtype=np.float32),
        b=np.arange(7, dtype=np.int8),
        c=np.arange(4, dtype=np.float32).reshape(2, 2),
        empty=np.zeros((0, 3), np.float16),
    )


def content(path: Path, slab: Slab, name: str) -> bytes:
    entry = slab.index.entries[name]
    return path.read_bytes()[entry.start : entry.end]


# -- laying --------------------------------------------------------------------------------------------


def test_a_slab_holds_the_same_bytes_where_it_says(tmp_path: Path) -> None:
    """Every tensor reads back, at multiples of 256 bytes behind a header that ends on a page."""
    original = three(tmp_path)
    path = laid(original)
    slab, index = read_slab(path), read_index(original)
    assert slab.index.entries.keys() == index.entries.keys()
    for name, entry in index.entries.items():
        assert content(path, slab, name) == original.read_bytes()[entry.start : entry.end]
        assert slab.index.entries[name].shape == entry.shape
        assert slab.header.tensors[name].offset % ALIGN == 0
    assert slab.data % PAGE == slab.size % PAGE == 0
    assert slab.index.slab
    assert (slab.header.fingerprint, slab.header.source) == (FINGERPRINT, SOURCE)
    assert read_weights(path) == slab.index


def test_a_header_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    """The same object for the same file, whatever else is read; a changed file is read again, and may be bad now."""
    path = laid(three(tmp_path))
    first = read_weights(path)
    for number in range(slab_module.REMEMBERED - 1):
        (tmp_path / str(number)).mkdir()
        read_weights(source(tmp_path / str(number), w=np.zeros(1, np.float32)))
    assert read_weights(path) is first
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"!")
    with pytest.raises(CorruptWeights):
        read_weights(path)
    assert len(slab_module._known) <= slab_module.REMEMBERED


def test_tensors_follow_in_the_order_of_first_use_and_the_rest_in_the_files(tmp_path: Path) -> None:
    """Names that are no tensors, or come twice, change nothing."""
    path = laid(three(tmp_path), Recipe(order=("c", "nonsense", "c", "b")))
    header = read_slab(path).header
    stored = sorted(header.tensors, key=lambda name: (header.tensors[name].offset, header.tensors[name].size))
    assert [name for name in stored if name != "empty"] == ["c", "b", "a"]


def test_checksums_are_those_of_the_data(tmp_path: Path) -> None:
    """xxh3_128 of each 4 MiB and blake3 of all, also when blocks cut through tensors."""
    values = np.random.default_rng(0).normal(size=(BLOCK + BLOCK // 2) // 4 + 5).astype(np.float32)
    path = laid(source(tmp_path, w=values, v=values[:1000]))
    slab = read_slab(path)
    data = path.read_bytes()[slab.data :]
    parts = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    assert slab.header.blocks == tuple(xxh3_128_hexdigest(part) for part in parts)
    assert slab.header.root == blake3(data).hexdigest()
    check_root(path, slab)


def test_tied_names_are_stored_once(tmp_path: Path) -> None:
    """The last name that the file has counts, as in `load_state_dict`; names it lacks become aliases too."""
    one, other = np.ones(3, np.float32), np.full(3, 2, np.float32)
    path = laid(source(tmp_path, head=one, embed=other, bias=one), Recipe(ties=(("head", "embed", "third"),)))
    slab = read_slab(path)
    assert dict(slab.header.aliases) == {"head": "embed", "third": "embed"}
    assert set(slab.header.tensors) == {"embed", "bias"}
    assert content(path, slab, "head") == other.tobytes()
    assert not slab.header.left_out


def test_computed_buffers_are_carried_and_are_no_state(tmp_path: Path) -> None:
    """A buffer that the file has as well is taken from the file."""
    buffers = {"ids": Computed("I64", (2,), bytes(range(16))), "b": Computed("I8", (7,), bytes(7))}
    path = laid(three(tmp_path), Recipe(buffers=buffers))
    slab = read_slab(path)
    assert slab.index.buffers == {"ids"}
    assert content(path, slab, "ids") == bytes(range(16))
    assert content(path, slab, "b") == bytes(range(7))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(buffers={"x": Computed("I64", (3,), b"short")}), "5 bytes, its shape takes 24"),
        (Recipe(buffers={"x": Computed("I65", (3,), b"")}), "unknown dtype"),
        (Recipe(buffers={"x": Computed("I8", (-3,), b"")}), "unsigned 64-bit"),
        (Recipe(buffers={"../x": Computed("I8", (0,), b"")}), "looks like a path"),
        (Recipe(ties=(("a", "\x00"),)), "control character"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, recipe: Recipe, words: str) -> None:
    """It comes from a process that runs models' code."""
    with pytest.raises(CorruptWeights, match=words):
        laid(three(tmp_path), recipe)


def test_a_recipe_survives_the_channel_and_garbage_does_not() -> None:
    """MessagePack there and back; anything else is an error of ours."""
    recipe = Recipe(("a",), (("a", "b"),), {"c": Computed("I8", (1,), b"x")})
    assert recipe_from(recipe.spelled()) == recipe
    for raw in (b"", b"\xff", recipe.spelled()[:-3], b"\x93" * 100_000):
        with pytest.raises(CorruptWeights):
            recipe_from(raw)
    assert Recipe(buffers={"big": Computed("U8", (1,), bytes(13 << 20))}).spelled() == b""


def test_a_source_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    """Half a slab is never complete."""
    original = source(tmp_path, w=np.zeros(1 << 20, np.float32))
    layout = plan(read_index(original), Recipe(), EVERYTHING, fingerprint=FINGERPRINT, source=SOURCE)
    os.truncate(original, 4096)
    reading = os.open(original, os.O_RDONLY)
    writing = os.open(tmp_path / "half", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(CorruptWeights, match="truncated"):
            finish(laying(layout, reading, writing))
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(CorruptWeights):
        read_slab(tmp_path / "half")


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    """F22: `/dev/full` refuses each write."""
    original = three(tmp_path)
    layout = plan(read_index(original), Recipe(), EVERYTHING, fingerprint=FINGERPRINT, source=SOURCE)
    reading, writing = os.open(original, os.O_RDONLY), os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(DiskFull):
            finish(laying(layout, reading, writing))
    finally:
        os.close(reading)
        os.close(writing)


# -- variants ------------------------------------------------------------------------------------------


def test_a_filter_takes_what_it_names(tmp_path: Path) -> None:
    """Included, less excluded; the rest is known as left out."""
    path = laid(three(tmp_path), variant=Variant(include=("[ac]", "empty"), exclude=("c*",)))
    slab = read_slab(path)
    assert set(slab.header.tensors) == {"a", "empty"}
    assert slab.index.left_out == {"b", "c"}


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (Variant(include=("a", "z*")), r"tensors.include: no tensor of the weights is called 'z\*'"),
        (Variant(exclude=("nothing",)), "tensors.exclude"),
        (Variant(exclude=("*",)), "nothing is left"),
    ],
)
def test_a_filter_that_fits_nothing_is_refused(tmp_path: Path, variant: Variant, words: str) -> None:
    """A typing error would else serve a model that is not meant."""
    with pytest.raises(LoadFailed, match=words):
        laid(three(tmp_path), variant=variant)


def test_a_precision_changes_what_is_floating_only(tmp_path: Path) -> None:
    """Half the bytes for the floating tensors, the same for the others, and a total that says so beforehand."""
    original = three(tmp_path)
    variant = Variant(dtype="bf16")
    slab = read_slab(laid(original, variant=variant))
    assert {name: one.dtype for name, one in slab.header.tensors.items()} == {
        "a": "BF16",
        "b": "I8",
        "c": "BF16",
        "empty": "BF16",
    }
    assert variant.total(read_index(original)) == 200 + 7 + 8


# -- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_data_are_read_and_checked_into_memory(tmp_path: Path, threads: int, *, direct: bool) -> None:
    """Past the page cache or through it, by one thread or several: the same bytes."""
    values = np.random.default_rng(1).normal(size=3 * BLOCK // 4 + 77).astype(np.float32)
    path = laid(source(tmp_path, w=values))
    slab = read_slab(path)
    target = scratch(slab.header.length)
    descriptor = open_direct(path) if direct else os.open(path, os.O_RDONLY)
    try:
        read_data(descriptor, slab, target, threads=threads)
    finally:
        os.close(descriptor)
    assert bytes(target) == path.read_bytes()[slab.data :]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_flipped_bit_is_found_in_its_block(tmp_path: Path, threads: int) -> None:
    """F16 for our own copy: every reader that checks finds it, and says where."""
    path = laid(source(tmp_path, w=np.ones(3 * BLOCK // 4, np.float32)))
    slab = read_slab(path)
    with path.open("r+b") as file:
        file.seek(slab.data + BLOCK + 5)
        file.write(b"\x01")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        check_block(descriptor, slab, 0, scratch())
        with pytest.raises(CorruptWeights, match="block 1"):
            check_block(descriptor, slab, 1, scratch())
        with pytest.raises(CorruptWeights, match="block 1"):
            read_data(descriptor, slab, scratch(slab.header.length), threads=threads)
        read_data(descriptor, slab, scratch(slab.header.length), verify=False)
    finally:
        os.close(descriptor)
    with pytest.raises(CorruptWeights, match="blake3"):
        check_root(path, slab)


def test_a_slab_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    """F1: nothing short is ever read as whole."""
    path = laid(three(tmp_path))
    whole = path.read_bytes()
    for length in (0, 4, 8, 15, 16, 20, 100, PAGE - 1, PAGE, len(whole) - PAGE, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptWeights):
            read_slab(path)
    path.write_bytes(whole + bytes(PAGE))
    with pytest.raises(CorruptWeights, match="length"):
        read_slab(path)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, PAGE - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_before_the_data_is_found(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    """Magic, length, header, its checksum and the padding: no bit of them is free."""
    folder = tmp_path_factory.mktemp("flip")
    path = laid(three(folder))
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    with pytest.raises(CorruptWeights):
        read_slab(path)


def hostile(path: Path, change: Mapping[str, object] | bytes, *, data: int = PAGE) -> Path:
    """A slab whose header says what it should not, under a checksum that fits."""
    tree: dict[str, object] = {
        "fingerprint": FINGERPRINT,
        "source": SOURCE,
        "length": PAGE,
        "tensors": {"w": {"dtype": "F32", "shape": [2, 2], "offset": 0}},
        "buffers": [],
        "aliases": {},
        "left_out": [],
        "blocks": ["0" * 32],
        "root": "0" * 64,
    }
    text = change if isinstance(change, bytes) else json.dumps({**tree, **change}).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    head += xxh3_128_digest(head)
    path.write_bytes(head + bytes(-len(head) % PAGE) + bytes(data))
    return path


def tensor(dtype: object = "F32", shape: object = (2,), offset: object = 0) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "offset": offset}


def test_the_hand_made_header_is_a_good_one(tmp_path: Path) -> None:
    """So that the next test refuses what it says."""
    assert read_slab(hostile(tmp_path / "s", {})).header.tensors["w"].size == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"source": SOURCE.upper()}, "source"),
        ({"root": 5}, "root"),
        ({"length": -4096}, "length"),
        ({"length": 4095}, "no multiple of 4096"),
        ({"length": 1 << 63}, "length"),
        ({"length": True}, "length"),
        ({"blocks": []}, "blocks is not a list of 1"),
        ({"blocks": ["0" * 31]}, "blocks holds"),
        ({"tensors": []}, "tensors is not an object"),
        ({"tensors": {"w": 5}}, "'w' is not an object"),
        ({"tensors": {"w": {"dtype": "F32", "shape": []}}}, "field 'offset' is missing"),
        ({"tensors": {"w": {**tensor(), "hidden": 1}}}, "field 'hidden' is unknown"),
        ({"tensors": {"w": tensor("F33")}}, "unknown dtype"),
        ({"tensors": {"w": tensor(shape=[-1])}}, "unsigned"),
        ({"tensors": {"w": tensor(shape=[1 << 62, 1 << 62])}}, "overflows"),
        ({"tensors": {"w": tensor(shape=[0, 1 << 63, 4])}}, "overflows"),
        ({"tensors": {"w": tensor(shape=[1] * 65)}}, "65 dimensions"),
        ({"tensors": {"w": tensor(shape=[1025])}}, "outside"),
        ({"tensors": {"w": tensor(offset=1 << 63)}}, "outside|multiple"),
        ({"tensors": {"w": tensor(offset=8)}}, "no multiple of 256"),
        ({"tensors": {"w": tensor(offset=256)}}, "leaves a hole"),
        ({"tensors": {"w": tensor(shape=[65]), "v": tensor(offset=256)}}, "overlaps"),
        ({"tensors": {"w": tensor(), "v": tensor()}}, "overlaps"),
        ({"tensors": {"w": tensor(), "v": tensor(offset=512)}}, "leaves a hole"),
        ({"tensors": {}}, "is not the 0 bytes"),
        ({"tensors": {"../w": tensor()}}, "looks like a path"),
        ({"tensors": {"w\x00": tensor()}}, "control character"),
        ({"tensors": {"\ud800": tensor()}}, "not UTF-8"),
        ({"tensors": {"w" * 2000: tensor()}}, "longer than"),
        ({"aliases": {"w": "w"}}, "is a tensor as well"),
        ({"aliases": {"v": "nowhere"}}, "not stored"),
        ({"aliases": {"v": {}}}, "not stored"),
        ({"aliases": []}, "aliases is not an object"),
        ({"buffers": ["v"]}, "is not stored"),
        ({"buffers": "w"}, "buffers is not a list"),
        ({"buffers": [5]}, "not a name"),
        ({"left_out": ["w"]}, "left_out: 'w' is stored"),
        ({"left_out": ["v", "v"]}, "twice"),
        ({"more": 1}, "field 'more' is unknown"),
        (b'{"fingerprint":"a","fingerprint":"b"}', "duplicate key 'fingerprint'"),
        (b'{"length":1.5}', "not an integer"),
        (b'{"length":' + b"9" * 5000 + b"}", "too long"),
        (b"[" * 100_000, "does not start"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply|not JSON"),
        (b"", "does not start"),
        (b"{", "not JSON"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b"{}", "is missing"),
    ],
)
def test_a_bad_slab_is_refused_and_the_fault_is_named(tmp_path: Path, change: Any, words: str) -> None:
    """F2 to F7: a checksum that fits is no reason to believe anything."""
    with pytest.raises(CorruptWeights, match=words):
        read_slab(hostile(tmp_path / "s", change))


@pytest.mark.parametrize("length", [0, 1, (1 << 63), (1 << 64) - 1, slab_module.HEADER_CAP + 1])
def test_a_hostile_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    """F2: it is compared with the file before a byte is read."""
    path = tmp_path / "s"
    path.write_bytes(MAGIC + length.to_bytes(8, "little"))
    with pytest.raises(CorruptWeights, match=r"header|truncated|cap"):
        read_slab(path)


def test_something_hidden_before_the_data_is_found(tmp_path: Path) -> None:
    """F3: the padding is zeros."""
    path = hostile(tmp_path / "s", {})
    raw = bytearray(path.read_bytes())
    raw[PAGE - 1] = 1
    path.write_bytes(raw)
    with pytest.raises(CorruptWeights, match="between header and data"):
        read_slab(path)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO, a directory, nothing, a name with NUL."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises((CorruptWeights, FetchFailed)):
            read_slab(path)
    for path in (tmp_path / "none", Path("a\0b")):
        with pytest.raises(FetchFailed) as caught:
            read_slab(path)
        assert str(path) not in caught.value.message
