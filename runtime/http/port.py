"""What the HTTP layer asks of the server behind it. It only translates; every decision is made behind this.

Names reach these methods after one percent-decode and the strict pattern check. Any `ForeloadError` raised here
becomes a status by `errors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runtime.workers.port import Answer, TensorSpec

    Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Served:
    """An inference's answer and how the model was found; `waited` in seconds."""

    answer: Answer
    model_name: str
    model_version: str
    found: str
    result: str
    waited: float
    trace_id: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A health answer. `extra` is merged into the JSON body (`state`, `tier`, …)."""

    ok: bool
    reason: str = ""
    retry_after: float | None = None
    extra: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a model is, for `GET /v2/models/{m}`."""

    name: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One row of the repository index; empty `version` and `state` are left out of the JSON."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Backend(Protocol):
    """The server as HTTP sees it; `runtime/server.py` implements it."""

    @property
    def draining(self) -> bool:
        """True from the first stop signal: answers carry `Connection: close`."""
        ...

    async def infer(
        self,
        name: str,
        version: str | None,
        body: bytes,
        json_length: int | None,
        *,
        request_id: str,
        timeout: float | None,  # noqa: ASYNC109 - the caller's own deadline, part of the protocol
        priority: int,
        traceparent: str,
        tracestate: str,
    ) -> Served:
        """Run one inference. `timeout` in seconds is the caller's own deadline; cancelling gives the place up."""
        ...

    def live(self) -> Verdict:
        """Does the loop answer, and does the cold path make progress?"""
        ...

    def ready(self) -> Verdict:
        """Should a balancer send traffic here?"""
        ...

    def model_ready(self, name: str, version: str | None, *, strict: bool | None) -> Verdict:
        """Is an infer sent now expected to succeed? `strict` None takes the server's setting. Raises `UnknownModel`."""
        ...

    def server_metadata(self) -> Json:
        """`name`, `version`, `extensions`."""
        ...

    def metadata(self, name: str, version: str | None) -> Metadata:
        """Raises `UnknownModel`."""
        ...

    def index(self, *, ready: bool) -> Sequence[IndexRow]:
        """Every known model version; only the READY ones if asked."""
        ...

    async def load(self, name: str, parameters: Json) -> None:
        """Make resident and return when it can infer. Raises `BadRequest` for an unknown parameter."""
        ...

    async def unload(self, name: str, parameters: Json) -> None:
        """Give residency back; in-flight requests finish in the background."""
        ...

    def statistics(self, name: str | None, version: str | None) -> Json:
        """The statistics extension's body."""
        ...

    def state(self) -> Json:
        """Residency, capacity, leases, hit rates: the body of `/api/v1/state`."""
        ...

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """Prometheus or OpenMetrics text, and its content type."""
        ...
