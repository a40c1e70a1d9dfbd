"""Model names and versions in a path, read after exactly one percent-decode.

Belongs here: the strict pattern and the split of an infer path. Never: a file access, a look-up.
"""

from __future__ import annotations

import re
from typing import Final

from actors.errors import NotFound, UnknownModel

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PREFIX: Final = "/v2/models/"
_SUFFIX: Final = "/infer"
_SHORTEST: Final = len(_PREFIX) + len(_SUFFIX)


def checked_name(name: str) -> str:
    """Return a model name that fits the pattern. Raises `UnknownModel`: no model can be called anything else."""
    if _NAME.fullmatch(name) is None:
        raise UnknownModel("no such model: the name is not one a model can have")
    return name


def checked_version(version: str | None) -> str | None:
    """Return a version that fits the same pattern. Raises `UnknownModel`."""
    if version is not None and _NAME.fullmatch(version) is None:
        raise UnknownModel("no such version: the version is not one a model can have")
    return version


def infer_target(path: str) -> tuple[str, str | None] | None:
    """Split `/v2/models/{m}[/versions/{v}]/infer`; None for any path of another shape.

    Raises `NotFound` for more segments than that, `UnknownModel` for a name or version no model can have.
    """
    if not (path.endswith(_SUFFIX) and path.startswith(_PREFIX) and len(path) > _SHORTEST):
        return None
    middle = path[len(_PREFIX) : -len(_SUFFIX)]
    if "/" not in middle:
        return checked_name(middle), None
    name, *rest = middle.split("/")
    if len(rest) != 2 or rest[0] != "versions":  # noqa: PLR2004 - `versions` and its value
        raise NotFound("no such path")
    return checked_name(name), checked_version(rest[1])
