"""How models get onto a tier: wishes in order, room made for them, one load each, and what its end means.

Belongs to `TierCache`, which decides who may ask at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from actors import events as facts
from actors import messages as m
from actors.errors import (
    Broken,
    DeadlineExceeded,
    ForeloadError,
    LoadFailed,
    NotReady,
    OutOfMemory,
    StillLoading,
    WorkerDied,
)
from actors.residency.model import Trigger
from actors.residency.plan import Asking, Join, Load, Never, Ready, Wait, plan
from actors.residency.states import State
from actors.supervisor import one_line

if TYPE_CHECKING:
    from actors.alarm import Alarm
    from actors.below import Below
    from actors.books import Books
    from actors.departures import Departures
    from actors.ports import LoadReport, Residence
    from actors.residency.ledger import Resident
    from actors.residency.model import Model, ModelKey, Ticket, Tier
    from actors.residency.wishes import Waiter, Wish
    from actors.spawning import Spawn

EVICTS = frozenset({Trigger.DEMAND, Trigger.ADMIN, Trigger.PREFETCH})
"""Warm loads and recoveries only take room that is free."""


class Arrivals:
    """Serves the wishes of one tier."""

    def __init__(
        self,
        books: Books,
        departures: Departures,
        *,
        residence: Residence,
        below: Below,
        alarm: Alarm,
        spawn: Spawn[m.Command],
    ) -> None:
        self._books = books
        self._departures = departures
        self._residence = residence
        self._below = below
        self._alarm = alarm
        self._spawn = spawn

    # -- wishing -------------------------------------------------------------------------------------

    def wish(self, model: Model, trigger: Trigger, *, now: float, priority: int = 0, request: str = "") -> Wish:
        """The wish for a model, new or joined; a joined one takes over a higher urgency."""
        books = self._books
        wish = books.wishes.of(model.key)
        if wish is not None and wish.model.fingerprint != model.fingerprint:
            # The weights changed while the old ones were wanted: nobody new may join the old load.
            self.refuse_all(wish, NotReady("replaced by newer weights", model=model.name, retry_after=1.0), now)
            self.abandon(wish, now)
            wish = None
        if wish is None:
            return books.wishes.make(books.name(""), model, trigger, now=now, priority=priority, request=request)
        was = books.wishes.raise_to(wish, trigger, priority=priority, request=request)
        if was is not None:
            books.emit(facts.LoadUpgraded(now, books.where, books.tier, wish.key, was, request))
            if wish.loading:
                self._below.hurry(wish)
        return wish

    def drop_if_unwanted(self, wish: Wish, now: float) -> None:
        """After somebody left: give the load up if nobody else is there."""
        if wish.wanted or wish.given_up:
            return
        if wish.loading and self._books.settings.finish_orphans:
            wish.kept = True
            return
        self.abandon(wish, now)

    def abandon(self, wish: Wish, now: float) -> None:
        """Nobody wants it: forget the wish, or undo its load."""
        books = self._books
        if wish.anticipated:
            books.emit(facts.PrefetchSettled(now, books.where, wish.key, "cancelled"))
        self._spare(wish, now)
        if not wish.loading:
            books.wishes.end(wish)
            return
        books.wishes.give_up(wish)
        if wish.row is not None and books.ledger.get(wish.key) is wish.row:
            books.ledger.abort(wish.key, now=now)
        assert wish.job is not None
        wish.job.cancel()

    def _spare(self, wish: Wish, now: float) -> None:
        """Residents that were only draining for this wish stay, and expire like the others."""
        for row in self._departures.spare(wish, now):
            self._alarm.at(self._departures.expire(row, now))

    def refuse_all(self, wish: Wish, error: ForeloadError, now: float) -> None:
        """Tell everyone who wants it, each with an error of their own."""
        for waiter in tuple(wish.waiters.values()):
            self.refuse(wish, waiter, error, now)
        for watcher in wish.watchers:
            watcher.reply.refuse(error.again())
        wish.watchers.clear()

    def refuse(self, wish: Wish, waiter: Waiter, error: ForeloadError, now: float) -> None:
        """Tell one waiter."""
        self._books.wishes.leave(waiter.ticket)
        waiter.reply.refuse(error.again())
        self.tell_left(wish, waiter, error.code, now)

    def tell_left(self, wish: Wish, waiter: Waiter, reason: str, now: float) -> None:
        """State that a waiter is gone without a lease."""
        waited = now - waiter.since
        self._books.emit(
            facts.WaiterLeft(now, self._books.where, wish.key, waiter.ticket, waiter.request, reason, waited)
        )

    def overdue(self, waiter: Waiter, now: float) -> None:
        """A waiter's deadline, or the server's patience with it, has passed."""
        books = self._books
        wish = books.wishes.waited_by(waiter.ticket)
        if wish is None:
            return
        if waiter.deadline is not None and now >= waiter.deadline:
            doing = "loading" if wish.loading else f"waiting for room ({wish.blocked or 'queued'})"
            error: ForeloadError = DeadlineExceeded(
                f"the request's own deadline passed while {wish.key} was {doing}", model=wish.model.name
            )
        elif wish.loading:
            wish.kept = True
            error = StillLoading(
                f"{wish.key} is still loading", model=wish.model.name, retry_after=max(wish.model.load_seconds, 1.0)
            )
        else:
            error = books.no_room(wish, max(wish.model.load_seconds, 1.0))
        self.refuse(wish, waiter, error, now)
        self.drop_if_unwanted(wish, now)

    def expire_watchers(self, wish: Wish, now: float) -> None:
        """Those who wanted it resident by now, and did not get it."""
        late = [watcher for watcher in wish.watchers if watcher.expires is not None and watcher.expires <= now]
        for watcher in late:
            wish.watchers.remove(watcher)
            watcher.reply.refuse(DeadlineExceeded(f"no room for {wish.key} in time", model=wish.model.name))
        if late and not wish.waiters and not wish.watchers and not wish.loading and not wish.kept:
            self.abandon(wish, now)

    # -- making room and loading ---------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Start what can start and make room for what cannot, in order."""
        books = self._books
        if not books.wishes.queueing:
            return  # after most messages nobody waits for room
        claimed = places = 0
        full: set[bool] = set()
        lost = {wish.key for wish in books.wishes.begun() if wish.lost}
        for wish in books.wishes.queued(now, self._sizes()):
            if wish.key in lost:
                continue  # a job of the life before may still touch this model
            far = books.far(wish.model)
            if far in full:
                continue
            if books.occupied(far=far):
                if wish.urgent:
                    self._make_way(now, far=far)
                full.add(far)
                continue
            impatient = wish.urgent and now - wish.since >= books.settings.fairness
            asking = Asking(
                wish.key,
                books.need(wish.model),
                claimed,
                places,
                may_evict=wish.trigger in EVICTS,
                only=None if wish.urgent else wish.victims,
                urgent=wish.urgent,
                impatient=impatient,
                victims=books.settings.victims,
            )
            waits = self._advance(wish, asking, now)
            if waits and wish.blocked != "pinned" and (impatient or wish.blocked == "room"):
                # What leaves for this wish, or will, is not for those behind it.
                claimed += asking.need
                places += 1

    def _sizes(self) -> dict[ModelKey, int] | None:
        books = self._books
        if not books.settings.shortest_first:
            return None
        return {wish.key: books.need(wish.model) for wish in books.wishes.all()}

    def _advance(self, wish: Wish, asking: Asking, now: float) -> bool:
        """Do what the plan says; True if the wish still waits."""
        books = self._books
        verdict = plan(books.ledger, asking, score=books.score, now=now, outlook=books.outlook)
        match verdict:
            case Ready():
                return self._found(wish, now)
            case Join():
                return True
            case Load(evict):
                for key in evict:
                    victim = books.ledger.get(key)
                    assert victim is not None
                    self._departures.retire(victim, "room", now, wish)
                wish.blocked = "room"
                if evict or not books.affords(asking.need):
                    return True
                self._start(wish, asking.need, now)
                return False
            case Wait(reason, until):
                return self._blocked(wish, reason, until, now)
            case Never():
                self.refuse_all(wish, books.never(wish.model), now)
                self.abandon(wish, now)
                return False
            case _:
                assert_never(verdict)

    def _found(self, wish: Wish, now: float) -> bool:
        """It is here already, if with these weights; older ones have to leave first."""
        row = self._books.ledger.get(wish.key)
        assert row is not None
        if row.model.fingerprint != wish.model.fingerprint:
            self._departures.retire(row, "replaced", now)
            return True
        self._fulfil(wish, row, self._books.tier, now)
        return False

    def _blocked(self, wish: Wish, reason: str, until: float | None, now: float) -> bool:
        wish.blocked = reason
        if wish.urgent:
            impatient_at = wish.since + self._books.settings.fairness
            self._alarm.at(impatient_at if now < impatient_at else None)
            self._alarm.at(until)
            self._make_way(now)
            return True
        if wish.trigger is Trigger.PREFETCH or reason == "unloading":
            self._alarm.at(until)
            return True
        # Warm loads and recoveries take free room or none.
        self.refuse_all(wish, self._books.no_room(wish, 5.0), now)
        self.abandon(wish, now)
        return False

    def _make_way(self, now: float, *, far: bool | None = None) -> None:
        """Someone waits: a load that was only foresight is undone, at its next chunk, and asked for again later.

        `far` restricts it to one channel, where that is what is short.
        """
        for wish in reversed(self._books.wishes.begun()):
            if far is not None and wish.far is not far:
                continue
            if wish.trigger is Trigger.PREFETCH and not wish.given_up and not wish.lost:
                self.refuse_all(wish, NotReady(f"{wish.key} made way for a request", retry_after=1.0), now)
                self.abandon(wish, now)
                return

    def _start(self, wish: Wish, need: int, now: float) -> None:
        books, load = self._books, wish.load
        row = books.ledger.reserve(wish.model, need, now=now, trigger=wish.trigger)
        books.quarantine.trying(wish.model.artefact)

        async def bring() -> m.Command:
            return m.Loaded(load, *await self._below.bring(wish, self._residence))

        job = self._spawn(bring, failed=lambda exc: m.LoadBroke(load, exc), cancelled=m.LoadStopped(load))
        books.wishes.begin(wish, row, job, now=now, far=books.far(wish.model))
        books.emit(
            facts.LoadStarted(
                now, load, books.where, books.tier, wish.key, row.model.fingerprint, need, wish.trigger, wish.request
            )
        )

    # -- the end of a load ---------------------------------------------------------------------------

    def loaded(self, load: str, report: LoadReport, below: Ticket | None) -> None:
        """It is there."""
        books = self._books
        wish = books.wishes.under(load)
        if wish is None:
            self._below.drop(below)  # a load of a former incarnation: nobody else knows this ticket
            return
        now = books.now()
        if wish.lost:
            self._after_loss(wish, report, below)
            return
        self._below.keep(wish.key, below)
        books.measured[wish.model.fingerprint] = report.resident
        if wish.given_up:
            books.wishes.end(wish)
            self._departures.take_away(wish, now)
            return
        row = books.ledger.commit(wish.key, report.resident, now=now)
        row.trigger = Trigger.PREFETCH if wish.anticipated and not wish.waiters else wish.trigger
        books.quarantine.clear(wish.model.artefact)
        books.emit(
            facts.LoadFinished(
                now,
                load,
                books.where,
                books.tier,
                wish.key,
                wish.trigger,
                report.source,
                now - wish.started,
                report.resident,
                report.steps,
            )
        )
        self._fulfil(wish, row, report.source, now)
        if books.ledger.free < 0:
            self._departures.shrink(-books.ledger.free, "room", now)
        self._alarm.at(self._departures.expire(row, now))

    def _fulfil(self, wish: Wish, row: Resident, source: Tier, now: float) -> None:
        """Lease to every waiter inside this message: nothing can evict the newcomer before its first use."""
        books = self._books
        if wish.anticipated and wish.waiters:
            books.emit(facts.PrefetchSettled(now, books.where, wish.key, "late"))
        books.wishes.end(wish)
        result = "miss"
        for waiter in wish.waiters.values():
            if waiter.reply.abandoned:
                self.tell_left(wish, waiter, "cancelled", now)
                continue
            books.ledger.lease(row, waiter.ticket, now=now)
            waited = now - waiter.since
            waiter.reply.settle(m.Grant(result, source, waited, wish.load))
            books.emit(
                facts.LeaseGranted(
                    now, books.where, row.key, waiter.ticket, waiter.request, result, source, waited, wish.load
                )
            )
            result = "coalesced"
        for watcher in wish.watchers:
            row.pinned = row.pinned if watcher.pin is None else watcher.pin
            if watcher.hold_until is not None:
                row.hold(watcher.hold_until, firm=watcher.firm, now=now)
            watcher.reply.settle(None)

    def broke(self, load: str, exc: Exception) -> None:
        """It failed, and was undone."""
        books = self._books
        wish = books.wishes.under(load)
        if wish is None:
            return
        if wish.lost or wish.given_up:
            self.stopped(load)
            return
        now = books.now()
        error = exc if isinstance(exc, ForeloadError) else _unforeseen(wish, exc)
        error.model = error.model or wish.model.name
        self._undo(wish, now)
        if isinstance(error, OutOfMemory) and not wish.retried and self._try_again(wish, error, now):
            return
        if isinstance(error, Broken):
            error.retry_after = books.quarantine.failed(
                wish.model.artefact, code=error.code, cause=error.message, now=now
            )
        else:
            books.quarantine.gave_up(wish.model.artefact)
        self._tell_failed(wish, error, now)
        self.refuse_all(wish, error, now)
        self._spare(wish, now)
        books.wishes.end(wish)

    def stopped(self, load: str) -> None:
        """It was given up, and is undone."""
        books = self._books
        wish = books.wishes.under(load)
        if wish is None:
            return
        if wish.lost:
            self._after_loss(wish, None, None)
            return
        now = books.now()
        self._undo(wish, now)
        books.quarantine.gave_up(wish.model.artefact)
        books.wishes.end(wish)
        self._tell_cancelled(wish, now)

    def _undo(self, wish: Wish, now: float) -> None:
        """The load is over and holds nothing: give its bytes back."""
        ledger = self._books.ledger
        if wish.row is not None and ledger.get(wish.key) is wish.row:
            if wish.row.state is State.LOADING:
                ledger.abort(wish.key, now=now)
            ledger.forget(wish.key)

    def _try_again(self, wish: Wish, error: OutOfMemory, now: float) -> bool:
        """Out of memory although the books had room: evict one more resident and try once again."""
        books = self._books
        victim = next(iter(books.disposable(now)), None)
        if victim is None:
            return False
        books.quarantine.gave_up(wish.model.artefact)
        self._tell_failed(wish, error, now)
        wish.retried = True
        books.wishes.requeue(wish, books.name(""))
        self._departures.retire(victim, "out_of_memory", now, wish)
        return True

    def _tell_failed(self, wish: Wish, error: ForeloadError, now: float) -> None:
        books = self._books
        books.emit(
            facts.LoadFailed(
                now,
                wish.load,
                books.where,
                books.tier,
                wish.key,
                wish.trigger,
                error.code,
                one_line(error.__cause__) if error.__cause__ is not None else error.message,
                now - wish.started,
                error.retry_after or 0.0,
            )
        )

    def _tell_cancelled(self, wish: Wish, now: float) -> None:
        books = self._books
        took = now - wish.started
        books.emit(facts.LoadCancelled(now, wish.load, books.where, books.tier, wish.key, wish.trigger, took))

    # -- the end of the place ------------------------------------------------------------------------

    def lose(self, cause: str, now: float) -> None:
        """The place ended under every load: their bytes are back, and who waited for them hears why."""
        books = self._books
        for wish in books.wishes.begun():
            if wish.lost:
                continue
            wish.lost = True
            self._undo(wish, now)
            if wish.given_up:
                books.quarantine.gave_up(wish.model.artefact)
                self._tell_cancelled(wish, now)
                continue
            died = WorkerDied(f"the worker of {books.where} ended: {cause}", model=wish.model.name)
            died.retry_after = books.quarantine.failed(wish.model.artefact, code=died.code, cause=died.message, now=now)
            self._tell_failed(wish, died, now)
            self.refuse_all(wish, died, now)
            books.wishes.give_up(wish)
            assert wish.job is not None
            wish.job.cancel()

    def _after_loss(self, wish: Wish, report: LoadReport | None, below: Ticket | None) -> None:
        """The job of a load that was lost with its place has ended."""
        books = self._books
        books.wishes.end(wish)
        if report is None or books.ledger.get(wish.key) is not None:
            self._below.drop(below)
            return
        # It ran on into the next life of the place, so there it is.
        now = books.now()
        row = books.ledger.adopt(wish.model, report.resident, now=now, idle=True)
        books.emit(facts.Adopted(now, books.where, books.tier, row.key, row.size, 0))
        self._below.keep(row.key, below)
        self._alarm.at(self._departures.expire(row, now))

    def __repr__(self) -> str:
        return f"<Arrivals {self._books.wishes!r}>"


def _unforeseen(wish: Wish, exc: Exception) -> LoadFailed:
    """Callers hear the kind of a foreign exception only: its text may name files. The event has all of it."""
    error = LoadFailed(f"{wish.key} could not be loaded ({type(exc).__name__})")
    error.__cause__ = exc
    return error
