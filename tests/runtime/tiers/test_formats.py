"""Files of engines other than ours, before any library opens them: whole, of that kind, and not reaching outside."""

from __future__ import annotations

import io
import os
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.errors import CorruptWeights, FetchFailed, ForeloadError
from runtime.tiers.formats import SPARE, check_file, check_graph
from tests.contracts.engine_kit import field, model_proto, module, node, onnx_of, tensor, varint

if TYPE_CHECKING:
    from pathlib import Path

PARTS = {
    "torchscript": {"m/data.pkl": b"x", "m/code/__torch__.py": b"y", "m/version": b"3"},
    "export": {"m/archive_format": b"pt2", "m/models/model.json": b"{}"},
    "aot": {"m/data/aotinductor/model/x.so": b"\x7fELF"},
}
ONNX = onnx_of(module())


def archive(path: Path, parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """A zip file of these entries."""
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, content in parts.items():
            made.writestr(name, content)
    return path


@pytest.mark.parametrize("engine", PARTS)
def test_an_archive_with_its_parts_passes_and_lacks_none(tmp_path: Path, engine: str) -> None:
    """Each part is needed, and named when it is missing."""
    parts = PARTS[engine]
    check_file(archive(tmp_path / "whole", parts), engine)
    for gone in parts:
        with pytest.raises(CorruptWeights, match="has no entry"):
            check_file(archive(tmp_path / "less", {k: v for k, v in parts.items() if k != gone}), engine)


@pytest.mark.parametrize("engine", PARTS)
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "m/../../x", "..\\x"])
def test_an_entry_outside_the_archive_is_refused(tmp_path: Path, engine: str, name: str) -> None:
    """F20: whatever unpacks it would write there."""
    with pytest.raises(CorruptWeights, match="path out of the archive"):
        check_file(archive(tmp_path / "m", {**PARTS[engine], name: b"x"}), engine)


def test_a_bomb_a_link_and_a_twin_are_refused(tmp_path: Path) -> None:
    """F12: what unpacks to far more than the file, what points elsewhere, what is there twice."""
    parts = PARTS["export"]
    bomb = archive(tmp_path / "bomb", {**parts, "m/zeros": bytes(SPARE + (1 << 20))}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptWeights, match="unpacks to more"):
        check_file(bomb, "export")
    with zipfile.ZipFile(tmp_path / "link", "w") as made:
        for name, content in parts.items():
            made.writestr(name, content)
        entry = zipfile.ZipInfo("m/link")
        entry.external_attr = 0o120777 << 16
        made.writestr(entry, "/etc/passwd")
    with pytest.raises(CorruptWeights, match="is a link"):
        check_file(tmp_path / "link", "export")
    with zipfile.ZipFile(tmp_path / "twice", "w") as made:
        for name, content in parts.items():
            made.writestr(name, content)
        with pytest.warns(UserWarning, match="Duplicate"):
            made.writestr("m/archive_format", b"other")
    with pytest.raises(CorruptWeights, match="is there twice"):
        check_file(tmp_path / "twice", "export")
    with pytest.raises(CorruptWeights, match="compressed in an unusual way"):
        check_file(archive(tmp_path / "bzip", parts, zipfile.ZIP_BZIP2), "export")


@pytest.mark.parametrize("engine", [*PARTS, "onnx", "openvino"])
def test_what_is_no_file_is_said_to_be_none(tmp_path: Path, engine: str) -> None:
    """Missing, a folder, a FIFO: an error without the path, and no hanging."""
    with pytest.raises(FetchFailed):
        check_file(tmp_path / "secret", engine)
    os.mkfifo(tmp_path / "fifo")
    for name in ("", "fifo"):
        with pytest.raises(ForeloadError) as refused:
            check_file(tmp_path / name, engine)
        assert str(tmp_path) not in refused.value.message


def test_a_good_onnx_file_passes(tmp_path: Path) -> None:
    """Under either engine that takes it."""
    (tmp_path / "m").write_bytes(ONNX)
    check_file(tmp_path / "m", "onnx")
    check_file(tmp_path / "m", "openvino")


NESTED = b""
for _ in range(200):
    NESTED = field(1, node("If", ["c"], "y", field(1, "then_branch") + field(6, NESTED) + field(20, 5)))

BAD_ONNX = {
    "no graph": (field(1, 8), "graph: is missing"),
    "graph is a number": (field(1, 8) + field(7, 5), "graph: is not a message"),
    "length past the end": (field(1, 8) + varint(7 << 3 | 2) + varint(1 << 40), "truncated"),
    "endless number": (field(1, 8) + b"\xff" * 12, "more than 64 bits"),
    "group": (field(1, 8) + varint(7 << 3 | 3), "wire type 3"),
    "field zero": (field(1, 8) + b"\x00\x00", "number 0"),
    "nested without end": (model_proto(NESTED), "graphs deep"),
    "external": (model_proto(field(5, tensor("w", np.zeros(1), field(14, 1)))), "in another file"),
    "external in a subgraph": (
        model_proto(
            field(1, node("If", ["c"], "y", field(6, field(5, tensor("w", np.zeros(1), field(13, b"")))))),
        ),
        r"graph\.node\.attribute\.g\.initializer: keeps its data in another file",
    ),
    "external in a constant": (
        model_proto(field(1, node("Constant", [], "y", field(5, tensor("w", np.zeros(1), field(14, 1)))))),
        r"graph\.node\.attribute\.t: keeps",
    ),
    "external and sparse": (
        model_proto(field(15, field(1, tensor("w", np.zeros(1), field(14, 1))))),
        r"graph\.sparse_initializer\.values: keeps",
    ),
    "external in a function": (
        model_proto(b"") + field(25, field(7, node("C", [], "y", field(5, tensor("w", np.zeros(1), field(14, 1)))))),
        r"functions\.node\.attribute\.t: keeps",
    ),
}


@pytest.mark.parametrize("case", BAD_ONNX)
def test_a_bad_onnx_file_is_refused_by_field(tmp_path: Path, case: str) -> None:
    """F4, F6, F18: wherever in the graph it hides."""
    content, said = BAD_ONNX[case]
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(CorruptWeights, match=said):
        check_file(tmp_path / "m", "onnx")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, len(ONNX) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(ONNX)))
def test_no_changed_onnx_file_raises_anything_else(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    """Accepted or `CorruptWeights`, whatever byte is changed and wherever it ends."""
    raw = bytearray(ONNX)
    raw[at] = byte
    (tmp_path / "m").write_bytes(raw[:cut])
    with suppress(CorruptWeights):
        check_file(tmp_path / "m", "onnx")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, 500), byte=st.integers(0, 255), cut=st.integers(0, 500), engine=st.sampled_from(sorted(PARTS)))
def test_no_changed_archive_raises_anything_else(tmp_path: Path, at: int, byte: int, cut: int, engine: str) -> None:
    """The same for zip archives."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as target:
        for name, content in PARTS[engine].items():
            target.writestr(name, content)
    raw = bytearray(made.getvalue())
    raw[at % len(raw)] = byte
    (tmp_path / "m").write_bytes(raw[: len(raw) - cut % len(raw)] if cut % 3 else raw)
    with suppress(CorruptWeights):
        check_file(tmp_path / "m", engine)


def graph(data: str = 'offset="0" size="8"', head: str = "", root: str = "net") -> bytes:
    """An OpenVINO graph with one constant."""
    return f'<?xml version="1.0"?>{head}<{root}><layers><layer><data {data}/></layer></layers></{root}>'.encode()


BAD_GRAPHS = {
    "beyond the end": (graph('offset="1" size="8"'), "outside the 8 bytes"),
    "overflow": (graph(f'offset="{2**64}" size="8"'), "outside the 8 bytes"),
    "negative": (graph('offset="-1" size="8"'), "is not a number"),
    "digits of another script": (graph('offset="٣" size="8"'), "is not a number"),
    "entities": (graph(head='<!DOCTYPE a [<!ENTITY b "c">]>'), "document type"),
    "a doctype": (graph(head="<!DOCTYPE html>"), "document type"),
    "another document": (graph(root="html"), "starts with <html>"),
    "cut": (graph()[:-5], "is not XML"),
    "nothing": (b"", "is not XML"),
    "bytes": (b"\x00\xff" * 20, "is not XML"),
}


def test_a_graph_within_its_weights_passes() -> None:
    """The last constant may end where the weights do."""
    check_graph(graph(), 8)


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_bad_graph_is_refused(case: str) -> None:
    """Offsets beyond the file would read other memory (as in Ollama's CVE-2026-7482); entities could fill it."""
    raw, said = BAD_GRAPHS[case]
    with pytest.raises(CorruptWeights, match=said):
        check_graph(raw, 8)
