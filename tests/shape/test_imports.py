"""The shape of the code: imports point down, nobody pays for what they do not use, and the wheel has three roots."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from importlinter import api

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "starlette", "uvicorn", "opentelemetry", "prometheus_client", "pydantic", "ruamel")
CLUSTER = ("ray", "redis", "obstore")
FRONT = ("catalog", "config", "http", "telemetry", "tiers", "workers")
"""Packages of the front process."""


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after importing these."""
    code = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return set(json.loads(done.stdout))


def modules_of(package: str) -> list[str]:
    """Every module below a package, the package included."""
    path = str(ROOT.joinpath(*package.split(".")))
    return [package, *(each.name for each in pkgutil.walk_packages([path], f"{package}."))]


def test_the_import_contracts_of_the_project_hold() -> None:
    """Rule 1: runtime above actors above forecasting, and one home per heavy dependency."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    assert {each["type"] for each in contracts} == {"layers", "forbidden"}
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(contracts)} kept, 0 broken" in done.stdout


def test_the_core_and_its_simulator_load_nothing_heavy() -> None:
    """Policies and actors run in a simulator that never pays for PyTorch, a web framework or telemetry."""
    found = loaded_by(*modules_of("actors"), *modules_of("runtime.simulation"))
    assert "actors" in found
    assert found.isdisjoint({*HEAVY, *CLUSTER})


def test_the_forecast_knows_nothing_of_serving() -> None:
    """Floor 1: arrays and calendars only."""
    found = loaded_by(*modules_of("forecasting"))
    assert "forecasting" in found
    assert found.isdisjoint({*HEAVY, *CLUSTER, "actors", "runtime", "anyio"})


def test_the_actors_know_nothing_of_the_world() -> None:
    """Floor 2: beside the standard library it sees anyio and the forecast."""
    assert loaded_by(*modules_of("actors")).isdisjoint({"runtime", "msgspec", "psutil", "structlog"})


@pytest.mark.parametrize("package", FRONT)
def test_the_front_process_never_loads_torch(package: str) -> None:
    """What talks to clients starts in a second, and a device error cannot poison it."""
    names = modules_of(f"runtime.{package}")
    assert len(names) > 3
    assert loaded_by(*names).isdisjoint({"torch", "transformers"})


def test_the_worker_is_where_torch_lives() -> None:
    """The other side of the same coin: the check above is able to notice."""
    assert "torch" in loaded_by("runtime.worker.engine")


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_three_roots(tmp_path: Path) -> None:
    """`from actors.residency import …` works as installed, tests and benchmarks stay at home, types are marked."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("runtime", "actors", "forecasting", "bench", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"runtime", "actors", "forecasting"}
    expected = {
        str(path.relative_to(ROOT))
        for root in ("runtime", "actors", "forecasting")
        for path in (ROOT / root).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert expected <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]
