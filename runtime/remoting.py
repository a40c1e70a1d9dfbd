"""From the configuration's `remote:` to the values that the remote tier takes; nothing else reads its secrets."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from actors.errors import ConfigError
from runtime.tiers.pull import Pace
from runtime.tiers.sources import HubPlace, ObjectPlace, Permits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.config.remote import Hub, Remote


def permits_of(remote: Remote, environ: Mapping[str, str]) -> Permits:
    """What may be fetched, with the secrets of `environ`. Raises `ConfigError` naming a variable that is not set."""

    def secret(name: str, key: str) -> str:
        if not environ.get(name):
            raise ConfigError(f"{key}: the environment variable {name} is not set")
        return environ[name]

    hosts = {
        each.name: secret(each.token, f"remote.hosts.{place}.token") if each.token else ""
        for place, each in enumerate(remote.hosts)
    }
    hub = _hub(
        remote.hub, secret(remote.hub.token, "remote.hub.token") if remote.hub and remote.hub.token else "", environ
    )
    if hub is not None and hub.endpoint is not None:
        hosts.setdefault(urlsplit(hub.endpoint).hostname or "", "")
    return Permits(
        hosts=hosts,
        networks=tuple(ipaddress.ip_network(each) for each in remote.networks),
        stores=tuple(
            ObjectPlace(
                each.url,
                each.endpoint,
                each.region,
                each.auth,
                {key: secret(name, f"remote.stores.{place}.keys.{key}") for key, name in each.keys.items()},
            )
            for place, each in enumerate(remote.stores)
        ),
        folders=tuple(each.absolute() for each in remote.folders),
        hub=hub,
        allow_http=remote.allow_http,
    )


def _hub(hub: Hub | None, token: str, environ: Mapping[str, str]) -> HubPlace | None:
    """The hub's cache is where its own library would look (its documented variables, in its order)."""
    if hub is None:
        return None
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = hub.cache or Path(environ.get("HF_HUB_CACHE") or home / "hub")
    return HubPlace(cache.expanduser().absolute(), hub.endpoint, token)


def pace_of(remote: Remote) -> Pace:
    """How it is fetched."""
    return Pace(
        parallel=remote.parallel,
        chunk=remote.chunk,
        stall=remote.timeouts.stall,
        total=remote.timeouts.total,
        attempts=remote.attempts,
    )
