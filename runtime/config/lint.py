"""Predicts trouble that a legal configuration will have. Advice only: nothing here refuses to start.

Pure; sizes of the machine are arguments. What contradicts itself is an error and belongs in `checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from runtime.config.checks import is_loopback
from runtime.config.document import KeyPath, dotted
from runtime.config.units import Amount, print_ratio, print_seconds, round_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.config.schema import Config, Device

_GRACE: Final = 30.0
"""Seconds between the stop signal and the kill that orchestrators allow by default."""
_AFTER_LEASES: Final = 5.0
"""Seconds the server may need after its leases are back: 2 to end workers, 3 to flush telemetry."""


class Level(StrEnum):
    """How bad it will be."""

    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One prediction: how bad, which key, and why."""

    level: Level
    path: str
    text: str


def lint(config: Config, *, machine: int | None = None) -> list[Finding]:
    """Predict trouble. `machine` is this machine's memory in bytes; without it shares of it are only compared."""
    found = [*_memory(config, machine), *_models(config, machine), *_stopping(config), *_serving(config)]
    return [Finding(level, dotted(path), text) for level, path, text in found]


_Row = tuple[Level, KeyPath, str]


def _memory(config: Config, machine: int | None) -> Iterator[_Row]:
    for index, device in enumerate(config.devices):
        path = ("devices", index, "memory")
        whole = machine if device.id == "cpu:0" else None
        room = _room(device, whole)
        if room is not None and room <= 0:
            yield Level.WARNING, ("devices", index, "headroom"), "leaves no memory for models on this machine"
        if device.id != "cpu:0":
            continue
        held, lent = _bytes(config.host.memory, whole), _bytes(device.memory, whole)
        if held is not None and lent is not None and held < lent:
            text = f"{round_bytes(held)} is less than {device.id} may use ({round_bytes(lent)})"
            yield Level.WARNING, ("host", "memory"), f"{text}; weights on a CPU device lie in the host tier"
        if whole is not None and lent is not None and lent > whole:
            yield Level.WARNING, path, f"{round_bytes(lent)} is more than this machine has ({round_bytes(whole)})"
    held = _bytes(config.host.memory, machine)
    if machine is not None and held is not None and held > config.host.pressure.high * machine:
        high = print_ratio(config.host.pressure.high)
        text = f"reaches host.pressure.high ({high} of this machine) before it is full; models will be let go early"
        yield Level.WARNING, ("host", "memory"), text


def _models(config: Config, machine: int | None) -> Iterator[_Row]:
    rooms = [_room(device, machine if device.id == "cpu:0" else None) for device in config.devices]
    known = {e.name: e.footprint.device for e in config.models if e.footprint}
    known |= {f"{e.name}@{e.version}": e.footprint.device for e in config.models if e.footprint}
    warm = {entry.model for entry in config.warm or ()}
    pinned = {e.name for e in config.models if e.pinned}
    kept = {name.partition("@")[0]: known[name] for name in sorted(warm | pinned) if name in known}
    total = sum(room for room in rooms if room is not None)
    if kept and None not in rooms and sum(kept.values()) > total:
        text = f"warm and pinned models need {round_bytes(sum(kept.values()))}, the devices have {round_bytes(total)}"
        yield Level.WARNING, ("warm",), f"{text}; the first loaded will be evicted or the last will not load"
    slots = [device.count for device in config.devices if device.count is not None]
    if len(slots) == len(config.devices) and len({w.partition("@")[0] for w in warm} | pinned) > sum(slots):
        yield Level.WARNING, ("warm",), f"lists more models than the devices may hold ({sum(slots)})"
    if not (config.models or config.repository):
        yield Level.WARNING, ("models",), "no model and no repository is listed; the server has nothing to serve"
    if config.warm is None:
        text = "is not set; the server is ready only once a model is resident. Say warm: [] if none is wanted"
        yield Level.NOTE, ("warm",), text
    yield from _lifetimes(config)


def _lifetimes(config: Config) -> Iterator[_Row]:
    rows: list[tuple[KeyPath, float | None]] = [(("policy", "ttl"), config.policy.ttl)]
    rows += [(("models", index, "ttl"), entry.ttl) for index, entry in enumerate(config.models)]
    for path, limit in rows:
        if limit is not None and limit < config.policy.backoff.first:
            text = f"{print_seconds(limit)} is shorter than the first back-off; models may spend their life loading"
            yield Level.WARNING, path, text
    for index, entry in enumerate(config.models):
        lives = [limit for limit in (entry.ttl_idle, entry.ttl) if limit is not None]
        if entry.pinned and entry.ttl_idle is not None:
            yield Level.NOTE, ("models", index, "ttl_idle"), "has no effect on a pinned model"
        if lives and min(lives) < config.policy.min_residency:
            text = f"is under policy.min_residency ({print_seconds(config.policy.min_residency)})"
            yield Level.WARNING, ("models", index), f"a time limit of this model {text}"


def _stopping(config: Config) -> Iterator[_Row]:
    drain = config.server.drain
    total = drain.delay + drain.timeout + _AFTER_LEASES
    if drain.delay + drain.timeout >= _GRACE:
        text = f"delay and timeout are {print_seconds(drain.delay + drain.timeout)}"
    elif total > _GRACE:
        text = f"stopping takes up to {print_seconds(total)}"
    else:
        return
    limit = print_seconds(_GRACE)
    yield Level.WARNING, ("server", "drain"), f"{text}; orchestrators kill after {limit} unless told otherwise"


def _serving(config: Config) -> Iterator[_Row]:
    server = config.server
    if server.insecure and not is_loopback(server.host):
        yield Level.WARNING, ("server", "insecure"), "anyone who reaches this address may load, run and unload models"
    if "*" in server.trusted_hosts:
        text = "answers any Host header; a web page that a user opens may then reach this server by DNS rebinding"
        yield Level.WARNING, ("server", "trusted_hosts"), text
    if not server.trusted_hosts:
        yield Level.WARNING, ("server", "trusted_hosts"), "is empty; every request will be refused"
    elif not is_loopback(server.host) and all(is_loopback(name.strip("[]")) for name in server.trusted_hosts):
        text = "names only this machine, so requests from others will be refused; add the names they use"
        yield Level.WARNING, ("server", "trusted_hosts"), text
    deadline = server.wait.default_deadline
    if deadline is not None and deadline < server.wait.soft:
        yield Level.NOTE, ("server", "wait", "soft"), "is never reached; default_deadline comes first"
    for index, device in enumerate(config.devices):
        if device.isolation == "thread":
            text = "a crash of a model's native code ends the server, and memory is not given back as reliably"
            yield Level.WARNING, ("devices", index, "isolation"), text
        if device.start == "standby" and device.id.startswith("cuda") and device.pinned:
            text = f"holds {round_bytes(device.pinned)} of page-locked memory twice, and one more context on the GPU"
            yield Level.NOTE, ("devices", index, "start"), text
        if device.load_timeout < server.wait.soft:
            yield Level.NOTE, ("devices", index, "load_timeout"), "is under server.wait.soft, so loads fail before it"


def _bytes(amount: Amount, whole: int | None) -> int | None:
    return amount.size if amount.size is not None else None if whole is None else amount.of(whole)


def _room(device: Device, whole: int | None) -> int | None:
    lent = _bytes(device.memory, whole)
    return None if lent is None else lent - device.headroom
