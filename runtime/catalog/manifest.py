"""The manifest of one model directory, `foreload.yaml`: its grammar and its rules.

Belongs here: what a manifest may say. Never: looking at the directory (`repository.py`) or writing it (`describe.py`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, Strict, StringConstraints, model_validator

from runtime.catalog.preprocess import Preprocess, tensor_faults
from runtime.config.units import Bytes, Flag, Seconds
from runtime.config.yaml import Fault, Frozen, read, refuse, validate
from runtime.tiers import sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Row = TypeVar("Row")

FILE_NAME: Final = "foreload.yaml"
DATATYPES: Final = frozenset(
    {
        *("BOOL", "BYTES", "FP16", "BF16", "FP32", "FP64"),
        *(f"{sign}INT{width}" for sign in ("", "U") for width in (8, 16, 32, 64)),
    }
)
SAFE_SUFFIX: Final = ".safetensors"
PICKLE_SUFFIXES: Final = (".pth", ".pt")
SUFFIXES: Final = {
    "eager": (SAFE_SUFFIX, *PICKLE_SUFFIXES),
    "export": (".pt2",),
    "aot": (".pt2",),
    "torchscript": (".pt", ".ts", ".jit", ".torchscript"),
    "onnx": (".onnx",),
    "openvino": (".bin", ".onnx"),
}
"""What the weights of each engine may be called. OpenVINO's `.bin` has its graph in an `.xml` of its own."""

RUNS_CODE: Final = frozenset({"export", "aot", "torchscript"})
"""Engines whose files can make whoever opens them run code (`SECURITY.md`)."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_TARGET = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*", re.ASCII)
_CLASS = re.compile(_WORD, re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_PATH_BYTES = 512
_LARGEST = (1 << 63) - 1


def matching(pattern: str, what: str) -> Callable[[str], str]:
    """Make a validator that refuses text which is not wholly `pattern`."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"is not a {what}; use {pattern}")
        return text

    return check


def some(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Refuse an empty list; runs after its rows were checked, so that a bad row is not reported as a missing one."""
    if not rows:
        raise ValueError("is empty; there is at least one")
    return rows


def relative_path(text: str) -> str:
    """Accept `a/b.json`; raise `ValueError` for whatever could leave the directory or confuse a reader."""
    if not text or len(text.encode("utf-8", "surrogatepass")) > _PATH_BYTES:
        raise ValueError(f"is empty or longer than {_PATH_BYTES} bytes; name a file of this directory")
    if _CONTROL.search(text) or "\\" in text:
        raise ValueError("holds a control character or a backslash; write a plain relative path with /")
    if text.startswith("/") or any(part in {"", ".", ".."} for part in text.split("/")):
        raise ValueError("is not a relative path inside the directory; leave out /, . and ..")
    return text


def source(text: str) -> str:
    """Accept an address that files may come from. Raises `ValueError`; whether it is permitted is not known here."""
    sources.parse(text)
    return text


Name: TypeAlias = Annotated[str, AfterValidator(matching(_NAME, "model name"))]
Version: TypeAlias = Annotated[str, AfterValidator(matching(_VERSION, "version"))]
Digest: TypeAlias = Annotated[str, AfterValidator(matching(r"[0-9a-f]{64}", "sha256 in lower-case hex"))]
RelativePath: TypeAlias = Annotated[str, AfterValidator(relative_path)]
SourceUrl: TypeAlias = Annotated[str, AfterValidator(source)]
Text: TypeAlias = Annotated[str, StringConstraints(max_length=1024)]
Pattern: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Size: TypeAlias = Annotated[Bytes, Field(ge=1)]
Delay: TypeAlias = Annotated[Seconds, Field(le=60)]
Switch: TypeAlias = Flag
Natural: TypeAlias = Annotated[int, Strict(), Field(ge=0, le=_LARGEST)]
Dimension: TypeAlias = Annotated[int, Strict(), Field(ge=-1, le=_LARGEST)]


class FileRow(Frozen):
    """One file of the directory."""

    path: RelativePath
    """Relative to the manifest."""
    size: Natural
    """Bytes."""
    sha256: Digest
    """Of the file's bytes, lower-case hex."""
    source: SourceUrl | None = None
    """Where the file comes from, if it is not in the directory; overrides the model's `source`."""


class Builder(Frozen):
    """How the module is made: `transformers` from a config file, or `python` from a function."""

    kind: Literal["transformers", "python"]
    """Who builds."""
    config: RelativePath | None = None
    """For transformers: the listed file that holds the configuration."""
    architecture: Annotated[str, StringConstraints(max_length=256)] = Field(default="", alias="class")
    """For transformers: the class to build; empty takes the configuration's own."""
    target: Annotated[str, StringConstraints(max_length=512)] = ""
    """For python: `package.module:factory`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """For python: keyword arguments of the factory."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(_builder_faults(self))
        return self


class Tensor(Frozen):
    """One input or output."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Name on the wire."""
    datatype: str
    """Open Inference Protocol datatype."""
    shape: tuple[Dimension, ...] = Field(max_length=16)
    """Dimensions, -1 for a variable one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.datatype not in DATATYPES:
            refuse([Fault(("datatype",), "is not a datatype", f"known are {', '.join(sorted(DATATYPES))}")])
        if _CONTROL.search(self.name):
            refuse([Fault(("name",), "holds a control character")])
        return self


class Input(Tensor):
    """What the model takes; how it is made where clients send a file instead."""

    preprocess: Preprocess | None = None
    """Steps from a JPEG, PNG or WAV file to this tensor; null where clients send the tensor."""

    @model_validator(mode="after")
    def _check_preprocess(self) -> Self:
        if self.preprocess is not None:
            refuse(tensor_faults(self.preprocess, self.datatype, self.shape))
        return self


class Batch(Frozen):
    """Micro-batching."""

    max_size: Annotated[int, Strict(), Field(ge=1, le=4096)] = 1
    """Most requests in one forward; 1 is off."""
    delay: Delay = 0.0
    """How long the first request of a batch waits for others."""


class Sizes(Frozen):
    """Bytes the model needs, workspace included, where they are known better than from the weights."""

    device: Size
    """Bytes on the device."""
    host: Size
    """Bytes in host memory."""


class Chosen(Frozen):
    """Which tensors of the weights are taken, by name patterns: `*`, `?`, `[ab]`."""

    include: tuple[Pattern, ...] = Field(default=(), max_length=1024)
    """Names that are taken; empty takes all."""
    exclude: tuple[Pattern, ...] = Field(default=(), max_length=1024)
    """Names that are left out, also of the included."""


class Manifest(Frozen):
    """All that is known of a model before it is built."""

    name: Name
    """Name in URLs."""
    version: Version
    """Version in URLs; text, so write it in quotes."""
    engine: Literal["eager", "export", "aot", "torchscript", "onnx", "openvino"] = "eager"
    """What runs it: `eager` builds a module and binds weights to it; the others open a file that holds both."""
    builder: Builder | None = None
    """How the module is made; for `engine: eager` alone."""
    trust: Literal["code"] | None = None
    """Says that the weights' file may run code, as export, aot and torchscript need; the server's `trust` must too."""
    graph: RelativePath | None = None
    """For openvino: the listed .xml whose .bin the weights are."""
    compile: Switch = False
    """For eager and export: compiles in the background and switches over when that is done; needs g++."""
    weights: RelativePath | None = None
    """The weights among the files; null takes the only one there is."""
    files: Annotated[tuple[FileRow, ...], AfterValidator(some)] = Field(max_length=10_000)
    """Every file of the model; the model is complete when all are there."""
    source: SourceUrl | None = None
    """Where all files come from instead of the directory: their paths are added to it."""
    allow_pickle: Literal["weights_only"] | None = None
    """Allows .pth and .pt weights, which are read without running code and converted once."""
    state_dict: Text | None = None
    """Dotted path of the state dict inside a .pth checkpoint."""
    rename: dict[Text, Text] = Field(default_factory=dict)
    """Key prefixes of a .pth state dict and what they become."""
    inputs: Annotated[tuple[Input, ...], AfterValidator(some)] = Field(max_length=1024)
    """What the model takes."""
    outputs: Annotated[tuple[Tensor, ...], AfterValidator(some)] = Field(max_length=1024)
    """What the model gives."""
    batch: Batch = Batch()
    """Micro-batching; off by default."""
    footprint: Sizes | None = None
    """Bytes it needs; null computes them from the weights."""
    cast: Switch = False
    """Converts weights whose dtype differs from the module's."""
    dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Precision of whatever is floating, weights and module; null takes both as they are."""
    tensors: Chosen = Chosen()
    """Which tensors of the weights are taken; all by default."""
    reject_nonfinite: Switch = False
    """Refuses weights with NaN or infinity."""
    in_place: Switch = False
    """Serves the file where it lies, for read-only stores; else it is copied into the cache."""
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=64)
    """Free words for people."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse([*_engine_faults(self), *_file_faults(self), *_weights_faults(self), *_tensor_faults(self)])
        return self

    @property
    def weights_row(self) -> FileRow:
        """The file row of the weights."""
        return self.found_weights()[0]

    def found_weights(self) -> list[FileRow]:
        """The rows that can be the weights; exactly one in a manifest that passed its checks."""
        return self._rows([self.weights]) if self.weights else self._candidates()

    @property
    def pickled(self) -> bool:
        """Whether the weights have to be converted first."""
        return self.engine == "eager" and self.weights_row.path.endswith(PICKLE_SUFFIXES)

    @property
    def needed(self) -> tuple[FileRow, ...]:
        """The files that a load reads: what the builder is configured by, the graph, and the weights."""
        config = self.builder.config if self.builder is not None else None
        return (*self._rows([path for path in (config, self.graph) if path is not None]), self.weights_row)

    def source_of(self, row: FileRow) -> str | None:
        """The address that a file comes from; None for one that lies in the directory."""
        if row.source is not None or self.source is None:
            return row.source
        return str(sources.parse(self.source) / row.path)

    @property
    def sources(self) -> dict[str, str]:
        """Address by path, of the files that come from elsewhere."""
        found = ((row.path, self.source_of(row)) for row in self.files)
        return {path: text for path, text in found if text is not None}

    def row(self, path: str) -> FileRow:
        """Look up a listed file."""
        return self._rows([path])[0]

    def _rows(self, paths: Iterable[str]) -> list[FileRow]:
        wanted = set(paths)
        return [row for row in self.files if row.path in wanted]

    def _candidates(self) -> list[FileRow]:
        if self.engine != "eager":
            return [row for row in self.files if row.path.endswith(SUFFIXES[self.engine])]
        safe = [row for row in self.files if row.path.endswith(SAFE_SUFFIX)]
        return safe or [row for row in self.files if row.path.endswith(PICKLE_SUFFIXES)]


def parse_manifest(text: str, source: str = FILE_NAME) -> Manifest:
    """Read a manifest. Raises one `ConfigError` with a line per fault, each starting with `source:line`."""
    return validate(Manifest, read(text, source))


def _builder_faults(builder: Builder) -> Iterator[Fault]:
    if builder.kind == "transformers":
        if builder.config is None:
            yield Fault(("config",), "is missing", "name the listed config.json")
        if builder.architecture and not _CLASS.fullmatch(builder.architecture):
            yield Fault(("class",), "is not a class name")
        if builder.target or builder.arguments:
            yield Fault((), "target and arguments belong to kind: python")
        return
    if not _TARGET.fullmatch(builder.target):
        yield Fault(("target",), "is not a function", "write package.module:factory")
    if builder.config is not None or builder.architecture:
        yield Fault((), "config and class belong to kind: transformers")


def _engine_faults(manifest: Manifest) -> Iterator[Fault]:
    engine = manifest.engine
    if engine == "eager" and manifest.builder is None:
        yield Fault(("builder",), "is missing", "say how the module is made, or name another engine")
    if engine != "eager":
        for key in ("builder", "cast", "dtype", "tensors"):
            if getattr(manifest, key) != type(manifest).model_fields[key].default:
                yield Fault((key,), "belongs to engine: eager", f"a file for {engine} says that itself")
    if engine in RUNS_CODE and manifest.trust is None:
        yield Fault(("trust",), f"is missing: a file for {engine} can run code", "set trust: code if you trust it")
    if engine not in RUNS_CODE and manifest.trust is not None:
        yield Fault(("trust",), f"has no meaning for engine: {engine}", "leave it out")
    if manifest.compile and engine not in {"eager", "export"}:
        yield Fault(("compile",), "belongs to engine: eager or export")
    yield from _graph_faults(manifest)


def _graph_faults(manifest: Manifest) -> Iterator[Fault]:
    weights = manifest.found_weights()
    split = manifest.engine == "openvino" and len(weights) == 1 and weights[0].path.endswith(".bin")
    if split and manifest.graph is None:
        yield Fault(("graph",), "is missing", "name the listed .xml that goes with the .bin")
    if manifest.graph is not None and not split:
        yield Fault(("graph",), "belongs to the .bin of engine: openvino")
    if manifest.graph is not None and not manifest.graph.endswith(".xml"):
        yield Fault(("graph",), "has no known format", "known is .xml")


def _file_faults(manifest: Manifest) -> Iterator[Fault]:
    seen: set[str] = set()
    for place, row in enumerate(manifest.files):
        if row.path in seen:
            yield Fault(("files", place, "path"), "is listed twice")
        if row.path == FILE_NAME:
            yield Fault(("files", place, "path"), "is the manifest itself", "leave it out")
        seen.add(row.path)
    config = manifest.builder.config if manifest.builder else None
    if config is not None and config not in seen:
        yield Fault(("builder", "config"), "is not among the files")
    if manifest.graph is not None and manifest.graph not in seen:
        yield Fault(("graph",), "is not among the files")


def _weights_faults(manifest: Manifest) -> Iterator[Fault]:
    if manifest.weights is not None:
        found = manifest.found_weights()
        if not found:
            yield Fault(("weights",), "is not among the files")
            return
    else:
        found = manifest.found_weights()
        if len(found) != 1:
            count = "no" if not found else str(len(found))
            yield Fault(("files",), f"{count} files could be the weights", "name one under weights:")
            return
    path = found[0].path
    if manifest.in_place and manifest.source_of(found[0]) is not None:
        yield Fault(("in_place",), "belongs to weights in the directory", "what comes from elsewhere is copied")
    if manifest.pickled:
        if manifest.allow_pickle is None:
            yield Fault(("allow_pickle",), f"{path} is a pickle", "convert it, or set allow_pickle: weights_only")
        return
    known = SUFFIXES[manifest.engine]
    if not path.endswith(known):
        yield Fault(("weights",), f"has no known format of engine: {manifest.engine}", f"known are {', '.join(known)}")
    for key in ("allow_pickle", "state_dict", "rename"):
        if getattr(manifest, key):
            yield Fault((key,), "belongs to .pth weights")


def _tensor_faults(manifest: Manifest) -> Iterator[Fault]:
    for key, rows in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        names = [row.name for row in rows]
        for place, name in enumerate(names):
            if name in names[:place]:
                yield Fault((key, place, "name"), "is there twice")
