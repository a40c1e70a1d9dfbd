"""Settings of the remote tier: nothing allowed by default, every mistake with its key, no secret as a value."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from actors.errors import ConfigError
from runtime.config.document import read
from runtime.config.schema import Config
from runtime.config.yaml import validate
from runtime.remoting import pace_of, permits_of

WHOLE = """
remote:
  hosts:
    - models.example.org
    - {name: "*.CDN.example.org", token: CDN_TOKEN}
    - "[::1]"
  networks: [10.0.0.0/8]
  stores:
    - {url: s3://models, region: eu-central-1, keys: {access_key_id: KEY, secret_access_key: SECRET}}
    - {url: s3://public, auth: anonymous}
    - {url: az://models, auth: ambient}
  folders: [/mnt/models]
  hub: {cache: /hub, endpoint: https://huggingface.co, token: HF}
  pulls: 3
  parallel: 16
  chunk: 16MiB
  attempts: 7
  timeouts: {connect: 5s, stall: 20s, total: 2h}
"""
ENVIRON = {"CDN_TOKEN": "s3cret-1", "KEY": "s3cret-2", "SECRET": "s3cret-3", "HF": "s3cret-4"}


def config(text: str) -> Config:
    return validate(Config, read(text, "f"))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(text)
    return caught.value.message


def test_nothing_is_allowed_by_default() -> None:
    """S4: no host, no bucket, no folder, no hub."""
    permits = permits_of(config("").remote, {})
    assert (permits.hosts, permits.stores, permits.folders, permits.hub) == ({}, (), (), None)
    assert not permits.allow_http


def test_a_whole_section_becomes_permits_and_a_pace() -> None:
    """Units, shorthands and secrets by the names of their variables; none of them in a repr."""
    remote = config(WHOLE).remote
    permits, pace = permits_of(remote, ENVIRON), pace_of(remote)
    assert permits.hosts == {"models.example.org": "", "*.cdn.example.org": "s3cret-1", "::1": "", "huggingface.co": ""}
    assert permits.networks == (ipaddress.ip_network("10.0.0.0/8"),)
    assert [(each.url, each.auth) for each in permits.stores] == [
        ("s3://models", "keys"),
        ("s3://public", "anonymous"),
        ("az://models", "ambient"),
    ]
    assert permits.stores[0].keys == {"access_key_id": "s3cret-2", "secret_access_key": "s3cret-3"}
    assert permits.folders == (Path("/mnt/models"),)
    assert permits.hub is not None
    assert (permits.hub.cache, permits.hub.token) == (Path("/hub"), "s3cret-4")
    assert (pace.parallel, pace.chunk, pace.stall, pace.total, pace.attempts) == (16, 16 << 20, 20.0, 7200.0, 7)
    assert "s3cret" not in repr((permits, pace, remote))


@pytest.mark.parametrize("missing", sorted(ENVIRON))
def test_a_variable_that_is_not_set_is_told_by_its_key(missing: str) -> None:
    """At the start, not at the first load."""
    environ = {name: value for name, value in ENVIRON.items() if name != missing}
    with pytest.raises(ConfigError, match=f"the environment variable {missing} is not set") as caught:
        permits_of(config(WHOLE).remote, environ)
    assert caught.value.message.startswith("remote.")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: ['*']", "remote.hosts.0.name: every host is no list of hosts"),
        ("hosts: ['https://a']", "remote.hosts.0.name"),
        ("hosts: ['a:80']", "remote.hosts.0.name"),
        ("hosts: [a, a]", "remote.hosts.1: is there twice"),
        ("hosts: [{name: a, token: 'not a name'}]", "remote.hosts.0.token: not the name of an environment variable"),
        ("hosts: [{name: a, tokn: A}]", "remote.hosts.0.tokn: unknown key"),
        ("networks: [10.0.0.1/8]", "remote.networks.0"),
        ("stores: [{url: s3://a/b, auth: anonymous}]", "remote.stores.0.url: not a bucket"),
        ("stores: [{url: ftp://a, auth: anonymous}]", "remote.stores.0.url: not a bucket"),
        ("stores: [{url: s3://aaa}]", "remote.stores.0.keys: are missing"),
        ("stores: [{url: s3://aaa, auth: anonymous, keys: {access_key_id: A}}]", "do not go with auth: anonymous"),
        ("stores: [{url: s3://aaa, keys: {acces_key_id: A}}]", "did you mean access_key_id"),
        ("stores: [{url: gs://aaa, keys: {access_key_id: A}}]", "remote.stores.0.keys.access_key_id"),
        ("stores: [{url: s3://aaa, keys: {access_key_id: 'AK IA/+'}}]", "not the name of an environment variable"),
        ("stores: [{url: gs://aaa, auth: ambient, region: x}]", "remote.stores.0.region: belongs to s3://"),
        ("stores: [{url: gs://aaa, auth: ambient, endpoint: 'https://a'}]", "remote.stores.0.endpoint: belongs to"),
        (
            "stores: [{url: s3://aaa, auth: ambient, endpoint: 'http://a'}]",
            "remote.stores.0.endpoint: is not encrypted",
        ),
        ("stores: [{url: s3://aaa, auth: ambient}, {url: s3://aaa, auth: ambient}]", "remote.stores.1: is there twice"),
        ("stores: [{url: s3://aaa, auth: magic}]", "remote.stores.0.auth: is not one of the choices"),
        ("folders: ['s3://a']", "remote.folders.0"),
        ("hub: {endpoint: 'http://a'}", "remote.hub.endpoint: is not encrypted"),
        ("hub: {endpoint: 'https://user:pw@a'}", "remote.hub.endpoint"),
        ("allow_http: maybe", "remote.allow_http: must be true or false"),
        ("pulls: 0", "remote.pulls"),
        ("parallel: 65", "remote.parallel"),
        ("chunk: 1KiB", "remote.chunk"),
        ("attempts: 0", "remote.attempts"),
        ("timeouts: {stall: 0s}", "remote.timeouts.stall"),
        ("timeouts: {total: 5s}", "remote.timeouts.total: is shorter than stall or connect"),
        ("timeouts: {totl: 5s}", "remote.timeouts.totl: unknown key"),
        ("host: []", "remote.host: unknown key"),
    ],
)
def test_each_mistake_is_told_with_its_key(text: str, says: str) -> None:
    """And what could be a secret in the wrong place is not repeated."""
    found = refusal(f"remote: {{{text}}}" if not text.startswith("{") else text)
    assert says in found
    assert "AK IA" not in found
    assert "pw@" not in found


def test_plain_http_is_allowed_by_saying_so() -> None:
    """For stores inside a network of one's own; hashes are checked all the same."""
    text = "remote: {allow_http: true, stores: [{url: s3://aaa, auth: anonymous, endpoint: 'http://minio:9000'}]}"
    assert permits_of(config(text).remote, {}).allow_http


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_hubs_cache_is_where_its_library_looks(environ: dict[str, str], cache: str) -> None:
    """Its documented variables, in its order; and asking the hub stays off."""
    hub = permits_of(config("remote: {hub: {}}").remote, environ).hub
    assert hub is not None
    assert (hub.cache, hub.endpoint) == (Path(cache), None)
