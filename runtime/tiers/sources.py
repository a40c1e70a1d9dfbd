"""Where a file may come from over the network: the grammar of source addresses, and what the configuration permits.

Pure: nothing here opens or resolves anything. An address is taken apart once and compared by its parts, never by a
pattern over the raw text. Credentials cannot be spelled in one.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

OBJECT_SCHEMES: Final = frozenset({"s3", "gs", "az"})
WEB_SCHEMES: Final = frozenset({"https", "http"})
SCHEMES: Final = (*sorted(OBJECT_SCHEMES), "https", "http", "hf", "file")

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_KNOWN = ", ".join(f"{scheme}://" for scheme in SCHEMES)
_LONGEST = 2048
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_HUB_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\x9f\\\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Source:
    """One address, taken apart. `place` is the bucket, the host with its port, `org/name`, or empty for a file.

    `path` has no leading slash but for a file; `commit` belongs to the hub.
    """

    scheme: str
    place: str
    path: str
    commit: str = ""

    @property
    def host(self) -> str:
        """The host name of a web address, lower case, without port and brackets."""
        return urlsplit(f"//{self.place}").hostname or ""

    def __truediv__(self, path: str) -> Source:
        """A file below it."""
        joined = f"{self.path.rstrip('/')}/{path}" if self.path else path
        return Source(self.scheme, self.place, joined, self.commit)

    def __str__(self) -> str:
        if self.scheme == "hf":
            return f"hf://{self.place}@{self.commit}" + (f"/{self.path}" if self.path else "")
        return f"{self.scheme}://{self.place}/{self.path.lstrip('/')}"


def parse(text: str) -> Source:
    """Take an address apart. Raises `ValueError` saying what would be right; it never shows what could be a secret."""
    parts, port = _split(text)
    if parts.scheme == "hf":
        return _hub(parts.netloc, parts.path)
    if "@" in parts.netloc:
        raise ValueError("holds a user or password; credentials belong into the environment")
    if parts.scheme == "file":
        return _file(parts.netloc, parts.path)
    path = parts.path.removeprefix("/").rstrip("/")
    if parts.scheme in OBJECT_SCHEMES:
        if port is not None or not _BUCKET.fullmatch(parts.netloc):
            raise ValueError(f"has no bucket; write {parts.scheme}://bucket/path")
        return Source(parts.scheme, parts.netloc, path)
    return Source(parts.scheme, _web_place(parts.hostname or "", port), path)


def _split(text: str) -> tuple[SplitResult, int | None]:
    """The parts and the port of what could be an address, free of anything that two readers read differently."""
    if not text or len(text.encode("utf-8", "surrogatepass")) > _LONGEST or _UNSAFE.search(text):
        raise ValueError(f"is not an address; write one of {_KNOWN}, without blanks")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("is not an address; its host or port cannot be read") from None
    if parts.scheme not in SCHEMES or not text.startswith(f"{parts.scheme}://"):
        raise ValueError(f"has no known scheme; known are {_KNOWN}")
    if "?" in text or "#" in text:
        raise ValueError("holds a query or fragment; credentials and signatures belong into the environment")
    if "%" in parts.netloc or any(part in {".", ".."} for part in unquote(parts.path).split("/")):
        raise ValueError("holds . or .. or an escaped host; write the plain path")
    return parts, port


def _file(place: str, path: str) -> Source:
    if place or not path.startswith("/"):
        raise ValueError("is not a local file; write file:///folder/file")
    return Source("file", "", unquote(path))


def _web_place(host: str, port: int | None) -> str:
    if not host or host.strip(".") != host:
        raise ValueError("has no host; write https://host/path")
    bracketed = f"[{host}]" if ":" in host else host
    return f"{bracketed}:{port}" if port is not None else bracketed


def _hub(place: str, path: str) -> Source:
    # Everything before the first slash is the organisation, so name@commit stands in the path.
    name, _, inner = path.removeprefix("/").partition("/")
    name, at, commit = name.partition("@")
    if not (_HUB_PART.fullmatch(place) and _HUB_PART.fullmatch(name)):
        raise ValueError("is not a repository of the hub; write hf://org/name@commit")
    if not at or not _COMMIT.fullmatch(commit):
        raise ValueError("names no commit; branches move, so write hf://org/name@ and the 40 digits of one")
    return Source("hf", f"{place}/{name}", inner.rstrip("/"), commit)


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """One bucket that models may come from, and how its store is reached.

    `keys` are the store's options by name, values taken from the environment; `auth` is keys, anonymous or ambient.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    auth: str = "keys"
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HubPlace:
    """The hub: a folder in huggingface_hub's layout, and an address if it may be asked at all."""

    cache: Path
    endpoint: str | None = None
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Permits:
    """What the configuration allows. `hosts` maps a name, `*.domain` or address to its bearer token, or to nothing.

    `networks` are address ranges beyond the public internet that names may lead to.
    """

    hosts: Mapping[str, str] = field(default_factory=dict, repr=False)
    networks: tuple[Network, ...] = ()
    stores: tuple[ObjectPlace, ...] = ()
    folders: tuple[Path, ...] = ()
    hub: HubPlace | None = None
    allow_http: bool = False

    def refusal(self, source: Source) -> str:
        """Why a source may not be used, in words for whoever wrote the manifest; empty if it may."""
        match source.scheme:
            case "file":
                if self.folder_of(Path(source.path)) is None:
                    return "the folder is not below one of remote.folders"
            case "hf":
                if self.hub is None:
                    return "remote.hub is not configured"
            case "http" | "https":
                if source.scheme == "http" and not self.allow_http:
                    return "http is not encrypted; remote.allow_http permits it"
                if self.host_entry(source.host) is None:
                    return f"the host {source.host} is not among remote.hosts"
            case _:
                if self.store_of(source) is None:
                    return f"{source.scheme}://{source.place} is not among remote.stores"
        return ""

    def store_of(self, source: Source) -> ObjectPlace | None:
        """The entry of a bucket."""
        return next((each for each in self.stores if each.url == f"{source.scheme}://{source.place}"), None)

    def folder_of(self, path: Path) -> Path | None:
        """The allowed folder that a path lies in, as it is spelled; links are looked at when it is opened."""
        return next((each for each in self.folders if path.is_relative_to(each)), None)

    def host_entry(self, host: str) -> str | None:
        """The key of `hosts` that covers a host: itself, or the longest `*.` suffix."""
        host = host.lower()
        if host in self.hosts:
            return host
        suffixes = [each for each in self.hosts if each.startswith("*.") and host.endswith(each[1:])]
        return max(suffixes, key=len, default=None)

    def reaches(self, host: str, address: Address) -> bool:
        """Whether a name may lead to an address: public ones, those in `networks`, or one that `hosts` spells out."""
        inner = _embedded(address)
        if inner.is_global and not inner.is_multicast:
            return True
        return host == str(address) or any(inner in each for each in self.networks if each.version == inner.version)


def _embedded(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one that would reach it."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address.sixtofour or address
    return address
