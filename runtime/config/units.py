"""Sizes, durations and shares as people write them, and back again.

Typed numbers with units live here; what a setting means lives in `schema.py`. Parsing is exact (no float in
between), and every refusal says what would have been right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict, WithJsonSchema
from pydantic_core import core_schema

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_SIZES: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
_TIMES: Final = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_LONGEST: Final = 40
_MOST_BYTES: Final = 2**63 - 1
_MOST_SECONDS: Final = Decimal(86400 * 365 * 100)
_NUMBER: Final = r"\d+(?:\.\d*)?|\.\d+"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)", re.ASCII)
_TIME: Final = re.compile(rf"({_NUMBER})\s*([A-Za-z]+)\s*", re.ASCII)
_SIZE_HINT: Final = "write 40GiB, 1.5GB, 512KiB or a whole number of bytes"
_TIME_HINT: Final = "write 30s, 500ms, 2m, 1h30m, 1d or a number of seconds"
_SHARE_HINT: Final = "write 0.85 or 85%"


def parse_bytes(value: object) -> int:
    """Read a size: a whole number of bytes, or text with a unit; fractions of a byte are dropped.

    Raises `ValueError` for anything negative, fractional without a unit, not finite, boolean or of unknown unit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _bounded_bytes(Decimal(value))
    if not isinstance(value, str):
        raise _wrong(value, "size", _SIZE_HINT)
    text = _short(value, "size", _SIZE_HINT)
    found = _SIZE.fullmatch(text)
    if found is None:
        raise _wrong(text, "size", _SIZE_HINT)
    number, unit = found.groups()
    if unit not in _SIZES and unit:
        raise ValueError(f"unknown unit {unit!r}; {_nearest(unit, _SIZES)}")
    if not unit and not number.isdigit():
        raise ValueError(f"{text!r} has no unit and is not a whole number of bytes; {_SIZE_HINT}")
    return _bounded_bytes(Decimal(number) * _SIZES.get(unit, 1))


def parse_seconds(value: object) -> float:
    """Read a duration: a number of seconds, or text with units, the longer ones first (`1h30m`).

    Raises `ValueError` for anything negative, not finite, boolean, over a hundred years or of unknown unit.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bounded_seconds(_decimal(value, _TIME_HINT))
    if not isinstance(value, str):
        raise _wrong(value, "duration", _TIME_HINT)
    text = _short(value, "duration", _TIME_HINT)
    if re.fullmatch(_NUMBER, text, re.ASCII):
        return _bounded_seconds(Decimal(text))
    total, last, place = Decimal(0), None, 0
    while place < len(text):
        part = _TIME.match(text, place)
        if part is None:
            raise _wrong(text, "duration", _TIME_HINT)
        number, unit = part.groups()
        if unit not in _TIMES:
            raise ValueError(f"unknown unit {unit!r}; {_nearest(unit, _TIMES)}")
        if last is not None and _TIMES[unit] >= last:
            raise ValueError(f"{text!r} is not a duration; write the longer units first, each once, as in 1h30m")
        total, last, place = total + Decimal(number) * _TIMES[unit], _TIMES[unit], part.end()
    return _bounded_seconds(total)


def parse_ratio(value: object) -> float:
    """Read a share of a whole, 0..1: a number, or text such as `85%`. Raises `ValueError`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = _decimal(value, _SHARE_HINT)
    elif isinstance(value, str):
        text = _short(value, "share", _SHARE_HINT)
        found = re.fullmatch(rf"({_NUMBER})\s*(%?)", text, re.ASCII)
        if found is None:
            raise _wrong(text, "share", _SHARE_HINT)
        number = Decimal(found[1]) / (100 if found[2] else 1)
    else:
        raise _wrong(value, "share", _SHARE_HINT)
    if not 0 <= number <= 1:
        raise ValueError(f"{number} is not between 0 and 1; {_SHARE_HINT}")
    return float(number)


def print_bytes(count: int) -> str:
    """Write a size the shortest exact way, so that it reads back as the same number: `40GiB`, `1500MB`, `17B`."""
    exact = [(count // factor, unit) for unit, factor in _SIZES.items() if count and count % factor == 0]
    number, unit = min(exact, key=lambda pair: (pair[0], "i" not in pair[1]), default=(count, "B"))
    return f"{number}{unit}"


def round_bytes(count: int) -> str:
    """Write a size for people, rounded: `1.4 GiB`. Does not read back exactly."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def print_seconds(seconds: float) -> str:
    """Write a duration exactly, so that it reads back as the same number: `1h30m`, `500ms`, `0s`."""
    left, parts = Decimal(str(seconds)), []
    for unit, length in reversed(_TIMES.items()):
        whole = left // length
        if whole:
            parts.append(f"{whole:f}{unit}")
            left -= whole * length
    if left:
        return f"{Decimal(str(seconds)):f}s"
    return "".join(parts) or "0s"


def print_ratio(ratio: float) -> str:
    """Write a share so that it reads back as the same number: `85%`."""
    return f"{(Decimal(str(ratio)) * 100).normalize():f}%"


@dataclass(frozen=True, slots=True)
class Amount:
    """A size, or a share of a whole that is only known on the machine. Exactly one of the two is set."""

    size: int | None = None
    share: float | None = None

    def of(self, whole: int) -> int:
        """Bytes, given the whole in bytes; never more than the whole for a share, unbounded for a size."""
        if self.size is not None:
            return self.size
        return int(Decimal(str(self.share)) * whole)

    def __str__(self) -> str:
        return print_bytes(self.size) if self.size is not None else print_ratio(self.share or 0.0)

    @classmethod
    def parse(cls, value: object) -> Amount:
        """Read `40GiB`, a whole number of bytes, `90%` or a fraction such as 0.9. Raises `ValueError`."""
        if isinstance(value, Amount):
            return value
        share = isinstance(value, float) or (isinstance(value, str) and value.strip().endswith("%"))
        amount = cls(share=parse_ratio(value)) if share else cls(size=parse_bytes(value))
        if not (amount.size or amount.share):
            raise ValueError("zero is not an amount of memory; write 40GiB or 90%")
        return amount

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        return {**_json("integer", 0, ["40GiB", "90%"]), "description": "Bytes with a unit, or a share of the whole."}


def _json(kind: str, least: int, examples: list[str]) -> dict[str, object]:
    return {"anyOf": [{"type": kind, "minimum": least}, {"type": "string"}], "examples": examples}


Bytes: TypeAlias = Annotated[
    int, BeforeValidator(parse_bytes), WithJsonSchema(_json("integer", 0, ["40GiB", "512KiB"]))
]
"""A size in bytes."""

Seconds: TypeAlias = Annotated[
    float, BeforeValidator(parse_seconds), WithJsonSchema(_json("number", 0, ["30s", "1h30m"]))
]
"""A duration in seconds."""

Flag: TypeAlias = Annotated[bool, Strict()]
"""True or false and nothing that merely resembles it."""

Count: TypeAlias = Annotated[int, Strict(), Field(ge=0)]
"""A whole number that is not negative."""

Ratio: TypeAlias = Annotated[float, BeforeValidator(parse_ratio), WithJsonSchema(_json("number", 0, ["85%"]))]
"""A share of a whole, 0..1."""


def _wrong(value: object, what: str, hint: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
    return ValueError(f"{shown} is not a {what}; {hint}")


def _short(text: str, what: str, hint: str) -> str:
    text = text.strip()
    if not text or len(text) > _LONGEST:
        raise _wrong(text, what, hint)
    if text.startswith("-"):
        raise ValueError(f"{text!r} is negative; {hint}")
    if text.casefold() in {"none", "off", "never", "null"}:
        raise _wrong(text, what, f"{hint}, or null where a setting may be absent")
    return text


def _decimal(value: float, hint: str) -> Decimal:
    try:
        number = Decimal(str(value))
    except (InvalidOperation, ValueError):
        raise ValueError(f"the number is too long; {hint}") from None
    if not number.is_finite():
        raise ValueError(f"{value!r} is not finite; {hint}")
    return number


def _bounded_bytes(count: Decimal) -> int:
    if count < 0:
        raise ValueError(f"{count} is negative; {_SIZE_HINT}")
    if count > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes; {_SIZE_HINT}")
    return int(count)


def _bounded_seconds(seconds: Decimal) -> float:
    if seconds < 0:
        raise ValueError(f"{seconds} is negative; {_TIME_HINT}")
    if seconds > _MOST_SECONDS:
        raise ValueError("longer than a hundred years; leave the setting out (null) for no limit")
    return float(seconds)


def _nearest(unit: str, known: dict[str, Any]) -> str:
    folded = {name.casefold(): name for name in known}
    written = unit.casefold().removesuffix("s") if len(unit) > 1 else unit.casefold()
    guess = folded.get(unit.casefold()) or folded.get(f"{written}b") or folded.get(written[:1])
    if guess:
        return f"did you mean {guess}?"
    return f"known are {', '.join(known)}"
