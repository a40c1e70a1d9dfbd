"""Who may ask for what: bearer keys with scopes, and no state change on behalf of another site.

Belongs here: keys, scopes, the cross-site rule. Never: a route; each route states the scope it needs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from actors.errors import NotAllowed, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_SCOPE: Final = re.compile(r"infer(:[A-Za-z0-9._*?-]+)?|read|admin")
_SAFE: Final = frozenset({"GET", "HEAD"})
_SAME_SITE: Final = frozenset({b"same-origin", b"none"})


class Scope(StrEnum):
    """What a route needs of a key. `ANY` is any valid key: probes, and paths that do not exist."""

    ANY = "any"
    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Key:
    """A key as the configuration keeps it: `sha256:<hex>` of the token, and scopes `infer[:<glob>]`, `read`, `admin`.

    A plain hash is enough because tokens come from `new_token`: nobody can guess 256 random bits, so there is
    nothing that a slow hash would slow down. `admin` includes `read`; nothing includes `infer`.
    """

    name: str
    hashed: str
    scopes: tuple[str, ...]

    def __post_init__(self) -> None:
        if _HASH.fullmatch(self.hashed) is None:
            msg = f"key {self.name!r}: the hash is not `sha256:` and 64 hex digits"
            raise ValueError(msg)
        for scope in self.scopes:
            if _SCOPE.fullmatch(scope) is None:
                msg = f"key {self.name!r}: {scope!r} is not a scope; use infer, infer:<glob>, read or admin"
                raise ValueError(msg)

    def __repr__(self) -> str:
        return f"<Key {self.name} {' '.join(self.scopes)}>"

    def allows(self, scope: Scope, model: str = "") -> bool:
        """Does one of the scopes cover this?"""
        if scope is Scope.ANY:
            return True
        if scope is Scope.READ:
            return "read" in self.scopes or "admin" in self.scopes
        if scope is Scope.ADMIN:
            return "admin" in self.scopes
        globs = [held.partition(":")[2] or "*" for held in self.scopes if held.startswith("infer")]
        return any(fnmatchcase(model, glob) for glob in globs)


def new_token() -> tuple[str, str]:
    """Make a token to give away and the hash to keep."""
    token = secrets.token_urlsafe(32)
    return token, "sha256:" + hashlib.sha256(token.encode("ascii")).hexdigest()


class Keyring:
    """All keys. An empty ring asks nobody; the composition root only binds a loopback address with one."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple((bytes.fromhex(key.hashed.partition(":")[2]), key) for key in keys)

    def __repr__(self) -> str:
        return f"<Keyring {len(self._keys)} keys>"

    def __bool__(self) -> bool:
        return bool(self._keys)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Key | None:
        """Find the caller's key; None where no keys are configured. Raises `Unauthorized`."""
        if not self._keys:
            return None
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not token:
            raise Unauthorized("a key is needed: authorization: Bearer <key>")
        digest = hashlib.sha256(token.strip()).digest()
        found: Key | None = None
        for known, key in self._keys:
            # Every key is compared, so that time tells nothing about which one was close.
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise Unauthorized("the key is not known")
        return found


def authorise(key: Key | None, scope: Scope, model: str = "") -> None:
    """Raise `NotAllowed` unless the key covers the scope."""
    if key is not None and not key.allows(scope, model):
        raise NotAllowed(f"the key lacks the scope {scope.value}", model=model or None)


def authorise_some(key: Key | None, scope: Scope) -> None:
    """Raise `NotAllowed` unless the key has the scope for some model; for which ones is asked once they are known."""
    if key is not None and not any(held.partition(":")[0] == scope for held in key.scopes):
        raise NotAllowed(f"the key lacks the scope {scope.value}")


def refuse_cross_site(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raise `NotAllowed` for an unsafe verb that a browser sends on behalf of another site."""
    if method in _SAFE:
        return
    site = headers.get(b"sec-fetch-site")
    if site is not None and site not in _SAME_SITE:
        raise NotAllowed("the request comes from another site")
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
        raise NotAllowed("the request comes from another origin")
