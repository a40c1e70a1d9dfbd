"""One tier's residency: the actor that owns its ledger and its wishes. Device and host caches are kinds of it.

Messages come in, decisions are taken here in plain functions, effects are jobs, facts are emitted. The hit path is
two synchronous methods, `lease_now` and `release_now`, called between messages on the same loop.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import anyio

from actors import events as facts
from actors import messages as m
from actors.actor import Actor, Reply
from actors.errors import (
    Broken,
    Busy,
    Conflict,
    DeadlineExceeded,
    Draining,
    ForeloadError,
    LoadFailed,
    NeverFits,
    NoEvictableSpace,
    NotReady,
    OutOfMemory,
    Quarantined,
    StillLoading,
    WorkerDied,
)
from actors.residency.ledger import Ledger, Resident
from actors.residency.model import Model, ModelKey, Ticket, Tier, Trigger
from actors.residency.plan import Asking, Join, Load, Never, Ready, Wait, ceiling, plan
from actors.residency.policies import POLICIES, Score, expires_at, order
from actors.residency.pressure import Watermarks
from actors.residency.quarantine import Quarantine
from actors.residency.states import State
from actors.residency.wishes import Waiter, Watcher, Wish, Wishes
from forecasting.outlook import UNKNOWN

if TYPE_CHECKING:
    from actors.actor import Job
    from actors.clock import Clock
    from actors.ports import Emit, Held, LoadReport, MemorySample, Residence

EVICTS = frozenset({Trigger.DEMAND, Trigger.ADMIN, Trigger.PREFETCH})
"""Warm loads and recoveries only take room that is free."""

TIMER_SLACK = 1e-5
"""Seconds by which a wake-up comes after what it is for."""

ADOPTION_POLL = 0.5
"""Seconds between looks at adopted residents that are not yet known to be idle."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of one tier. Bytes and seconds.

    `parallel` loads at once; `victims` per load; after `fairness` seconds a waiting demand may drain leased residents;
    `finish_orphans` lets a load go on that nobody waits for; `waiters` in all and per model.
    """

    capacity: int
    headroom: int = 0
    count: int | None = None
    parallel: int = 4
    victims: int = 16
    fairness: float = 1.0
    finish_orphans: bool = False
    backoff_first: float = 1.0
    backoff_limit: float = 300.0
    waiters: int = 10_000
    waiters_per_model: int = 2_000
    shortest_first: bool = False
    policy: str = "lru"
    high: float = 0.85
    low: float = 0.80


@dataclass(slots=True, eq=False)
class Leaving:
    """An eviction: decided, draining or under way."""

    id: str
    row: Resident
    reason: str
    since: float
    wish: Wish | None = None
    load: str = ""


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """A frozen, advisory view of one tier."""

    where: str
    tier: Tier
    up: bool
    draining: bool
    capacity: int
    headroom: int
    foreign: int
    leaked: int
    loading: int
    resident: int
    unloading: int
    free: int
    leases: int
    waiting: int
    under_pressure: bool
    residents: tuple[ResidentView, ...] = field(default=())
    wishes: tuple[WishView, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ResidentView:
    """One row of a snapshot; `age`, `idle` and `expires_in` in seconds."""

    model: str
    fingerprint: str
    state: State
    bytes: int
    leases: int
    pinned: bool
    adopted: bool
    age: float
    idle: float
    uses: int
    expires_in: float | None


@dataclass(frozen=True, slots=True)
class WishView:
    """One wish of a snapshot; `age` in seconds."""

    model: str
    trigger: Trigger
    waiters: int
    load: str
    blocked: str
    age: float


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
    ) -> None:
        super().__init__()
        self.where = where
        self.tier = tier
        self.settings = settings
        self._residence = residence
        self._clock = clock
        self._emit = emit
        self._score = score or POLICIES[settings.policy]
        self.ledger = Ledger(settings.capacity, headroom=settings.headroom, count=settings.count)
        self.wishes = Wishes(shortest_first=settings.shortest_first)
        self._quarantine = Quarantine(first=settings.backoff_first, limit=settings.backoff_limit)
        self._watermarks = Watermarks(settings.high, settings.low)
        self._leaving: dict[ModelKey, Leaving] = {}
        self._measured: dict[str, int] = {}
        self._recover: list[Model] = []
        self._leaked = 0
        self._up = False
        self._draining = False
        self._drained: list[Reply[int]] = []
        self._numbers = itertools.count(1)
        self._timer: Job | None = None
        self._timer_number = 0
        self._wakes_at = math.inf

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
        now = self._clock.now()
        return self._grant(row, ticket, request, now)

    def release_now(self, ticket: Ticket) -> bool:
        """Give a lease back; False if this ticket holds nothing here."""
        now = self._clock.now()
        released = self.ledger.release(ticket, now=now)
        if released is None:
            return False
        row, held = released
        self._emit(facts.LeaseReleased(now, self.where, row.key, ticket, held))
        if not row.leases and (row.state is State.DRAINING or self.wishes.waiting or self._drained):
            self.me.tell(m.Woke())
        return True

    def holds(self, key: ModelKey) -> bool:
        """Whether this tier has the model or is getting it; advice for placement."""
        row = self.ledger.get(key)
        return (row is not None and row.state is not State.UNLOADING) or self.wishes.of(key) is not None

    def state_of(self, key: ModelKey) -> State:
        """What the model's bytes are doing here; advice for readiness."""
        row = self.ledger.get(key)
        return row.state if row is not None else State.ABSENT

    @property
    def up(self) -> bool:
        """The place that holds the models answers."""
        return self._up

    def trouble(self, model: Model) -> tuple[str, str] | None:
        """Code and cause of why a load of this model would be refused now; None if it would be tried."""
        verdict = self._quarantine.verdict(model.fingerprint, self._clock.now())
        if verdict is not None:
            return verdict.code, verdict.cause
        if self._need(model) > ceiling(self.ledger):
            return NeverFits.code, f"needs {self._need(model)} bytes of {ceiling(self.ledger)}"
        return None

    def last_failure(self, model: Model) -> tuple[str, str] | None:
        """Code and cause of the last failed load, until a load succeeds."""
        return self._quarantine.last(model.fingerprint)

    # -- messages ------------------------------------------------------------------------------------

    def started(self) -> None:
        """Ask the tier what it really holds before deciding anything."""
        self._take_stock(0)

    def receive(self, message: m.Command) -> object:  # noqa: C901, PLR0912 - one closed union, one match
        """Handle one command."""
        match message:
            case m.Acquire():
                return self._acquire(message)
            case m.Release(ticket):
                self._release(ticket)
            case m.Ensure():
                self._ensure(message)
            case m.Upgrade(key, trigger, request):
                self._upgrade(key, trigger, request)
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
                self._rehold()
            case m.Drain():
                return self._drain()
            case m.Inventoried(held):
                self._inventoried(held)
            case m.InventoryFailed():
                self._up = False
            case m.Loaded(load, report, below):
                self._loaded(load, report, below)
            case m.LoadBroke(load, error):
                self._load_broke(load, error)
            case m.LoadStopped(load):
                self._load_stopped(load)
            case m.Gone(eviction, report):
                self._gone(eviction, report.returned, report.leaked)
            case m.EvictBroke(eviction, error):
                self._evict_broke(eviction, error)
            case m.Woke(timer):
                self._woke(timer)
            case _:
                assert_never(message)
        return None

    # -- acquiring -----------------------------------------------------------------------------------

    def _acquire(self, ask: m.Acquire) -> m.Grant | None:
        now = self._clock.now()
        if self._draining:
            raise self._stopping(ask.model)
        row = self.ledger.get(ask.model.key)
        if row is not None and row.state is State.RESIDENT:
            if row.model.fingerprint == ask.model.fingerprint:
                return m.Grant(self._grant(row, ask.ticket, ask.request, now), self.tier)
            self._retire(row, "replaced", now)
        self._admit(ask.model, now)
        wish = self._wish(ask.model, ask.trigger, priority=ask.priority, request=ask.request, now=now)
        if self.wishes.waiting >= self.settings.waiters or len(wish.waiters) >= self.settings.waiters_per_model:
            self._drop_if_unwanted(wish, now)
            raise Busy(
                f"too many requests wait for {ask.model.key}",
                model=ask.model.name,
                detail={"waiting": len(wish.waiters), "limit": self.settings.waiters_per_model},
                retry_after=max(ask.model.load_seconds, 1.0),
            )
        waiter = Waiter(ask.ticket, ask.request, self.defer(), now, ask.deadline, ask.patience)
        self.wishes.join(wish, waiter)
        self._emit(
            facts.WaiterJoined(now, self.where, ask.model.key, ask.ticket, ask.request, len(wish.waiters), wish.load)
        )
        self._pump(now)
        self._wake_at(self.wishes.next_deadline)
        return None

    def _grant(self, row: Resident, ticket: Ticket, request: str, now: float) -> str:
        """Lease a resident that was found here."""
        result = "hit"
        if row.uses == 0 and row.trigger is Trigger.PREFETCH:
            result = "prefetch_hit"
            self._emit(facts.PrefetchSettled(now, self.where, row.key, "used", now - row.loaded_at))
        self.ledger.lease(row, ticket, now=now)
        self._emit(facts.LeaseGranted(now, self.where, row.key, ticket, request, result, self.tier, 0.0))
        return result

    def _admit(self, model: Model, now: float) -> None:
        """Refuse what cannot work, before anything else is disturbed."""
        if self._draining:
            raise self._stopping(model)
        need = self._need(model)
        if need > ceiling(self.ledger) or self.ledger.count == 0:
            raise self._never(model, need)
        verdict = self._quarantine.verdict(model.fingerprint, now)
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

    def _never(self, model: Model, need: int, where: str = "", most: int | None = None) -> NeverFits:
        where = where or self.where
        most = ceiling(self.ledger) if most is None else most
        return NeverFits(
            f"{model.key} needs {need} bytes on {where}, which can hold {most}",
            model=model.name,
            detail={"bytes_needed": need, "bytes_available": most},
        )

    def _need(self, model: Model) -> int:
        """Bytes to reserve: measured once it was here, declared before."""
        return self._measured.get(model.fingerprint, model.footprint.on(self.tier))

    def _release(self, ticket: Ticket) -> None:
        now = self._clock.now()
        if self.release_now(ticket):
            self._after_release(now)
            return
        left = self.wishes.leave(ticket)
        if left is None:
            return
        wish, waiter = left
        waiter.reply.drop()
        self._emit(facts.WaiterLeft(now, self.where, wish.key, ticket, waiter.request, "cancelled", now - waiter.since))
        self._drop_if_unwanted(wish, now)
        self._pump(now)

    def _after_release(self, now: float) -> None:
        """Somebody may have waited for that lease to end."""
        for leaving in tuple(self._leaving.values()):
            if leaving.row.state is State.DRAINING and not leaving.row.leases:
                self._evict(leaving, now)
        self._pump(now)
        self._report_drained()

    # -- wishes --------------------------------------------------------------------------------------

    def _wish(self, model: Model, trigger: Trigger, *, now: float, priority: int = 0, request: str = "") -> Wish:
        wish = self.wishes.of(model.key)
        if wish is not None and wish.model.fingerprint != model.fingerprint:
            # The weights changed while the old ones were wanted: nobody new may join the old load.
            self._refuse_all(wish, NotReady("replaced by newer weights", model=model.name, retry_after=1.0), now)
            self._abandon(wish, now)
            wish = None
        if wish is None:
            return self.wishes.make(self._name_load(), model, trigger, now=now, priority=priority, request=request)
        was = self.wishes.raise_to(wish, trigger, priority=priority, request=request)
        if was is not None:
            self._emit(facts.LoadUpgraded(now, self.where, self.tier, wish.key, was, request))
            if wish.loading:
                self._hurry(wish)
        return wish

    def _hurry(self, wish: Wish) -> None:
        """A load under way became more urgent; tiers with one below pass that on."""

    def _upgrade(self, key: ModelKey, trigger: Trigger, request: str) -> None:
        wish = self.wishes.of(key)
        if wish is not None:
            now = self._clock.now()
            self._wish(wish.model, trigger, now=now, request=request)
            self._pump(now)

    def _ensure(self, ask: m.Ensure) -> None:
        now = self._clock.now()
        row = self.ledger.get(ask.model.key)
        if ask.trigger is Trigger.ADMIN:
            self._quarantine.clear(ask.model.fingerprint)
            if row is not None and row.state is State.DRAINING and row.model.fingerprint == ask.model.fingerprint:
                # The last command decides: a load takes the unload before it back.
                self._leaving.pop(row.key)
                self.ledger.resume(row.key, now=now)
        if row is not None and row.state is State.RESIDENT:
            if row.model.fingerprint == ask.model.fingerprint:
                row.pinned = row.pinned if ask.pin is None else ask.pin
                return
            self._retire(row, "replaced", now)
        self._admit(ask.model, now)
        wish = self._wish(ask.model, ask.trigger, priority=ask.priority, request=ask.request, now=now)
        wish.watchers.append(Watcher(self.defer(), ask.trigger, ask.expires, ask.pin))
        self._pump(now)
        if ask.expires is not None:
            self._wake_at(ask.expires)

    def _drop_if_unwanted(self, wish: Wish, now: float) -> None:
        if wish.wanted or wish.given_up:
            return
        if wish.loading and self.settings.finish_orphans:
            wish.kept = True
            return
        self._abandon(wish, now)

    def _abandon(self, wish: Wish, now: float) -> None:
        """Nobody wants it: forget the wish, or undo its load."""
        if wish.anticipated:
            self._emit(facts.PrefetchSettled(now, self.where, wish.key, "cancelled"))
        self._keep_spared(wish, now)
        if not wish.loading:
            self.wishes.end(wish)
            return
        self.wishes.give_up(wish)
        if wish.row is not None and self.ledger.get(wish.key) is wish.row:
            self.ledger.abort(wish.key, now=now)
        assert wish.job is not None
        wish.job.cancel()

    def _keep_spared(self, wish: Wish, now: float) -> None:
        """Residents that were only draining for this wish stay."""
        for leaving in tuple(self._leaving.values()):
            if leaving.wish is wish and leaving.row.state is State.DRAINING:
                del self._leaving[leaving.row.key]
                self.ledger.resume(leaving.row.key, now=now)

    def _refuse_all(self, wish: Wish, error: ForeloadError, now: float) -> None:
        for waiter in tuple(wish.waiters.values()):
            self._refuse(wish, waiter, error, now)
        for watcher in wish.watchers:
            watcher.reply.refuse(error.again())
        wish.watchers.clear()

    def _refuse(self, wish: Wish, waiter: Waiter, error: ForeloadError, now: float) -> None:
        self.wishes.leave(waiter.ticket)
        waiter.reply.refuse(error.again())
        self._emit(
            facts.WaiterLeft(now, self.where, wish.key, waiter.ticket, waiter.request, error.code, now - waiter.since)
        )

    # -- making room and loading ---------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Start what can start and make room for what cannot, in order."""
        if not self._up:
            return
        claimed = places = 0
        lost = {wish.key for wish in self.wishes.begun() if wish.lost}
        for wish in self.wishes.queued(now, self._sizes()):
            if wish.key in lost:
                continue  # a job of the life before may still touch this model
            if self.wishes.loading >= self.settings.parallel:
                return
            impatient = wish.urgent and now - wish.since >= self.settings.fairness
            need = self._need(wish.model)
            asking = Asking(
                wish.key,
                need,
                claimed,
                places,
                may_evict=wish.trigger in EVICTS,
                impatient=impatient,
                victims=self.settings.victims,
            )
            waits = self._advance(wish, asking, now)
            if waits and wish.blocked != "pinned" and (impatient or wish.blocked == "room"):
                # What leaves for this wish, or will, is not for those behind it.
                claimed += need
                places += 1

    def _sizes(self) -> dict[ModelKey, int] | None:
        if not self.settings.shortest_first:
            return None
        return {wish.key: self._need(wish.model) for wish in self.wishes.all()}

    def _advance(self, wish: Wish, asking: Asking, now: float) -> bool:
        """Do what the plan says; True if the wish still waits."""
        verdict = plan(self.ledger, asking, score=self._score, now=now, outlook=UNKNOWN)
        match verdict:
            case Ready():
                row = self.ledger.get(wish.key)
                assert row is not None
                self._fulfil(wish, row, self.tier, now)
                return False
            case Join():
                return True
            case Load(evict):
                for key in evict:
                    victim = self.ledger.get(key)
                    assert victim is not None
                    self._retire(victim, "room", now, wish)
                wish.blocked = "room"
                if not evict and self._affords(asking.need):
                    self._start(wish, asking.need, now)
                    return False
                return True
            case Wait(reason, until):
                return self._blocked(wish, reason, until, now)
            case Never():
                self._refuse_all(wish, self._never(wish.model, asking.need), now)
                self._abandon(wish, now)
                return False
            case _:
                assert_never(verdict)

    def _affords(self, need: int) -> bool:
        places = self.ledger.places
        return need <= self.ledger.free and (places is None or places > 0)

    def _blocked(self, wish: Wish, reason: str, until: float | None, now: float) -> bool:
        wish.blocked = reason
        if wish.urgent:
            self._wake_at(wish.since + self.settings.fairness if now < wish.since + self.settings.fairness else until)
            self._wake_at(until)
            return True
        if wish.trigger is Trigger.PREFETCH or reason == "unloading":
            return True
        # Warm loads and recoveries take free room or none.
        self._refuse_all(
            wish,
            NoEvictableSpace(
                f"no free room for {wish.key} on {self.where}",
                model=wish.model.name,
                detail={"bytes_needed": self._need(wish.model), "bytes_free": max(self.ledger.free, 0)},
                retry_after=5.0,
            ),
            now,
        )
        self._abandon(wish, now)
        return False

    def _start(self, wish: Wish, need: int, now: float) -> None:
        load = wish.load
        row = self.ledger.reserve(wish.model, need, now=now, trigger=wish.trigger)
        self._quarantine.trying(wish.model.fingerprint)
        job = self.spawn(
            lambda: self._bring(wish, load),
            failed=lambda exc: m.LoadBroke(load, exc),
            cancelled=m.LoadStopped(load),
        )
        self.wishes.begin(wish, row, job, now=now)
        self._emit(
            facts.LoadStarted(
                now, load, self.where, self.tier, wish.key, wish.model.fingerprint, need, wish.trigger, wish.request
            )
        )

    async def _bring(self, wish: Wish, load: str) -> m.Command:
        """The load itself; runs as a job."""
        return m.Loaded(load, await self._residence.load(wish.model))

    def _loaded(self, load: str, report: LoadReport, below: Ticket | None) -> None:
        now = self._clock.now()
        wish = self.wishes.under(load)
        if wish is None or wish.row is None:
            return
        if wish.lost:
            self._after_loss(wish, report, below)
            return
        self._keep_below(wish.key, below)
        self._measured[wish.model.fingerprint] = report.resident
        if wish.given_up:
            self.wishes.end(wish)
            leaving = Leaving(self._name_eviction(), wish.row, "cancelled", now, load=load)
            self._leaving[wish.key] = leaving
            self._send_away(leaving)
            return
        row = self.ledger.commit(wish.key, report.resident, now=now)
        row.trigger = Trigger.PREFETCH if wish.anticipated and not wish.waiters else wish.trigger
        self._quarantine.clear(wish.model.fingerprint)
        self._emit(
            facts.LoadFinished(
                now,
                load,
                self.where,
                self.tier,
                wish.key,
                wish.trigger,
                report.source,
                now - wish.started,
                report.resident,
                report.steps,
            )
        )
        self._fulfil(wish, row, report.source, now)
        if self.ledger.free < 0:
            self._shrink(-self.ledger.free, "room", now)
        self._watch_expiry(row)
        self._pump(now)
        self._report_drained()

    def _fulfil(self, wish: Wish, row: Resident, source: Tier, now: float) -> None:
        """Lease to every waiter inside this message: nothing can evict the newcomer before its first use."""
        if wish.anticipated and wish.waiters:
            self._emit(facts.PrefetchSettled(now, self.where, wish.key, "late"))
        waiters = list(wish.waiters.values())
        self.wishes.end(wish)
        result = "miss"
        for waiter in waiters:
            if waiter.reply.abandoned:
                continue
            self.ledger.lease(row, waiter.ticket, now=now)
            waited = now - waiter.since
            if not waiter.reply.settle(m.Grant(result, source, waited, wish.load)):
                self.ledger.release(waiter.ticket, now=now)
                continue
            self._emit(
                facts.LeaseGranted(
                    now, self.where, row.key, waiter.ticket, waiter.request, result, source, waited, wish.load
                )
            )
            result = "coalesced"
        for watcher in wish.watchers:
            row.pinned = row.pinned if watcher.pin is None else watcher.pin
            watcher.reply.settle(None)

    def _load_broke(self, load: str, exc: Exception) -> None:
        now = self._clock.now()
        wish = self.wishes.under(load)
        if wish is None:
            return
        if wish.lost:
            self._after_loss(wish, None, None)
            return
        error = exc if isinstance(exc, ForeloadError) else LoadFailed(f"{wish.key} could not be loaded: {exc}")
        error.model = error.model or wish.model.name
        self._undo(wish, now)
        if wish.given_up:
            self.wishes.end(wish)
            self._quarantine.gave_up(wish.model.fingerprint)
            self._emit(
                facts.LoadCancelled(now, load, self.where, self.tier, wish.key, wish.trigger, now - wish.started)
            )
            self._pump(now)
            self._report_drained()
            return
        retry = isinstance(error, OutOfMemory) and not wish.retried and self._make_room_after_oom(wish, now)
        pause = 0.0
        if isinstance(error, Broken) and not retry:
            pause = self._quarantine.failed(wish.model.fingerprint, code=error.code, cause=error.message, now=now)
            error.retry_after = pause
        else:
            self._quarantine.gave_up(wish.model.fingerprint)
        self._emit(
            facts.LoadFailed(
                now,
                load,
                self.where,
                self.tier,
                wish.key,
                wish.trigger,
                error.code,
                error.message,
                now - wish.started,
                pause,
            )
        )
        if retry:
            self._pump(now)
            return
        self._refuse_all(wish, error, now)
        self._keep_spared(wish, now)
        self.wishes.end(wish)
        self._pump(now)
        self._report_drained()

    def _undo(self, wish: Wish, now: float) -> None:
        """The load is over and holds nothing: give its bytes back."""
        if wish.row is not None and self.ledger.get(wish.key) is wish.row:
            if wish.row.state is State.LOADING:
                self.ledger.abort(wish.key, now=now)
            self.ledger.forget(wish.key)

    def _make_room_after_oom(self, wish: Wish, now: float) -> bool:
        """Out of memory although the books had room: evict one more resident and try once again."""
        candidates = [row for row in self.ledger.rows() if row.state is State.RESIDENT and row.idle and not row.pinned]
        if not candidates:
            return False
        victim = min(candidates, key=lambda row: order(row, self._score, now, UNKNOWN))
        wish.retried = True
        self.wishes.requeue(wish, self._name_load())
        self._retire(victim, "out_of_memory", now, wish)
        return True

    def _load_stopped(self, load: str) -> None:
        now = self._clock.now()
        wish = self.wishes.under(load)
        if wish is None:
            return
        if wish.lost:
            self._after_loss(wish, None, None)
            return
        self._undo(wish, now)
        self._quarantine.gave_up(wish.model.fingerprint)
        self.wishes.end(wish)
        self._emit(facts.LoadCancelled(now, load, self.where, self.tier, wish.key, wish.trigger, now - wish.started))
        self._pump(now)
        self._report_drained()

    # -- evicting ------------------------------------------------------------------------------------

    def _name_load(self) -> str:
        return f"{self.where}/{self.me.incarnation}.{next(self._numbers)}"

    def _name_eviction(self) -> str:
        return f"{self.where}/{self.me.incarnation}.e{next(self._numbers)}"

    def _retire(self, row: Resident, reason: str, now: float, wish: Wish | None = None) -> None:
        """Make a resident leave: at once if idle, after its leases otherwise."""
        if row.key in self._leaving:
            return
        load = wish.load if wish is not None else ""
        leaving = Leaving(self._name_eviction(), row, reason, now, wish, load)
        self._leaving[row.key] = leaving
        if row.leases or row.adopted:
            self.ledger.drain(row.key, now=now)
        else:
            self._evict(leaving, now)

    def _evict(self, leaving: Leaving, now: float) -> None:
        row = leaving.row
        self.ledger.retire(row.key, now=now)
        if row.uses == 0 and row.trigger is Trigger.PREFETCH:
            self._emit(facts.PrefetchSettled(now, self.where, row.key, "wasted", now - row.loaded_at))
        wish = leaving.wish
        self._emit(
            facts.EvictionStarted(
                now,
                leaving.id,
                self.where,
                self.tier,
                row.key,
                leaving.reason,
                leaving.load,
                wish.key if wish is not None else "",
            )
        )
        self._send_away(leaving)

    def _send_away(self, leaving: Leaving) -> None:
        eviction = leaving.id
        key = leaving.row.key
        leaving.since = self._clock.now()
        self.spawn(lambda: self._take_away(eviction, key), failed=lambda exc: m.EvictBroke(eviction, exc))

    async def _take_away(self, eviction: str, key: ModelKey) -> m.Command:
        """The eviction itself; runs as a job."""
        return m.Gone(eviction, await self._residence.evict(key))

    def _gone(self, eviction: str, returned: int, leaked: int) -> None:
        leaving = next((each for each in self._leaving.values() if each.id == eviction), None)
        if leaving is None:
            return
        now = self._clock.now()
        row = leaving.row
        del self._leaving[row.key]
        self.ledger.forget(row.key)
        self._leaked += leaked
        self.ledger.foreign += leaked
        self._let_go_below(self._below_of(row.key))
        self._tell_gone(leaving, returned, leaked, now)
        self._pump(now)
        self._report_drained()

    def _tell_gone(self, leaving: Leaving, returned: int, leaked: int, now: float) -> None:
        row = leaving.row
        if leaving.reason == "cancelled":
            # It became resident only because the cancellation came too late: for everybody else it never was.
            self._emit(
                facts.LoadCancelled(now, leaving.load, self.where, self.tier, row.key, row.trigger, now - leaving.since)
            )
            return
        self._emit(
            facts.Evicted(
                now,
                leaving.id,
                self.where,
                self.tier,
                row.key,
                leaving.reason,
                returned,
                leaked,
                now - row.loaded_at,
                leaving.since - row.last_used,
                now - leaving.since,
                row.uses,
            )
        )

    def _evict_broke(self, eviction: str, error: Exception) -> None:
        leaving = next((each for each in self._leaving.values() if each.id == eviction), None)
        if leaving is not None:
            # Nobody knows what it still holds: count all of it as lost until the place itself is renewed.
            self._gone(eviction, 0, 0 if isinstance(error, WorkerDied) else leaving.row.size)

    def _shrink(self, wanted: int, reason: str, now: float) -> None:
        """Evict idle residents, least valuable first, until so many bytes are on their way out."""
        wanted -= sum(each.row.size for each in self._leaving.values())
        idle = [
            row
            for row in self.ledger.rows()
            if row.state is State.RESIDENT
            and row.idle
            and not row.pinned
            and now - row.loaded_at >= row.model.rules.min_residency
        ]
        for row in sorted(idle, key=lambda row: order(row, self._score, now, UNKNOWN)):
            if wanted <= 0:
                return
            wanted -= row.size
            self._retire(row, reason, now)

    def _unload(self, ask: m.Unload) -> None:
        now = self._clock.now()
        row = self.ledger.get(ask.key)
        wish = self.wishes.of(ask.key)
        if row is not None and row.leases and not ask.drain:
            raise Conflict(f"{ask.key} is in use and draining was declined", detail={"leases": len(row.leases)})
        if wish is not None and not wish.waiters:
            # A load that only an operator, the warm list or the forecaster wanted: the last command decides.
            self._refuse_all(wish, NotReady(f"{ask.key} was unloaded meanwhile", retry_after=1.0), now)
            self._abandon(wish, now)
        if row is not None and row.state is State.RESIDENT:
            self._retire(row, ask.reason, now)
        self._pump(now)

    def _pin(self, key: ModelKey, *, on: bool) -> None:
        row = self.ledger.get(key)
        if row is None or row.state is not State.RESIDENT:
            raise NotReady(f"{key} is not resident on {self.where}", retry_after=1.0)
        row.pinned = on
        self._pump(self._clock.now())

    # -- time, memory, life --------------------------------------------------------------------------

    def _woke(self, timer: int) -> None:
        now = self._clock.now()
        if timer == self._timer_number:
            self._wakes_at = math.inf
            self._timer = None
        for waiter in tuple(self.wishes.overdue(now)):
            self._overdue(waiter, now)
        for wish in self.wishes.all():
            self._expire_watchers(wish, now)
        for row in tuple(self.ledger.rows()):
            if row.state is State.RESIDENT:
                self._expire(row, now)
        self._after_release(now)
        self._wake_at(self.wishes.next_deadline)

    def _expire(self, row: Resident, now: float) -> None:
        end = expires_at(row)
        if end is None:
            return
        at, reason = end
        if at > now:
            self._wake_at(at)
        elif reason == "ttl" or row.idle:
            self._retire(row, reason, now)
        else:
            # In use: the idle clock starts anew when it is given back.
            self._wake_at(now + (row.model.rules.ttl_idle or 1.0))

    def _overdue(self, waiter: Waiter, now: float) -> None:
        wish = next(wish for wish in self.wishes.all() if waiter.ticket in wish.waiters)
        if waiter.deadline is not None and now >= waiter.deadline:
            error: ForeloadError = DeadlineExceeded(
                f"the request's own deadline passed while {wish.key} was {self._doing(wish)}", model=wish.model.name
            )
        elif wish.loading:
            wish.kept = True
            error = StillLoading(
                f"{wish.key} is still loading", model=wish.model.name, retry_after=max(wish.model.load_seconds, 1.0)
            )
        else:
            error = NoEvictableSpace(
                f"no room for {wish.key} on {self.where}: what is there is {wish.blocked or 'busy'}",
                model=wish.model.name,
                detail={"bytes_needed": self._need(wish.model), "bytes_free": max(self.ledger.free, 0)},
                retry_after=max(wish.model.load_seconds, 1.0),
            )
        self._refuse(wish, waiter, error, now)
        self._drop_if_unwanted(wish, now)

    @staticmethod
    def _doing(wish: Wish) -> str:
        return "loading" if wish.loading else f"waiting for room ({wish.blocked or 'queued'})"

    def _expire_watchers(self, wish: Wish, now: float) -> None:
        late = [w for w in wish.watchers if w.expires is not None and w.expires <= now]
        for watcher in late:
            wish.watchers.remove(watcher)
            watcher.reply.refuse(DeadlineExceeded(f"no room for {wish.key} in time", model=wish.model.name))
        if late and not wish.waiters and not wish.watchers and not wish.loading and not wish.kept:
            self._abandon(wish, now)

    def _watch_expiry(self, row: Resident) -> None:
        end = expires_at(row)
        if end is not None:
            self._wake_at(end[0])

    def _wake_at(self, at: float | None) -> None:
        """Be woken at a time (loop seconds), if nothing wakes us before."""
        if at is None or at >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = at
        self._timer_number += 1
        number = self._timer_number
        self._timer = self.spawn(lambda: self._sleep_until(at, number), failed=lambda _: m.Woke(number))

    async def _sleep_until(self, at: float, number: int) -> m.Command:
        # A little late on purpose: loops fire timers up to their resolution early, and then nothing is due yet.
        await anyio.sleep(max(at - self._clock.now(), 0.0) + TIMER_SLACK)
        return m.Woke(number)

    def _sampled(self, sample: MemorySample) -> None:
        now = self._clock.now()
        if self._watermarks.feed(sample):
            self._emit(
                facts.PressureChanged(now, self.where, self.tier, self._watermarks.under_pressure, sample.used_ratio)
            )
        excess = self._watermarks.excess(sample)
        if excess:
            self._shrink(excess, "pressure", now)

    def _take_stock(self, delay: float) -> None:
        async def look() -> m.Command:
            await anyio.sleep(delay)
            return m.Inventoried(await self._residence.inventory())

        self.spawn(look, failed=lambda exc: m.InventoryFailed(str(exc)))

    def _inventoried(self, held: tuple[Held, ...]) -> None:
        now = self._clock.now()
        self._up = True
        for each in held:
            row = self.ledger.get(each.model.key)
            if row is None and self.wishes.of(each.model.key) is None:
                row = self.ledger.adopt(each.model, each.resident, now=now, idle=each.in_flight == 0)
                self._emit(facts.Adopted(now, self.where, self.tier, row.key, row.size, each.in_flight))
                self._adopted(row)
            elif row is not None and row.adopted and each.in_flight == 0:
                row.adopted = False
        if any(row.adopted for row in self.ledger.rows()):
            self._take_stock(ADOPTION_POLL)
        self._forgotten_below()
        recover, self._recover = self._recover, []
        for model in recover:
            if self.ledger.get(model.key) is None and self.wishes.of(model.key) is None:
                self.wishes.make(self._name_load(), model, Trigger.RECOVERY, now=now)
        self._after_release(now)

    def _lost(self, cause: str) -> None:
        """Everything here is gone: its bytes are back, who used it hears why, and it will be brought back."""
        now = self._clock.now()
        self._up = False
        for wish in self.wishes.begun():
            self._lose_load(wish, cause, now)
        rows = sorted(self.ledger.clear(), key=lambda row: row.last_used, reverse=True)
        here = [row.model for row in rows if row.state in {State.RESIDENT, State.DRAINING}]
        # A place that ends again before it came back had nothing to lose, and still owes what it held before.
        self._recover = here or self._recover
        self.ledger.foreign -= self._leaked
        self._leaked = 0
        leaving, self._leaving = self._leaving, {}
        for row in rows:
            self._let_go_below(self._below_of(row.key))
            self._lose_resident(row, leaving.get(row.key), now)
        self._report_drained()

    def _lose_load(self, wish: Wish, cause: str, now: float) -> None:
        """Its job will still report, but there is nothing left that it could report about."""
        if wish.lost:
            return
        wish.lost = True
        row, took = wish.row, now - wish.started
        if row is not None and self.ledger.get(wish.key) is row:
            if row.state is State.LOADING:
                self.ledger.abort(wish.key, now=now)
            self.ledger.forget(wish.key)
        if wish.given_up:
            self._quarantine.gave_up(wish.model.fingerprint)
            self._emit(facts.LoadCancelled(now, wish.load, self.where, self.tier, wish.key, wish.trigger, took))
            return
        died = WorkerDied(f"the worker of {self.where} ended: {cause}", model=wish.model.name)
        died.retry_after = self._quarantine.failed(wish.model.fingerprint, code=died.code, cause=died.message, now=now)
        self._emit(
            facts.LoadFailed(
                now,
                wish.load,
                self.where,
                self.tier,
                wish.key,
                wish.trigger,
                died.code,
                died.message,
                took,
                died.retry_after,
            )
        )
        self._refuse_all(wish, died, now)
        self.wishes.give_up(wish)
        assert wish.job is not None
        wish.job.cancel()

    def _lose_resident(self, row: Resident, leaving: Leaving | None, now: float) -> None:
        for ticket, since in row.leases.items():
            self._emit(facts.LeaseReleased(now, self.where, row.key, ticket, now - since))
        if leaving is None or row.state is State.DRAINING:
            leaving = Leaving(self._name_eviction(), row, "lost", now)
            self._emit(facts.EvictionStarted(now, leaving.id, self.where, self.tier, row.key, "lost"))
        self._tell_gone(leaving, row.size, 0, now)

    def _after_loss(self, wish: Wish, report: LoadReport | None, below: Ticket | None) -> None:
        """The job of a load that was lost with its place has ended."""
        self.wishes.end(wish)
        now = self._clock.now()
        if report is not None and self.ledger.get(wish.key) is None:
            # It ran on into the next life of the place, so there it is.
            row = self.ledger.adopt(wish.model, report.resident, now=now, idle=True)
            self._emit(facts.Adopted(now, self.where, self.tier, row.key, row.size, 0))
            self._keep_below(row.key, below)
        else:
            self._let_go_below(below)
        self._pump(now)

    def _drain(self) -> int | None:
        now = self._clock.now()
        self._draining = True
        for wish in self.wishes.all():
            if not wish.waiters:
                self._refuse_all(wish, Draining("the server is stopping", retry_after=5.0), now)
                self._abandon(wish, now)
        if not self.ledger.leases and not self.wishes.waiting:
            return 0
        self._drained.append(self.defer())
        return None

    def _report_drained(self) -> None:
        if self._drained and not self.ledger.leases and not self.wishes.waiting:
            for reply in self._drained:
                reply.settle(0)
            self._drained.clear()

    # -- the tier below (none here) ------------------------------------------------------------------

    def _adopted(self, row: Resident) -> None:
        """A resident was found after a crash."""

    def _rehold(self) -> None:
        """The tier below lost its books."""

    def _forgotten_below(self) -> None:
        """Let go of copies below that a former incarnation kept for what is not here any more."""

    def _keep_below(self, key: ModelKey, below: Ticket | None) -> None:
        """The copy below must stay while this one does."""

    def _below_of(self, key: ModelKey) -> Ticket | None:
        """The ticket that keeps the copy below, taken out of the books."""

    def _let_go_below(self, below: Ticket | None) -> None:
        """The copy below may leave."""

    # -- proof and view ------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove the books; tests call it after every message."""
        self.ledger.check()
        self.wishes.check()
        for key, leaving in self._leaving.items():
            assert leaving.row.key == key and self.ledger.get(key) is leaving.row, leaving  # noqa: PT018
            assert leaving.row.state in {State.DRAINING, State.UNLOADING}, leaving
        for row in self.ledger.rows():
            assert row.state is not State.DRAINING or row.key in self._leaving, row
        for wish in self.wishes.all():
            assert wish.wanted or wish.loading, wish

    def snapshot(self) -> TierSnapshot:
        """A frozen view."""
        now = self._clock.now()
        book = self.ledger
        return TierSnapshot(
            self.where,
            self.tier,
            self._up,
            self._draining,
            book.capacity,
            book.headroom,
            book.foreign,
            self._leaked,
            book.bytes_in(State.LOADING),
            book.bytes_in(State.RESIDENT),
            book.bytes_in(State.UNLOADING),
            book.free,
            book.leases,
            self.wishes.waiting,
            self._watermarks.under_pressure,
            tuple(self._view(row, now) for row in book.rows()),
            tuple(
                WishView(w.key, w.trigger, len(w.waiters), w.load if w.loading else "", w.blocked, now - w.since)
                for w in self.wishes.all()
            ),
        )

    @staticmethod
    def _view(row: Resident, now: float) -> ResidentView:
        end = expires_at(row) if row.state is State.RESIDENT else None
        return ResidentView(
            row.key,
            row.model.fingerprint,
            row.state,
            row.size,
            len(row.leases),
            row.pinned,
            row.adopted,
            now - row.loaded_at if row.loaded_at else 0.0,
            now - row.last_used if row.last_used else 0.0,
            row.uses,
            None if end is None else max(end[0] - now, 0.0),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where} {self.ledger!r} {self.wishes!r}>"
