"""File and environment become one value, or one list of all that is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.errors import ConfigError
from runtime.config.load import RESERVED, json_schema, load
from runtime.config.schema import Config
from runtime.config.units import Amount

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration file and give its path."""

    def put(text: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return put


def refusal(path: Path, environ: dict[str, str], overrides: dict[str, str] | None = None) -> str:
    """What file and variables are refused with."""
    with pytest.raises(ConfigError) as caught:
        load(path, environ, overrides)
    return caught.value.message


def test_relative_paths_start_at_the_files_folder(write: Write, tmp_path: Path) -> None:
    """Also those that nobody wrote: the working directory never matters."""
    config = load(write("repository: [a, /b]\nmodels: [{name: m, source: ../x}]\n"), {})
    assert config.repository == (tmp_path / "a", Path("/b"))
    assert config.models[0].source == tmp_path / "../x"
    assert config.disk.path == tmp_path / "cache"


def test_a_variable_overrides_the_file(write: Write) -> None:
    """Sections are joined by two underscores, list items are numbers, values are YAML scalars or flow lists."""
    path = write("server: {port: 1}\ndevices: [{id: cpu:0, memory: 1GiB}]\nmodels: [{name: a, source: x}]\n")
    config = load(
        path,
        {
            "FORELOAD_SERVER__PORT": "9000",
            "FORELOAD_SERVER__LIMITS__BODY_IDLE": "5s",
            "FORELOAD_SERVER__INSECURE": "true",
            "FORELOAD_DEVICES__0__MEMORY": "25%",
            "FORELOAD_DEVICES__1": "{id: cuda:0}",
            "FORELOAD_MODELS__0__VERSION": '"7"',
            "FORELOAD_WARM": "[a]",
            "FORELOAD_WARM__0": "{model: a, required: false}",
            "FORELOAD_POLICY__TTL": " null ",
            "PATH": "/bin",
            "foreload_server__port": "1",
        },
    )
    assert config.server.port == 9000
    assert config.server.limits.body_idle == 5.0
    assert config.server.insecure is True
    assert [(d.id, d.memory) for d in config.devices] == [("cpu:0", Amount(share=0.25)), ("cuda:0", Amount(share=0.5))]
    assert config.models[0].version == "7"
    assert config.warm is not None
    assert config.warm[0].required is False
    assert config.policy.ttl is None


def test_the_command_line_overrides_both(write: Write) -> None:
    """The nearest word wins, and a fault in it names the option."""
    path = write("server: {port: 1}\n")
    environ = {"FORELOAD_SERVER__PORT": "2"}
    assert load(path, environ, {"server.port": 3}).server.port == 3
    assert "command line --host: server.host: listening beyond" in refusal(path, environ, {"server.host": "0.0.0.0"})


def test_an_empty_variable_is_null(write: Write) -> None:
    """As an empty value in YAML is."""
    assert load(write("warm: []"), {"FORELOAD_WARM": ""}).warm is None


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("FORELOAD_SERVER__PROT", "1", "server.prot: unknown key (did you mean port?)"),
        ("FORELOAD_SEVER__PORT", "1", "sever: unknown key (did you mean server?)"),
        ("FORELOAD_PORT", "1", "port: unknown key"),
        ("FORELOAD_SERVER__PORT", "http", "server.port: must be a whole number"),
        ("FORELOAD_SERVER__PORT__X", "1", "server.port.x: leads nowhere"),
        ("FORELOAD_SERVER", "5", "server: must be a mapping"),
        ("FORELOAD_SERVER__", "5", "server.: leads nowhere"),
        ("FORELOAD_", "5", "leads nowhere"),
        ("FORELOAD_0", "5", "0: leads nowhere"),
        ("FORELOAD_DEVICES__5__MEMORY", "1GiB", "devices.5.memory: the list has 1 items (the next is number 1)"),
        ("FORELOAD_DEVICES__CPU__MEMORY", "1GiB", "devices.cpu.memory: leads nowhere"),
        ("FORELOAD_DEVICES__99999999999999999999__ID", "x", "leads nowhere"),
        ("FORELOAD_WARM", "[a", "warm: FORELOAD_WARM:1: "),
        ("FORELOAD_WARM", "[" * 1000, "nested deeper"),
        ("FORELOAD_POLICY", "{name: lru, name: lru}", "the key is here twice"),
        ("FORELOAD_SERVER__HOST", "127.0.0.1\nport: 1", "server.host"),
        ("FORELOAD_SERVER__HOST", "\udcff", "server.host"),
    ],
)
def test_a_variable_that_sets_nothing_is_an_error(write: Write, name: str, value: str, what: str) -> None:
    """A misspelt variable would otherwise be a setting that somebody believes in."""
    message = refusal(write("server: {port: 8080}\ndevices: [{id: cpu:0}]\n"), {name: value})
    assert message.startswith(f"environment {name}: ") or what in message
    assert what in message


def test_reserved_variables_are_not_settings(write: Write) -> None:
    """Those of the command line and the demo may be set beside them."""
    assert load(write(""), dict.fromkeys(RESERVED, "x")).server == Config().server


def test_faults_of_file_and_variables_come_together(write: Write) -> None:
    """F73: everything at once, and nothing is half loaded."""
    message = refusal(
        write("server: {port: x}\nhots: {}\n"),
        {"FORELOAD_POLICY__NAME": "lur", "FORELOAD_DEVICES__3__ID": "cpu:0", "FORELOAD_DISK__SIZE": "1PB"},
    )
    for expected in (
        "c.yaml:1: server.port: must be a whole number",
        "c.yaml:2: hots: unknown key (did you mean host?)",
        "environment FORELOAD_POLICY__NAME: policy.name: is not one of the choices (did you mean lru?)",
        "environment FORELOAD_DEVICES__3__ID: devices.3.id: the list has 0 items",
        "environment FORELOAD_DISK__SIZE: disk.size: unknown unit 'PB'",
    ):
        assert expected in message


def test_aliased_parts_are_overridden_one_by_one(write: Write) -> None:
    """A variable for one device does not reach another that shares its text."""
    path = write("devices:\n  - &d {id: cpu:0, memory: 1GiB}\n  - *d\n")
    config = load(path, {"FORELOAD_DEVICES__1__ID": "cuda:0"})
    assert [device.id for device in config.devices] == ["cpu:0", "cuda:0"]
    assert config.devices[1].memory == Amount(size=2**30)


def test_the_schema_for_editors_says_what_the_loader_says() -> None:
    """Every property is described, unknown keys are refused, and defaults read as a file has them."""
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["$defs"]["Device"]["properties"]["memory"]["default"] == "50%"
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        assert section["additionalProperties"] is False
        for key, entry in section["properties"].items():
            assert entry.get("description") or "$ref" in entry, key


def test_the_schema_for_editors_takes_short_forms() -> None:
    """A warm entry may be a bare name, a size text or a number; an editor must not underline what loads."""
    properties = json_schema()["properties"]
    (listed, _) = properties["warm"]["anyOf"]
    assert {"type": "string"} in listed["items"]["anyOf"]
    kinds = {entry["type"] for entry in json_schema()["$defs"]["Limits"]["properties"]["body"]["anyOf"]}
    assert kinds == {"integer", "string"}
