"""The tour as a user starts it: a process, a port, an exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.config.load import load
from runtime.demo import tour
from runtime.demo.itinerary import ROUNDS, itinerary
from tests.runtime.demo.conftest import BY_NAME

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tour to its end."""
    return subprocess.run(
        [sys.executable, "-m", "runtime.demo.tour", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_configuration_is_valid_and_names_the_prepared_folder() -> None:
    """`configs/demo.yaml` serves what the tour prepares, in 120 MB, with the builders that the manifests name."""
    config = load(tour.CONFIG, {})
    assert [path.resolve() for path in config.repository] == [tour.REPOSITORY]
    (device,) = config.devices
    assert (device.id, device.memory.size) == ("cpu:0", 120_000_000)
    targets = {str(model.builder.get("target", "")).partition(":")[0] for model in BY_NAME.values()} - {""}
    assert targets == set(device.allow)
    assert config.server.host == tour.HOST
    assert config.warm == ()


def test_a_taken_port_ends_the_tour_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started or downloaded when the port is in use; the message says how to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert tour.main(port) == tour.EXIT_START == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert f"port {port} cannot be used" in err
    assert "FORELOAD_SERVER__PORT=" in err


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "", "٣", "9" * 5000])
def test_a_port_that_is_none_ends_the_tour_with_2(port: str) -> None:
    """A bad FORELOAD_SERVER__PORT is named, whatever it holds."""
    with pytest.raises(tour.Abort, match=r"FORELOAD_SERVER__PORT.*between 1 and 65535") as refused:
        tour._port(port)
    assert refused.value.code == 2


@pytest.mark.real
def test_prepare_only_prepares_and_ends(demo_repository: Path) -> None:
    """`--prepare-only` lays the models out, or finds them laid out, and starts nothing."""
    done = start("--prepare-only")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("preparing 8 models, 202 MB of weights, in var")


@pytest.mark.real
def test_every_visit_sends_what_the_manifest_declares(demo_repository: Path) -> None:
    """Names, datatypes and fixed dimensions of each request fit its model, and every model is visited each round."""
    visits = list(itinerary(demo_repository / "minilm" / "tokenizer.json"))
    names = [visit.model for visit in visits]
    assert {name: names.count(name) >= ROUNDS for name in BY_NAME} == dict.fromkeys(BY_NAME, True)
    kinds = {"FP32": np.dtype("float32"), "INT64": np.dtype("int64")}
    for visit in visits:
        declared = BY_NAME[visit.model].inputs
        assert list(visit.inputs) == [name for name, _, _ in declared]
        for name, datatype, shape in declared:
            array = visit.inputs[name]
            assert array.dtype == kinds[datatype]
            assert array.flags.c_contiguous
            assert [-1 if want == -1 else size for size, want in zip(array.shape, shape, strict=True)] == list(shape)
