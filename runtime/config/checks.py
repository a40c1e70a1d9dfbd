"""What types cannot say: the form of names and addresses, and settings that contradict each other.

Pure functions called by `schema.py` while it validates. Advice about legal settings belongs in `lint.py`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from runtime.config.units import Amount, print_bytes, print_ratio, print_seconds
from runtime.config.yaml import Fault, closest, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import ValidationInfo

    from runtime.config import schema

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICE: Final = re.compile(r"(?:cpu|cuda):(?:0|[1-9]\d?)", re.ASCII)
_HOST_LABELS: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")
_LONGEST: Final = {"module": 255, "host": 253, "url": 2048, "path": 4096}
_NAME_RULE: Final = "letters, digits, dot, dash and underscore, at most 128, the first a letter or digit"
_VERSION_RULE: Final = _NAME_RULE.replace("128", "64")


# -- forms -------------------------------------------------------------------------------------------


def name(value: str) -> str:
    """Check a model's name, as it stands in URLs."""
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value[:60]!r} is not a model name; {_NAME_RULE}")
    return value


def version(value: str) -> str:
    """Check a version: same letters as a name."""
    if not _VERSION.fullmatch(value):
        raise ValueError(f"{value[:60]!r} is not a version; {_VERSION_RULE}")
    return value


def name_at_version(value: str) -> str:
    """Check `name` or `name@version`."""
    first, at, second = value.partition("@")
    name(first)
    if at:
        version(second)
    return value


def device_id(value: str) -> str:
    """Check a device: `cpu:0`, `cpu:1`, `cuda:3`."""
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{value[:60]!r} is not a device; write cpu:0, cpu:1, cuda:0, cuda:1, …")
    return value


def module(value: str) -> str:
    """Check a dotted Python module name; a dot at its end stands for all modules below."""
    parts = value.removesuffix(".").split(".")
    if len(value) > _LONGEST["module"] or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{value[:60]!r} is not a Python module; write package.module, or package. for all below it")
    return value


def key_hash(value: str) -> str:
    """Check the hash of a key; never show what was written, as it may be the key itself."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
        raise ValueError("not sha256: and 64 hexadecimal digits; `foreload key NAME` makes a key and its hash")
    return value


def scope(value: str) -> str:
    """Check what a key may do."""
    if not re.fullmatch(r"infer(:[A-Za-z0-9._*?-]{1,128})?|read|admin", value):
        raise ValueError(f"{value[:60]!r} is not a scope; write infer, infer:resnet*, read or admin")
    return value


def host_name(value: str) -> str:
    """Check an address to listen on: an IP address without brackets, or a name."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        numeric = value.replace(".", "").isdigit()
        if numeric or len(value) > _LONGEST["host"] or not _HOST_LABELS.fullmatch(value):
            raise ValueError(f"{value[:60]!r} is not an address; write 127.0.0.1, ::1, 0.0.0.0 or a name") from None
    return value


def trusted_host(value: str) -> str:
    """Check a Host header's name: `*`, `*.example.org`, a name or an address, without a port."""
    bare = value.removeprefix("*.")
    if bare.startswith("[") and bare.endswith("]") and bare == value:
        bare = bare[1:-1]
    if value != "*":
        try:
            host_name(bare)
        except ValueError:
            hint = "write a name, *.example.org, 127.0.0.1 or [::1], without a port, or * for any"
            raise ValueError(f"{value[:60]!r} is not a host; {hint}") from None
    return value


def url(value: str) -> str:
    """Check an http or https address without a user, password, query or fragment."""
    try:
        parts = urlsplit(value)
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound or len(value) > _LONGEST["url"] or re.search(r"[\s\x00-\x1f\x7f]", value):
        raise ValueError("not an http address; write http://host:4318")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a user, password, query or fragment does not belong here; write http://host:4318")
    return value


def trace_url(value: str) -> str:
    """Check the template of a trace's address: http(s), `{trace_id}` once and no other braces."""
    bare = value.replace("{trace_id}", "0", 1)
    if "{trace_id}" not in value or "{" in bare or "}" in bare:
        raise ValueError("must contain {trace_id} once and no other braces; write http://host:16686/trace/{trace_id}")
    if not bare.startswith(("http://", "https://")) or re.search(r"\s", bare):
        raise ValueError("not an http address; write http://host:16686/trace/{trace_id}")
    return value


def folder(value: object, context: ValidationInfo) -> Path:
    """Read a folder's path; a relative one starts at the folder in the validation context, if there is one."""
    text = str(value) if isinstance(value, str | Path) else ""
    if not text.strip() or "\x00" in text or len(text) > _LONGEST["path"]:
        raise ValueError("not a path; write ./folder or /folder")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError("only local folders are read; write ./folder or /folder")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError("this user has no home folder; write the path without ~") from None
    base = (context.context or {}).get("folder")
    return base / path if base is not None else path


def warm_entry(value: object) -> object:
    """Let a bare name stand for an entry with defaults."""
    return {"model": value} if isinstance(value, str) else value


# -- contradictions ----------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Tell whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.casefold() == "localhost"


def keys(section: tuple[schema.Key, ...]) -> tuple[schema.Key, ...]:
    """Each name and each key once."""
    refuse([*_repeated([key.name for key in section], "name"), *_repeated([key.hash for key in section], "hash")])
    return section


def limits(section: schema.Limits) -> None:
    """One model cannot have more waiters than all together."""
    if section.waiters_per_model > section.waiters:
        refuse([Fault(("waiters_per_model",), f"is over waiters ({section.waiters})", "lower it, or raise waiters")])


def server(section: schema.Server) -> None:
    """S1: beyond this machine only with keys, or with an operator's word."""
    if not (is_loopback(section.host) or section.keys or section.insecure):
        refuse(
            [
                Fault(
                    ("host",),
                    "listening beyond this machine needs server.keys",
                    "list keys, or say server.insecure: true if something else guards the network",
                )
            ]
        )


def headroom(memory: Amount, free: int) -> None:
    """Something must be left for models."""
    if memory.size is not None and free >= memory.size:
        refuse([Fault(("headroom",), f"leaves nothing of memory ({memory})", f"keep it under {memory}")])


def start(section: schema.Device) -> None:
    """A context of a GPU can't be forked, and a thread is no process."""
    if section.start == "zygote" and not section.id.startswith("cpu"):
        refuse([Fault(("start",), f"no zygote is possible for {section.id}", "as in start: standby")])
    if section.start != "auto" and section.isolation == "thread":
        refuse([Fault(("start",), "says nothing with isolation: thread", "leave it out")])


def pressure(section: schema.Pressure) -> None:
    """The end of pressure lies below its start, or it would flap."""
    if not section.low < section.high:
        refuse([Fault(("low",), f"must be below high ({print_ratio(section.high)})", "as in high: 85%, low: 80%")])


def backoff(section: schema.Backoff) -> None:
    """The first wait is within the limit."""
    if section.first > section.limit:
        refuse([Fault(("first",), f"is over limit ({print_seconds(section.limit)})", "lower it, or raise limit")])


def policy(section: schema.Policy) -> None:
    """A policy by idle time needs one; a resident's life is not shorter than its protection."""
    faults = []
    if section.name == "lru_ttl" and section.ttl_idle is None:
        faults.append(Fault(("ttl_idle",), "is missing; name: lru_ttl needs it", "as in ttl_idle: 1h"))
    for key in ("ttl_idle", "ttl"):
        limit = getattr(section, key)
        if limit is not None and limit < section.min_residency:
            protected = print_seconds(section.min_residency)
            faults.append(Fault((key,), f"is under min_residency ({protected})", "lower min_residency"))
    refuse(faults)


def devices(section: tuple[schema.Device, ...]) -> tuple[schema.Device, ...]:
    """At least one, each once."""
    if not section:
        refuse([Fault((), "no device is listed", "as in devices: [{id: cpu:0, memory: 2GiB}]")])
    refuse(_repeated([device.id for device in section], "id"))
    return section


def models(section: tuple[schema.ModelEntry, ...]) -> tuple[schema.ModelEntry, ...]:
    """Each version of a name once."""
    refuse(_repeated([f"{entry.name}@{entry.version}" for entry in section], "name"))
    return section


def whole(config: schema.Config) -> None:
    """What concerns more than one section."""
    refuse([*_warm(config), *_sizes(config)])


def _repeated(values: list[str], key: str) -> Iterator[Fault]:
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if value in first:
            yield Fault((index, key), f"{value} is listed twice", f"first as item {first[value]}")
        first.setdefault(value, index)


def _warm(config: schema.Config) -> Iterator[Fault]:
    entries = config.warm or ()
    for fault in _repeated([entry.model for entry in entries], "model"):
        yield Fault(("warm", *fault.path), fault.what, fault.hint)
    if config.repository:
        return
    known = {entry.name for entry in config.models}
    keys = {f"{entry.name}@{entry.version}" for entry in config.models}
    for index, entry in enumerate(entries):
        if entry.model not in known | keys:
            hint = (
                closest(entry.model, keys if "@" in entry.model else known) or "models is empty, and so is repository"
            )
            yield Fault(("warm", index, "model"), f"no model {entry.model} is listed", hint)


def _sizes(config: schema.Config) -> Iterator[Fault]:
    """A declared size that no device can hold is a mistake in one of the two numbers."""
    rooms: list[Any] = [d.memory.size - d.headroom if d.memory.size is not None else None for d in config.devices]
    if None in rooms:
        return
    for index, entry in enumerate(config.models):
        if entry.footprint and entry.footprint.device > max(rooms):
            yield Fault(
                ("models", index, "footprint", "device"),
                f"fits on no device (the largest has {print_bytes(max(rooms))})",
                "correct it, or give a device more memory",
            )
