"""The project's outside says what is so: README, Makefile, pinned versions, image, compose file, CI's own rule."""

from __future__ import annotations

import ast
import http.server
import math
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML
from typer.main import get_command

from runtime.catalog.manifest import parse_manifest
from runtime.cli import app, main
from runtime.config.load import load
from runtime.demo.weights import MODELS
from runtime.http.app import create_app
from runtime.remoting import permits_of
from runtime.tiers.remote import refusals

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("actors", "forecasting", "runtime", "bench")
DOCUMENTS = ("README.md", "SECURITY.md", "CHANGELOG.md", "actors/DESIGN.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
CODE_PATH = re.compile(r"`((?:actors|forecasting|runtime|tests|configs|deploy|bench)/[\w/.-]*)`")


def blocks(kind: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return [text for found, text in BLOCK.findall(README) if found == kind]


def targets() -> set[str]:
    """What can be made."""
    return set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


def yaml(path: str) -> Any:
    """One YAML file as plain values."""
    return YAML(typ="safe").load(ROOT / path)


def tracked() -> Iterator[Path]:
    """Every file of the project: what git knows or would add, or what lies there if there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        names = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = {"var", "build", "dist", "__pycache__", "out"}
        names = [p for p in ROOT.rglob("*") if not any(q in skipped or q[0] == "." for q in p.relative_to(ROOT).parts)]
    return (path for path in names if path.is_file())


# -- README and Makefile -----------------------------------------------------------------------------


def test_every_make_command_of_the_readme_is_a_target() -> None:
    """A stranger's first two commands exist, and so does every other one that is named."""
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(blocks("")) + " ".join(re.findall(r"`[^`]+`", README))))
    assert {"demo", "test"} <= named
    assert named <= targets()


def test_make_alone_lists_every_target() -> None:
    """`make` changes nothing and names whatever else can be asked of it."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True, timeout=30)
    assert set(re.findall(r"^make ([a-z]+)", done.stdout, re.MULTILINE)) == targets() == phony()


def phony() -> set[str]:
    """Targets declared as no files."""
    found = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert found
    return set(found[1].split())


def test_every_foreload_command_of_the_readme_is_known() -> None:
    """The command line has the verbs that the README uses."""
    verbs = set(re.findall(r"^foreload ([a-z]+)", "\n".join(blocks("")), re.MULTILINE))
    assert verbs
    assert verbs <= set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_files_that_exist(document: str) -> None:
    """Links and paths in code marks lead somewhere."""
    text = (ROOT / document).read_text(encoding="utf-8")
    assert [path for path in LINK.findall(text) if not (ROOT / document).parent.joinpath(path).exists()] == []
    assert [path for path in CODE_PATH.findall(text) if not (ROOT / path).exists()] == []


def test_the_readmes_manifest_and_configuration_are_valid(tmp_path: Path) -> None:
    """What is copied from the README is accepted; `describe` adds the manifest's files."""
    manifest, configuration = blocks("yaml")
    files = "".join(
        f"  - {{path: {path}, size: 1, sha256: '{'0' * 64}'}}\n" for path in ("model.safetensors", "config.json")
    )
    assert parse_manifest(f"{manifest}files:\n{files}").name == "sentences"
    file = tmp_path / "foreload.yaml"
    file.write_text(configuration, encoding="utf-8")
    assert load(file, {}).policy.name == "lru_ttl"


def test_the_readmes_remote_model_is_valid_and_permitted_by_its_configuration(tmp_path: Path) -> None:
    """The two blocks of the section on weights from elsewhere go together."""
    manifest = next(parse_manifest(text) for text in blocks("yml") if "\nsource:" in text)
    file = tmp_path / "foreload.yaml"
    file.write_text(next(text for text in blocks("yml") if text.startswith("remote:")), encoding="utf-8")
    environ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert len(manifest.sources) == 2
    assert refusals(permits_of(load(file, {}).remote, environ))(manifest.sources) == ""


def test_the_readmes_curl_lines_ask_for_paths_that_exist() -> None:
    """Each address is served with that verb; the inference has the inputs that the demo's model declares."""
    commands = re.findall(r"^curl .*?(?=\n\n|\ncurl|\n#|\Z)", "\n".join(blocks("")), re.MULTILINE | re.DOTALL)
    routes = {route.path_regex: route.endpoint for route in front_routes()}
    assert len(commands) >= 7
    for command in commands:
        path = re.search(r"localhost:8080(/\S*)", command)
        assert path, command
        if path[1].endswith("/infer"):
            check_inference(path[1], command)
            continue
        endpoint = next(end for regex, end in routes.items() if regex.match(path[1]))
        verb = "POST" if "-X POST" in command else "GET"
        assert verb in repr(vars_of(endpoint)), command


def front_routes() -> Any:
    """Routes of the HTTP application; none of them is called."""
    backend: Any = None
    return create_app(backend, trusted_hosts=["localhost"]).router.routes


def vars_of(endpoint: object) -> dict[str, object]:
    """What a slotted endpoint holds."""
    return {name: getattr(endpoint, name) for kind in type(endpoint).__mro__ for name in getattr(kind, "__slots__", ())}


def check_inference(path: str, command: str) -> None:
    """The body names the model's inputs, with as much data as the shape says."""
    model = next(model for model in MODELS if model.name == path.split("/")[3])
    body = YAML(typ="safe").load(command[command.index("'") + 1 : command.rindex("'")])
    declared = {name: (datatype, len(shape)) for name, datatype, shape in model.inputs}
    assert {one["name"]: (one["datatype"], len(one["shape"])) for one in body["inputs"]} == declared
    assert all(math.prod(one["shape"]) == len(one["data"]) for one in body["inputs"])


# -- versions and packages ---------------------------------------------------------------------------


def test_the_version_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """pyproject, the command line and the image's tag agree."""
    version = PROJECT["project"]["version"]
    assert main(["version"]) == 0
    assert capsys.readouterr().out.split() == ["foreload", version]
    assert yaml("deploy/compose.yaml")["services"]["foreload"]["image"] == f"foreload:{version}"
    assert re.search(rf"^## \[(Unreleased|{re.escape(version)})\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_dependency_that_is_installed_by_make_is_pinned_above_its_floor() -> None:
    """One exact version each, without a local part, in order, and what pyproject demands."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert lines == sorted(set(lines), key=str.lower)
    pins = dict(line.split("==") for line in lines)
    assert not [version for version in pins.values() if "+" in version or "*" in version]
    named = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["hf"], *extras["remote"]]
    wanted += [line for group in PROJECT["dependency-groups"].values() for line in group]
    for requirement in map(Requirement, wanted):
        assert named[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("root", PACKAGES)
def test_every_package_says_what_it_is(root: str) -> None:
    """Each `__init__.py` opens with a sentence (rule 2)."""
    found = list((ROOT / root).rglob("__init__.py"))
    assert found
    assert [str(p.relative_to(ROOT)) for p in found if not ast.get_docstring(ast.parse(p.read_text("utf-8")))] == []


@pytest.mark.parametrize("root", ["actors", "forecasting", "runtime"])
def test_the_import_roots_are_typed(root: str) -> None:
    """Type checkers of users read our annotations."""
    assert (ROOT / root / "py.typed").read_bytes() == b""


def test_no_file_holds_a_path_of_a_machine() -> None:
    """Nothing in the repository depends on, or tells of, where it was written."""
    places = {str(ROOT) + "/", "/root" + "/", "/work" + "/"}
    if len(Path.home().parts) > 1:
        places.add(f"{Path.home()}/")
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in tracked()
        for place in places
        if place.encode() in path.read_bytes()
    ]
    assert found == []


# -- image and compose file --------------------------------------------------------------------------


def test_the_image_copies_files_that_exist_and_runs_as_somebody_else_than_root() -> None:
    """Sources are there and reach the builder; user, port, probe and command are stated."""
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    ]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == let_in
    assert all((ROOT / source).exists() for source in sources)
    last = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in text.splitlines() if re.match(r"[A-Z]+ ", line)}
    assert last["USER"] == "10001:10001"
    assert last["EXPOSE"] == "8080"
    assert (last["ENTRYPOINT"], last["CMD"]) == ('["foreload"]', '["serve", "/etc/foreload/foreload.yaml"]')
    assert "healthcheck" in last["HEALTHCHECK"]


def test_the_compose_file_mounts_files_that_exist_and_publishes_on_loopback_only() -> None:
    """S1: the server there has no keys, so nobody beyond the machine may reach it; images and limits are fixed."""
    services = yaml("deploy/compose.yaml")["services"]
    assert (ROOT / "deploy" / services["foreload"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / services["foreload"]["build"]["dockerfile"]).is_file()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["cap_drop"] == ["ALL"]
        assert service["mem_limit"]
        assert service["pids_limit"]
        mounts = [volume.split(":")[0] for volume in service.get("volumes", ()) if volume.startswith("./")]
        assert all((ROOT / "deploy" / mount).is_file() for mount in mounts)


def test_the_containers_configuration_fits_its_surroundings() -> None:
    """It validates, and ports, names and paths are those of image, compose file and Prometheus."""
    config = load(ROOT / "deploy" / "foreload.yaml", {})
    services = yaml("deploy/compose.yaml")["services"]
    scraped = yaml("deploy/prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert config.server.host == "0.0.0.0"
    assert services["foreload"]["ports"] == [f"127.0.0.1:{config.server.port}:8080"]
    assert scraped == [f"foreload:{config.server.port}"]
    assert "foreload" in config.server.trusted_hosts
    assert config.telemetry.otlp == "http://jaeger:4318"
    writable = [volume.split(":")[1] for volume in services["foreload"]["volumes"] if not volume.endswith(":ro")]
    assert [path for path in writable if config.disk.path.is_relative_to(path)]
    grace = int(services["foreload"]["stop_grace_period"].removesuffix("s"))
    assert config.server.drain.delay + config.server.drain.timeout + 3 < grace


class Probed(http.server.BaseHTTPRequestHandler):
    """Answers as a server with one key does."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """200 for the key, 401 else."""
        self.seen.append(self.path)
        self.send_response(200 if self.headers["authorization"] == "Bearer right" else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(("key", "code", "said"), [("right", 0, ""), ("wrong", 1, "/livez answers 401\n")])
def test_the_images_probe_asks_livez_with_the_key(key: str, code: int, said: str) -> None:
    """A healthy server is told from one that refuses."""
    with http.server.HTTPServer(("127.0.0.1", 0), Probed) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = probe(server.server_port, key)
        thread.join()
    assert (done.returncode, done.stderr) == (code, said)
    assert Probed.seen.pop() == "/livez"


def test_the_images_probe_fails_in_one_line_without_a_server() -> None:
    """F80: whoever reads `docker inspect` learns why."""
    with http.server.HTTPServer(("127.0.0.1", 0), Probed) as closed:
        port = closed.server_port
    done = probe(port, "")
    assert (done.returncode, done.stderr) == (1, "no answer from /livez: URLError\n")


def probe(port: int, key: str) -> subprocess.CompletedProcess[str]:
    """Run the image's health check here."""
    environment = {**os.environ, "FORELOAD_SERVER__PORT": str(port), "FORELOAD_KEY": key}
    command = [sys.executable, "-I", str(ROOT / "deploy" / "healthcheck.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


# -- CI's own rule -----------------------------------------------------------------------------------

SUITE = """
import pytest

@pytest.mark.real
def test_skips_by_itself():
    pytest.skip("no weights")

@pytest.mark.real
@pytest.mark.skipif(True, reason="not here")
def test_is_skipped():
    raise AssertionError

@pytest.fixture
def weights():
    pytest.skip("no network")

@pytest.mark.real
def test_has_a_fixture_that_skips(weights):
    raise AssertionError

@pytest.mark.real
@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    raise AssertionError

def test_is_not_real():
    pytest.skip("may be")

@pytest.mark.real
def test_passes():
    pass
"""


@pytest.mark.parametrize(
    ("ci", "counts"),
    [
        ("true", "1 failed, 2 passed, 5 skipped, 2 xfailed, 2 errors"),
        ("", "2 passed, 8 skipped, 2 xfailed"),
    ],
)
def test_ci_fails_a_skipped_real_test(tmp_path: Path, ci: str, counts: str) -> None:
    """What needs real weights can't pass by not running (skips in `setup` count as errors); tests/gpu may."""
    for folder in (tmp_path / "tests" / "gpu", tmp_path / "tests" / "unit"):
        folder.mkdir(parents=True)
        (folder / f"test_{folder.name}.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text("from tests.plugin_real import pytest_runtest_makereport\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = real: needs a real component\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(tmp_path)]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.splitlines()[-1].startswith(f"{counts} in "), done.stdout
    assert (done.returncode == 1) is bool(ci)
    assert ("CI runs every test marked `real`" in done.stdout) is bool(ci)
