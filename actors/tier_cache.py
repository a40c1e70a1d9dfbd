"""One tier's residency: the actor that owns its books. Device and host caches are kinds of it.

Messages come in, decisions are taken in plain functions (`arrivals.py`, `departures.py`), effects are jobs, facts are
emitted. The hit path is two synchronous methods, `lease_now` and `release_now`, called between messages on one loop.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, assert_never

import anyio

from actors import events as facts
from actors import messages as m
from actors.actor import Actor, Reply
from actors.alarm import Alarm
from actors.arrivals import Arrivals
from actors.below import Below, Bottom
from actors.books import Books
from actors.departures import Departures
from actors.errors import Busy, Conflict, Draining, NeverFits, NotReady, Quarantined
from actors.residency.model import Model, ModelKey, Ticket, Tier, Trigger
from actors.residency.pressure import Watermarks
from actors.residency.states import State
from actors.residency.wishes import Waiter, Watcher
from actors.views import TierSnapshot, view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.clock import Clock
    from actors.ports import Emit, Held, MemorySample, Residence
    from actors.residency.ledger import Ledger, Resident
    from actors.residency.policies import Score
    from actors.residency.wishes import Wishes
    from actors.settings import Settings

STOCK_RETRY = 1.0
"""Seconds until a place that could not tell what it holds is asked again."""

ADOPTION_POLL = 0.5
"""Seconds between looks at adopted residents that are not yet known to be idle."""


class TierCache(Actor[m.Command]):
    """See the module. `where` names the place in events (`cpu:0`, `host`), `residence` is the port to it."""

    def __init__(
        self,
        where: str,
        tier: Tier,
        settings: Settings,
        *,
        residence: Residence,
        clock: Clock,
        emit: Emit,
        score: Score | None = None,
        below: Below | None = None,
        far: Callable[[Model], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        numbers = itertools.count(1)
        self.where = where
        self.tier = tier
        self._residence = residence
        self._emit = emit
        self._now = clock.now
        self._below = below or Bottom()
        self._books = Books(
            where,
            tier,
            settings,
            clock=clock,
            emit=emit,
            score=score,
            name=lambda kind: f"{where}/{self.me.incarnation}.{kind}{next(numbers)}",
            far=far,
        )
        self.ledger: Ledger = self._books.ledger
        self.wishes: Wishes = self._books.wishes
        self._alarm = Alarm(clock, self.spawn)
        self._departures = Departures(self._books, residence, self._below, self.spawn)
        self._arrivals = Arrivals(
            self._books,
            self._departures,
            residence=residence,
            below=self._below,
            alarm=self._alarm,
            spawn=self.spawn,
        )
        self._watermarks = Watermarks(settings.high, settings.low)
        self._recover: list[Model] = []
        self._up = False
        self._draining = False
        self._drained: list[Reply[int]] = []

    # -- the hit path: synchronous, between two messages -----------------------------------------------

    def lease_now(self, model: Model, ticket: Ticket, request: str) -> str | None:
        """Lease a resident at once; the result word, or None when the mailbox has to decide."""
        row = self.ledger.get(model.key)
        if (
            row is None
            or row.state is not State.RESIDENT
            or row.model.fingerprint != model.fingerprint
            or self._draining
        ):
            return None
        return self._grant(row, ticket, request, self._now())

    def release_now(self, ticket: Ticket) -> bool:
        """Give a lease back; False if this ticket holds nothing here."""
        now = self._now()
        released = self.ledger.release(ticket, now=now)
        if released is None:
            return False
        row, held = released
        self._emit(facts.LeaseReleased(now, self.where, row.key, ticket, held))
        if not row.leases and (row.state is State.DRAINING or self.wishes.open or self._drained):
            self.me.tell(m.Woke())
        return True

    def _grant(self, row: Resident, ticket: Ticket, request: str, now: float) -> str:
        """Lease a resident that was found here."""
        result = "hit"
        if row.uses == 0 and row.trigger is Trigger.PREFETCH:
            result = "prefetch_hit"
            self._emit(facts.PrefetchSettled(now, self.where, row.key, "used", now - row.loaded_at))
        self.ledger.lease(row, ticket, now=now)
        self._emit(facts.LeaseGranted(now, self.where, row.key, ticket, request, result, self.tier, 0.0))
        return result

    # -- advice --------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """The place that holds the models answers."""
        return self._up

    @property
    def parallel(self) -> int:
        """Loads that may be under way at once."""
        return self._books.settings.parallel

    def holds(self, key: ModelKey) -> bool:
        """Whether this tier has the model or is getting it."""
        row = self.ledger.get(key)
        return (row is not None and row.state is not State.UNLOADING) or self.wishes.of(key) is not None

    def state_of(self, key: ModelKey) -> State:
        """What the model's bytes are doing here."""
        row = self.ledger.get(key)
        return row.state if row is not None else State.ABSENT

    def trouble(self, model: Model) -> tuple[str, str] | None:
        """Code and cause of why a load of this model would be refused now; None if it would be tried."""
        verdict = self._books.quarantine.verdict(model.artefact, self._now())
        if verdict is not None:
            return verdict.code, verdict.cause
        if not self._books.fits(model):
            return NeverFits.code, self._books.never(model).message
        return None

    # -- messages ------------------------------------------------------------------------------------

    def started(self) -> None:
        """Ask the tier what it really holds before deciding anything."""
        self._take_stock(0)

    def receive(self, message: m.Command) -> object:
        """Handle one command, then start whatever it made possible."""
        result = self._handle_one(message)
        now = self._now()
        self._departures.go_on(now)
        if self._up:
            self._arrivals.pump(now)
        self._report_drained()
        self._alarm.at(self.wishes.next_deadline)
        return result

    def _handle_one(self, message: m.Command) -> object:  # noqa: C901, PLR0912 - one closed union, one match
        match message:
            case m.Acquire():
                return self._acquire(message)
            case m.Release(ticket):
                self._release(ticket)
            case m.Ensure():
                self._ensure(message)
            case m.Outlooked(outlook):
                self._books.outlook = outlook
            case m.Upgrade(key, trigger, request):
                if (wish := self.wishes.of(key)) is not None:
                    self._arrivals.wish(wish.model, trigger, now=self._now(), request=request)
            case m.Unload():
                self._unload(message)
            case m.Pin(key, on):
                self._pin(key, on=on)
            case m.Sampled(sample):
                self._sampled(sample)
            case m.Lost(cause):
                self._lost(cause)
            case m.Restored():
                self._take_stock(0)
            case m.Rehold():
                self._below.rehold(self.ledger.rows())
            case m.Drain():
                self._drain()
            case m.Inventoried(held):
                self._inventoried(held)
            case m.InventoryFailed():
                self._up = False
                self._take_stock(STOCK_RETRY)
            case m.Loaded(load, report, below):
                self._arrivals.loaded(load, report, below)
            case m.LoadBroke(load, error):
                self._arrivals.broke(load, error)
            case m.LoadStopped(load):
                self._arrivals.stopped(load)
            case m.Gone(eviction, report):
                self._departures.gone(eviction, report.returned, report.leaked)
            case m.EvictBroke(eviction, error):
                self._departures.broke(eviction, error)
            case m.Woke(timer):
                self._woke(timer)
            case _:
                assert_never(message)
        return None

    # -- asking for models ---------------------------------------------------------------------------

    def _acquire(self, ask: m.Acquire) -> m.Grant | None:
        now = self._now()
        model = ask.model
        if self.asker_left:
            return None  # its release came first and found nothing: a lease would have no end
        if self._draining:
            raise self._stopping(model)
        if ask.trigger is Trigger.ADMIN:
            self._books.quarantine.clear(model.artefact)
        row = self._resident(model)
        if row is not None:
            return m.Grant(self._grant(row, ask.ticket, ask.request, now), self.tier)
        self._admit(model, now)
        self._make_way(model, now)
        wish = self._arrivals.wish(model, ask.trigger, priority=ask.priority, request=ask.request, now=now)
        settings = self._books.settings
        if self.wishes.waiting >= settings.waiters or len(wish.waiters) >= settings.waiters_per_model:
            self._arrivals.drop_if_unwanted(wish, now)
            raise Busy(
                f"too many requests wait for {model.key}",
                model=model.name,
                detail={"waiting": len(wish.waiters), "limit": settings.waiters_per_model},
                retry_after=max(model.load_seconds, 1.0),
            )
        self.wishes.join(wish, Waiter(ask.ticket, ask.request, self.defer(), now, ask.deadline, ask.patience))
        self._emit(
            facts.WaiterJoined(now, self.where, model.key, ask.ticket, ask.request, len(wish.waiters), wish.load)
        )
        return None

    def _ensure(self, ask: m.Ensure) -> None:
        now = self._now()
        model = ask.model
        if ask.trigger is Trigger.ADMIN:
            self._books.quarantine.clear(model.artefact)
            draining = self.ledger.get(model.key)
            if (
                draining is not None
                and draining.state is State.DRAINING
                and draining.model.fingerprint == model.fingerprint
            ):
                # The last command decides: a load takes the unload before it back.
                self._departures.resume(draining, now)
        row = self._resident(model)
        if row is not None:
            row.pinned = row.pinned if ask.pin is None else ask.pin
            if ask.hold_until is not None:
                row.hold(ask.hold_until, firm=ask.firm, now=now)
            self._alarm.at(self._departures.expire(row, now))
            return
        self._admit(model, now)
        self._make_way(model, now)
        before = self.wishes.of(model.key)
        wish = self._arrivals.wish(model, ask.trigger, priority=ask.priority, request=ask.request, now=now)
        if wish is not before:
            wish.anticipated = ask.trigger is Trigger.PREFETCH
            wish.victims = ask.victims
        wish.watchers.append(Watcher(self.defer(), ask.trigger, ask.expires, ask.pin, ask.hold_until, firm=ask.firm))
        self._alarm.at(ask.expires)

    def _resident(self, model: Model) -> Resident | None:
        """The model, if it is resident with these very weights."""
        row = self.ledger.get(model.key)
        fits = row is not None and row.state is State.RESIDENT and row.model.fingerprint == model.fingerprint
        return row if fits else None

    def _make_way(self, model: Model, now: float) -> None:
        """Older weights under the key of an admitted model have to leave."""
        row = self.ledger.get(model.key)
        if row is not None and row.state is State.RESIDENT:
            self._departures.retire(row, "replaced", now)

    def _admit(self, model: Model, now: float) -> None:
        """Refuse what cannot work, before anything else is disturbed."""
        if self._draining:
            raise self._stopping(model)
        if not self._books.fits(model):
            raise self._books.never(model)
        verdict = self._books.quarantine.verdict(model.artefact, now)
        if verdict is not None and self.wishes.of(model.key) is None:
            raise Quarantined(
                f"{model.key} failed to load and is left alone for a while: {verdict.cause}",
                model=model.name,
                detail={"cause": verdict.code, "failures": verdict.failures},
                retry_after=max(verdict.remaining, 0.001),
            )

    @staticmethod
    def _stopping(model: Model) -> Draining:
        return Draining("the server is stopping", model=model.name, retry_after=5.0)

    def _release(self, ticket: Ticket) -> None:
        if self.release_now(ticket):
            return
        left = self.wishes.leave(ticket)
        if left is None:
            return
        wish, waiter = left
        waiter.reply.drop()
        now = self._now()
        self._arrivals.tell_left(wish, waiter, "cancelled", now)
        self._arrivals.drop_if_unwanted(wish, now)

    def _unload(self, ask: m.Unload) -> None:
        now = self._now()
        row = self.ledger.get(ask.key)
        wish = self.wishes.of(ask.key)
        if row is not None and row.leases and not ask.drain:
            raise Conflict(f"{ask.key} is in use and draining was declined", detail={"leases": len(row.leases)})
        if wish is not None and not wish.waiters:
            # A load that only an operator, the warm list or the forecaster wanted: the last command decides.
            self._arrivals.refuse_all(wish, NotReady(f"{ask.key} was unloaded meanwhile", retry_after=1.0), now)
            self._arrivals.abandon(wish, now)
        if row is not None and row.state is State.RESIDENT:
            self._departures.retire(row, ask.reason, now)

    def _pin(self, key: ModelKey, *, on: bool) -> None:
        row = self.ledger.get(key)
        if row is None or row.state is not State.RESIDENT:
            raise NotReady(f"{key} is not resident on {self.where}", retry_after=1.0)
        row.pinned = on
        self._alarm.at(self._departures.expire(row, self._now()))

    # -- time and memory -----------------------------------------------------------------------------

    def _woke(self, timer: int) -> None:
        now = self._now()
        self._alarm.rang(timer)
        for waiter in tuple(self.wishes.overdue(now)):
            self._arrivals.overdue(waiter, now)
        for wish in self.wishes.all():
            self._arrivals.expire_watchers(wish, now)
        for row in tuple(self.ledger.rows()):
            self._alarm.at(self._departures.expire(row, now))

    def _sampled(self, sample: MemorySample) -> None:
        now = self._now()
        if self._watermarks.feed(sample):
            high = self._watermarks.under_pressure
            self._emit(facts.PressureChanged(now, self.where, self.tier, high, sample.used_ratio))
        excess = self._watermarks.excess(sample)
        if excess:
            self._departures.shrink(excess, "pressure", now)

    # -- the life of the place -----------------------------------------------------------------------

    def _take_stock(self, delay: float) -> None:
        async def look() -> m.Command:
            await anyio.sleep(delay)
            return m.Inventoried(await self._residence.inventory())

        self.spawn(look, failed=lambda exc: m.InventoryFailed(str(exc)))

    def _inventoried(self, held: tuple[Held, ...]) -> None:
        now = self._now()
        self._up = True
        for each in held:
            row = self.ledger.get(each.model.key)
            if row is None:
                row = self.ledger.adopt(each.model, each.resident, now=now, idle=each.in_flight == 0)
                self._emit(facts.Adopted(now, self.where, self.tier, row.key, row.size, each.in_flight))
                self._below.adopted(row)
                self._alarm.at(self._departures.expire(row, now))
            elif row.adopted and each.in_flight == 0:
                row.adopted = False
        if any(row.adopted for row in self.ledger.rows()):
            self._take_stock(ADOPTION_POLL)
        self._below.forget_others(row.key for row in self.ledger.rows())
        recover, self._recover = self._recover, []
        for model in recover:
            if self.ledger.get(model.key) is None and self.wishes.of(model.key) is None:
                self._arrivals.wish(model, Trigger.RECOVERY, now=now).kept = True

    def _lost(self, cause: str) -> None:
        """Everything here is gone: its bytes are back, who used it hears why, and it will be brought back."""
        now = self._now()
        self._up = False
        self._arrivals.lose(cause, now)
        rows = sorted(self.ledger.clear(), key=lambda row: row.last_used, reverse=True)
        here = [row.model for row in rows if row.state in {State.RESIDENT, State.DRAINING}]
        # A place that ends again before it came back had nothing to lose, and still owes what it held before.
        self._recover = here or self._recover
        self._books.renew()
        for row in rows:
            self._departures.lose(row, now)

    def _drain(self) -> None:
        now = self._now()
        self._draining = True
        for wish in self.wishes.all():
            if not wish.waiters:
                self._arrivals.refuse_all(wish, self._stopping(wish.model), now)
                self._arrivals.abandon(wish, now)
        self._drained.append(self.defer())

    def _report_drained(self) -> None:
        if self._drained and not self.ledger.leases and not self.wishes.waiting:
            for reply in self._drained:
                reply.settle(0)
            self._drained.clear()

    # -- proof and view ------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove the books; tests call it after every message."""
        self.ledger.check()
        self.wishes.check()
        self._departures.check()
        for wish in self.wishes.all():
            assert wish.wanted or wish.loading, wish

    def snapshot(self) -> TierSnapshot:
        """A frozen view."""
        return view_of(
            self._books, up=self._up, draining=self._draining, under_pressure=self._watermarks.under_pressure
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._books!r}>"
