"""Promises of source addresses: one way to read each, no room for secrets, nothing allowed that nobody allowed."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.tiers.sources import HubPlace, ObjectPlace, Permits, Source, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("s3://models/team/resnet", Source("s3", "models", "team/resnet")),
        ("s3://models", Source("s3", "models", "")),
        ("gs://models/a", Source("gs", "models", "a")),
        ("az://container/a/", Source("az", "container", "a")),
        ("https://Models.Example.org/a/b", Source("https", "models.example.org", "a/b")),
        ("https://models.example.org:8443/a", Source("https", "models.example.org:8443", "a")),
        ("http://[::1]:80/a", Source("http", "[::1]:80", "a")),
        (f"hf://org/name@{COMMIT}", Source("hf", "org/name", "", COMMIT)),
        (f"hf://org/name@{COMMIT}/onnx/model", Source("hf", "org/name", "onnx/model", COMMIT)),
        ("file:///mnt/models", Source("file", "", "/mnt/models")),
        ("file:///mnt/a%20b", Source("file", "", "/mnt/a b")),
    ],
)
def test_an_address_is_taken_apart(text: str, source: Source) -> None:
    """Scheme, place, path; and the same again from what it spells."""
    assert parse(text) == source
    assert parse(str(source).replace(" ", "%20")) == source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an address"),
        ("models/resnet", "no known scheme"),
        ("ftp://host/a", "no known scheme"),
        ("s3:/models/a", "no known scheme"),
        ("javascript:alert(1)", "no known scheme"),
        ("https://user:s3cret@host/a", "user or password"),
        ("https://ok@evil/a", "user or password"),
        ("https://host/a?X-Amz-Signature=s3cret", "query"),
        ("https://host/a#b", "query or fragment"),
        ("https://host/a?", "query"),
        ("https://host/../a", ". or .."),
        ("https://host/%2e%2e/a", ". or .."),
        ("s3://bucket/a/./b", ". or .."),
        ("file:///mnt/../etc/passwd", ". or .."),
        ("https://host%2f@evil/a", "escaped host"),
        ("https:///a", "no host"),
        ("https://host./a", "no host"),
        ("https://host:port/a", "cannot be read"),
        ("https://[::1/a", "cannot be read"),
        ("https://host\\@evil/a", "not an address"),
        ("https://ho st/a", "not an address"),
        ("https://host/a\nb", "not an address"),
        ("https://host/" + "a" * 3000, "not an address"),
        ("s3://bucket:80/a", "no bucket"),
        ("s3:///a", "no bucket"),
        ("file://host/a", "not a local file"),
        ("hf://org/name", "no commit"),
        ("hf://org/name@main", "no commit"),
        (f"hf://org/name@{COMMIT[:-1]}", "no commit"),
        (f"hf://org/name@{COMMIT.upper()}", "no commit"),
        (f"hf://name@{COMMIT}", "not a repository"),
        (f"hf://../name@{COMMIT}", "not a repository"),
    ],
)
def test_anything_else_is_refused_without_being_repeated(text: str, says: str) -> None:
    """F21: what two readers could read differently, what holds a secret, what moves."""
    with pytest.raises(ValueError, match=says) as caught:
        parse(text)
    assert "s3cret" not in str(caught.value)


@given(st.text(max_size=80))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    """Hostile text raises `ValueError` and nothing else."""
    for prefix in ("", "https://", "s3://", "hf://", "file://"):
        try:
            found = parse(prefix + text)
        except ValueError:
            continue
        assert "@" not in found.place
        assert not {".", ".."} & set(found.path.split("/"))


def test_a_file_below_an_address_is_joined() -> None:
    """With one slash, whatever stood there."""
    assert str(parse("s3://models/team/") / "model.safetensors") == "s3://models/team/model.safetensors"
    assert str(parse("s3://models") / "a/b") == "s3://models/a/b"
    assert str(parse(f"hf://org/name@{COMMIT}") / "model.safetensors") == f"hf://org/name@{COMMIT}/model.safetensors"
    assert str(parse("file:///mnt") / "a") == "file:///mnt/a"
    assert str(parse("https://host:8443") / "a") == "https://host:8443/a"


EVERY = Permits(
    hosts={"models.example.org": "t0ken", "*.cdn.example.org": "", "10.0.0.7": ""},
    networks=(ipaddress.ip_network("10.1.0.0/16"),),
    stores=(ObjectPlace("s3://models"),),
    folders=(Path("/mnt/models"),),
    hub=HubPlace(Path("/hub")),
)


@pytest.mark.parametrize(
    "text",
    [
        "https://models.example.org/a",
        "https://MODELS.example.org:8443/a",
        "https://a.cdn.example.org/a",
        "https://10.0.0.7/a",
        "s3://models/a",
        "file:///mnt/models/a",
        f"hf://org/name@{COMMIT}",
    ],
)
def test_what_is_listed_is_allowed(text: str) -> None:
    """By host, bucket, folder, or the hub as a whole; and nothing of it without a list."""
    assert EVERY.refusal(parse(text)) == ""
    assert Permits().refusal(parse(text)) != ""


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a",
        "https://models.example.org.evil.org/a",
        "https://evilmodels.example.org/a",
        "https://cdn.example.org/a",
        "https://evilcdn.example.org/a",
        "https://10.0.0.8/a",
        "http://models.example.org/a",
        "s3://models2/a",
        "gs://models/a",
        "file:///mnt/models2/a",
        "file:///mnt/a",
    ],
)
def test_what_resembles_it_is_not(text: str) -> None:
    """Suffixes, prefixes and other schemes of what is listed."""
    assert EVERY.refusal(parse(text))


@pytest.mark.parametrize(
    ("host", "address", "allowed"),
    [
        ("models.example.org", "93.184.216.34", True),
        ("models.example.org", "2606:2800:220:1::1", True),
        ("models.example.org", "10.1.2.3", True),
        ("models.example.org", "10.2.2.3", False),
        ("models.example.org", "127.0.0.1", False),
        ("models.example.org", "::ffff:127.0.0.1", False),
        ("models.example.org", "::ffff:10.1.2.3", True),
        ("models.example.org", "2002:7f00:1::", False),
        ("models.example.org", "169.254.169.254", False),
        ("models.example.org", "100.64.0.1", False),
        ("models.example.org", "224.0.0.1", False),
        ("models.example.org", "fd00::1", False),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
    ],
)
def test_addresses_inside_are_reached_only_if_they_are_listed(host: str, address: str, *, allowed: bool) -> None:
    """F21: by network, or because the address itself stands in the list of hosts."""
    assert EVERY.reaches(host, ipaddress.ip_address(address)) is allowed


def test_no_permit_shows_its_secrets() -> None:
    """S10: not in a repr, which is where logs get their words from."""
    place = ObjectPlace("s3://models", keys={"secret_access_key": "s3cret"})
    shown = repr((EVERY, place, HubPlace(Path("/hub"), None, "s3cret")))
    assert "t0ken" not in shown
    assert "s3cret" not in shown
