"""From YAML text to a frozen, validated value, with every fault listed at once.

The base class of settings lives here, no particular setting does (`schema.py`). Parsing is in `document.py`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

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


def validate(model_class: type[M], document: Document) -> M:
    """Build a section from a document. Raises one `ConfigError` with a line per fault, in the order of the file."""
    try:
        return model_class.model_validate(document.tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    return report((fault for each in details for fault in _faults(model_class, each, document)), document)


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
    for step in path:
        if isinstance(step, int):
            continue
        if current is None or step not in current.model_fields:
            return None
        current = section_of(current.model_fields[step].annotation)
    return current


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Find the section class inside an annotation such as `tuple[Device, ...]` or `Otlp | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := section_of(each))), None)


def _faults(model_class: type[BaseModel], error: ErrorDetails, document: Document) -> list[Fault]:
    path = _existing(error["loc"], error["type"], document)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "faults":
        return [Fault((*path, *fault.path), fault.what, fault.hint) for fault in context["faults"]]
    if kind == "extra_forbidden":
        section = section_at(model_class, path[:-1])
        hint = closest(str(path[-1]), section.model_fields if section else ())
        return [Fault(path, "unknown key", hint)]
    if kind == "missing":
        return [Fault(path, "is missing", "add it")]
    if kind == "model_type":
        section = section_at(model_class, path)
        names = ", ".join(section.model_fields) if section else ""
        return [Fault(path, "must be a mapping", f"keys: {names}" if names else "")]
    if kind == "tuple_type":
        return [Fault(path, "must be a list", "write - item, or [item, item]")]
    what, _, hint = error["msg"].removeprefix("Value error, ").partition("; ")
    return [Fault(path, what[:1].lower() + what[1:], hint)]


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
