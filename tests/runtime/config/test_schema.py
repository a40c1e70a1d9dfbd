"""Settings that contradict each other or endanger someone are refused; everything else has a sound default."""

import pytest

from actors.errors import ConfigError
from runtime.config.checks import is_loopback
from runtime.config.document import read
from runtime.config.schema import Config
from runtime.config.units import MIB, Amount
from runtime.config.yaml import validate

HASH = "sha256:" + "0" * 64


def config(text: str) -> Config:
    """Validate a text."""
    return validate(Config, read(text, "f"))


def refusal(text: str) -> str:
    """What a text is refused with."""
    with pytest.raises(ConfigError) as caught:
        config(text)
    return caught.value.message


def test_an_empty_file_is_a_safe_server() -> None:
    """S1, S9: only this machine reaches it, and the limits are on."""
    plain = config("")
    assert plain == Config()
    assert (plain.server.host, plain.server.port, plain.server.insecure) == ("127.0.0.1", 8080, False)
    assert (plain.server.limits.body, plain.server.limits.json_depth) == (64 * MIB, 64)
    assert plain.devices[0].memory == Amount(share=0.5)
    assert plain.warm is None
    assert config("warm: []").warm == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.example.org"])
def test_listening_beyond_this_machine_needs_keys_or_a_word(host: str) -> None:
    """S1: refused by default; keys or `insecure: true` permit it."""
    assert "f:1: server.host: listening beyond this machine needs server.keys" in refusal(f"server: {{host: '{host}'}}")
    assert config(f"server: {{host: '{host}', insecure: true}}").server.host == host
    assert config(f"server: {{host: '{host}', keys: [{{name: a, hash: '{HASH}'}}]}}").server.keys[0].scopes == (
        "infer",
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_a_loopback_address_needs_nothing(host: str) -> None:
    """The whole of 127/8 and ::1."""
    assert is_loopback(host)
    assert config(f"server: {{host: '{host}'}}").server.host == host


@pytest.mark.parametrize(
    "host", ["", "256.1.1.1", "1.2.3", "a b", "-x", "http://x", "[::1]", "x" * 300, "127.0.0.1:80"]
)
def test_an_address_that_is_none_is_refused(host: str) -> None:
    """A wrong address is a fault of the file, not of the socket."""
    assert "server.host" in refusal(f"server: {{host: '{host}', insecure: true}}")


def test_a_key_that_is_not_a_hash_is_not_shown() -> None:
    """S10: whoever writes the key itself into the file does not find it in a log."""
    message = refusal("server: {keys: [{name: a, hash: my-secret-key}]}")
    assert "server.keys.0.hash: not sha256:" in message
    assert "my-secret" not in message


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("server: {port: 65536}", "server.port"),
        ("server: {port: -1}", "server.port"),
        (f"server: {{keys: [{{name: a, hash: '{HASH}', scopes: []}}]}}", "server.keys.0.scopes: is too short"),
        (f"server: {{keys: [{{name: a, hash: '{HASH}', scopes: [root]}}]}}", "write infer"),
        (
            f"server: {{keys: [{{name: a, hash: '{HASH}'}}, {{name: a, hash: '{HASH}'}}]}}",
            "server.keys.1.name: a is listed",
        ),
        ("server: {wait: {soft: 0s}}", "server.wait.soft: must be greater than 0"),
        ("server: {wait: {default_deadline: 0}}", "server.wait.default_deadline"),
        ("server: {limits: {body: 0}}", "server.limits.body"),
        ("server: {limits: {waiters: 5}}", "server.limits.waiters_per_model: is over waiters (5)"),
        ("server: {limits: {json_depth: 100000}}", "server.limits.json_depth"),
        ("server: {trusted_hosts: ['a.org:80']}", "server.trusted_hosts.0: 'a.org:80' is not a host"),
        ("server: {trusted_hosts: ['http://a.org']}", "server.trusted_hosts.0"),
        ("server: {trusted_hosts: ['a*.org']}", "server.trusted_hosts.0"),
        ("server: {trusted_hosts: ['*.']}", "server.trusted_hosts.0"),
        ("server: {model_ready: maybe}", "known are loadable, resident"),
        ("devices: []", "devices: no device is listed"),
        ("devices: [{memory: 1GiB}]", "devices.0.id: is missing"),
        ("devices: [{id: cpu:0}, {id: cpu:0}]", "devices.1.id: cpu:0 is listed twice"),
        ("devices: [{id: gpu:0}]", "write cpu:0, cpu:1"),
        ("devices: [{id: cpu:100}]", "write cpu:0, cpu:1"),
        ("devices: [{id: 'cuda:\u0663'}]", "write cpu:0, cpu:1"),
        ("devices: [{id: cpu:0, memory: 1GiB, headroom: 1GiB}]", "devices.0.headroom: leaves nothing of memory (1GiB)"),
        ("devices: [{id: cpu:0, count: 0}]", "devices.0.count"),
        ("devices: [{id: cpu:0, allow: [os.path;x]}]", "devices.0.allow.0"),
        ("devices: [{id: cpu:0, isolation: none}]", "known are process, thread"),
        ("devices: [{id: cpu:0, start: fork}]", "known are auto, spawn, standby, zygote"),
        ("devices: [{id: cuda:0, start: zygote}]", "devices.0.start: no zygote is possible for cuda:0"),
        ("devices: [{id: cpu:0, isolation: thread, start: spawn}]", "devices.0.start: says nothing with isolation"),
        ("disk: {skeletons: 1}", "disk.skeletons"),
        ("host: {memory: 1MiB, headroom: 2MiB}", "host.headroom"),
        ("host: {pressure: {high: 80%, low: 80%}}", "host.pressure.low: must be below high (80%)"),
        ("host: {pressure: {interval: 0}}", "host.pressure.interval"),
        ("disk: {path: s3://bucket/x}", "only local folders"),
        ("disk: {path: ''}", "not a path"),
        ("disk: {size: 0}", "disk.size"),
        ("policy: {name: auto}", "known are lru, lru_ttl"),
        ("policy: {name: lru_ttl}", "policy.ttl_idle: is missing; name: lru_ttl needs it"),
        ("policy: {ttl: 1s, min_residency: 5s}", "policy.ttl: is under min_residency (5s)"),
        ("policy: {backoff: {first: 10m}}", "policy.backoff.first: is over limit (5m)"),
        ("policy: {victims_per_load: 0}", "policy.victims_per_load"),
        ("models: [{name: ../a, source: x}]", "models.0.name"),
        ("models: [{name: a/b, source: x}]", "models.0.name"),
        ("models: [{name: \u00e9, source: x}]", "models.0.name"),
        ("models: [{name: a, source: x, version: 1}]", "models.0.version: must be text (put it into quotes)"),
        ("models: [{name: a, source: x, version: ''}]", "models.0.version"),
        ("models: [{name: a, source: x}, {name: a, source: y}]", "models.1.name: a@1 is listed twice"),
        ("models: [{name: a}]", "models.0.source: is missing"),
        ("models: [{name: a, source: hf://x/y}]", "only local folders"),
        ("models: [{name: a, source: x, footprint: {device: 1}}]", "models.0.footprint.host: is missing"),
        (
            "devices: [{id: cpu:0, memory: 1GiB}]\nmodels: [{name: a, source: x, footprint: {device: 2GiB, host: 1}}]",
            "f:2: models.0.footprint.device: fits on no device (the largest has 1GiB)",
        ),
        ("warm: [a]", "warm.0.model: no model a is listed"),
        ("models: [{name: ab, source: x}]\nwarm: [abc]", "f:2: warm.0.model: no model abc is listed (did you mean ab?"),
        ("models: [{name: ab, source: x}]\nwarm: [ab@2]", "no model ab@2 is listed (did you mean ab@1?)"),
        ("repository: [x]\nwarm: [a, a]", "warm.1.model: a is listed twice"),
        ("warm: [5]", "warm.0: must be a mapping"),
        ("warm: ['']", "warm.0.model"),
        ("warm: [a@b@c]", "warm.0.model"),
        ("telemetry: {otlp: 'ftp://x'}", "telemetry.otlp: not an http address"),
        ("telemetry: {otlp: 'http://'}", "telemetry.otlp: not an http address"),
        ("telemetry: {otlp: 'http://x:99999'}", "telemetry.otlp: not an http address"),
        ("telemetry: {otlp: 'http://user:secret@x'}", "telemetry.otlp: a user, password"),
        ("telemetry: {trace_url: 'http://x/'}", "must contain {trace_id} once"),
        ("telemetry: {trace_url: 'http://x/{trace_id}/{trace_id}'}", "must contain {trace_id} once"),
        ("telemetry: {trace_url: 'javascript:{trace_id}'}", "not an http address"),
        ("telemetry: {access_log: off}", "must be true or false"),
    ],
)  # fmt: skip
def test_a_contradiction_or_wrong_form_is_refused(text: str, what: str) -> None:
    """F19, S1, S4, S10: each with its key, and never with a secret in the message."""
    message = refusal(text)
    assert what in message
    assert "secret" not in message


def test_trusted_hosts_are_names_addresses_and_patterns() -> None:
    """S1: what the Host check understands is what the configuration accepts."""
    hosts = ("*", "*.example.org", "a_b.svc", "10.0.0.1", "[fe80::1]", "::1")
    assert config(f"server: {{trusted_hosts: {list(hosts)}}}").server.trusted_hosts == hosts


def test_a_repository_may_hold_what_the_list_does_not() -> None:
    """Names of a repository's models are only known after the scan."""
    assert config("repository: [models]\nwarm: [a, {model: b@2, required: false}]").warm is not None


def test_keys_of_warm_entries_and_models_may_name_versions() -> None:
    """`name@version` is known when that version is listed."""
    text = "models: [{name: a, version: '1', source: x}, {name: a, version: '2', source: y}]\nwarm: [a@2]"
    warm = config(text).warm
    assert warm is not None
    assert (warm[0].model, warm[0].required) == ("a@2", True)


def test_thirty_faults_come_at_once_each_on_its_line() -> None:
    """A file that is wrong all over needs one run to be understood."""
    text = """\
server:
  host: 'a b'
  port: http
  insecure: yes
  kays: []
  limits:
    body: 64MIB
    headers: -1
    header_count: 0
    url: 8K
    json_depth: 1.5
    chunks: many
    body_idle: 30sec
    header_idle: 0
    waiters: -1
  wait: {soft: never}
  drain:
    delay: -1s
    timeout: x
  model_ready: loadabel
devices:
  - id: cpu
    memory: 150%
    isolation: proces
    slots: 0
    allow: os
host:
  memory: 0
  mlock: on
  pressure: {high: 0.8, low: 0.9}
disk:
  path: s3://x
  size: 1PB
policy:
  name: lur
  ttl: none
  backoff: {first: 10m}
repository: models
models:
  - name: ../x
    version: 1
    source: 5
warm: a
telemetry: {log: {level: INFO, format: text}}
peaks: []
"""
    rows = refusal(text).split("\n")
    lines = [int(row.split(":")[1]) for row in rows]
    assert len(rows) >= 36
    assert lines == sorted(lines)
    for row, number in zip(rows, lines, strict=True):
        key = row.split(": ")[1].split(".")[-1]
        assert key in text.split("\n")[number - 1] or key.isdigit(), row
