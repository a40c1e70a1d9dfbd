"""Small modules that load in every way a real one can, and what the tests need to make and call them.

Every factory is deterministic in shape, not in values: its weights come from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from runtime.workers.port import BatchSpec, BuilderSpec, LoadSpec, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALLOW = ("tests.runtime.worker.",)


class Linear(nn.Module):
    """Two layers and a batch dimension."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(4, width)
        self.b = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Tied(nn.Module):
    """Embedding and head share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).mean(1))


class Normed(nn.Module):
    """Batch statistics: buffers that are persistent and small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).flatten(1)


class Rotary(nn.Module):
    """A non-persistent buffer, a plain tensor attribute, and a constructor that reads a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("inv", 1.0 / (10000 ** (torch.arange(4).float() / 4)), persistent=False)
        self.scale = torch.linspace(0.5, 2, 4)
        self.rates = [one.item() for one in torch.linspace(0, 0.1, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.inv * self.scale + self.rates[1]


class Cyclic(nn.Module):
    """Holds itself through a child, and keeps what it computed from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.loop = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


class Recurrent(nn.Module):
    """An LSTM: torch keeps its weights in a list beside the registry."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Listed(nn.Module):
    """Holds its weights in a list and a dict of its own, beside the registry."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.order = [self.a.weight, None]
        self.table = {"bias": self.a.bias}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.order[0].t() + self.table["bias"]


class Counting(nn.Module):
    """Writes a small buffer at each call; with `wide`, a large one that is in no file."""

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(200, 200), persistent=False)
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.wide:
            self.cache += 1
        return self.a(x) + self.calls + self.cache[0, 0]


class Attention(nn.Module):
    """An encoder layer with torch's fused fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Halves(nn.Module):
    """bf16 parameters beside an integer buffer, under one submodule reachable by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.twin = self.a
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.twin(self.a(x.bfloat16())).float() + self.steps.sum(), "z": x}


class Writer(nn.Module):
    """Writes a large parameter, a small buffer and a large buffer in eval, behind autograd's back too."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.zeros(300, 300))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(200, 200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache[0, 0] += 1
        self.big.data[0, :4] += 1
        return x + self.calls + self.cache[0, 0] + self.big[0, :4]


class Moody(nn.Module):
    """Refuses a batch with a negative number in it, and exits the interpreter on 99."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            msg = "negative input, see /home/secret/model.py"
            raise ValueError(msg)
        if (x == 99).any():
            raise SystemExit(3)
        return self.a(x)


class Paired(nn.Module):
    """Two inputs with one batch, and a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(1, 2, 4), persistent=False)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.a(a) * self.scale + b}


class Summed(nn.Module):
    """Its output has no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum(0)


class Identity(nn.Module):
    """Gives its input back, so an answer may view a body, and remembers where it lay."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.address = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.address = x.data_ptr()
        return x


class InPlace(nn.Module):
    """Works on its input where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).add_(self.scale)


class Hoarder(nn.Module):
    """Keeps a view of its own weights in a reference cycle, or for good."""

    kept: list[Any] = []  # noqa: RUF012  # what a leaky module does

    def __init__(self, *, forever: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(40, 40)
        self.forever = forever

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.a.weight.t()
        loop: list[Any] = [view]
        loop.append(loop)
        if self.forever and not self.kept:
            self.kept.append(view)
        return x @ view


class Keeper(nn.Module):
    """Keeps its last input, as modules with caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return self.a(x)


class Stubborn(nn.Module):
    """Its constructor looks into its own parameters, which meta tensors cannot answer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.norm = float(self.a.weight.detach().abs().max().item() >= 0)
        self.register_buffer("ones", torch.ones_like(self.a.weight.detach()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.norm + x @ self.ones.t()


def not_a_module() -> int:
    """A factory that gives something else."""
    return 3


def failing(**_: object) -> nn.Module:
    """A factory that raises."""
    msg = "no such file: /etc/secret/weights.bin on 10.1.2.3"
    raise OSError(msg)


X4 = (TensorSpec("x", "FP32", (-1, 4)),)
Y = (TensorSpec("y", "FP32", (-1, -1)),)


def saved(path: Path, module: nn.Module, *, drop: tuple[str, ...] = ()) -> Path:
    """Write a module's weights, tied ones once, as a converter does."""
    seen: set[int] = set()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        if tensor.data_ptr() not in seen and name not in drop:
            seen.add(tensor.data_ptr())
            state[name] = tensor.contiguous().clone()
    save_file(state, path)
    return path


def randomised(factory: Callable[..., nn.Module], seed: int = 0, **config: Any) -> nn.Module:
    """A module built by plain PyTorch, in eval, with every weight and statistic random."""
    module = factory(**config).eval().requires_grad_(requires_grad=False)
    noise = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=noise) + 0.1)
    return module


def spec_for(
    weights: Path,
    factory: str,
    *,
    key: str = "m@1",
    fingerprint: str = "f1",
    inputs: tuple[TensorSpec, ...] = X4,
    outputs: tuple[TensorSpec, ...] = Y,
    config: dict[str, object] | None = None,
    batch: int = 1,
    cast: bool = False,
    warm_up: bool = True,
) -> LoadSpec:
    """A load of one of these modules."""
    return LoadSpec(
        key=key,
        fingerprint=fingerprint,
        weights=str(weights),
        weights_bytes=weights.stat().st_size if weights.exists() else 0,
        builder=BuilderSpec("python", f"tests.runtime.worker.modules:{factory}", config or {}),
        inputs=inputs,
        outputs=outputs,
        batch=BatchSpec(batch),
        cast=cast,
        warm_up=warm_up,
    )
