"""Takes secrets out of what people may read: log lines, span status, the dashboard's feed.

Pure functions on JSON-like values. It never decides what is logged, only what must not be legible in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

MASK = "[redacted]"
_LONGEST = 8_192
_MARGIN = 4_096
_DEEPEST = 6
_WIDEST = 256

# Whole words inside a field's name: `authorization`, `x-api-key`, `db_password`, never `monkey` or `tokenizer`.
_SECRET_FIELD = re.compile(
    r"(?:^|[^a-z0-9])(?:authorization|cookie|credentials?|keys?|passw(?:or)?d|passphrase|secrets?|sig|signature|tokens?)"
    r"(?:$|[^a-z0-9])",
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# A whole URL at once, and taken apart by hand: a pattern for its parts would be quadratic in hostile text.
_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^\s\"'<>]*")
_SCHEME = re.compile(r"\b(bearer|basic|digest|negotiate)\s+[A-Za-z0-9+/=._~-]{4,}", re.IGNORECASE)
_PAIR = re.compile(
    r"\b((?:[A-Za-z0-9]+[-_]){0,4}"
    r"(?:authorization|api[-_]?key|access[-_]?key|secret(?:[-_]?(?:access[-_]?)?key)?|password|passwd|token|cookie|signature|sig|credential)"
    r"[\"']?\s{0,4}[=:]\s{0,4})(?!\[redacted\])(?:\"[^\"\n]{0,2048}\"?|'[^'\n]{0,2048}'?|[^\s\"'&,;)}\]]+)",
    re.IGNORECASE,
)


def is_secret_field(name: str) -> bool:
    """Does a field of this name hold something that must never be legible?"""
    spelled = _CAMEL.sub("_", name).lower().replace("apikey", "api_key").replace("accesskey", "access_key")
    return _SECRET_FIELD.search(spelled) is not None


def text(value: str) -> str:
    """Strip URL user-info and query strings, credentials after an auth scheme, and `secret=value` pairs."""
    whole = len(value)
    if whole > _LONGEST:
        value = value[: _LONGEST + _MARGIN]  # the margin lets a secret across the cut be recognised
    if "://" in value:
        value = _URL.sub(_url, value)
    value = _PAIR.sub(rf"\1{MASK}", _SCHEME.sub(rf"\1 {MASK}", value))
    return value if whole <= _LONGEST else value[:_LONGEST] + "…"


def _url(found: re.Match[str]) -> str:
    place, asks, _ = found.group().partition("?")
    parts = place.split("//")
    for index, part in enumerate(parts[1:], 1):
        authority, slash, path = part.partition("/")
        if "@" in authority:
            parts[index] = f"{MASK}@{authority.rpartition('@')[2]}{slash}{path}"
    return "//".join(parts) + (f"?{MASK}" if asks else "")


def fields(values: Mapping[str, object]) -> dict[str, object]:
    """Redact a mapping by field name, and every string inside it."""
    return _mapping(values, 0)


def _mapping(values: Mapping[str, object], depth: int) -> dict[str, object]:
    masked: dict[str, object] = {}
    for name, value in islice(values.items(), _WIDEST):
        hide = not isinstance(value, bool | int | float | None) and is_secret_field(name)  # a number is no secret
        masked[name] = MASK if hide else _value(value, depth + 1)
    return masked


def _value(value: object, depth: int) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping | Sequence | set | frozenset):
        return _container(value, depth) if depth <= _DEEPEST else "…"
    return text(_spell(value))


def _spell(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001  an object that cannot be printed must not break who logs it
        return f"<{type(value).__name__} that raises {type(error).__name__}>"


def _container(value: Mapping[object, object] | Sequence[object] | AbstractSet[object], depth: int) -> object:
    if isinstance(value, Mapping):
        return _mapping({str(name): inner for name, inner in islice(value.items(), _WIDEST)}, depth)
    return [_value(inner, depth + 1) for inner in islice(value, _WIDEST)]
