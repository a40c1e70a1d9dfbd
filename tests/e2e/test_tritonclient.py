"""NVIDIA's unmodified `tritonclient[http]` against the real server with real weights (T13)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils as exceptions

from tests.e2e import shelf
from tests.e2e.live import HOST, serving
from tests.e2e.plain import MODELS, known, same

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.e2e.live import Live

pytestmark = pytest.mark.real

CODINGS = (None, "gzip", "deflate")
DATATYPES = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, demo_repository: Path, demo_cache: Path) -> Iterator[Live]:
    """One server for the module: a start takes seconds, and no test here depends on what another left resident."""
    folder = tmp_path_factory.mktemp("triton")
    for name, extra in (("echo", {}), ("late", {"factory": "late", "seconds": 1.0}), ("broken", {"factory": "absent"})):
        shelf.put(folder / "models", name, **extra)
    shelf.put(folder / "models", "huge", width=30_000_000)
    repositories = [str(folder / "models"), str(demo_repository)]
    with serving(folder, repository=repositories, disk__path=str(demo_cache), devices__memory="200MB") as running:
        yield running


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    """A connection of its own for each test."""
    made = triton.InferenceServerClient(f"{HOST}:{live.port}", network_timeout=60, connection_timeout=10, concurrency=8)
    try:
        yield made
    finally:
        made.close()


def given(arrays: Mapping[str, NDArray[Any]], *, binary: bool, module: Any = triton) -> list[Any]:
    """Input tensors as the client wants them."""
    tensors = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), DATATYPES[array.dtype])
        tensor.set_data_from_numpy(array, binary_data=binary)
        tensors.append(tensor)
    return tensors


def row(width: int = 3) -> dict[str, NDArray[Any]]:
    """One row for the small models."""
    return {"x": np.ones((1, width), np.float32)}


def refused(call: Any) -> str:
    """The text of the exception that a call ends in."""
    with pytest.raises(exceptions.InferenceServerException) as caught:
        call()
    return str(caught.value)


def test_live_ready_and_metadata(client: Any) -> None:
    """Server and model health, metadata with what every manifest says; a cold model counts as ready."""
    assert client.is_server_live()
    assert client.is_server_ready()
    server = client.get_server_metadata()
    assert server["name"] == "foreload"
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(server["extensions"])
    for name in MODELS:
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "1")
        metadata = client.get_model_metadata(name)
        assert (metadata["name"], metadata["versions"]) == (name, ["1"])
        assert metadata["platform"].startswith("pytorch")
    assert client.get_model_metadata("minilm")["inputs"] == [
        {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
    ]
    assert not client.is_model_ready("nobody")
    assert not client.is_model_ready("minilm", "2")


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_every_demo_model_answers_as_plain_pytorch(client: Any, demo_repository: Path, *, binary: bool) -> None:
    """T13, T14: eight real models through the client, tensors in binary and in JSON, equal to PyTorch's numbers."""
    for name, case in known(demo_repository).items():
        outputs = [triton.InferRequestedOutput(output, binary_data=binary) for output in case.outputs]
        result = client.infer(name, given(case.inputs, binary=binary), outputs=outputs, request_id=f"r-{name}")
        same({output: result.as_numpy(output) for output in case.outputs}, case.outputs)
        response = result.get_response()
        assert (response["model_name"], response["model_version"], response["id"]) == (name, "1", f"r-{name}")


@pytest.mark.parametrize("there", CODINGS)
@pytest.mark.parametrize("back", CODINGS)
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_compression_both_ways(
    client: Any, demo_repository: Path, there: str | None, back: str | None, *, binary: bool
) -> None:
    """Gzip and deflate on the way there and back, in every combination, change no number."""
    case = known(demo_repository)["crepe-tiny"]
    outputs = [triton.InferRequestedOutput("activation", binary_data=binary)]
    result = client.infer(
        "crepe-tiny",
        given(case.inputs, binary=binary),
        outputs=outputs,
        request_compression_algorithm=there,
        response_compression_algorithm=back,
    )
    same({"activation": result.as_numpy("activation")}, case.outputs)


def test_default_outputs_come_all_and_binary(client: Any, demo_repository: Path) -> None:
    """Without a selection every output comes; the client asks for binary by itself."""
    case = known(demo_repository)["mtcnn-onet"]
    result = client.infer("mtcnn-onet", given(case.inputs, binary=True))
    same({name: result.as_numpy(name) for name in case.outputs}, case.outputs)
    assert all("binary_data_size" in output["parameters"] for output in result.get_response()["outputs"])


def test_index_load_and_unload(client: Any, live: Live) -> None:
    """Index with the empty body it sends; load is synchronous, unload gives the place back, infer loads again (P3)."""
    client.unload_model("echo")
    client.load_model("echo")
    rows = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert set(MODELS) | {"echo", "late", "broken", "huge"} <= set(rows)
    assert rows["echo"] == {"name": "echo", "version": "1", "state": "READY"}
    assert "echo" in live.residents()
    client.load_model("echo")  # the same again is nothing to do
    client.unload_model("echo")
    live.until(lambda: "echo" not in live.residents(), "gone")
    rows = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert rows["echo"] == {"name": "echo", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert client.is_model_ready("echo"), "it loads on demand"
    result = client.infer("echo", given(row(), binary=True))
    np.testing.assert_array_equal(result.as_numpy("y"), shelf.expected(np.ones((1, 3), np.float32)))


def test_error_texts_are_sentences(client: Any) -> None:
    """Section 4: `[status] sentence` for everything that can go wrong, and nothing that the client cannot print."""
    x = given(row(), binary=True)
    assert refused(lambda: client.infer("nobody", x)) == "[404] model 'nobody' is not known"
    assert "[404]" in refused(lambda: client.infer("echo", x, model_version="9"))
    assert "[404]" in refused(lambda: client.load_model("nobody"))
    assert "[404]" in refused(lambda: client.unload_model("nobody"))
    assert "[404]" in refused(lambda: client.get_model_metadata("nobody"))
    assert "[404]" in refused(lambda: client.get_inference_statistics("nobody"))
    assert "[507]" in refused(lambda: client.load_model("huge"))
    assert "[507]" in refused(lambda: client.infer("huge", x))
    assert "[400]" in refused(lambda: client.load_model("echo", config="{}"))
    assert "[400]" in refused(lambda: client.load_model("echo", files={"file:1/model.pt": b"x"}, config="{}"))
    broken = refused(lambda: client.load_model("broken"))
    assert "[503]" in broken
    assert "/" not in broken.replace("[503]", ""), "no path in an answer"
    for call in (lambda: client.get_model_config("echo"), client.get_trace_settings, client.get_log_settings):
        assert "[501]" in refused(call)


def test_bad_tensors_are_400_and_name_the_field(client: Any) -> None:
    """F29: a wrong name, shape, datatype or output is the caller's mistake, and the answer says which."""
    wide = given({"x": np.ones((1, 5), np.float32)}, binary=True)
    assert "x" in refused(lambda: client.infer("echo", wide))
    whole = given({"x": np.ones((1, 3), np.int64)}, binary=True)
    assert "FP32" in refused(lambda: client.infer("echo", whole))
    other = given({"z": np.ones((1, 3), np.float32)}, binary=True)
    assert "'z'" in refused(lambda: client.infer("echo", other))
    for tensors in (wide, whole, other):
        assert refused(lambda tensors=tensors: client.infer("echo", tensors)).startswith("[400]")
    nothing = [triton.InferRequestedOutput("nothing")]
    assert "[400]" in refused(lambda: client.infer("echo", given(row(), binary=True), outputs=nothing))
    assert client.is_model_ready("echo")


def test_concurrent_loads_of_one_model_are_one_load(client: Any, live: Live) -> None:
    """R5: eight load calls and as many infers at once: one load on the device, every one of them 200."""
    client.unload_model("late")
    live.until(lambda: "late" not in live.residents(), "cold")
    before = len([line for line in live.said("loaded") if (line["device"], line["model"]) == ("cpu:0", "late@1")])
    pending = [client.async_infer("late", given(row(), binary=True)) for _ in range(7)]
    client.load_model("late")
    for each in pending:
        np.testing.assert_array_equal(each.get_result().as_numpy("y"), shelf.expected(np.ones((1, 3), np.float32)))
    after = len([line for line in live.said("loaded") if (line["device"], line["model"]) == ("cpu:0", "late@1")])
    assert after - before == 1


def test_statistics_count_what_was_asked(client: Any) -> None:
    """Section 8: successes, failures and batches of one model, and of all."""
    before = client.get_inference_statistics("mtcnn-rnet", "1")["model_stats"][0]
    x = given({"image": np.zeros((1, 3, 24, 24), np.float32)}, binary=True)
    for _ in range(3):
        client.infer("mtcnn-rnet", x)
    after = client.get_inference_statistics("mtcnn-rnet", "1")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert {each["name"] for each in client.get_inference_statistics()["model_stats"]} >= set(MODELS)


def test_deadline_of_a_request(client: Any, live: Live) -> None:
    """Its `timeout` in microseconds passes while the model loads: 504; without one the same request succeeds."""
    client.unload_model("late")
    live.until(lambda: "late" not in live.residents(), "cold")
    x = given(row(), binary=True)
    assert refused(lambda: client.infer("late", x, timeout=1)).startswith("[504]")
    assert client.infer("late", x).as_numpy("y").shape == (1, 3)


async def test_the_async_client(live: Live, demo_repository: Path) -> None:
    """The aiohttp client: health, metadata, repository, and forty inferences of five models at once."""
    cases = [case for name, case in known(demo_repository).items() if name not in {"minilm", "crepe-full", "speaker"}]
    async with triton_aio.InferenceServerClient(f"{HOST}:{live.port}") as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert (await client.get_server_metadata())["name"] == "foreload"
        assert len(await client.get_model_repository_index()) >= len(MODELS)
        await client.load_model("echo")
        await client.unload_model("echo")

        async def one(at: int) -> None:
            case = cases[at % len(cases)]
            result = await client.infer(case.name, given(case.inputs, binary=at % 2 == 0, module=triton_aio))
            # Requests of one model may share a forward here, and batches of other sizes round differently.
            same({name: result.as_numpy(name) for name in case.outputs}, case.outputs, within=1e-5)

        await asyncio.gather(*(one(at) for at in range(40)))
        with pytest.raises(exceptions.InferenceServerException, match=r"\[404\] model 'nobody' is not known"):
            await client.infer("nobody", given(row(), binary=True, module=triton_aio))
