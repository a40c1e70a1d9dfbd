"""What a file of each engine must look like before it may be opened, without opening it in the library that runs it.

Belongs here: structure, sizes, references out of the file; no torch. Never: whether the file may be trusted (that is
the manifest's and the operator's word), and safetensors, which `index.py` reads in full.
"""

from __future__ import annotations

import os
import stat
import zipfile
from typing import TYPE_CHECKING, Final, NoReturn
from xml.parsers import expat

from actors.errors import CorruptWeights, FetchFailed
from runtime.tiers.index import read_index_at
from runtime.tiers.onnxfile import check_onnx
from runtime.tiers.sniff import looks_like

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENTRIES: Final = 200_000
"""Most entries of one archive."""

SPARE: Final = 64 << 20
"""Bytes that an archive may unpack to beyond twice its size: torch stores tensors as they are, and packs code text."""

_HEAD = 64
_SHOWN = 80


def check_file(path: Path, engine: str) -> None:
    """As `check_descriptor`, for a path. Raises `FetchFailed` if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FetchFailed(f"the weights cannot be read: {os.strerror(error.errno or 0)}") from None
    try:
        check_descriptor(descriptor, engine)
    finally:
        os.close(descriptor)


def check_descriptor(descriptor: int, engine: str) -> None:
    """Check one open file. Raises `CorruptWeights` naming what is wrong in it, and nothing else."""
    if engine == "eager":
        read_index_at(descriptor)
        return
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptWeights("the weights are not a regular file")
    if not status.st_size:
        _refuse(engine, "an empty file")
    head = os.pread(descriptor, _HEAD, 0)
    if engine == "onnx" or (engine == "openvino" and _is_onnx(head)):
        kind = looks_like(head)
        if kind:
            _refuse(engine, f"looks like {kind}")
        check_onnx(descriptor, status.st_size)
    elif engine in _ARCHIVES:
        _check_archive(descriptor, engine, head)
    # The .bin of OpenVINO is bare bytes: its graph says what they are (`check_graph`).


def _is_onnx(head: bytes) -> bool:
    # ModelProto begins with its version, field 1 as a varint; exporters write it first.
    return head[:1] == b"\x08"


# -- archives of torch -------------------------------------------------------------------------------


def _has(part: str, suffix: str = "") -> Callable[[list[str]], bool]:
    return lambda names: any(part in f"/{name}" and name.endswith(suffix) for name in names)


_ARCHIVES: Final[dict[str, tuple[tuple[str, Callable[[list[str]], bool]], ...]]] = {
    "torchscript": (("code/", _has("/code/")), ("data.pkl", _has("/data.pkl")), ("version", _has("/version"))),
    "export": (("archive_format", _has("/archive_format")), ("models/*.json", _has("/models/", ".json"))),
    "aot": (("data/aotinductor/*.so", _has("/data/aotinductor/", ".so")),),
}
"""Entries without which an archive is not one of this engine."""


def _check_archive(descriptor: int, engine: str, head: bytes) -> None:
    """Refuse what unpacks to far more than it is, reaches outside, or lacks its parts."""
    kind = looks_like(head)
    if kind != "zip":
        _refuse(engine, f"looks like {kind}" if kind else "not a zip archive")
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file, zipfile.ZipFile(file) as archive:
            rows = archive.infolist()
            size = os.fstat(descriptor).st_size
            _check_rows(engine, rows, size)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, ValueError, NotImplementedError) as error:
        _refuse(engine, f"truncated or damaged: {error}")
    names = [row.filename for row in rows]
    for part, there in _ARCHIVES[engine]:
        if not there(names):
            _refuse(engine, f"the archive has no entry {part}")


def _check_rows(engine: str, rows: list[zipfile.ZipInfo], size: int) -> None:
    if len(rows) > ENTRIES:
        _refuse(engine, f"{len(rows)} entries are over the limit of {ENTRIES}")
    seen: set[str] = set()
    total = 0
    for row in rows:
        shown = f"entry {row.filename[:_SHOWN]!a}"
        if row.filename.startswith(("/", "\\")) or ".." in row.filename.replace("\\", "/").split("/"):
            _refuse(engine, f"{shown} looks like a path out of the archive")
        if row.filename in seen:
            _refuse(engine, f"{shown} is there twice")
        if row.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            _refuse(engine, f"{shown} is compressed in an unusual way")
        if stat.S_ISLNK(row.external_attr >> 16):
            _refuse(engine, f"{shown} is a link")
        seen.add(row.filename)
        total += row.file_size
        if row.header_offset + row.compress_size > size:
            _refuse(engine, f"{shown}: {row.compress_size} bytes lie outside the file's {size}")
        if row.compress_type == zipfile.ZIP_STORED and row.file_size != row.compress_size:
            _refuse(engine, f"{shown} is stored, in {row.compress_size} bytes instead of {row.file_size}")
        if total > 2 * size + SPARE:
            _refuse(engine, f"{shown}: the archive unpacks to more than {2 * size + SPARE} bytes")


# -- OpenVINO's graph --------------------------------------------------------------------------------


def check_graph(raw: bytes, weights: int) -> None:
    """Check an OpenVINO graph against the size of its weights in bytes.

    Raises `CorruptWeights` for what is no graph, declares entities, or places a constant outside the weights.
    """
    parser = expat.ParserCreate()
    first: list[str] = []

    def started(name: str, attributes: dict[str, str]) -> None:
        if not first:
            first.append(name)
            if name != "net":
                _refuse("openvino", f"the graph starts with <{name[:_SHOWN]}>, not with <net>")
        if "offset" in attributes and "size" in attributes:
            _check_constant(attributes, weights)

    def refused(*_: object) -> None:
        _refuse("openvino", "the graph declares a document type or entities")

    parser.StartElementHandler = started
    parser.StartDoctypeDeclHandler = refused
    parser.EntityDeclHandler = refused
    try:
        parser.Parse(raw, True)
    except expat.ExpatError as error:
        _refuse("openvino", f"the graph is not XML: {error}")


def _check_constant(attributes: dict[str, str], weights: int) -> None:
    offset, size = attributes["offset"], attributes["size"]
    if not (offset.isascii() and offset.isdigit() and size.isascii() and size.isdigit()):
        _refuse("openvino", f"the graph's offset {offset[:_SHOWN]!r} or size {size[:_SHOWN]!r} is not a number")
    if max(len(offset), len(size)) > 19 or int(offset) + int(size) > weights:  # noqa: PLR2004 -- digits of 2**63
        _refuse("openvino", f"the graph's constant at offset {offset[:24]} lies outside the {weights} bytes of weights")


def _refuse(engine: str, reason: str) -> NoReturn:
    raise CorruptWeights(f"corrupt weights: not a file for engine {engine}: {reason}")
