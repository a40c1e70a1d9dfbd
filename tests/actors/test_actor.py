"""The kernel: order, replies, jobs, and what a crash or a cancellation leaves behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from actors.actor import IN_A_ROW, STOP, Actor, Envelope, Mailbox, Ref, Reply
from actors.errors import ActorStopped, Busy
from tests.actors.cast import Alarm, Break, CancelWork, Decline, Hold, Note, Panic, Read, Scribe, Settle, Work, stage
from tests.actors.virtual import virtual


@virtual
async def test_messages_are_handled_in_the_order_they_were_told() -> None:
    """One sender's ordinary messages never overtake each other."""
    async with stage() as s:
        for word in "abc":
            s.ref.tell(Note(word))
        assert await s.ref.ask(Read()) == ("life 1", "a", "b", "c")


@virtual
async def test_urgent_messages_go_first_and_keep_their_own_order() -> None:
    """F66: releases and load results are never stuck behind a flood of requests."""
    async with stage() as s:
        for number in range(1000):
            s.ref.tell(Note(f"n{number}"))
        s.ref.tell(Alarm("first"))
        s.ref.tell(Alarm("second"))
        words = await s.ref.ask(Read())
        assert words[1:4] == ("first", "second", "n0")
        assert len(words) == 1003


@virtual
async def test_a_full_mailbox_lets_others_run_in_between() -> None:
    """F66: messages that are there cost no turn of the loop each, and still nobody waits for all of them."""
    async with stage() as s:
        for number in range(100):
            s.ref.tell(Note(f"n{number}"))
        seen = []
        while s.ref.mailbox.depth:
            seen.append(s.ref.mailbox.depth)
            await checkpoint()
        assert len(seen) >= 100 // IN_A_ROW
        assert max(before - after for before, after in itertools.pairwise(seen)) <= IN_A_ROW


@virtual
async def test_an_urgent_message_overtakes_one_that_was_already_taken_out() -> None:
    """A message handed to the sleeping actor in the same turn still comes after the urgent one, and is not lost."""
    async with stage() as s:
        s.ref.tell(Note("ordinary"))
        s.ref.tell(Alarm("urgent"))
        assert await s.ref.ask(Read()) == ("life 1", "urgent", "ordinary")


@virtual
async def test_a_deferred_reply_is_settled_by_a_later_message() -> None:
    """`defer` answers nobody until it is settled, and then everybody."""
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await s.ref.ask(Hold()))

    async with stage() as s, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await anyio.sleep(1)
        assert answers == []
        s.ref.tell(Settle("now"))
        await anyio.sleep(1)
        assert answers == ["now", "now"]


@virtual
async def test_a_told_request_may_be_deferred_and_settled_although_nobody_reads_the_answer() -> None:
    """`tell` of a request is legal; the answer goes nowhere."""
    async with stage() as s:
        s.ref.tell(Hold())
        s.ref.tell(Settle("to nobody"))
        assert await s.ref.ask(Read()) == ("life 1",)
        assert s.ref.incarnation == 1


@virtual
async def test_refusing_a_reply_that_nobody_reads_is_silent() -> None:
    """A told request that is refused leaves no 'exception was never retrieved' in the log."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context["message"]))
    async with stage() as s:
        s.ref.tell(Hold())
        await anyio.sleep(1)
    gc.collect()
    await anyio.sleep(1)
    assert complaints == []


@virtual
async def test_an_error_of_ours_is_a_reply_and_the_actor_lives_on() -> None:
    """A `ForeloadError` raised while answering travels to the asker with its fields."""
    async with stage() as s:
        with pytest.raises(Busy) as caught:
            await s.ref.ask(Decline())
        assert caught.value.retry_after == 2.0
        assert await s.ref.ask(Read()) == ("life 1",)


@pytest.mark.parametrize("told", [Decline(), Decline(late=True)])
def test_an_error_of_ours_that_nobody_can_hear_is_a_crash(told: Decline) -> None:
    """A refusal of a mere `tell`, or after the reply was deferred, is a bug and ends the incarnation."""

    async def main() -> None:
        async with stage() as s:
            if told.late:
                with pytest.raises(ActorStopped, match="scribe stopped before answering"):
                    await s.ref.ask(told)
            else:
                s.ref.tell(told)
            assert await s.ref.ask(Read()) == ("life 1", "life 2")

    virtual(main)()


@virtual
async def test_any_other_error_refuses_its_asker_and_ends_the_incarnation() -> None:
    """A crash is never the asker's error text; the next life answers the next question."""
    async with stage() as s:
        with pytest.raises(ActorStopped) as caught:
            await s.ref.ask(Break("secret detail"))
        assert "secret" not in caught.value.message
        assert await s.ref.ask(Read()) == ("life 1", "life 2")


@virtual
async def test_a_crash_refuses_every_deferred_reply_with_an_error_of_its_own() -> None:
    """Nobody hangs on a dead incarnation, and tracebacks do not pile up on a shared exception."""
    caught: list[ActorStopped] = []

    async def ask() -> None:
        try:
            await s.ref.ask(Hold())
        except ActorStopped as error:
            caught.append(error)

    async with stage() as s, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await anyio.sleep(1)
        s.ref.tell(Break())
        await anyio.sleep(1)
        assert len(caught) == 2
        assert caught[0] is not caught[1]


@virtual
async def test_a_cancelled_ask_loses_neither_its_message_nor_the_next_answer() -> None:
    """Whoever leaves in the middle leaves the mailbox and the actor as they were."""
    async with stage() as s:
        with anyio.move_on_after(1):
            await s.ref.ask(Hold())
        s.ref.tell(Note("still here"))
        s.ref.tell(Settle("too late"))
        assert await s.ref.ask(Read()) == ("life 1", "still here")
        assert s.ref.incarnation == 1


@virtual
async def test_a_reply_is_settled_once() -> None:
    """The first answer wins; later ones are harmless and say so."""
    reply: Reply[int] = Reply()
    assert reply.settle(1)
    assert not reply.settle(2)
    assert not reply.refuse(Busy("no"))
    assert not reply.abandoned
    assert await reply == 1


@virtual
async def test_a_dropped_reply_counts_as_abandoned() -> None:
    """Dropping is what happens to an asker who is known to have left."""
    reply: Reply[int] = Reply()
    reply.drop()
    assert reply.abandoned
    assert not reply.settle(1)


@virtual
async def test_a_jobs_result_is_the_actors_next_message() -> None:
    """Slow work never blocks `receive`: messages go on being handled while it runs."""
    async with stage() as s:
        s.ref.tell(Work(5, "job"))
        s.ref.tell(Note("meanwhile"))
        await anyio.sleep(4)
        assert s.journal == ["life 1", "meanwhile"]
        await anyio.sleep(2)
        assert s.journal == ["life 1", "meanwhile", "done job"]


@virtual
async def test_a_failed_job_is_a_message_and_not_a_crash() -> None:
    """The actor decides what a failure means."""
    async with stage() as s:
        s.ref.tell(Work(1, "disk", fails=True))
        await anyio.sleep(2)
        assert s.journal == ["life 1", "failed disk"]


@pytest.mark.parametrize(
    ("order", "written"),
    [
        (Work(5, "job"), ["life 1", "cancelled job"]),
        (Work(5, "job", tells_cancelled=False), ["life 1"]),
        # Cancelled too late: the work went through, and the actor has to hear of that.
        (Work(5, "job", stubborn=True), ["life 1", "done job"]),
    ],
)
def test_a_cancelled_job_reports_what_became_of_it(order: Work, written: list[str]) -> None:
    """Cancelled, cancelled in silence, or finished all the same: at most one message, and the true one."""

    async def main() -> None:
        async with stage() as s:
            s.ref.tell(order)
            await anyio.sleep(1)
            s.ref.tell(CancelWork())
            await anyio.sleep(10)
            assert s.journal == written

    virtual(main)()


@virtual
async def test_a_crash_cancels_the_incarnations_jobs() -> None:
    """Every task has a parent: a job does not outlive the life that started it."""
    async with stage() as s:
        s.ref.tell(Work(5, "job"))
        await anyio.sleep(1)
        s.ref.tell(Panic())
        await anyio.sleep(10)
        assert s.journal == ["life 1", "life 2"]


@virtual
async def test_messages_told_between_two_lives_reach_the_next_one() -> None:
    """F65: mailbox and ref survive a crash, also for the message that was already taken out of the stream."""
    async with stage() as s:
        s.ref.tell(Note("before"))
        s.ref.tell(Panic())
        s.ref.tell(Note("after"))
        assert await s.ref.ask(Read()) == ("life 1", "life 2", "before", "after")


@virtual
async def test_mailbox_depth_counts_what_waits() -> None:
    """The queue length that the gauge shows: zero when idle, every waiting message once, zero when closed."""
    box = Mailbox()
    assert box.depth == 0
    for number in range(3):
        box.post(Envelope(number))
    box.post(Envelope("urgent"), urgent=True)
    assert box.depth == 4
    assert (await box.next()).message == "urgent"
    assert [(await box.next()).message for _ in range(3)] == [0, 1, 2]
    box.close(ActorStopped("closed"))
    assert box.depth == 0


@virtual
async def test_a_closed_mailbox_refuses_what_is_left_and_what_comes() -> None:
    """Ordinary, urgent, taken-out, and late requests all get an answer; told messages just vanish."""
    box = Mailbox()
    replies: list[Reply[Any]] = [Reply() for _ in range(4)]

    async def take() -> None:
        box.post(Envelope("takes the turn"), urgent=True)
        await box.next()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.next)  # waits in the stream
        await checkpoint()
        box.post(Envelope("held", replies[0]))
        box.post(Envelope("first", None), urgent=True)
        await checkpoint()
    box.post(Envelope("ordinary", replies[1]))
    box.post(Envelope("urgent", replies[2]), urgent=True)
    box.post(Envelope("told"))
    box.close(ActorStopped("closed"))
    box.post(Envelope("late", replies[3]))
    box.post(Envelope("late and told"))
    for reply in replies:
        with pytest.raises(ActorStopped):
            await reply


@virtual
async def test_an_actor_prints_itself_and_shows_a_snapshot() -> None:
    """`snapshot()` is what the operator sees; the ref tells life, incarnation and depth in one line."""
    async with stage() as s:
        owner = s.ref.owner
        assert isinstance(owner, Scribe)
        assert owner.me is s.ref
        assert owner.snapshot() == repr(owner)
        assert repr(s.ref) == "<Ref scribe alive incarnation=1 depth=0>"
    assert repr(s.ref) == "<Ref scribe down incarnation=1 depth=0>"


def test_an_actor_that_was_not_started_has_no_ref_and_no_jobs() -> None:
    """Using the kernel before `live` is a bug that says so."""
    scribe = Scribe([])
    with pytest.raises(AssertionError, match="not started"):
        _ = scribe.me
    with pytest.raises(AssertionError, match="not started"):
        scribe.receive(Work(1, "x"))


@virtual
async def test_an_actor_without_first_jobs_starts_too() -> None:
    """`started` is optional."""

    class Mute(Actor[Any]):
        def receive(self, message: Any) -> object:
            return "heard"

    ref: Ref[Any] = Ref("mute")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Mute().live, ref)
        assert await ref.ask(Hold()) == "heard"
        tasks.cancel_scope.cancel()
    ref.mailbox.close(ActorStopped("the end"))


@virtual
async def test_an_incarnation_that_is_merely_told_to_stop_ends_after_what_it_has() -> None:
    """The stop needs nobody who waits for it."""
    journal: list[str] = []
    ref: Ref[Any] = Ref("scribe")
    ref.tell(Note("before"))
    ref.tell(STOP)
    ref.tell(Note("after"))
    await Scribe(journal).live(ref)
    assert (journal, ref.mailbox.depth, ref.mailbox.taken) == (["life 1", "before"], 1, 2)
    ref.mailbox.close(ActorStopped("the end"))
