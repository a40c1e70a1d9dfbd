"""Settings of the remote tier: where model files may come from besides folders, and how they are fetched.

Values and their grammar only. Nothing is allowed by default, and no secret is ever a value here: names of environment
variables are.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, Strict, model_validator

from runtime.config import checks
from runtime.config.units import GIB, MIB, Bytes, Flag, Seconds
from runtime.config.yaml import Fault, Frozen, closest, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_BUCKET_URL = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
KEYS = {
    "s3": ("access_key_id", "secret_access_key", "session_token"),
    "gs": ("service_account_key",),
    "az": ("account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"),
}
"""What each kind of store may be told from the environment, in obstore's words."""


def variable(value: str) -> str:
    """Check the name of an environment variable; never show what was written, as it may be the secret itself."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError("not the name of an environment variable; put the secret there and its name here")
    return value


def web_host(value: str) -> str:
    """Check a host that files may come from: a name, `*.example.org`, or an address; without a port, never `*`."""
    if value == "*":
        raise ValueError("every host is no list of hosts; name them, or *.example.org")
    if ":" in value:
        try:
            return str(ipaddress.ip_address(value.removeprefix("[").removesuffix("]")))
        except ValueError:
            raise ValueError(f"{value[:60]!r} is not a host; write a name or an address, without a port") from None
    return checks.trusted_host(value).lower()


def bucket(value: str) -> str:
    """Check a bucket's address: scheme and name, nothing below it."""
    if not _BUCKET_URL.fullmatch(value):
        raise ValueError("not a bucket; write s3://bucket, gs://bucket or az://container")
    return value


def network(value: str) -> str:
    """Check a range of addresses."""
    try:
        return str(ipaddress.ip_network(value))
    except ValueError:
        raise ValueError(f"{value[:60]!r} is not a network; write 10.0.0.0/8") from None


def host_item(value: object) -> object:
    """A bare name stands for a host without a token."""
    return {"name": value} if isinstance(value, str) else value


Variable: TypeAlias = Annotated[str, AfterValidator(variable)]
Folder: TypeAlias = Annotated[Path, BeforeValidator(checks.folder)]
SomeSeconds: TypeAlias = Annotated[Seconds, Field(gt=0)]


class WebHost(Frozen):
    """A web server that files may come from."""

    name: Annotated[str, AfterValidator(web_host)]
    """Its name, or `*.example.org`, or an address; without a port."""
    token: Variable | None = None
    """Environment variable that holds a bearer token for it."""


HostItem: TypeAlias = Annotated[WebHost, BeforeValidator(host_item, json_schema_input_type=str | WebHost)]


class Store(Frozen):
    """A bucket that files may come from."""

    url: Annotated[str, AfterValidator(bucket)]
    """`s3://bucket`, `gs://bucket` or `az://container`."""
    endpoint: Annotated[str, AfterValidator(checks.url)] | None = None
    """Address of a store of your own that speaks S3 or Azure's protocol."""
    region: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Region of an s3:// bucket."""
    auth: Literal["keys", "anonymous", "ambient"] = "keys"
    """`keys` below; `anonymous` for public buckets; `ambient` takes what machine or cluster provide."""
    keys: dict[str, Variable] = Field(default_factory=dict)
    """Environment variables by what they hold, as `access_key_id: AWS_ACCESS_KEY_ID`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(_store_faults(self))
        return self


class Hub(Frozen):
    """The Hugging Face hub. Its local cache is read; it is only asked if it has an address here."""

    cache: Folder | None = None
    """Folder of huggingface_hub's cache; null takes the one that the library uses."""
    endpoint: Annotated[str, AfterValidator(checks.url)] | None = None
    """Address to ask for what the cache lacks, as https://huggingface.co; null asks nobody."""
    token: Variable | None = None
    """Environment variable that holds a token for it."""


class Timeouts(Frozen):
    """How long fetching may take. A fetch that moves is never cut off but by `total`."""

    connect: SomeSeconds = 10.0
    """Until a connection stands."""
    stall: SomeSeconds = 30.0
    """Without a byte, after which a request is made again."""
    total: SomeSeconds = 3600.0
    """For one file, all tries together."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.total < max(self.stall, self.connect):
            refuse([Fault(("total",), "is shorter than stall or connect", "no fetch could end by its own limits")])
        return self


class Remote(Frozen):
    """Where model files may come from besides folders. Nothing is allowed by default."""

    hosts: tuple[HostItem, ...] = ()
    """Web servers for https:// sources and their redirects; a name alone, or with a token."""
    networks: tuple[Annotated[str, AfterValidator(network)], ...] = ()
    """Address ranges beyond the public internet that those names may lead to, as 10.0.0.0/8."""
    stores: tuple[Store, ...] = ()
    """Buckets for s3://, gs:// and az:// sources."""
    folders: tuple[Folder, ...] = ()
    """Folders for file:// sources, as network mounts."""
    hub: Hub | None = None
    """The Hugging Face hub for hf:// sources; null allows none."""
    allow_http: Flag = False
    """Permits http:// sources and endpoints, unencrypted; hashes are checked all the same."""
    pulls: Annotated[int, Strict(), Field(ge=1, le=64)] = 2
    """Models that are fetched at one time, beside loads from disk."""
    parallel: Annotated[int, Strict(), Field(ge=1, le=64)] = 8
    """Requests at one time for one file."""
    chunk: Annotated[Bytes, Field(ge=64 << 10, le=GIB)] = 8 * MIB
    """Bytes per request; as many times `parallel` are held in memory."""
    attempts: Annotated[int, Strict(), Field(ge=1, le=100)] = 5
    """Tries per request before the load fails."""
    timeouts: Timeouts = Timeouts()
    """How long fetching may take."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(_faults(self))
        return self


def _store_faults(store: Store) -> Iterator[Fault]:
    scheme = store.url.partition(":")[0]
    for key in store.keys:
        if key not in KEYS[scheme]:
            yield Fault(("keys", key), f"is nothing that {scheme}:// is told", closest(key, KEYS[scheme]))
    if store.auth == "keys" and not store.keys:
        yield Fault(("keys",), "are missing", "name variables, or say auth: anonymous, or auth: ambient")
    if store.auth != "keys" and store.keys:
        yield Fault(("keys",), f"do not go with auth: {store.auth}", "leave one of the two out")
    if store.region is not None and scheme != "s3":
        yield Fault(("region",), "belongs to s3://")
    if store.endpoint is not None and scheme == "gs":
        yield Fault(("endpoint",), "belongs to s3:// and az://")


def _faults(remote: Remote) -> Iterator[Fault]:
    for name, rows in (
        ("hosts", [each.name for each in remote.hosts]),
        ("stores", [each.url for each in remote.stores]),
    ):
        for place, row in enumerate(rows):
            if row in rows[:place]:
                yield Fault((name, place), "is there twice")
    plain = [("stores", place, "endpoint") for place, each in enumerate(remote.stores) if _is_plain(each.endpoint)]
    if remote.hub is not None and _is_plain(remote.hub.endpoint):
        plain.append(("hub", "endpoint"))  # type: ignore[arg-type]  # a shorter path
    if not remote.allow_http:
        for path in plain:
            yield Fault(path, "is not encrypted", "write https://, or allow_http: true")


def _is_plain(url: str | None) -> bool:
    return url is not None and url.startswith("http://")
