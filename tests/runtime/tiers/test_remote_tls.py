"""Promises of https sources: a name's certificate is checked although an address is what is connected to."""

from __future__ import annotations

import ipaddress
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from actors.errors import FetchFailed
from runtime.tiers.sources import Permits
from tests.runtime.tiers.places import elsewhere, model_of
from tests.runtime.tiers.web import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.runtime.tiers.places import Place

    Make = Callable[..., Place]

NETWORKS = (ipaddress.ip_network("127.0.0.0/8"),)
PERMITS = Permits(hosts={"*.example.org": ""}, networks=NETWORKS)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for a name, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def presenting(cert: Path, key: Path) -> ssl.SSLContext:
    """A server's side of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


async def loaded(tmp_path: Path, make: Make, *, shown: str, trusted: str) -> tuple[Place, Any, bytes]:
    """Load a model of models.example.org from a server that shows one certificate, trusting another."""
    certificates = {name: certificate(tmp_path, name) for name in {shown, trusted}}
    with serving(presenting(*certificates[shown])) as web:
        record, content = elsewhere(tmp_path / "m", f"https://models.example.org:{web.port}/m")
        web.files["/m/model.safetensors"] = content
        place = make(record, permits=PERMITS, attempts=1)

        async def resolve(host: str, port: int) -> list[Any]:
            return [ipaddress.ip_address("127.0.0.1")]

        client = place.remote._web
        assert client is not None
        client._resolve = resolve
        client._tls.load_verify_locations(certificates[trusted][0])
        await place.host.load(model_of(record))
        assert web.asked
        return place, record, content


@pytest.mark.real
async def test_the_certificate_of_the_name_is_accepted_at_its_address(tmp_path: Path, make: Make) -> None:
    """Connected to 127.0.0.1, checked as models.example.org."""
    name = "models.example.org"
    place, record, content = await loaded(tmp_path, make, shown=name, trusted=name)
    assert place.host.path_of(model_of(record)).read_bytes() == content


@pytest.mark.real
@pytest.mark.parametrize(
    ("shown", "trusted"),
    [("other.example.org", "other.example.org"), ("models.example.org", "other.example.org")],
    ids=["another name", "nobody signed it"],
)
async def test_another_certificate_is_refused(tmp_path: Path, make: Make, shown: str, trusted: str) -> None:
    """One for another name, however trusted; one for the right name that nobody we trust has signed."""
    with pytest.raises(FetchFailed, match="cannot be connected to"):
        await loaded(tmp_path, make, shown=shown, trusted=trusted)
