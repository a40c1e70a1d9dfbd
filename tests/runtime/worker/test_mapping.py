"""Mapped weights: shared while clean, private once written, clean again on demand; measured, not assumed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from actors.errors import CorruptWeights, FetchFailed
from runtime.tiers.index import Entry, WeightIndex, read_index
from runtime.worker.cuda import CHUNK, chunks, plan
from runtime.worker.mapping import TORCH_DTYPES, Mapping
from runtime.worker.memory import Watch, resident_bytes
from runtime.worker.skeleton import Skeleton, build
from runtime.workers.heap import give_back


def process_memory() -> tuple[int, int, int]:
    """Bytes of this process by the kernel's roll-up: resident, its share of them, and not backed by files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    rows = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)}
    return rows["Rss"], rows["Pss"], rows.get("Anonymous", 0)


def mapped(path: Path, state: dict[str, torch.Tensor]) -> Mapping:
    """A file with these tensors, mapped."""
    save_file(state, path)
    return Mapping(path, read_index(path))


def test_every_dtype_is_viewed_with_its_values(tmp_path: Path) -> None:
    """All of safetensors' dtypes, empty and scalar tensors included."""
    state = {name: torch.tensor([0, 1, 1, 0]).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    state |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(7.0)}
    weights = mapped(tmp_path / "w", state)
    weights.populate()
    assert weights.names == set(state)
    for name, tensor in state.items():
        view = weights.view(name)
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert view.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_write_makes_its_page_private_and_reset_undoes_it(tmp_path: Path) -> None:
    """Exactly the pages written become private; the file and other mappings never see it."""
    path = tmp_path / "w"
    weights = mapped(path, {"a": torch.zeros(1 << 20)})
    weights.populate()
    before = path.read_bytes()
    assert weights.written() == 0
    view = weights.view("a")
    view.data[::200_000] = 5
    assert 0 < weights.written() <= 6 * 4096
    assert path.read_bytes() == before
    assert Mapping(path, read_index(path)).view("a").count_nonzero() == 0
    weights.reset()
    assert weights.written() == 0
    assert view.count_nonzero() == 0


def test_populating_costs_page_cache_but_no_private_memory(tmp_path: Path) -> None:
    """64 MB of weights become resident without one private page of them."""
    weights = mapped(tmp_path / "w", {"a": torch.ones(16 << 20)})
    gc.collect()
    was_resident, _, was_private = process_memory()
    weights.populate()
    resident, shared_out, private = process_memory()
    assert resident - was_resident > 60 << 20
    assert private - was_private < 8 << 20
    assert weights.written() == 0
    assert 0 < shared_out <= resident


def test_misplaced_tensors_are_copied_into_alignment(tmp_path: Path) -> None:
    """A header may put data at any byte; kernels still get aligned memory."""
    path = tmp_path / "w"
    path.write_bytes(b"\0" + torch.arange(4.0).numpy().tobytes())
    weights = Mapping(path, WeightIndex({"a": Entry("F32", (4,), 1, 17)}))
    assert weights.view("a").tolist() == [0, 1, 2, 3]
    assert not weights.holds(weights.view("a"))


def test_an_unknown_dtype_or_a_short_file_is_corrupt(tmp_path: Path) -> None:
    """The index is held against the file, not believed."""
    path = tmp_path / "w"
    path.write_bytes(b"\0" * 16)
    with pytest.raises(CorruptWeights, match="F4"):
        Mapping(path, WeightIndex({"a": Entry("F4", (4,), 0, 16)})).view("a")
    with pytest.raises(CorruptWeights, match="16 bytes where its header needs 17"):
        Mapping(path, WeightIndex({"a": Entry("F32", (4,), 1, 17)}))
    with pytest.raises(FetchFailed):
        Mapping(tmp_path / "none", WeightIndex({}))


def test_a_file_cut_after_mapping_fails_populate_instead_of_killing_the_process(tmp_path: Path) -> None:
    """Populating reports what a plain read would turn into SIGBUS."""
    path = tmp_path / "w"
    weights = mapped(path, {"a": torch.zeros(1 << 20)})
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CorruptWeights):
        weights.populate()


def test_watch_sees_views_and_lets_cycles_go() -> None:
    """A live view is leaked bytes; one kept alive by a cycle only is collected first."""
    tensors = [torch.zeros(100), torch.zeros(50)]
    watch = Watch(tensors)
    assert watch.leaked() == 0
    view = tensors[0][3:]
    assert watch.leaked() == 400
    loop: list[object] = [view]
    loop.append(loop)
    del view, loop
    assert watch.leaked() == 0


def test_bytes_of_tied_tensors_count_once() -> None:
    """The same object twice is one footprint."""
    one = torch.zeros(10)
    assert resident_bytes([one, one, torch.zeros(5)]) == 60
    give_back()


def test_building_a_skeleton_allocates_no_weights() -> None:
    """A 400 MB module costs no memory to build, ties keep their object, and other threads' builds are untouched."""

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(10_000, 10_000, bias=False)
            self.same = self.a.weight
            self.register_buffer("steps", torch.arange(3), persistent=False)

    gc.collect()
    before = process_memory()[0]
    skeleton = Skeleton(Big)
    assert process_memory()[0] - before < 50 << 20
    assert skeleton.module.get_buffer("steps").tolist() == [0, 1, 2]
    assert len(skeleton.cells) == 2
    assert skeleton.cells[0].names == ["same", "a.weight"]
    assert build(lambda: nn.Linear(2, 2)).get_parameter("weight").is_meta
    assert not nn.Linear(2, 2).weight.is_meta, "outside a build, modules are what they always were"


SIZES = [0, 1, 255, 256, 257, CHUNK, CHUNK + 5, 3 * CHUNK - 1, 7]


@pytest.mark.parametrize("limit", [300, 4096, CHUNK])
def test_chunks_cover_every_byte_once_within_the_limit(limit: int) -> None:
    """The GPU's copies: contiguous pieces in order, none larger than the staging buffer, nothing overlapping."""
    sizes = [size if limit == CHUNK else size % 20_000 for size in SIZES]
    offsets, total = plan(sizes)
    assert all(offset % 256 == 0 for offset in offsets)
    done = dict.fromkeys(range(len(sizes)), 0)
    end = 0
    for chunk in chunks(sizes, offsets, limit):
        assert 0 < chunk.length <= limit
        assert chunk.start >= end
        end = chunk.start + chunk.length
        for piece in chunk.pieces:
            assert piece.source == done[piece.tensor]
            assert chunk.start + piece.target == offsets[piece.tensor] + piece.source
            assert piece.target + piece.length <= chunk.length
            done[piece.tensor] += piece.length
    assert list(done.values()) == sizes
    assert end <= total
