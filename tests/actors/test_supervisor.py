"""Supervision: restarts, their limit, and an end that leaves nobody waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from actors.clock import LoopClock
from actors.errors import ActorStopped
from actors.events import ActorRestarted
from actors.supervisor import SupervisionFailed, Supervisor, one_line
from tests.actors.cast import Break, Hold, Note, Panic, Read, Scribe, Work, stage
from tests.actors.virtual import virtual

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from actors.actor import Ref, Request


def failures(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """Every leaf of a group, as text."""
    return [
        text
        for each in group.exceptions
        for text in (failures(each) if isinstance(each, BaseExceptionGroup) else [f"{type(each).__name__}: {each}"])
    ]


async def hear(ref: Ref[Any], heard: list[str]) -> None:
    """Ask for something that is never answered and note the refusal."""
    try:
        await ref.ask(Hold())
    except ActorStopped as error:
        heard.append(error.message)


async def refused(ref: Ref[Any], request: Request[Any], why: str) -> None:
    """Ask, and be refused at once."""
    with anyio.fail_after(10), pytest.raises(ActorStopped, match=why):
        await ref.ask(request)


@virtual
async def test_a_crash_is_stated_once_with_its_cause() -> None:
    """`ActorRestarted` names the actor, the life that ended and the exception in one line."""
    async with stage() as s:
        s.ref.tell(Break("first line\nsecond line"))
        await anyio.sleep(1)
        assert s.events == [ActorRestarted(s.events[0].at, "scribe", 1, "ValueError: first line")]
        assert s.ref.incarnation == 2


@virtual
async def test_crashes_spread_over_time_are_tolerated_for_ever() -> None:
    """The intensity counts crashes within the period only."""
    async with stage(intensity=2, period=10) as s:
        for _ in range(20):
            s.ref.tell(Break())
            await anyio.sleep(6)
        assert s.ref.incarnation == 21


@pytest.mark.parametrize("intensity", [0, 1, 3])
def test_more_crashes_than_the_intensity_end_everything_loudly(intensity: int) -> None:
    """A crash loop is not hidden: the supervisor raises, the mailbox is closed, and the askers hear of it."""

    async def main() -> None:
        heard: list[str] = []
        refs: list[Ref[Any]] = []

        async def crash() -> None:
            async with anyio.create_task_group() as tasks, stage(intensity=intensity) as s:
                refs.append(s.ref)
                for _ in range(intensity + 1):
                    s.ref.tell(Break())
                tasks.start_soon(hear, s.ref, heard)
                await anyio.sleep(100)

        with pytest.raises(BaseExceptionGroup) as caught:
            await crash()
        count = intensity + 1
        assert failures(caught.value) == [
            f"SupervisionFailed: scribe crashed {count} times in 30 s, last: ValueError: broken on purpose"
        ]
        assert heard == ["scribe keeps crashing"]
        await refused(refs[0], Read(), "the actor has stopped")

    virtual(main)()


@virtual
async def test_the_last_straw_refuses_also_what_was_already_taken_out_of_the_stream() -> None:
    """An ordinary request that an urgent one overtook is answered when its actor ends for good."""

    async def panic() -> None:
        async with stage(intensity=0) as s, anyio.create_task_group() as tasks:
            tasks.start_soon(refused, s.ref, Read(), "keeps crashing")
            await checkpoint()
            s.ref.tell(Panic())
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)

    with pytest.raises(BaseExceptionGroup):
        await panic()


@virtual
async def test_a_crash_loop_during_the_stop_is_still_loud() -> None:
    """Leaving the supervisor while an actor crashes for the last time neither hangs nor hides it."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with stage(intensity=0) as s:
            s.ref.tell(Break())
    assert any(text.startswith("SupervisionFailed") for text in failures(caught.value))


@virtual
async def test_actors_stop_in_reverse_order_after_what_they_already_have() -> None:
    """Who was started last stops first, and messages told before the stop are handled."""
    order: list[str] = []

    class Last(Scribe):
        def receive(self, message: object) -> object:
            order.append(self.me.name)
            return super().receive(message)

    async with Supervisor(emit=lambda _: None, clock=LoopClock()) as supervisor:
        refs = [supervisor.start(name, lambda: Last([])) for name in ("below", "above")]
        for ref in refs:
            ref.tell(Note("x"))
            ref.tell(Note("y"))
        assert supervisor.snapshot()["above"]["mailbox_depth"] == 2
        assert repr(supervisor) == "<Supervisor 0/2 actors alive>"
        await checkpoint()
        assert repr(supervisor) == "<Supervisor 2/2 actors alive>"
    assert sorted(order) == ["above", "above", "below", "below"]
    assert supervisor.snapshot() == {
        name: {"alive": False, "incarnation": 1, "mailbox_depth": 0} for name in ("below", "above")
    }


@virtual
async def test_stopping_cancels_jobs_and_refuses_deferred_replies() -> None:
    """F74: an end is an end; nobody waits for a job that will not report."""
    heard: list[str] = []
    async with anyio.create_task_group() as tasks, stage() as s:
        tasks.start_soon(hear, s.ref, heard)
        s.ref.tell(Work(1000, "never"))
        await anyio.sleep(1)
    assert heard == ["scribe stopped before answering"]
    assert s.journal == ["life 1"]
    assert anyio.current_time() < 10


@virtual
async def test_stopping_twice_is_harmless() -> None:
    """The second stop finds closed mailboxes."""
    async with stage() as s:
        await s.supervisor.stop()
        await s.supervisor.stop()
        with pytest.raises(ActorStopped):
            await s.ref.ask(Read())


@virtual
async def test_an_error_in_the_block_ends_the_actors_and_answers_their_askers() -> None:
    """Also an abnormal end leaves nobody waiting: neither who asked before nor who asks afterwards."""
    heard: list[str] = []
    refs: list[Ref[Any]] = []

    async def fail(tasks: TaskGroup) -> None:
        async with stage() as s:
            refs.append(s.ref)
            tasks.start_soon(hear, s.ref, heard)
            await anyio.sleep(1)
            raise KeyError("in the block")

    async with anyio.create_task_group() as tasks:
        with pytest.raises(BaseExceptionGroup):
            await fail(tasks)
        await refused(refs[0], Read(), "the actor has stopped")
    assert heard == ["scribe stopped before answering"]


def test_an_exception_is_told_in_one_line() -> None:
    """A group is told by its first leaf."""
    assert one_line(OSError("no\nsuch")) == "OSError: no"
    assert one_line(BaseExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("k")])])) == "KeyError: 'k'"


@virtual
async def test_a_supervisor_has_to_be_entered_first() -> None:
    """Starting an actor outside the block would leave a task without a parent."""
    supervisor = Supervisor(emit=lambda _: None, clock=LoopClock())
    with pytest.raises(AssertionError, match="enter the supervisor first"):
        supervisor.start("early", lambda: Scribe([]))


def test_supervision_failure_is_not_one_of_the_errors_that_travel() -> None:
    """It ends the process; it must never be sent to a client as an answer."""
    assert issubclass(SupervisionFailed, RuntimeError)
