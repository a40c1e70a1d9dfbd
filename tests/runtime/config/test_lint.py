"""Advice about legal configurations: given when due, and silent when not."""

import pytest

from runtime.config.document import read
from runtime.config.lint import lint
from runtime.config.schema import Config
from runtime.config.units import GIB
from runtime.config.yaml import validate

QUIET = "warm: []\nrepository: [models]\n"


def paths(text: str, machine: int | None = 16 * GIB) -> dict[str, str]:
    """Findings by path."""
    config = validate(Config, read(text, "f"))
    return {finding.path: finding.text for finding in lint(config, machine=machine)}


@pytest.mark.parametrize("machine", [None, 16 * GIB])
def test_a_plain_configuration_has_no_findings(machine: int | None) -> None:
    """Advice that always comes is not read."""
    assert paths(QUIET, machine) == {}


@pytest.mark.parametrize(
    ("text", "path", "what"),
    [
        ("host: {memory: 1GiB}\ndevices: [{id: cpu:0, memory: 2GiB}]", "host.memory", "1.0 GiB is less than cpu:0"),
        ("host: {memory: 90%}", "host.memory", "reaches host.pressure.high"),
        ("host: {memory: 14GiB}\ndevices: [{id: cpu:0, memory: 1GiB}]", "host.memory", "reaches host.pressure.high"),
        ("devices: [{id: cpu:0, memory: 64GiB}]\nhost: {memory: 12GiB}", "devices.0.memory", "more than this machine"),
        ("devices: [{id: cpu:0, headroom: 8GiB}]", "devices.0.headroom", "leaves no memory"),
        ("devices: [{id: cpu:0, isolation: thread}]", "devices.0.isolation", "ends the server"),
        (
            "devices: [{id: cuda:0, start: standby, pinned: 2GiB}]",
            "devices.0.start",
            "2.0 GiB of page-locked memory twice",
        ),
        ("devices: [{id: cpu:0, load_timeout: 10s}]", "devices.0.load_timeout", "under server.wait.soft"),
        ("server: {drain: {delay: 10s, timeout: 20s}}", "server.drain", "delay and timeout are 30s"),
        ("server: {drain: {delay: 6s, timeout: 20s}}", "server.drain", "stopping takes up to 31s"),
        ("server: {host: 0.0.0.0, insecure: true}", "server.insecure", "anyone"),
        ("server: {trusted_hosts: ['*']}", "server.trusted_hosts", "DNS rebinding"),
        ("server: {host: 0.0.0.0, insecure: true}", "server.trusted_hosts", "add the names they use"),
        ("server: {trusted_hosts: []}", "server.trusted_hosts", "every request"),
        ("server: {wait: {default_deadline: 1s}}", "server.wait.soft", "never reached"),
        ("policy: {ttl: 500ms}", "policy.ttl", "500ms is shorter"),
        ("models: [{name: a, source: x, pinned: true, ttl_idle: 1h}]", "models.0.ttl_idle", "no effect"),
        ("policy: {min_residency: 1m}\nmodels: [{name: a, source: x, ttl: 30s}]", "models.0", "under policy.min"),
    ],
)
def test_trouble_is_predicted_with_its_numbers(text: str, path: str, what: str) -> None:
    """Each finding names the key and says why."""
    found = paths(QUIET + text)
    assert what in found[path]


def test_a_missing_warm_list_and_an_empty_catalogue_are_pointed_out() -> None:
    """A server without models, or without a word about its warm list, is ready later than people think."""
    found = paths("")
    assert set(found) == {"warm", "models"}
    assert "warm: []" in found["warm"]


def test_warm_and_pinned_models_that_do_not_fit_together_are_counted() -> None:
    """Declared sizes are added up over all devices, each model once."""
    text = """\
devices: [{id: cpu:0, memory: 3GiB, headroom: 1GiB}]
models:
  - {name: a, source: x, footprint: {device: 1536MiB, host: 1GiB}, pinned: true}
  - {name: b, source: x, footprint: {device: 1GiB, host: 1GiB}}
warm: [a@1, b]
"""
    assert "need 2.5 GiB, the devices have 2.0 GiB" in paths(text)["warm"]
    assert "warm" not in paths(text.replace("memory: 3GiB", "memory: 4GiB"))


def test_more_warm_models_than_places_are_pointed_out() -> None:
    """`count` bounds the warm list too."""
    text = "devices: [{id: cpu:0, count: 1}]\nrepository: [m]\nwarm: [a, b]\n"
    assert "may hold (1)" in paths(text)["warm"]


def test_unknown_sizes_are_not_guessed() -> None:
    """Without the machine's memory, and for GPUs, shares are not turned into bytes."""
    text = """\
devices: [{id: cuda:0, memory: 90%}]
models: [{name: a, source: x, footprint: {device: 100GiB, host: 1GiB}}]
warm: [a]
"""
    assert paths(text, None) == {}
