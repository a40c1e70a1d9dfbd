"""The contract of an engine, over every one: what it answers, what it refuses, and that nothing of it stays behind."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from actors.errors import BadTensor, Conflict, CorruptWeights, ForeloadError, InferenceFailed, LoadFailed
from runtime.worker.core import Cancelled, Core
from runtime.worker.memory import heap_in_use
from runtime.workers.port import ArtefactSpec, Note, TensorSpec
from tests.contracts.engine_kit import (
    ENGINES,
    F32,
    Artefact,
    artefact,
    ask,
    compile_package,
    drain,
    field,
    module,
    never,
    onnx_of,
    outputs_of,
    send,
    tensor,
)
from tests.runtime.worker.modules import ALLOW

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = np.linspace(-1, 1, 8, dtype=F32).reshape(2, 4)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
FILES = [engine for engine in ENGINES if engine != "eager"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artefact]:
    """The artefact of an engine, made once."""
    known: dict[str, Artefact] = {}

    def give(engine: str) -> Artefact:
        if engine not in known:
            known[engine] = artefact(engine, tmp_path_factory.mktemp(engine))
        return known[engine]

    return give


@pytest.fixture
def core() -> Core:
    """A core on the CPU that may build the test modules."""
    return Core("cpu:0", ALLOW)


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What plain PyTorch computes."""
    with torch.inference_mode():
        return np.asarray(module()(torch.from_numpy(x.copy())))


@pytest.mark.parametrize("engine", ENGINES)
def test_it_answers_what_plain_pytorch_does(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """One model in six formats: the same numbers within 1e-5, for one row and for many."""
    loaded = core.load(made(engine).spec(engine), never)
    assert loaded.resident > 0
    assert not loaded.reused
    for x in (X, X[:1], np.repeat(X, 4, axis=0)):
        np.testing.assert_allclose(ask(core, "m@1", x=x)["y"], expected(x), **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
def test_it_comes_and_goes_any_number_of_times(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """Load, call, evict, over and over: same answers, measured bytes come back, an evicted model cannot be called."""
    spec = made(engine).spec(engine)
    for _ in range(4):
        loaded = core.load(spec, never)
        np.testing.assert_allclose(ask(core, "m@1", x=X)["y"], expected(X), **TOLERANCE)
        assert core.load(spec, never).reused, "a second load finds it resident"
        evicted = core.evict("m@1")
        assert (evicted.returned, evicted.leaked) == (loaded.resident, 0)
        assert core.inventory() == []
        with pytest.raises(ForeloadError, match="not resident"):
            send(core, "m@1", [], x=X)


@pytest.mark.parametrize("engine", FILES)
def test_memory_comes_back(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """Twenty residencies leave less behind than one of them holds; what is measured covers the weights."""
    spec = made(engine).spec(engine)
    for _ in range(3):  # caches that a library fills once are not a leak
        resident = core.load(spec, never).resident
        core.evict("m@1")
    assert resident >= made(engine).bytes
    gc.collect()
    before = heap_in_use()
    for _ in range(20):
        core.load(spec, never)
        core.evict("m@1")
    gc.collect()
    assert heap_in_use() - before < max(resident, 1 << 20)


@pytest.mark.parametrize("engine", ENGINES)
def test_its_measured_bytes_hardly_vary(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """A footprint that planning rests on is not noise: the third and fourth load agree within a half and some pages."""
    spec = made(engine).spec(engine)
    sizes = []
    for _ in range(4):
        sizes.append(core.load(spec, never).resident)
        core.evict("m@1")
    assert max(sizes[2:]) <= 1.5 * min(sizes[2:]) + (256 << 10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": X.astype(np.float64)}, "FP64"),
        ({"x": X[:, :3]}, "shape"),
        ({"x": X.ravel()}, "shape"),
        ({"q": X}, "q"),
        ({}, "x"),
    ],
    ids=["dtype", "extent", "rank", "name", "missing"],
)
def test_a_wrong_input_is_the_callers_mistake(
    core: Core, made: Callable[[str], Artefact], engine: str, arrays: dict[str, np.ndarray[Any, Any]], said: str
) -> None:
    """Wrong datatype, shape, name, or nothing: an error that names it, and the model goes on."""
    core.load(made(engine).spec(engine), never)
    with pytest.raises(ForeloadError, match=said):
        ask(core, "m@1", **arrays)
    np.testing.assert_allclose(ask(core, "m@1", x=X)["y"], expected(X), **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_share_a_forward_and_get_their_own_rows(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """Batched: three calls, one forward, everyone's rows; unbatched: the same numbers."""
    rows = [X[:1], X, X[1:] * 3]
    core.load(made(engine).spec(engine), never)
    told: list[Any] = []
    for x in rows:
        send(core, "m@1", told, x=x)
    drain(core)
    assert [answer.timings.batch for answer in told] == [3, 3, 3]
    for x, answer in zip(rows, told, strict=True):
        np.testing.assert_allclose(outputs_of(answer)["y"], expected(x), **TOLERANCE)
        np.testing.assert_allclose(ask(core, "m@1", x=x)["y"], expected(x), **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_not_evicted_under_a_call(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """I3: a call in flight keeps it, and is answered."""
    core.load(made(engine).spec(engine), never)
    told: list[Any] = []
    send(core, "m@1", told, x=X)
    with pytest.raises(Conflict):
        core.evict("m@1")
    drain(core)
    np.testing.assert_allclose(outputs_of(told[0])["y"], expected(X), **TOLERANCE)
    assert core.evict("m@1").leaked == 0


@pytest.mark.parametrize("engine", FILES)
def test_it_loads_and_leaves_while_another_serves(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """Concurrency with another engine: eager answers correctly all the time, and so does each newcomer."""
    core.load(made("eager").spec("eager", key="steady@1"), never)
    wanted = expected(X)
    faults: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(3):
                core.load(made(engine).spec(engine), never)
                core.evict("m@1")
        except BaseException as fault:  # noqa: BLE001  # it is the main thread that fails the test
            faults.append(fault)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    while thread.is_alive():
        np.testing.assert_allclose(ask(core, "steady@1", x=X)["y"], wanted, **TOLERANCE)
    thread.join()
    assert faults == []
    core.load(made(engine).spec(engine), never)
    np.testing.assert_allclose(ask(core, "m@1", x=X)["y"], wanted, **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_names_share_one_file_and_the_last_one_takes_it_along(
    core: Core, made: Callable[[str], Artefact], engine: str
) -> None:
    """The same fingerprint under two keys is opened once."""
    spec = made(engine).spec(engine)
    core.load(spec, never)
    core.load(msgspec.structs.replace(spec, key="twin@1"), never)
    assert core.evict("m@1").returned == 0
    np.testing.assert_allclose(ask(core, "twin@1", x=X)["y"], expected(X), **TOLERANCE)
    assert core.evict("twin@1").returned > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cancelled_load_leaves_nothing(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """Cancelled after each of its steps in turn, and loaded for good afterwards."""
    spec = made(engine).spec(engine)
    for step in range(1, 4):
        left = iter([False] * step)
        with pytest.raises(Cancelled):
            core.load(spec, lambda left=left: next(left, True))
        assert core.inventory() == []
    core.load(spec, never)
    np.testing.assert_allclose(ask(core, "m@1", x=X)["y"], expected(X), **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cut", ["empty", "head", "half", "tail"])
def test_a_truncated_file_is_corrupt_and_disturbs_nobody(
    core: Core, made: Callable[[str], Artefact], tmp_path: Path, engine: str, cut: str
) -> None:
    """F1: cut anywhere, it is refused as corrupt, without its path; a model beside it goes on."""
    core.load(made("eager").spec("eager", key="steady@1", fingerprint="steady"), never)
    raw = made(engine).path.read_bytes()
    short = tmp_path / f"secret-{made(engine).path.name}"
    short.write_bytes(raw[: {"empty": 0, "head": 5, "half": len(raw) // 2, "tail": len(raw) - 7}[cut]])
    spec = made(engine).spec(engine, weights=str(short))
    with pytest.raises((CorruptWeights, LoadFailed)) as refused:
        core.load(spec, never)
    assert engine == "openvino" or isinstance(refused.value, CorruptWeights)
    assert "secret" not in refused.value.message
    assert [one.key for one in core.inventory()] == ["steady@1"]
    np.testing.assert_allclose(ask(core, "steady@1", x=X)["y"], expected(X), **TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "content",
    [b"<html>404</html>" * 20, b"PK\x03\x04" + bytes(400), b"\x80\x02}q\x00." * 40],
    ids=["html", "zip", "pickle"],
)
def test_another_kind_of_file_is_refused_by_what_it_looks_like(
    core: Core, made: Callable[[str], Artefact], tmp_path: Path, engine: str, content: bytes
) -> None:
    """F14: an error page or a pickle under the right name."""
    path = tmp_path / made(engine).path.name
    path.write_bytes(content)
    with pytest.raises((CorruptWeights, LoadFailed)):
        core.load(made(engine).spec(engine, weights=str(path)), never)
    assert core.inventory() == []


@pytest.mark.parametrize("engine", FILES)
def test_a_manifest_that_is_not_the_files_is_refused_by_name(
    core: Core, made: Callable[[str], Artefact], engine: str
) -> None:
    """A tensor too many fails the load, not the first request; the right manifest then loads."""
    spec = made(engine).spec(engine, inputs=(*made(engine).spec(engine).inputs, TensorSpec("extra", "FP32", (-1, 4))))
    with pytest.raises(LoadFailed, match=r"extra|takes"):
        core.load(spec, never)
    assert core.inventory() == []
    core.load(made(engine).spec(engine), never)


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs": (TensorSpec("z", "FP32", (-1, 4)),)}, "input 'z' is not in the file"),
        ({"inputs": (TensorSpec("x", "INT64", (-1, 4)),)}, "input 'x' is FP32 in the file"),
        ({"inputs": (TensorSpec("x", "FP32", (-1, 5)),)}, "input 'x' has shape"),
        ({"inputs": (TensorSpec("x", "FP32", (-1, 4, 1)),)}, "input 'x' has shape"),
        ({"outputs": (TensorSpec("z", "FP32", (-1, 3)),)}, "output 'z' is not in the file"),
        ({"outputs": (TensorSpec("y", "BF16", (-1, 3)),)}, "output 'y' is FP32 in the file"),
    ],
)
def test_a_graph_with_names_is_compared_with_the_manifest(
    core: Core, made: Callable[[str], Artefact], engine: str, changes: dict[str, Any], said: str
) -> None:
    """Name, datatype, rank and extent of each tensor, at the load."""
    with pytest.raises(LoadFailed, match=said):
        core.load(made(engine).spec(engine, **changes), never)


@pytest.mark.parametrize("engine", ["export", "aot", "torchscript"])
def test_what_can_run_code_needs_trust(core: Core, made: Callable[[str], Artefact], engine: str) -> None:
    """F13: without it the file is not even opened."""
    with pytest.raises(LoadFailed, match="can run code"):
        core.load(made(engine).spec(engine, trusted=False, weights="/nonexistent"), never)


def test_an_unknown_engine_is_refused(core: Core, made: Callable[[str], Artefact]) -> None:
    """A spec from elsewhere."""
    with pytest.raises(LoadFailed, match="known are"):
        core.load(made("onnx").spec("tensorflow"), never)


@pytest.mark.parametrize(("engine", "library"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_a_missing_extra_is_named(
    core: Core, made: Callable[[str], Artefact], monkeypatch: pytest.MonkeyPatch, engine: str, library: str
) -> None:
    """The error says what to install."""
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(LoadFailed, match=rf"foreload\[{engine}\]"):
        core.load(made(engine).spec(engine), never)


def test_a_compiled_package_refuses_what_it_would_read_past(core: Core, tmp_path: Path) -> None:
    """Machine code believes one input's size of all of them; unequal ones are refused before it runs."""

    class Added(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        Added(), (torch.zeros(3, 4), torch.zeros(3, 4)), dynamic_shapes=({0: batch}, {0: batch})
    )
    path = tmp_path / "added.pt2"
    compile_package(program, path)
    inputs = (TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "FP32", (-1, 4)))
    outputs = (TensorSpec("y", "FP32", (-1, 4)),)
    core.load(Artefact(path).spec("aot", inputs=inputs, outputs=outputs), never)
    np.testing.assert_array_equal(ask(core, "m@1", a=X, b=X)["y"], 2 * X)
    with pytest.raises(BadTensor, match="equal"):
        ask(core, "m@1", a=np.repeat(X, 500, axis=0), b=X)
    with pytest.raises(InferenceFailed):
        ask(core, "m@1", a=np.repeat(X, 5000, axis=0), b=np.repeat(X, 5000, axis=0))
    np.testing.assert_array_equal(ask(core, "m@1", a=X, b=X)["y"], 2 * X)


def test_onnx_with_its_data_elsewhere_is_refused(core: Core, tmp_path: Path) -> None:
    """F18: a reference to another file is one out of the model, whatever file that is."""

    def elsewhere(name: str, array: np.ndarray[Any, Any]) -> bytes:
        return tensor(name, array, field(13, field(1, "location") + field(2, "/etc/passwd")), field(14, 1))

    path = tmp_path / "m.onnx"
    path.write_bytes(onnx_of(module(), elsewhere))
    with pytest.raises(CorruptWeights, match=r"graph\.initializer: keeps its data in another file"):
        core.load(Artefact(path).spec("onnx"), never)


def test_openvino_keeps_what_it_compiled(made: Callable[[str], Artefact], tmp_path: Path) -> None:
    """The second worker imports the first one's code: same answers, the time saved is told; a damaged one is remade."""
    spec = made("openvino").spec("openvino", artefacts=ArtefactSpec(str(tmp_path / "kept"), 1 << 30))
    notes: list[Note] = []

    def cold() -> None:
        core = Core("cpu:0", ALLOW)
        core.listen(notes.append)
        core.load(spec, never)
        np.testing.assert_allclose(ask(core, "m@1", x=X)["y"], expected(X), **TOLERANCE)

    cold()
    cold()
    (blob,) = tmp_path.glob("kept/*/model.blob")
    blob.write_bytes(blob.read_bytes()[:-1])
    cold()
    assert [note.phase for note in notes] == ["finished", "reused", "finished"]
    assert notes[1].saved >= 0
