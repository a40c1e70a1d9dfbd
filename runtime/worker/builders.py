"""From a builder spec to a factory: `transformers` architectures and allow-listed Python factories.

Belongs here: finding code that may be run. Never: weights, the network, code that travels with a model.
"""

from __future__ import annotations

import importlib
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from actors.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from runtime.workers.port import BuilderSpec

_PYTHON_TARGET = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_CLASS = re.compile(r"[A-Za-z]\w*", re.ASCII)
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")


def factory_for(spec: BuilderSpec, allow: tuple[str, ...]) -> Callable[[], nn.Module]:
    """A function that builds the module. Raises `LoadFailed` for anything unknown or not allowed.

    `allow` lists module names, exact or as a prefix ending in a dot, that `python` targets may come from.
    """
    factory = _factory(spec, allow)
    return partial(converted, factory, spec.dtype) if spec.dtype else factory


def _factory(spec: BuilderSpec, allow: tuple[str, ...]) -> Callable[[], nn.Module]:
    if spec.kind == "transformers":
        return _transformers(spec)
    if spec.kind == "python":
        return _python(spec, allow)
    raise LoadFailed(f"builder kind {spec.kind[:32]!r} is unknown; use 'transformers' or 'python'")


def sets_default_dtype(spec: BuilderSpec) -> bool:
    """Whether building flips torch's process-wide default dtype meanwhile, so that no forward may run beside it."""
    wanted = spec.config.get("dtype", spec.config.get("torch_dtype"))
    return spec.kind == "transformers" and wanted not in (None, "float32", "torch.float32")


# -- precision ---------------------------------------------------------------------------------------


def converted(factory: Callable[[], nn.Module], dtype: str) -> nn.Module:
    """Build a module whose floating tensors have a dtype, as `module.to(dtype)` makes it, inputs included.

    Raises `LoadFailed` for an unknown word.
    """
    import torch

    words = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    wanted = words.get(dtype)
    if wanted is None:
        raise LoadFailed(f"dtype {dtype[:32]!r} is unknown; use {', '.join(words)}")

    def taken(value: object) -> object:
        return value.to(wanted) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def on_call(_: nn.Module, given: tuple[object, ...], named: dict[str, object]) -> tuple[Any, Any]:
        return tuple(map(taken, given)), {name: taken(value) for name, value in named.items()}

    module = factory().to(wanted)
    # What is in fp32 on the wire would meet weights of another dtype; outputs are converted back by the engine.
    module.register_forward_pre_hook(on_call, with_kwargs=True)
    return module


# -- python ------------------------------------------------------------------------------------------


def _allowed(module: str, allow: tuple[str, ...]) -> bool:
    return any(module == one or (one.endswith(".") and module.startswith(one)) for one in allow)


def _python(spec: BuilderSpec, allow: tuple[str, ...]) -> Callable[[], nn.Module]:
    parts = _PYTHON_TARGET.fullmatch(spec.target)
    if parts is None:
        raise LoadFailed("builder target must read 'package.module:factory'")
    module, name = parts.groups()
    if not _allowed(module, allow):
        raise LoadFailed(f"builder module {module!r} is not on the allow-list")
    try:
        factory = getattr(importlib.import_module(module), name)
    except Exception as fault:
        raise LoadFailed(f"builder {spec.target!r} cannot be imported: {type(fault).__name__}") from fault
    # Names that a module merely imported (`from os import system`) are not its factories.
    if not callable(factory) or not _allowed(getattr(factory, "__module__", None) or "", allow):
        raise LoadFailed(f"builder {spec.target!r} is not a factory of an allow-listed module")
    return partial(cast("Callable[..., nn.Module]", factory), **spec.config)


# -- transformers ------------------------------------------------------------------------------------


def _foreign_code(config: object) -> bool:
    """Whether a config asks, at any depth, for Python code that comes with the model."""
    if isinstance(config, dict):
        return "auto_map" in config or any(_foreign_code(value) for value in config.values())
    return isinstance(config, list) and any(_foreign_code(value) for value in config)


def _library() -> Any:
    """`transformers`, told to stay offline before it is imported. Raises `ImportError`."""
    for name in _OFFLINE:
        os.environ[name] = "1"
    return importlib.import_module("transformers")


def import_kind(kind: str) -> None:
    """Import what building a `transformers` model of this type imports. Raises what an import raises."""
    configuration = _library().CONFIG_MAPPING[kind].__module__
    importlib.import_module("transformers.modeling_utils")
    importlib.import_module(configuration.replace(".configuration_", ".modeling_"))


def _transformers(spec: BuilderSpec) -> Callable[[], nn.Module]:
    if _foreign_code(spec.config):
        raise LoadFailed("the config asks for code of its own ('auto_map'), which is never run")
    try:
        transformers = _library()
    except ImportError:
        raise LoadFailed("the 'transformers' builder needs the extra 'hf' installed") from None
    kind = spec.config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise LoadFailed(f"the config's model_type {str(kind)[:64]!r} is unknown to this version of transformers")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(spec.config))
    except Exception as fault:
        raise LoadFailed(f"the config is not one of {kind!r}: {type(fault).__name__}") from fault
    architecture = spec.target or _first_architecture(spec.config)
    if not architecture:
        return partial(transformers.AutoModel.from_config, config, trust_remote_code=False)
    found = getattr(transformers, architecture, None) if _CLASS.fullmatch(architecture) else None
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise LoadFailed(f"architecture {architecture[:64]!r} is unknown to this version of transformers")
    return partial(_from_config, found, config)


def _first_architecture(config: Mapping[str, object]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else ""


def _from_config(architecture: Any, config: Any) -> nn.Module:
    # What `AutoModel.from_config` itself calls: the constructor alone would ignore the config's dtype.
    return cast("nn.Module", architecture._from_config(config))  # noqa: SLF001
