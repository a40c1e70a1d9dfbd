"""From a file and the environment to one `Config`, and the schema for editors.

The only place that knows `FORELOAD_…` names. Everything wrong is reported at once; nothing is half loaded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from actors.errors import ConfigError
from runtime.config.document import MAX_BYTES, Document, KeyPath, Scalar, read, read_file, scalar
from runtime.config.schema import Config
from runtime.config.yaml import Fault, faults_in, report, section_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PREFIX: Final = "FORELOAD_"
_INDEX: Final = re.compile("[0-9]{1,5}")
RESERVED: Final = frozenset({"FORELOAD_CONFIG", "FORELOAD_URL", "FORELOAD_KEY", "FORELOAD_WHEELS"})
"""Read by the command line and the demo; not settings."""


def load(path: Path, environ: Mapping[str, str], overrides: Mapping[str, Scalar] | None = None) -> Config:
    """Read a file, lay `FORELOAD_SECTION__KEY` variables and then `overrides` (dotted keys) over it, and validate.

    Relative paths start at the file's folder. Raises `ConfigError` with a line per fault.
    """
    document, faults = _overlaid(read_file(path), environ, overrides or {})
    config, more = faults_in(Config, document, {"folder": path.absolute().parent})
    if config is None or faults:
        report([*faults, *more], document)
    return config


def json_schema() -> dict[str, Any]:
    """Describe the file for editors, as JSON Schema 2020-12."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "foreload configuration"
    _spell_defaults(Config, schema, schema["$defs"])
    return schema


def spelled(value: object) -> object:
    """Write a value of the tree as a file would: sizes of memory as `50%`, sections as mappings, lists as lists."""
    if isinstance(value, tuple):
        return [spelled(each) for each in value]
    if isinstance(value, dict):
        return {key: spelled(each) for key, each in value.items()}
    if isinstance(value, BaseModel):
        return {key: spelled(getattr(value, key)) for key in type(value).model_fields}
    return value if value is None or isinstance(value, str | int | float) else str(value)


# -- environment -------------------------------------------------------------------------------------


def _overlaid(
    document: Document, environ: Mapping[str, str], overrides: Mapping[str, Scalar]
) -> tuple[Document, list[Fault]]:
    tree, places, faults = _copied(document.tree), dict(document.places), list[Fault]()
    # Shallow keys first, so that a whole list given by one variable can be refined by another.
    names = sorted((n for n in environ if n.startswith(PREFIX) and n not in RESERVED), key=lambda n: (n.count("__"), n))
    for name in names:
        path = _path(name)
        places[path] = f"environment {name}"
        try:
            _put(tree, path, _typed(environ[name], name))
        except ConfigError as error:
            faults.append(Fault(path, error.message))
    for dots, value in overrides.items():
        path = tuple(dots.split("."))
        places[path] = f"command line --{path[-1]}"
        _put(tree, path, value)
    return Document(document.source, tree, document.lines, places), faults


def _copied(value: Any) -> Any:
    """Copy a tree; parts that aliases share become parts of their own, so that one can be changed alone."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _path(name: str) -> KeyPath:
    steps = name.removeprefix(PREFIX).lower().split("__")
    return tuple(int(step) if _INDEX.fullmatch(step) else step for step in steps)


def _typed(text: str, name: str) -> Any:
    """Read a variable as a YAML scalar, or as a flow list or mapping, or as quoted text."""
    text = text.strip()
    if text[:1] in {"[", "{", '"', "'"} and "\n" not in text and len(text) < MAX_BYTES:
        return read(f"value: {text}", name).tree["value"]
    return scalar(text)


def _put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set a value deep in the tree, making the sections on the way. Raises `ConfigError` where there is no way."""
    here: Any = tree
    for step, after in zip(path, (*path[1:], None), strict=True):
        if isinstance(here, dict) and isinstance(step, str) and step:
            if after is not None and here.get(step) is None:
                here[step] = [] if isinstance(after, int) else {}
        elif isinstance(here, list) and isinstance(step, int):
            if step > len(here):
                raise ConfigError(f"the list has {len(here)} items (the next is number {len(here)})")
            if step == len(here):
                here.append([] if isinstance(after, int) else {})
        else:
            raise ConfigError("leads nowhere (sections and list numbers are joined by two underscores)")
        if after is None:
            here[step] = value
        else:
            here = here[step]


# -- schema ------------------------------------------------------------------------------------------


def _spell_defaults(model_class: type[BaseModel], schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Defaults in the schema read as a file would have them, not as Python holds them."""
    for key, field in model_class.model_fields.items():
        entry = schema["properties"][key]
        if "default" in entry:
            entry["default"] = spelled(field.default)
        inner = section_of(field.annotation)
        if inner is not None:
            _spell_defaults(inner, definitions[inner.__name__], definitions)
