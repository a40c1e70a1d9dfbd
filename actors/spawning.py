"""The kernel's `spawn`, as those parts of an actor see it that are not the actor itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.actor import Job

M_contra = TypeVar("M_contra", contravariant=True)


class Spawn(Protocol[M_contra]):
    """Starts slow work whose outcome comes back as a message; see `Actor.spawn`."""

    def __call__(
        self,
        job: Callable[[], Awaitable[M_contra]],
        *,
        failed: Callable[[Exception], M_contra],
        cancelled: M_contra | None = None,
    ) -> Job:
        """Start a job."""
        ...
