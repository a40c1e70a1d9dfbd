"""What the tests of device workers share: models that behave as named, started workers, and waiting with a deadline."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import anyio

from actors.residency.model import Footprint, Model
from runtime.workers.local import ThreadWorker
from runtime.workers.port import BuilderSpec, LoadSpec
from runtime.workers.process import Backoff, ProcessWorker
from runtime.workers.zygotes import Zygotes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

FAKE = "tests.runtime.workers.fake_core:FakeCore"
Worker: TypeAlias = ProcessWorker | ThreadWorker
SLOT_BYTES = 4 << 20


@dataclass
class Rig:
    """A worker and what it said; `behave` decides what a model's load does."""

    worker: Any = None
    ready: list[int] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    behaviour: dict[str, tuple[str, dict[str, object]]] = field(default_factory=dict)

    def model(self, name: str, target: str = "echo", size: int = 1000, **config: object) -> Model:
        model = Model(name, "1", f"f-{name}", Footprint(size, size))
        self.behaviour[model.key] = (target, {key: str(value) for key, value in config.items()})
        return model

    def resolve(self, model: Model) -> LoadSpec:
        target, config = self.behaviour[model.key]
        return LoadSpec(
            key=model.key,
            fingerprint=model.fingerprint,
            weights="/nowhere",
            weights_bytes=model.footprint.device,
            builder=BuilderSpec("python", target, config),
            inputs=(),
            outputs=(),
        )


@asynccontextmanager
async def process_worker(**changes: Any) -> AsyncIterator[Rig]:
    """A started `ProcessWorker` with the fake core."""
    rig = Rig()
    settings: dict[str, Any] = {
        "device": "cpu:0",
        "slots": 64,
        "slot_bytes": SLOT_BYTES,
        "load_timeout": 20.0,
        "start_timeout": 20.0,
        "backoff": Backoff(0.01, 0.05),
        "core": FAKE,
        **changes,
    }
    device, wait, start = settings.pop("device"), settings.pop("wait", True), settings.pop("start", "spawn")
    async with AsyncExitStack() as stack:
        if start == "zygote":
            settings["starter"] = await stack.enter_async_context(zygotes(rig, settings["core"]))
        rig.worker = ProcessWorker(
            device,
            resolve=rig.resolve,
            on_ready=rig.ready.append,
            on_lost=lambda pid, cause: rig.lost.append((pid, cause)),
            **settings,
        )
        await stack.enter_async_context(rig.worker)
        if wait:
            with anyio.fail_after(20):
                await rig.worker.ready()
        yield rig


def zygotes(rig: Rig, core: str = FAKE, **changes: Any) -> Zygotes:
    """A starter that forks and never falls back, so that no test passes by spawning."""
    return Zygotes(core, **{"notify": rig.notes.append, "insist": True, "start_timeout": 20.0, **changes})


@asynccontextmanager
async def thread_worker(**changes: Any) -> AsyncIterator[Rig]:
    """A started `ThreadWorker` with the fake core."""
    rig = Rig()
    settings: dict[str, Any] = {"slot_bytes": SLOT_BYTES, "core": FAKE, **changes}
    rig.worker = ThreadWorker(
        "cpu:0",
        resolve=rig.resolve,
        on_ready=rig.ready.append,
        on_lost=lambda pid, cause: rig.lost.append((pid, cause)),
        **settings,
    )
    async with rig.worker:
        yield rig


KINDS = {"process": process_worker, "thread": thread_worker}


async def eventually(holds: Callable[[], object], within: float = 10.0) -> None:
    """Wait until `holds()`; fail after `within` seconds."""
    with anyio.fail_after(within):
        while not holds():  # noqa: ASYNC110 - another process sets no event
            await anyio.sleep(0.005)
