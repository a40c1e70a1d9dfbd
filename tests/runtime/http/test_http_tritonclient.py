"""The unmodified tritonclient against the server (T13, the HTTP part)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils as exceptions

from actors.errors import Busy
from runtime.http.limits import Limits
from tests.runtime.http.fake import FakeBackend, served

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def connected(backend: FakeBackend, limits: Limits | None = None) -> Iterator[Any]:
    with served(backend, limits) as (port, _):
        client = triton.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=10.0)
        try:
            yield client
        finally:
            client.close()


def given(array: np.ndarray[Any, Any], *, binary: bool) -> list[Any]:
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return [tensor]


def test_it_finds_out_who_serves_and_what():
    """Live, ready, model-ready, metadata, statistics, and the extensions we lack."""
    with connected(FakeBackend()) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.is_model_ready("echo", "1")
        assert not client.is_model_ready("none")
        assert client.get_server_metadata()["name"] == "foreload"
        assert client.get_model_metadata("echo")["inputs"][0]["name"] == "x"
        assert len(client.get_inference_statistics()["model_stats"]) == 2
        assert client.get_inference_statistics("echo", "1")["model_stats"][0]["name"] == "echo"
        for ask in (lambda: client.get_model_config("echo"), client.get_log_settings, client.get_trace_settings):
            with pytest.raises(exceptions.InferenceServerException, match="does not offer"):
                ask()


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("coding_in", [None, "gzip", "deflate"])
@pytest.mark.parametrize("coding_out", [None, "gzip", "deflate"])
def test_tensors_come_back_as_they_went(
    shared: Any, *, binary_in: bool, binary_out: bool, coding_in: str | None, coding_out: str | None
):
    """JSON and binary, plain and compressed, in every combination."""
    array = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    outputs = [triton.InferRequestedOutput("y", binary_data=binary_out)] if not binary_out else None
    result = shared.infer(
        "echo",
        given(array, binary=binary_in),
        outputs=outputs,
        request_compression_algorithm=coding_in,
        response_compression_algorithm=coding_out,
        timeout=5_000_000,
        priority=2,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), array)
    assert result.get_response()["model_version"] == "2"


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """One connection for the table above; every call of it is independent of the others."""
    with connected(FakeBackend()) as client:
        yield client


def test_deadline_and_priority_arrive():
    """`timeout` is microseconds there and seconds here; its own trace header passes through."""
    backend = FakeBackend()
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with connected(backend) as client:
        client.infer(
            "echo",
            given(np.ones((1, 4), np.float32), binary=True),
            model_version="1",
            timeout=1_500_000,
            priority=7,
            headers={"traceparent": parent},
        )
    (asked,) = backend.asked
    assert (asked.timeout, asked.priority, asked.version, asked.traceparent) == (1.5, 7, "1", parent)


def test_the_repository_can_be_driven():
    """Index with its empty body, load and unload with theirs; synchronous, 200, nothing in the answer."""
    backend = FakeBackend()
    with connected(backend) as client:
        assert client.get_model_repository_index()[2] == {"name": "unseen"}
        client.load_model("cold")
        assert {row["name"]: row.get("state") for row in client.get_model_repository_index()}["cold"] == "READY"
        client.unload_model("cold")
    assert backend.orders == [("load", "cold", {}), ("unload", "cold", {"unload_dependents": False})]


def test_errors_are_strings_it_can_show():
    """P13, section 4: `[status] text`, whatever else the object carries."""
    backend = FakeBackend()
    array = given(np.ones(4, np.float32), binary=True)
    with connected(backend, Limits(body=1 << 20)) as client:
        with pytest.raises(exceptions.InferenceServerException, match=r"\[404\] no such model: none"):
            client.infer("none", array)
        with pytest.raises(
            exceptions.InferenceServerException, match=r"\[400\] parameters.config: no such load parameter"
        ):
            client.load_model("cold", config="{}")
        with pytest.raises(exceptions.InferenceServerException, match=r"\[413\]"):
            client.infer("echo", given(np.ones(1 << 19, np.float32), binary=True))
        backend.raises = Busy("the queue is full", retry_after=3)
        with pytest.raises(exceptions.InferenceServerException, match=r"\[429\] the queue is full"):
            client.infer("echo", array)
        backend.raises = RuntimeError("secret")
        with pytest.raises(exceptions.InferenceServerException, match=r"\[500\] internal error"):
            client.infer("echo", array)
