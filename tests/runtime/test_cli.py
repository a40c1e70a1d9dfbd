"""The command line: exit codes, where words go, and what it never imports."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import DECLINED, OK, SETUP, UNAVAILABLE, main
from runtime.commands.client import Server, Unreachable

GOOD = "repository: [models]\nwarm: []\n"
STATE = {
    "devices": [
        {
            "id": "cpu:0",
            "capacity": 2**30,
            "used": 2**29,
            "residents": [
                {"model": "tiny@1", "bytes": 3 * 2**28, "state": "resident", "leases": 2, "idle": 61.4, "expires": 90},
                {"model": "evil\x1b[2J@2", "bytes": 17, "state": "loading", "pinned": True},
                "nonsense",
            ],
        },
    ],
}


class Answering(BaseHTTPRequestHandler):
    """A server that knows four paths and notes what it was asked."""

    asked: list[tuple[str, dict[str, str], bytes]]

    def do_GET(self) -> None:
        """Answer, or say no."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        status, answer, headers = self.answers().get(
            self.path, (404, {"error": "no such model", "code": "unknown_model"}, {})
        )
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for key, value in {"content-length": str(len(raw)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_GET  # noqa: N815  # the base class looks for these names

    def answers(self) -> dict[str, tuple[int, Any, dict[str, str]]]:
        """What each path answers."""
        rows = [{"name": "tiny", "version": "1", "state": "READY"}, {"name": "cold"}]
        busy = {"error": "too many wait", "code": "busy"}
        return {
            "/api/v1/state": (200, STATE, {}),
            "/v2/repository/index": (200, rows, {}),
            "/v2/repository/models/tiny/load": (200, b"", {}),
            "/v2/repository/models/tiny/unload": (200, b"", {}),
            "/v2/repository/models/busy/load": (429, busy, {"retry-after": "7"}),
            "/v2/repository/models/html/load": (502, b"<html>", {}),
            "/v2/repository/models/text/load": (200, b"welcome", {}),
            "/v2/repository/models/away/load": (302, b"", {"location": "/v2/repository/models/tiny/load"}),
            "/v2/repository/models/..%2Fx/load": (200, b"", {}),
        }

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    """A real HTTP server on a free port: its address, and what it was asked."""
    asked: list[tuple[str, dict[str, str], bytes]] = []
    kind = type("Answering", (Answering,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sound configuration."""
    path = tmp_path / "c.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def spawned(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    command = [sys.executable, "-c", "import sys; from runtime.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **(environ or {})}
    )


# -- check, schema, version, key ---------------------------------------------------------------------


def test_check_passes_a_sound_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0; findings are shown and do not fail."""
    file.write_text(GOOD + "server: {drain: {timeout: 1h}}\n", encoding="utf-8")
    assert main(["check", str(file)]) == OK
    out = capsys.readouterr().out
    assert "warning: server.drain: " in out
    assert out.endswith(": ok\n")


def test_check_lists_every_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, each fault with its line, on standard error."""
    file.write_text("server: {port: x}\npolicy: {name: lur}\n", encoding="utf-8")
    assert main(["check", str(file)]) == SETUP
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [row.removeprefix(f"{file}:") for row in captured.err.splitlines()] == [
        "1: server.port: must be a whole number (without quotes or unit)",
        "2: policy.name: is not one of the choices (did you mean lru?)",
    ]


def test_check_speaks_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object either way, with the same exit codes."""
    assert main(["check", str(file), "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == {"ok": True, "errors": [], "findings": []}
    file.write_text("a: 1\nb: 2\n", encoding="utf-8")
    assert main(["check", str(file), "--json"]) == SETUP
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], len(answer["errors"])) == (False, 2)


def test_check_takes_its_file_and_overrides_from_the_environment(file: Path) -> None:
    """FORELOAD_CONFIG names the file; a misspelt setting is an error of the environment."""
    assert spawned("check", environ={"FORELOAD_CONFIG": str(file)}).returncode == OK
    wrong = spawned("check", str(file), environ={"FORELOAD_SERVER__PROT": "1"})
    assert wrong.returncode == SETUP
    assert "environment FORELOAD_SERVER__PROT: server.prot: unknown key (did you mean port?)" in wrong.stderr


@pytest.mark.parametrize(
    "arguments", [["chek"], ["check"], ["check", "a", "b"], ["serve", "x", "--port", "y"], ["ps", "--url"]]
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    """Usage and configuration share a code: both are for whoever typed it."""
    assert main(arguments) == SETUP


def test_check_imports_nothing_heavy_and_is_quick(file: Path) -> None:
    """A file can be checked in an editor's save hook: no torch, no web framework, under half a second of CPU."""
    heavy = ["torch", "starlette", "uvicorn", "opentelemetry", "prometheus_client", "rich", "numpy", "anyio"]
    code = f"""\
import sys
from runtime.cli import main
code = main(["check", {str(file)!r}])
print(*(name for name in {heavy} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""

    def cost() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (done.returncode, done.stderr.strip()) == (OK, "")
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # The first run may compile; the better of three says what the code costs.
    assert min(cost() for _ in range(3)) < 0.5


def test_schema_prints_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """What an editor needs, and nothing else on the stream."""
    assert main(["schema"]) == OK
    assert json.loads(capsys.readouterr().out)["title"] == "foreload configuration"


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And an object for programs."""
    assert main(["version"]) == OK
    assert capsys.readouterr().out.startswith("foreload ")
    assert main(["version", "--json"]) == OK
    assert set(json.loads(capsys.readouterr().out)) == {"foreload", "python"}


def test_a_new_key_opens_what_its_hash_guards(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key is on standard output alone; the configuration takes what is printed beside it."""
    assert main(["key", "shop", "--scope", "infer:res*", "--scope", "read", "--json"]) == OK
    made = json.loads(capsys.readouterr().out)
    row = json.dumps({name: made[name] for name in ("name", "hash", "scopes")})
    file.write_text(f"{GOOD}server: {{host: 0.0.0.0, keys: [{row}]}}\n", encoding="utf-8")
    assert main(["check", str(file)]) == OK
    capsys.readouterr()
    assert main(["key", "shop"]) == OK
    captured = capsys.readouterr()
    assert captured.out.strip() not in captured.err
    assert "sha256:" in captured.err
    assert main(["key", "shop", "--scope", "root"]) == SETUP
    assert main(["key", "a b"]) == SETUP


# -- serve -------------------------------------------------------------------------------------------


def test_serve_refuses_a_wrong_file_and_an_unguarded_address(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S1: exit 2 before anything is started, also when the address comes from the command line."""
    assert main(["serve", str(file), "--host", "0.0.0.0"]) == SETUP
    assert "server.host: listening beyond this machine needs server.keys" in capsys.readouterr().err
    assert main(["serve", str(file), "--port", "70000"]) == SETUP
    assert "command line --port: server.port" in capsys.readouterr().err
    assert main(["serve", str(file.parent / "nowhere.yaml")]) == SETUP
    assert "No such file" in capsys.readouterr().err


# -- describe ----------------------------------------------------------------------------------------


def test_describe_refuses_a_folder_without_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and hashes can be computed; what the model takes and gives cannot."""
    assert main(["describe", str(tmp_path)]) == SETUP
    assert "cannot be read" in capsys.readouterr().err
    assert main(["describe", str(tmp_path / "nowhere")]) == SETUP


def test_describe_writes_sizes_and_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest lists what lies there; a second run sees what changed."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x" * 17)
    (tmp_path / "foreload.yaml").write_text(
        "name: tiny\nversion: '1'\nbuilder: {kind: python, target: 'pkg.models:tiny'}\n"
        "inputs: [{name: x, datatype: FP32, shape: [-1, 2]}]\noutputs: [{name: y, datatype: FP32, shape: [-1, 2]}]\n",
        encoding="utf-8",
    )
    assert main(["describe", str(tmp_path), "--json"]) == OK
    (row,) = json.loads(capsys.readouterr().out)["files"]
    assert (row["path"], row["size"]) == ("model.safetensors", 17)
    weights.write_bytes(b"y" * 18)
    assert main(["describe", str(tmp_path)]) == OK
    assert 'size": 18' in (tmp_path / "foreload.yaml").read_text(encoding="utf-8")
    (tmp_path / "words.txt").write_text("x", encoding="utf-8")
    capsys.readouterr()
    assert main(["describe", str(tmp_path)]) == OK
    assert ": 1 file\n" in capsys.readouterr().out
    assert main(["describe", str(tmp_path), "--all"]) == OK
    assert ": 2 files\n" in capsys.readouterr().out


# -- clients -----------------------------------------------------------------------------------------


def test_ps_shows_residents_and_nothing_a_terminal_obeys(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Size, state, leases, idle and expiry; control characters of a name are not passed on."""
    assert main(["ps", "--url", server[0]]) == OK
    out = capsys.readouterr().out
    assert "NAME" in out
    tiny = next(line for line in out.splitlines() if "tiny" in line)
    assert tiny.split() == ["tiny", "1", "cpu:0", "768.0", "MiB", "resident", "2", "1m1s", "1m30s"]
    assert "pinned" in out
    assert "\x1b" not in out
    assert main(["ps", "--url", server[0], "--json"]) == OK
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {
        "name": "tiny", "version": "1", "device": "cpu:0", "size": 3 * 2**28, "state": "resident", "leases": 2,
        "idle": 61.4, "expires": 90,
    }  # fmt: skip


def test_models_lists_the_index(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per version, cold ones by name alone."""
    assert main(["models", "--url", f"{server[0]}/"]) == OK
    out = capsys.readouterr().out
    assert "READY" in out
    assert "cold" in out
    assert main(["models", "--url", server[0], "--json"]) == OK
    assert json.loads(capsys.readouterr().out)[1] == {"name": "cold"}


def test_state_shows_devices_and_everything_as_json(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON is the server's own."""
    assert main(["state", "--url", server[0]]) == OK
    assert "cpu:0  512.0 MiB of 1.0 GiB  2 models" in capsys.readouterr().out
    assert main(["state", "--url", server[0], "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == STATE


def test_load_and_unload_ask_by_the_published_protocol(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The version travels as a parameter; a name is encoded once and cannot leave its place in the path."""
    address, asked = server
    assert main(["load", "tiny", "--version", "2", "--url", address]) == OK
    assert main(["load", "tiny", "--url", address, "--json"]) == OK
    assert main(["unload", "tiny", "--url", address]) == OK
    assert main(["load", "../x", "--url", address]) == OK
    assert [(path, body) for path, _, body in asked] == [
        ("/v2/repository/models/tiny/load", b'{"parameters": {"version": "2"}}'),
        ("/v2/repository/models/tiny/load", b"{}"),
        ("/v2/repository/models/tiny/unload", b"{}"),
        ("/v2/repository/models/..%2Fx/load", b"{}"),
    ]
    assert "tiny: unloaded" in capsys.readouterr().out


def test_a_no_of_the_server_exits_1_with_its_words(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The stable code and the time to come back are shown; a proxy's page is not."""
    assert main(["load", "busy", "--url", server[0]]) == DECLINED
    assert "too many wait (busy). Try again in 7 s." in capsys.readouterr().err
    assert main(["load", "unknown", "--url", server[0]]) == DECLINED
    assert "no such model (unknown_model)" in capsys.readouterr().err
    assert main(["load", "html", "--url", server[0]]) == DECLINED
    assert "(http_502)" in capsys.readouterr().err


def test_redirects_are_not_followed(server: Any) -> None:
    """S4: a key never travels to another place because an answer says so."""
    assert main(["load", "away", "--url", server[0]]) == DECLINED
    assert len(server[1]) == 1


def test_what_is_no_foreload_server_exits_3(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listening, or something else answering."""
    assert main(["load", "text", "--url", server[0]]) == UNAVAILABLE
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert main(["ps", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}"]) == UNAVAILABLE
    assert "Connection refused" in capsys.readouterr().err


def test_a_silent_server_exits_3_in_time() -> None:
    """The timeout bounds the silence."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match=r"not answer|no answer"):
        Server(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05).get("/")


@pytest.mark.parametrize("address", ["ftp://x", "file:///etc/passwd", "x", "http://u:p@x", "http://"])
def test_an_address_that_is_none_exits_2(address: str) -> None:
    """Only http(s): a local file is not a server."""
    assert main(["ps", "--url", address]) == SETUP


def test_the_key_comes_from_the_environment_and_is_sent_as_bearer(server: Any) -> None:
    """S10: never on the command line, where every user of the machine could read it."""
    address, asked = server
    done = spawned(
        "ps", environ={"FORELOAD_URL": address, "FORELOAD_KEY": "planted-marker", "http_proxy": "http://127.0.0.1:9"}
    )
    assert (done.returncode, asked[0][1]["authorization"]) == (OK, "Bearer planted-marker")
    assert "planted-marker" not in done.stdout + done.stderr
    broken = spawned("ps", environ={"FORELOAD_URL": address, "FORELOAD_KEY": "a\r\nx: planted-marker"})
    assert broken.returncode == SETUP
    assert "planted-marker" not in broken.stdout + broken.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    """F79: output into a pipe that nobody reads ends quietly."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "import sys; from runtime.cli import main; sys.exit(main())", "schema"]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (OK, "")
