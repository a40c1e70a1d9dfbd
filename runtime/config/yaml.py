"""From YAML text to a frozen, validated value, with every fault listed at once.

The base class of settings lives here, no particular setting does (`schema.py`). Parsing is in `document.py`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from actors.errors import ConfigError
from runtime.config.document import Document, KeyPath, dotted, read, read_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic_core import ErrorDetails

__all__ = ["Document", "Fault", "Frozen", "closest", "read", "read_file", "refuse", "report", "validate"]

M = TypeVar("M", bound=BaseModel)
_MOST = 200
_PLAIN = {
    "missing": ("is missing", "add it"),
    "tuple_type": ("must be a list", "write - item, or [item, item]"),
    "bool_type": ("must be true or false", "in YAML 1.2 on, off, yes and no are text"),
    "int_type": ("must be a whole number", "without quotes or unit"),
    "string_type": ("must be text", "put it into quotes"),
}


class Frozen(BaseModel):
    """A section of the configuration: immutable, unknown keys refused, defaults checked like written values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: the key path it concerns, what is wrong, and what would be right."""

    path: KeyPath
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what


def refuse(faults: Iterable[Fault]) -> None:
    """Raise the faults that a section's validator found, if any, as one pydantic error that `validate` takes apart."""
    found = tuple(faults)
    if found:
        raise PydanticCustomError("faults", "{text}", {"text": "; ".join(map(str, found)), "faults": found})


def validate(model_class: type[M], document: Document, context: dict[str, Any] | None = None) -> M:
    """Build a section from a document; `context` reaches its validators.

    Raises one `ConfigError` with a line per fault, in the order of the file.
    """
    value, faults = faults_in(model_class, document, context)
    return report(faults, document) if value is None else value


def faults_in(
    model_class: type[M], document: Document, context: dict[str, Any] | None = None
) -> tuple[M | None, list[Fault]]:
    """Build a section, or say all that is wrong; for callers with faults of their own to add."""
    try:
        return model_class.model_validate(document.tree, context=context), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    return None, [fault for each in details for fault in _faults(model_class, each, document)]


def report(faults: Iterable[Fault], document: Document) -> NoReturn:
    """Raise `ConfigError` listing the faults as `file:line: key.path: what is wrong (hint)`."""
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: (document.line(fault.path), dotted(fault.path)))
    rows = [f"{document.place(f.path)}: {dotted(f.path)}{': ' if f.path else ''}{f}" for f in ordered[:_MOST]]
    if len(ordered) > _MOST:
        rows.append(f"… and {len(ordered) - _MOST} more")
    raise ConfigError("\n".join(rows), detail={"faults": len(ordered)})


def closest(word: str, known: Iterable[str]) -> str:
    """Word a hint: the nearest known name, or the list of all when nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word.casefold()[:64], names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(names[:30])}" if names else ""


def section_at(model_class: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Find the section that a key path leads into: `devices.0` is a `Device`. None where there is none."""
    current: type[BaseModel] | None = model_class
    named = False
    for step in path:
        if isinstance(step, int) or named:
            named = False
            continue
        fields = {} if current is None else {field.alias or name: field for name, field in current.model_fields.items()}
        current = section_of(fields[step].annotation) if step in fields else None
        # In a mapping of sections the next step is a name that the user chose.
        named = current is not None and get_origin(fields[step].annotation) is dict
    return current


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Find the section class inside an annotation such as `tuple[Device, ...]` or `Otlp | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := section_of(each))), None)


def _faults(model_class: type[BaseModel], error: ErrorDetails, document: Document) -> list[Fault]:
    path = _existing(error["loc"], error["type"], document)
    if error["type"] == "faults":
        return [Fault((*path, *fault.path), fault.what, fault.hint) for fault in error["ctx"]["faults"]]
    return [Fault(path, *_words(model_class, error, path, document))]


def _words(model_class: type[BaseModel], error: ErrorDetails, path: KeyPath, document: Document) -> tuple[str, str]:
    """Say what is wrong and what would be right, in the words of someone who writes YAML."""
    kind, context = error["type"], error.get("ctx", {})
    what, _, hint = error["msg"].removeprefix("Value error, ").partition("; ")
    match kind:
        case "extra_forbidden":
            section = section_at(model_class, path[:-1])
            what, hint = "unknown key", closest(str(path[-1]), _keys(section))
        case "model_type":
            section = section_at(model_class, path)
            what, hint = "must be a mapping", f"keys: {', '.join(_keys(section))}" if section else ""
        case "literal_error":
            what = "is not one of the choices"
            hint = _choices(context["expected"], _value(document.tree, path))
        case "too_short" | "string_too_short":
            what, hint = "is too short", f"at least {context['min_length']}"
        case "too_long" | "string_too_long":
            what, hint = "is too long", f"at most {context['max_length']}"
        case "greater_than_equal" | "greater_than" | "less_than_equal":
            what = what.replace("Input should be", "must be")
        case _:
            what, hint = _PLAIN.get(kind, (what[:1].lower() + what[1:], hint))
    return what, hint


def _keys(section: type[BaseModel] | None) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def _value(tree: Any, path: KeyPath) -> Any:
    """Find what was written; None where the fault is in something that was not."""
    for step in path:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _choices(expected: str, written: Any) -> str:
    names = expected.replace("'", "").replace(" or ", ", ").split(", ")
    return closest(written, names) if isinstance(written, str) else f"known are {', '.join(names)}"


def _existing(loc: tuple[int | str, ...], kind: str, document: Document) -> KeyPath:
    """Keep of pydantic's location what is a path in the document; validator names are not."""
    path: list[int | str] = []
    here: Any = document.tree
    for step in loc:
        if isinstance(here, dict) and step in here:
            here = here[str(step)]
        elif isinstance(here, list | tuple) and isinstance(step, int) and step < len(here):
            here = here[step]
        elif kind == "missing" and step == loc[-1]:
            pass
        else:
            here = None
            if not str(step).isidentifier() and not isinstance(step, int):
                continue
        path.append(step)
    return tuple(path)
