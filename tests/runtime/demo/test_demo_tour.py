"""The tour as a user starts it: a process, a port, an exit code."""

from __future__ import annotations

import os
import signal
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
def test_a_port_that_is_none_ends_the_tour_with_2(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad FORELOAD_SERVER__PORT is named, whatever it holds."""
    monkeypatch.setenv("FORELOAD_SERVER__PORT", port)
    assert tour.main() == tour.EXIT_SETUP == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("demo: the port (FORELOAD_SERVER__PORT) is a number between 1 and 65535")
    assert len(err) < 200


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.real
@pytest.mark.slow
def test_the_tour_shows_evictions_and_serves_until_interrupted(demo_repository: Path) -> None:
    """Every request is answered, the large models come back from host memory, small ones are found on the device.

    Ctrl-C then ends tour and server with 0, and frees the port.
    """
    pytest.importorskip("runtime.running")
    port = free_port()
    command = [sys.executable, "-u", "-m", "runtime.demo.tour", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if "serving until Ctrl-C" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    said = "\n".join(lines)
    found = [(words[0], words[1]) for words in map(str.split, lines) if words and words[0] in BY_NAME]
    assert process.returncode == 0, said + rest
    assert "FAILED" not in said
    assert {name for name, _ in found} == set(BY_NAME)
    assert found.count(("silero-vad", "device")) >= 1, said
    assert ("minilm", "host") in found, said
    assert ("crepe-full", "host") in found, said
    assert "sentences 1 and 2 mean the same" in said
    assert "sounds like 440." in said
    with socket.create_server(("127.0.0.1", port)):
        pass
