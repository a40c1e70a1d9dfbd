"""The engine: keywords or positions in, every form of result out, dtypes as declared."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actors.errors import InferenceFailed, LoadFailed
from runtime.worker.codec import WireTensor
from runtime.worker.engine import TORCH_OF, Engine, to_torch, to_wire
from runtime.workers.port import TensorSpec

CPU = torch.device("cpu")
A, B = TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "FP32", (-1, 2))
Y, Z = TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "INT64", (-1, 2))


class Gives(nn.Module):
    """Gives back what it was told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, a: torch.Tensor) -> Any:
        return self.result


class Named(nn.Module):
    def forward(self, *, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return a - b


class Positional(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first - second


class Keywords(nn.Module):
    def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
        return kwargs["a"] - kwargs["b"]


class Stars(nn.Module):
    def forward(self, *args: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return args[0] - args[1]


class Pooled(nn.Module):
    """Needs an image of at least 32 pixels."""

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(a, 32)


T = torch.ones(1, 2)


@pytest.mark.parametrize("module", [Named(), Positional(), Keywords(), Stars()])
def test_inputs_go_by_keyword_where_the_forward_takes_them_else_by_position(module: nn.Module) -> None:
    """The signature's order is the positional order."""
    engine = Engine(module, [A, B], [Y], CPU)
    assert engine.run({"b": T, "a": T * 3})["y"].tolist() == [[2, 2]]


@pytest.mark.parametrize(
    "result",
    [(T, T * 2), [T, T * 2, T], {"z": T * 2, "y": T, "more": None}, OrderedDict(y=T, z=T * 2)],
    ids=["tuple", "longer list", "dict", "ordered dict"],
)
def test_results_map_to_outputs_by_order_or_name_in_declared_dtypes(result: Any) -> None:
    """INT64 was declared, so a float comes out as INT64."""
    found = Engine(Gives(result), [A], [Y, Z], CPU).run({"a": T})
    assert found["y"].tolist() == [[1, 1]]
    assert found["z"].tolist() == [[2, 2]]
    assert found["z"].dtype == torch.int64


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (T, "1 outputs where 2"),
        ((T,), "1 outputs where 2"),
        ({"y": T}, "no output 'z'"),
        ((T, "x"), "'z' is a str"),
        (None, "NoneType instead"),
        ("text", "str instead"),
    ],
)
def test_a_result_unlike_the_signature_is_the_models_failure(result: Any, words: str) -> None:
    """Named, never an index error."""
    with pytest.raises(InferenceFailed, match=words):
        Engine(Gives(result), [A], [Y, Z], CPU).run({"a": T})


@pytest.mark.parametrize("bad", ["BYTES", "STRING"])
def test_a_signature_without_a_torch_datatype_is_refused_at_load(bad: str) -> None:
    """Not at the first request."""
    with pytest.raises(LoadFailed, match="'t'"):
        Engine(Named(), [TensorSpec("t", bad, (1,))], [Y], CPU)
    with pytest.raises(LoadFailed, match="no outputs"):
        Engine(Named(), [A], [], CPU)


def test_no_gradient_is_recorded() -> None:
    """Inference mode, whatever the module's parameters say."""
    linear = nn.Linear(2, 2)
    found = Engine(linear, [TensorSpec("input", "FP32", (-1, 2))], [Y], CPU).run({"input": T})
    assert found["y"].is_inference()


def test_warm_up_tries_larger_inputs_for_variable_dimensions() -> None:
    """A network that needs 32 pixels is warmed up with 64; a fixed shape is tried as it is."""
    Engine(Pooled(), [TensorSpec("a", "FP32", (-1, 1, -1, -1))], [Y], CPU).warm_up()
    with pytest.raises(RuntimeError):
        Engine(Pooled(), [TensorSpec("a", "FP32", (-1, 1, 8, 8))], [Y], CPU).warm_up()


@pytest.mark.parametrize("datatype", TORCH_OF)
def test_every_datatype_crosses_to_torch_and_back_to_the_bit(datatype: str) -> None:
    """BF16 travels as bit patterns."""
    dtype = TORCH_OF[datatype]
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    wire = to_wire("x", datatype, tensor)
    back = to_torch(wire, CPU)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_memory_that_may_not_be_written_is_copied() -> None:
    """A model that works in place must not write into an immutable body."""
    fixed = np.frombuffer(b"\0" * 8, np.float32)
    to_torch(WireTensor("x", "FP32", fixed), CPU).add_(1)
    assert fixed.tolist() == [0, 0]
    free = np.zeros(2, np.float32)
    to_torch(WireTensor("x", "FP32", free), CPU).add_(1)
    assert free.tolist() == [1, 1], "writable memory is viewed, not copied"
