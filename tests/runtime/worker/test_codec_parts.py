"""Large binary answers stay in parts that view the outputs; small ones are whole."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.worker.codec import IN_PARTS, Codec, InferRequest, WireTensor
from runtime.workers.port import TensorSpec

SPEC = (TensorSpec("x", "FP32", (-1, 4)),)


def request(*names: str) -> InferRequest:
    """Asks for these outputs as binary."""
    return InferRequest(None, {}, {}, dict.fromkeys(names, True))


def codec(*outputs: str, datatype: str = "FP32") -> Codec:
    """For a model with these outputs."""
    return Codec("m@1", SPEC, tuple(TensorSpec(name, datatype, (-1, 4)) for name in outputs))


@pytest.mark.parametrize("rows", [0, 1, IN_PARTS // 16 - 1, IN_PARTS // 16, IN_PARTS // 4])
def test_parts_joined_are_the_body(rows: int) -> None:
    """Around the limit the bytes are the same; from it on the tensor is viewed, not copied."""
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    body, json_length = codec("y").encode(request("y"), {"y": WireTensor("y", "FP32", array)})
    whole = b"".join(body) if isinstance(body, tuple) else body
    assert json_length is not None
    assert whole[json_length:] == array.tobytes()
    assert isinstance(body, tuple) == (array.nbytes >= IN_PARTS)
    if isinstance(body, tuple):
        assert np.shares_memory(np.frombuffer(body[1], np.uint8), array)


def test_order_strides_and_datatypes_are_kept() -> None:
    """Several outputs in the order of asking; one that is not contiguous is copied in row order; half floats too."""
    base = np.arange(1 << 16, dtype=np.float16).reshape(256, 256)
    outputs = {
        "a": WireTensor("a", "FP16", base[:, ::2]),
        "b": WireTensor("b", "FP16", base[:1, :4]),
        "c": WireTensor("c", "FP16", base.T),
    }
    body, json_length = codec("a", "b", "c", datatype="FP16").encode(request("c", "a", "b"), outputs)
    assert isinstance(body, tuple)
    wanted = b"".join(outputs[name].array.tobytes() for name in "cab")
    assert b"".join(body)[json_length:] == wanted
