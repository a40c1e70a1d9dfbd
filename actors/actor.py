"""The kernel: messages, mailboxes, refs, and the life of one incarnation.

`receive` is a plain function, so nothing interleaves and nothing needs a lock. Slow work is a job; what it
returns is this actor's next message. Nothing here knows what the messages mean.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import anyio
from anyio import CancelScope, create_memory_object_stream
from anyio.lowlevel import checkpoint

from actors.errors import ActorStopped, ForeloadError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

IN_A_ROW: Final = 4
"""Messages that an actor takes without letting anything else run in between."""
R = TypeVar("R")
M = TypeVar("M")


class Request(Generic[R]):
    """Base of messages that expect a reply of type `R`."""

    __slots__ = ()


class Urgent:
    """Base of control messages: never shed, handled before ordinary ones."""

    __slots__ = ()


class Reply(Generic[R]):
    """The place for one answer. Settling twice, or after the asker left, is harmless and returns False."""

    __slots__ = ("_future", "_open")

    def __init__(self) -> None:
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._open: set[Reply[Any]] | None = None

    def settle(self, value: R) -> bool:
        """Give the answer; False if nobody waits for it any more."""
        self._close()
        if self._future.done():
            return False
        self._future.set_result(value)
        return True

    def refuse(self, error: ForeloadError) -> bool:
        """Give an error instead; False if nobody waits for it any more."""
        self._close()
        if self._future.done():
            return False
        self._future.set_exception(error)
        self._future.exception()  # looked at: the answer to a mere `tell` is nobody's, and no fault of the loop
        return True

    def drop(self) -> None:
        """Forget an asker who is known to have left."""
        self._close()
        self._future.cancel()

    @property
    def abandoned(self) -> bool:
        """True when the asker was cancelled."""
        return self._future.cancelled()

    def keep_in(self, unsettled: set[Reply[Any]]) -> None:
        """Be refused with the others of this set if the incarnation ends first."""
        self._open = unsettled
        unsettled.add(self)

    def _close(self) -> None:
        if self._open is not None:
            self._open.discard(self)

    def __await__(self) -> Any:
        return self._future.__await__()


class Envelope:
    """A message and the place to reply, nothing else."""

    __slots__ = ("message", "reply")

    def __init__(self, message: object, reply: Reply[Any] | None = None) -> None:
        self.message = message
        self.reply = reply


class Mailbox:
    """One anyio stream for ordinary messages and a lane for urgent ones, which is emptied first."""

    def __init__(self) -> None:
        # Unbounded on purpose: a release or a load's result must never be shed. The front door is bounded.
        self._send, self._receive = create_memory_object_stream[Envelope](math.inf)
        self._urgent: deque[Envelope] = deque()
        self._news: anyio.Event | None = None
        self._row = 0
        self.closed = False
        self.taken = 0
        """Messages handed out so far: a queue that does not move while this stands still is stuck."""

    def post(self, envelope: Envelope, *, urgent: bool = False) -> None:
        """Add a message; refuses its reply at once when the mailbox is closed."""
        if self.closed:
            if envelope.reply is not None:
                envelope.reply.refuse(ActorStopped("the actor has stopped"))
            return
        if urgent:
            self._urgent.append(envelope)
        else:
            self._send.send_nowait(envelope)
        if self._news is not None:
            self._news.set()

    async def next(self) -> Envelope:
        """Wait for the next message, urgent ones first.

        What is there already is handed out without a turn of the loop, `IN_A_ROW` messages long: a turn costs more
        than most messages do, and others have to come in between.
        """
        self._row += 1
        if self._row > IN_A_ROW:
            self._row = 1
            await checkpoint()
        while True:
            found = self._now()
            if found is not None:
                self.taken += 1
                return found
            self._row = 1
            self._news = anyio.Event()
            try:
                await self._news.wait()  # nothing is taken while waiting, so a cancelled receiver loses nothing
            finally:
                self._news = None

    def _now(self) -> Envelope | None:
        if self._urgent:
            return self._urgent.popleft()
        try:
            return self._receive.receive_nowait()
        except anyio.WouldBlock:
            return None

    def close(self, cause: ForeloadError) -> None:
        """Refuse everything that is left and everything that will come; the first cause counts."""
        if self.closed:
            return
        self.closed = True
        while (envelope := self._now()) is not None:
            if envelope.reply is not None:
                envelope.reply.refuse(cause.again())
        self._send.close()
        self._receive.close()

    @property
    def depth(self) -> int:
        """Messages waiting."""
        if self.closed:
            return 0
        return self._receive.statistics().current_buffer_used + len(self._urgent)


class Ref(Generic[M]):
    """The only handle on an actor; survives restarts."""

    __slots__ = ("_mailbox", "incarnation", "name", "owner")

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.owner: Actor[M] | None = None
        """The living actor object, for synchronous calls between two of its messages; None between incarnations."""
        self._mailbox = Mailbox()

    @property
    def mailbox(self) -> Mailbox:
        """The queue, for its statistics."""
        return self._mailbox

    def tell(self, message: M) -> None:
        """Send, never wait."""
        self._mailbox.post(Envelope(message), urgent=isinstance(message, Urgent))

    async def ask(self, request: Request[R]) -> R:
        """Send and await the typed reply. Raises whatever `ForeloadError` the actor answers with."""
        reply: Reply[R] = Reply()
        self._mailbox.post(Envelope(request, reply), urgent=isinstance(request, Urgent))
        return cast("R", await reply)

    def __repr__(self) -> str:
        life = "alive" if self.owner is not None else "down"
        return f"<Ref {self.name} {life} incarnation={self.incarnation} depth={self._mailbox.depth}>"


class Job:
    """Slow work under way."""

    __slots__ = ("_scope",)

    def __init__(self, scope: CancelScope) -> None:
        self._scope = scope

    def cancel(self) -> None:
        """Ask it to stop; the actor still gets one message from it."""
        self._scope.cancel()


class Actor(ABC, Generic[M]):
    """Single-reader state. Subclasses implement `receive` as a plain function that never awaits."""

    def __init__(self) -> None:
        self._tasks: TaskGroup | None = None
        self._current: Reply[Any] | None = None
        self._unsettled: set[Reply[Any]] = set()
        self._ref: Ref[M] | None = None

    @abstractmethod
    def receive(self, message: M) -> object:
        """Handle one message; what it returns is the reply, unless `defer()` was called."""

    def started(self) -> None:
        """Begin first jobs; called once per incarnation, before the first message."""

    def snapshot(self) -> object:
        """A frozen, advisory view for tests and the operator."""
        return repr(self)

    @property
    def me(self) -> Ref[M]:
        """This actor's own ref."""
        assert self._ref is not None, "not started"
        return self._ref

    @property
    def asker_left(self) -> bool:
        """True when whoever asked what is being handled was cancelled meanwhile."""
        return self._current is not None and self._current.abandoned

    def defer(self) -> Reply[Any]:
        """Take over the current message's reply and settle it while handling a later message."""
        reply, self._current = self._current, None
        if reply is None:
            reply = Reply[Any]()  # a `tell` of a request: nobody will read the answer
        reply.keep_in(self._unsettled)
        return reply

    def spawn(
        self,
        job: Callable[[], Awaitable[M]],
        *,
        failed: Callable[[Exception], M],
        cancelled: M | None = None,
    ) -> Job:
        """Start slow work; its result (or `failed(exc)`, or `cancelled`) is delivered to this actor, urgently."""
        assert self._tasks is not None, "not started"
        scope = CancelScope()
        self._tasks.start_soon(self._work, job, scope, failed, cancelled)
        return Job(scope)

    async def _work(
        self,
        job: Callable[[], Awaitable[M]],
        scope: CancelScope,
        failed: Callable[[Exception], M],
        cancelled: M | None,
    ) -> None:
        message = cancelled
        with scope:
            try:
                message = await job()
            except Exception as exc:  # noqa: BLE001 - the actor decides what a failure means
                message = failed(exc)
        if message is not None:
            self.me.mailbox.post(Envelope(message), urgent=True)

    async def live(self, ref: Ref[M]) -> None:
        """Run one incarnation until it is stopped (returns) or crashes (raises)."""
        self._ref = ref
        cause = ActorStopped(f"{ref.name} stopped before answering")
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                ref.incarnation += 1
                ref.owner = self
                self.started()
                while (envelope := await ref.mailbox.next()).message is not STOP:
                    self._handle(envelope)
                tasks.cancel_scope.cancel()
                if envelope.reply is not None:
                    envelope.reply.settle(None)
        finally:
            ref.owner = None
            for reply in tuple(self._unsettled):
                reply.refuse(cause.again())

    def _handle(self, envelope: Envelope) -> None:
        self._current = envelope.reply
        try:
            result = self.receive(cast("M", envelope.message))
        except ForeloadError as error:
            if self._current is None:
                raise  # nobody asked (or the reply was deferred): then it is a bug of ours
            self._current.refuse(error)
        except Exception:
            if self._current is not None:
                self._current.refuse(ActorStopped(f"{self.me.name} failed while answering"))
            raise
        else:
            if self._current is not None:
                self._current.settle(result)
        finally:
            self._current = None


STOP: object = object()
"""Ends an incarnation for good; only the supervisor sends it."""
