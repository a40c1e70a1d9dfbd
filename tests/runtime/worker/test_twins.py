"""Compiled twins: eager serves first, the twin takes over, and whatever goes wrong with it costs nobody an answer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from runtime.worker.core import Core
from runtime.worker.engine import Engine
from runtime.workers.port import ArtefactSpec, LoadSpec, Note, TensorSpec
from tests.contracts.engine_kit import F32, Artefact, artefact, ask, module, never
from tests.runtime.worker import modules
from tests.runtime.worker.modules import ALLOW, randomised, saved, spec_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]  # compilers run at idle priority

X = np.linspace(-1, 1, 8, dtype=F32).reshape(2, 4)
PATIENCE = 1_000.0


@dataclass
class Rig:
    """A core and what it told."""

    core: Core = field(default_factory=lambda: Core("cpu:0", ALLOW))
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core.listen(self.notes.append)

    def load(self, spec: LoadSpec) -> None:
        """Load and wait until nothing is compiled any more."""
        self.core.load(spec, never)
        assert self.core.compiled(PATIENCE)

    def twin(self, spec: LoadSpec) -> Any:
        """The twin of a resident, or None."""
        mount = self.core._mounts[spec.fingerprint]
        engine = mount.engines[spec.key][1]
        return engine.twin if isinstance(engine, Engine) else mount.current.twin  # type: ignore[union-attr]

    @property
    def phases(self) -> list[str]:
        """What was told, in order."""
        return [note.phase for note in self.notes]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artefacts of the whole session: compiling takes seconds."""
    return tmp_path_factory.mktemp("artefacts")


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """The weights of the eager model."""
    return artefact("eager", tmp_path_factory.mktemp("weights"))


@pytest.fixture
def spec(weights: Artefact, shared: Path) -> LoadSpec:
    """A load that asks for a twin."""
    return weights.spec("eager", compile=True, artefacts=ArtefactSpec(str(shared), 1 << 30))


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What plain PyTorch computes."""
    with torch.inference_mode():
        return np.asarray(module()(torch.from_numpy(x.copy())))


def test_eager_serves_at_once_and_the_twin_takes_over(spec: LoadSpec) -> None:
    """The load does not wait; the answers stay the same before and after, for any batch."""
    rig = Rig()
    loaded = rig.core.load(spec, never)
    assert "compile" not in dict(loaded.steps)
    np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-5)
    assert rig.core.compiled(PATIENCE)
    assert rig.phases in (["started", "finished"], ["reused"])
    twin = rig.twin(spec)
    assert twin is not None
    calls: list[int] = []
    package = twin._package
    twin._package = lambda *tensors: calls.append(len(tensors)) or package(*tensors)
    for x in (X[:1], X, np.repeat(X, 7, axis=0)):
        np.testing.assert_allclose(ask(rig.core, "m@1", x=x)["y"], expected(x), rtol=1e-4)
    assert calls == [1, 1, 1], "every batch ran on the twin, a single row too"


def test_a_cold_worker_reuses_what_another_process_compiled(spec: LoadSpec) -> None:
    """Two processes: the second one compiles nothing, and says how much time that saved."""
    Rig().load(spec)
    code = (
        "import msgspec, sys\n"
        "from runtime.worker.core import Core\n"
        "from runtime.workers.port import LoadSpec\n"
        "core, notes = Core('cpu:0', ('tests.runtime.worker.',)), []\n"
        "core.listen(notes.append)\n"
        "core.load(msgspec.json.decode(sys.stdin.buffer.read(), type=LoadSpec), lambda: False)\n"
        f"assert core.compiled({PATIENCE})\n"
        "print(msgspec.json.encode(notes).decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.json.encode(spec), capture_output=True, timeout=PATIENCE, check=True
    )
    (note,) = msgspec.json.decode(done.stdout, type=list[Note])
    assert (note.phase, note.key, note.fingerprint) == ("reused", spec.key, spec.fingerprint)
    assert note.saved > 0


def test_the_twin_stays_over_evictions_and_goes_with_the_weights(spec: LoadSpec) -> None:
    """A host hit has its twin at once and leaks nothing; weights that leave the host take it along."""
    rig = Rig()
    rig.load(spec)
    told = len(rig.notes)
    for _ in range(3):
        evicted = rig.core.evict("m@1")
        assert evicted.leaked == 0
        assert evicted.returned > 0
        rig.core.load(spec, never)
        assert rig.twin(spec) is not None
        np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-4)
    assert len(rig.notes) == told
    gone = weakref.ref(rig.twin(spec))
    mapping = weakref.ref(rig.core._mounts[spec.fingerprint])
    rig.core.evict("m@1")
    rig.core.release_host(spec.fingerprint)
    assert gone() is None
    assert mapping() is None
    rig.load(spec)
    assert rig.phases[-1] == "reused"
    np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-4)


def test_a_module_that_cannot_be_compiled_stays_eager(tmp_path: Path) -> None:
    """Its forward depends on values: the failure is told once, and it serves as before. No folder is needed."""
    path = saved(tmp_path / "moody.safetensors", randomised(modules.Moody))
    spec = msgspec.structs.replace(
        spec_for(path, "Moody", outputs=(TensorSpec("y", "FP32", (-1, 3)),)),
        compile=True,
    )
    rig = Rig()
    rig.load(spec)
    assert rig.phases == ["started", "failed"]
    assert rig.notes[-1].cause
    assert "/" not in rig.notes[-1].cause
    first = ask(rig.core, "m@1", x=abs(X))["y"]
    rig.core.evict("m@1")
    rig.load(spec)
    assert rig.phases == ["started", "failed"], "not again in this worker's life"
    np.testing.assert_array_equal(ask(rig.core, "m@1", x=abs(X))["y"], first)


def test_a_twin_that_answers_otherwise_is_not_used(
    spec: LoadSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the module before it serves: a difference is a failure, and nothing is kept."""
    rig = Rig()
    monkeypatch.setattr("runtime.worker.twin.Twin.__call__", lambda _, inputs: torch.zeros(len(inputs["x"]), 3))
    rig.load(spec)
    assert rig.phases[-1] == "failed"
    assert "off by" in rig.notes[-1].cause
    assert rig.twin(spec) is None
    np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-5)


def test_a_damaged_artefact_is_made_anew(spec: LoadSpec, shared: Path, tmp_path: Path) -> None:
    """A flipped byte of machine code is never run."""
    Rig().load(spec)
    kept = tmp_path / "kept"
    shutil.copytree(shared, kept)
    mine = msgspec.structs.replace(spec, artefacts=ArtefactSpec(str(kept), 1 << 30))
    for package in kept.glob("*/model.pt2"):
        raw = bytearray(package.read_bytes())
        raw[len(raw) // 2] ^= 1
        package.write_bytes(raw)
    rig = Rig()
    rig.load(mine)
    assert rig.phases == ["started", "finished"]
    np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-4)


def test_a_process_that_takes_too_long_is_ended(spec: LoadSpec, tmp_path: Path) -> None:
    """No compiler is left behind."""
    rig = Rig()
    rig.core._compiler._limit = 0.2
    rig.load(msgspec.structs.replace(spec, artefacts=ArtefactSpec(str(tmp_path), 1 << 30)))
    assert rig.phases == ["started", "failed"]
    assert "longer than 0.2 s" in rig.notes[-1].cause
    assert not [*tmp_path.glob(".making-*")]


def test_an_exported_program_gets_a_twin_too(tmp_path: Path, shared: Path) -> None:
    """It leaves with the program at an eviction and is attached again after the next load."""
    spec = artefact("export", tmp_path).spec("export", compile=True, artefacts=ArtefactSpec(str(shared), 1 << 30))
    rig = Rig()
    rig.load(spec)
    assert rig.phases == ["started", "finished"]
    np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-4)
    assert rig.core.evict("m@1").leaked == 0
    rig.load(spec)
    assert rig.phases[-1] == "reused"
    assert rig.twin(spec) is not None
    np.testing.assert_allclose(ask(rig.core, "m@1", x=X)["y"], expected(X), rtol=1e-4)


def test_it_takes_no_shape_that_it_was_not_made_for(tmp_path: Path, shared: Path) -> None:
    """Sizes that must be equal and are not go to the module, which says what is wrong."""
    path = saved(tmp_path / "pair.safetensors", randomised(modules.Paired))
    inputs = (TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "FP32", (-1, 4)))
    spec = msgspec.structs.replace(
        spec_for(path, "Paired", inputs=inputs, outputs=(TensorSpec("y", "FP32", (-1, 4)),)),
        compile=True,
        artefacts=ArtefactSpec(str(shared), 1 << 30),
    )
    rig = Rig()
    rig.load(spec)
    twin = rig.twin(spec)
    assert twin is not None

    def takes(*rows: int, width: int = 4) -> bool:
        taken: bool = twin.takes({name: torch.zeros(n, width) for name, n in zip("ab", rows, strict=True)})
        return taken

    assert [takes(1, 1), takes(5, 5), takes(5, 4), takes(5, 5, width=3)] == [True, True, False, False]
    assert not twin.takes({"a": torch.zeros(4, 4).t(), "b": torch.zeros(4, 4).t()})
    with pytest.raises(Exception, match="size of tensor"):
        ask(rig.core, "m@1", a=np.zeros((5, 4), F32), b=np.zeros((4, 4), F32))
