"""Text to a plain tree that remembers its lines. No setting is known here; `yaml.py` validates.

The YAML 1.2 core schema and nothing more: `12:30`, `NO` and dates stay text; no tags, no merge keys, one document.
Hostile input costs bounded time and memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from actors.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Scalar: TypeAlias = str | int | float | bool | None
Step: TypeAlias = str | int
KeyPath: TypeAlias = tuple[Step, ...]

MAX_BYTES: Final = 1 << 20
MAX_LINE: Final = 1 << 16  # the scanner's cost grows with the square of some runs on one line
MAX_NODES: Final = 200_000
MAX_DEPTH: Final = 32

_WORDS: Final[Mapping[str, Scalar]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{f"{sign}.{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in ("inf", "Inf", "INF")},
    **{f".{word}": float("nan") for word in ("nan", "NaN", "NAN")},
}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")


@dataclass(frozen=True, slots=True)
class Document:
    """One configuration text: `tree` of dict, list and scalars, and where each part of it stands.

    `places` overrides a line with words, for parts that do not come from the file (environment overrides).
    """

    source: str
    tree: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    places: Mapping[KeyPath, str] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """Line (from 1) of a key or list item, or of the nearest part around it that is known."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def place(self, path: KeyPath) -> str:
        """Where a part comes from, for people: `file:line`, or the name of the variable that set it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
            if path[:end] in self.lines:
                break
        return f"{self.source}:{self.line(path)}"


def read(text: str, source: str) -> Document:
    """Parse one document whose root is a mapping; an empty text is an empty mapping.

    Raises `ConfigError` naming source and line.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"{source}:1: the file is over {MAX_BYTES} bytes")
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MAX_LINE:
            raise ConfigError(f"{source}:{number}: a line of over {MAX_LINE} characters (break it)")
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ConfigError(f"{source}:{number}: a tab in the indentation (use spaces)")
    return _Builder(source).build(text)


def read_file(path: Path, source: str | None = None) -> Document:
    """Read a file as UTF-8 and parse it. Raises `ConfigError`."""
    source = source or str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or type(error).__name__}") from None
    try:
        return read(raw.decode("utf-8-sig"), source)
    except UnicodeDecodeError as error:
        if len(raw) > MAX_BYTES:  # the cut itself may have split a character
            raise ConfigError(f"{source}:1: the file is over {MAX_BYTES} bytes") from None
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: not UTF-8 (save the file as UTF-8)") from None


def scalar(text: str) -> Scalar:
    """Give a plain scalar its type by the YAML 1.2 core schema. `NO`, `on`, `12:30` and dates are text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


@dataclass(slots=True)
class _Frame:
    """A collection being filled: `key` is the mapping key that waits for its value."""

    value: dict[str, Any] | list[Any]
    path: KeyPath
    anchor: str | None
    before: int
    key: str | None = None


class _Builder:
    """Turns parser events into a tree with a stack of its own, so that nesting never recurses."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[KeyPath, int] = {}
        self.anchors: dict[str, tuple[Any, int, int]] = {}
        self.stack: list[_Frame] = []
        self.nodes = 0
        self.root: Any = None
        self.rooted = False

    def build(self, text: str) -> Document:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        line = 1
        try:
            for event in YAML(typ="safe", pure=True).parse(text):
                line = event.start_mark.line + 1
                self._take(event, line)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._refuse(mark.line + 1 if mark else line, _plain(error.problem or error.context))
        except YAMLError as error:
            self._refuse(line, _plain(str(error)))
        except (ValueError, RecursionError):
            self._refuse(line, "this cannot be read as YAML")
        if self.rooted and self.root is not None and not isinstance(self.root, dict):
            self._refuse(1, "the file must be a mapping of settings (key: value)")
        return Document(self.source, self.root or {}, self.lines)

    def _take(self, event: Any, line: int) -> None:
        match type(event).__name__:
            case "ScalarEvent":
                self._tags(event, line)
                value = scalar(event.value) if event.style is None and event.implicit[0] else event.value
                self._scalar(value, event, line)
            case "MappingStartEvent":
                self._open({}, event, line)
            case "SequenceStartEvent":
                self._open([], event, line)
            case "MappingEndEvent" | "SequenceEndEvent":
                self._close(line)
            case "AliasEvent":
                self._alias(event.anchor, line)
            case "DocumentStartEvent":
                if self.rooted:
                    self._refuse(line, "a second document begins here (one file holds one document)")
                if event.version not in {None, (1, 2)}:
                    self._refuse(line, "only YAML 1.2 is read (remove the %YAML line)")
            case _:
                pass

    def _scalar(self, value: Scalar, event: Any, line: int) -> None:
        frame = self.stack[-1] if self.stack else None
        self._count(1, line)
        if not event.value.isascii() and any("\ud800" <= each <= "\udfff" for each in event.value):
            self._refuse(line, "half of a surrogate pair (write the character itself)")
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, 1, 1)
        if frame is None or isinstance(frame.value, list) or frame.key is not None:
            self._place(value, line)
            return
        key = str(event.value)
        if key == "<<" and event.style is None:
            self._refuse(line, "merge keys (<<) are not YAML 1.2 (write the keys out)")
        if key in frame.value:
            first = self.lines[(*frame.path, key)]
            self._refuse(line, f"{dotted((*frame.path, key))}: the key is here twice (first on line {first})")
        self.lines[(*frame.path, key)] = line
        frame.key = key

    def _open(self, value: dict[str, Any] | list[Any], event: Any, line: int) -> None:
        self._tags(event, line)
        if len(self.stack) >= MAX_DEPTH:
            self._refuse(line, f"nested deeper than {MAX_DEPTH} levels")
        before = self.nodes
        self._count(1, line)
        path = self._place(value, line)
        self.stack.append(_Frame(value, path, event.anchor, before))

    def _close(self, line: int) -> None:
        frame = self.stack.pop()
        if frame.anchor is not None:
            self.anchors[frame.anchor] = (frame.value, self.nodes - frame.before, _depth(frame.value))
        if self.nodes > MAX_NODES:
            self._refuse(line, f"more than {MAX_NODES} values")

    def _alias(self, anchor: str, line: int) -> None:
        if anchor not in self.anchors:
            self._refuse(line, f"*{anchor[:40]} refers to nothing before it (or to itself)")
        value, size, depth = self.anchors[anchor]
        if len(self.stack) + depth > MAX_DEPTH:
            self._refuse(line, f"nested deeper than {MAX_DEPTH} levels")
        self._count(size, line)
        self._place(value, line)

    def _place(self, value: Any, line: int) -> KeyPath:
        if not self.stack:
            self.root, self.rooted = value, True
            return ()
        frame = self.stack[-1]
        if isinstance(frame.value, list):
            path = (*frame.path, len(frame.value))
            frame.value.append(value)
            self.lines[path] = line
            return path
        if frame.key is None:
            self._refuse(line, "a key must be plain text")
        path = (*frame.path, frame.key)
        frame.value[frame.key] = value
        frame.key = None
        return path

    def _tags(self, event: Any, line: int) -> None:
        if event.ctag is not None:
            self._refuse(line, "tags (!…) are not read (put text into quotes instead)")

    def _count(self, more: int, line: int) -> None:
        self.nodes += more
        if self.nodes > MAX_NODES:
            self._refuse(line, f"more than {MAX_NODES} values once aliases are written out")

    def _refuse(self, line: int, what: str) -> NoReturn:
        raise ConfigError(f"{self.source}:{line}: {what}")


def dotted(path: KeyPath) -> str:
    """Spell a key path: `devices.0.memory`."""
    return ".".join(str(step) for step in path)


def _depth(value: Any) -> int:
    """Levels of nesting, bounded because an alias can only hold what was already within bounds."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(each) for each in inner if isinstance(each, dict | list)), default=0)


def _plain(text: str | None) -> str:
    first = (text or "not YAML").strip().splitlines()[0]
    return f"{first[:160]} (is a quote, colon or bracket missing?)"
